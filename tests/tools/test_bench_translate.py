"""fw-bench translate end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import translation
from fw_fairseq.tools.plot import style

SIZES = ["--layers", "1", "--width", "16", "--heads", "2", "--ffn", "16", "--vocabulary", "20"]
TINY = ["translate", *SIZES, "--sentences", "2", "--beam", "3", "--rounds", "2", "--dpfp-nu", "2", "--lengths", "4", "16"]
NAMES = {"fast_weight_transformer elu", "fast_weight_transformer dpfp", "transformer"}


def test_translate_report(tmp_path, capsys):
    files = ["--json", str(tmp_path / "translate.json"), "--figure", str(tmp_path / "translate.png")]
    bench.main([*TINY, *files])
    report = json.loads((tmp_path / "translate.json").read_text())
    assert {row["name"] for row in report["parameters"]} == NAMES
    assert {(row["name"], row["tokens"]) for row in report["decoding"]} == {(n, t) for n in NAMES for t in (4, 16)}
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["decoding"])
    state = {name: [row["state_bytes"] for row in report["decoding"] if row["name"] == name] for name in NAMES}
    hypotheses, head = 2 * 3, 8
    decoder, cross = (rows * 2 * (head * head + head) * 4 for rows in (hypotheses, 2))
    assert state["fast_weight_transformer elu"] == [decoder + cross] * 2, "one summary a sentence, whatever the length"
    width = 4 * head  # of dpfp: 6 tokens are smaller as keys and values
    short, full = state["fast_weight_transformer dpfp"]
    assert short < full == (hypotheses + 2) * 2 * (width * head + width) * 4
    for row in report["decoding"]:
        assert row["sentences_per_second"] == pytest.approx(2 / row["seconds"])
    assert state["transformer"][0] < state["transformer"][1]
    assert len(report["ratios"]) == 2 * 2
    assert (tmp_path / "translate.png").stat().st_size > 1000
    assert "| transformer | 16 |" in capsys.readouterr().out


def test_the_figure_has_speeds_and_megabytes(monkeypatch):
    kept = {"fast_weight_transformer elu": 5_000, "transformer": 40_000}  # bytes of a token
    rows = [
        {"name": name, "tokens": t, "sentences_per_second": 300 / t, "state_bytes": t * size}
        for name, size in kept.items()
        for t in (4, 16)
    ]
    figures = []
    monkeypatch.setattr(style, "save", lambda figure, _: figures.append(figure))
    translation.draw({"decoding": rows}, Path("x.svg"))
    speeds, states = figures[0].axes
    assert (speeds.get_ylabel(), states.get_ylabel()) == ("sentences/s", "state in the end, MB")
    for axes in (speeds, states):
        assert {line.get_label(): list(line.get_xdata()) for line in axes.lines} == {name: [4, 16] for name in kept}
    for speed, state in zip(speeds.lines, states.lines):
        assert list(speed.get_ydata()) == [75, 18.75]
        assert list(state.get_ydata()) == pytest.approx([4 * kept[state.get_label()] / 1e6, 16 * kept[state.get_label()] / 1e6])


@pytest.mark.parametrize(
    "change, message",
    [
        (["--feature-maps", "identity"], "invalid choice: 'identity'"),
        (["--beam", "0"], "0 is not a positive number"),
        (["--heads", "3"], "--width 16 is not a multiple of --heads 3"),
    ],
)
def test_mistakes(change, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main([*TINY, *change])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_the_table_of_a_report():
    report = {
        "machine": {"device": "a processor", "threads": 2, "torch": "2.0"},
        "settings": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocabulary": 20, "sentences": 4, "beam": 3, "rounds": 5},
        "decoding": [{"name": "own", "tokens": 8, "sentences_per_second": 12.5, "state_bytes": 3000}],
        "ratios": [{"name": "own", "tokens": 8, "times_smaller": 2.5, "times_faster": 1.25}],
    }
    assert translation.table(report).splitlines() == [
        "a processor, 2 threads, torch 2.0; 1+1 layers, width 16, 2 heads, ffn 32, 20 words; 4 sentences at beam 3, as long as"
        " their translations; medians of 5 rounds",
        "",
        "| model | tokens | sentences/s | state in the end, kB |",
        "|---|---:|---:|---:|",
        "| own | 8 | 12.5 | 3 |",
        "",
        "| model | tokens | against transformer |",
        "|---|---:|---|",
        "| own | 8 | 1.25 x as fast, 2.5 x smaller state |",
    ]


def test_ratios_to_the_transformer():
    """A translation of one token ends before any state is needed again; as small as each other are two states of no bytes."""
    rows = translation.ratios(
        {(t, name): ([time], size * (t > 1)) for t in (1, 8) for name, time, size in (("own", 2.0, 4), ("transformer", 6.0, 12))}
    )
    assert [(row["times_faster"], row["times_smaller"]) for row in rows] == [(3, 1), (3, 3)]


def test_each_batch_is_timed_once_a_round(monkeypatch):
    """After one of the shortest length, which loads libraries; the state is that of the last round."""
    decoded, sizes = [], iter(range(9))
    monkeypatch.setattr(
        translation, "decode", lambda args, task, model, source: decoded.append((model, *source.shape)) or (1.0, next(sizes))
    )
    args = Namespace(sentences=2, lengths=[4, 3], rounds=2, vocabulary=20, device="cpu")
    found = translation.time_decoding(args, None, {"a": "A"})
    assert found == {(4, "a"): ([1.0, 1.0], 2), (3, "a"): ([1.0, 1.0], 4)}
    assert decoded == [("A", 2, 3), ("A", 2, 4), ("A", 2, 4), ("A", 2, 3), ("A", 2, 3)]


def test_the_models_are_of_one_size():
    """They share all embeddings, and have room for the longest text and what fairseq puts around it."""
    args = bench.build_parser().parse_args(TINY)
    torch.manual_seed(5)
    task, models = translation.build_models(args)
    assert torch.initial_seed() == 0 and len(task.target_dictionary) == 20 and {*models} == NAMES
    for model in models.values():
        assert model.encoder.embed_tokens is model.decoder.embed_tokens and not model.training
        assert model.max_positions() == (19, 19)


@pytest.mark.parametrize("name", sorted(NAMES))
@torch.no_grad()
def test_every_hypothesis_has_as_many_tokens_as_the_source(name, monkeypatch):
    """Though the model would end each as soon as it may. They are those of a search that nobody watches, and the state is that of
    all hypotheses."""
    args = bench.build_parser().parse_args(TINY)
    task, models = translation.build_models(args)
    plain_scores, end = models[name].get_normalized_probs, torch.arange(args.vocabulary) == task.target_dictionary.eos()
    monkeypatch.setattr(models[name], "get_normalized_probs", lambda *given, **more: plain_scores(*given, **more) + 9 * end)
    found, source = [], translation.draw_tokens(args, 2, 16)
    monkeypatch.setattr(translation, "timed", lambda call, device: found.append(call()) or 1.5)
    seconds, size = translation.decode(args, task, models[name], source)
    hypotheses = [hypothesis["tokens"] for sentence in found[0] for hypothesis in sentence]
    assert seconds == 1.5 and [len(tokens) for tokens in hypotheses] == [16] * 6
    generator = SequenceGenerator([models[name]], task.target_dictionary, beam_size=3, max_len_b=15, min_len=15)
    plain = generator.generate([models[name]], {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([16, 16])}})
    for ours, theirs in zip(hypotheses, [hypothesis["tokens"] for sentence in plain for hypothesis in sentence], strict=True):
        assert ours.equal(theirs)
    features = {"fast_weight_transformer elu": 8, "fast_weight_transformer dpfp": 32}
    if name in features:  # memories and sums of two heads, of six rows and of two sources
        assert size == 4 * (6 + 2) * 2 * features[name] * (8 + 1)
