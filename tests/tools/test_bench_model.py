"""fw-bench model end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary

from fw_fairseq.mixers import MIXERS
from fw_fairseq.rules import RULES
from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import fairseq_parts, language_models, measure

SIZES = ["--layers", "1", "--width", "16", "--heads", "2", "--ffn", "16", "--vocabulary", "20"]
TINY = [
    "model",
    *SIZES,
    "--tokens",
    "8",
    "2048",
    "--max-tokens",
    "64",
    "--contexts",
    "8",
    "32",
    "64",
    "--steps",
    "2",
    "--rounds",
    "2",
]
NAMES = {"fast_weight_lm delta", "fast_weight_lm sru", "transformer_lm"}


def test_model_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    files = ["--json", str(tmp_path / "model.json"), "--figure", str(tmp_path / "model.png")]
    bench.main([*TINY, "--mixers", "delta", "sru", *files])
    report = json.loads((tmp_path / "model.json").read_text())
    assert {row["name"] for row in report["parameters"]} == NAMES
    assert {(row["name"], row["tokens"]) for row in report["training"]} == {(n, t) for n in NAMES for t in (8, 2048)}
    assert {(row["name"], row["context"]) for row in report["generation"]} == {(n, c) for n in NAMES for c in (8, 32, 64)}
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["training"] + report["generation"])
    state = {name: [row["state_bytes"] for row in report["generation"] if row["name"] == name] for name in NAMES}
    keys_and_values = 2 * 16 * 4 * 5  # 5 hypotheses
    assert state.pop("transformer_lm") == [keys_and_values * context for context in (8, 32, 64)]
    assert all(sizes[0] > 0 and len(set(sizes)) == 1 for sizes in state.values())
    assert len(report["ratios"]) == 2 * (2 + 3)
    for row in report["training"]:
        assert row["tokens_per_second"] == pytest.approx(max(64, row["tokens"]) / row["seconds"])
    parameters = {row["name"]: row["parameters"] for row in report["parameters"]}
    assert parameters["transformer_lm"] == 20 * 16 + 4 * (16 * 16 + 16) + 2 * (16 * 16 + 16) + 3 * 2 * 16  # one matrix for words
    peak = {(row["name"], row["tokens"]): row["peak_bytes"] for row in report["training"]}
    assert peak["transformer_lm", 2048] > 2048**2 * 4 > peak["transformer_lm", 8] >= 0  # its mask alone
    assert peak["fast_weight_lm sru", 2048] < peak["transformer_lm", 2048]
    assert (tmp_path / "model.png").stat().st_size > 1000
    printed, progress = capsys.readouterr()
    assert "| transformer_lm | " in printed and f"| {keys_and_values * 8 / 1e3:.0f} |" in printed
    said = [f"memory of {name}, {tokens} tokens" for name in NAMES for tokens in (8, 2048)]
    assert all(f"\r\033[K{part}" in progress for part in [*said, "training, 8 tokens, round 2 of 2"])

    report["training"] = [row for row in report["training"] if row["tokens"] == 8]
    del report["settings"]["host"]  # as in an older report
    (tmp_path / "model.json").write_text(json.dumps(report))
    bench.main([*TINY, "--mixers", "delta", "sru", *files, "--resume"])
    resumed = json.loads((tmp_path / "model.json").read_text())
    assert resumed["generation"] == report["generation"] and resumed["training"][: len(NAMES)] == report["training"]
    assert {row["tokens"] for row in resumed["training"][len(NAMES) :]} == {2048}
    with pytest.raises(SystemExit, match=r"model.json was measured with mixers \['delta', 'sru'\], not \['delta'\]"):
        bench.main([*TINY, *files, "--resume"])


@pytest.mark.parametrize(
    "change, message",
    [
        (["--mixers", "dleta"], "invalid choice: 'dleta'"),
        (["--contexts", "0"], "0 is not a positive number"),
        (["--heads", "3"], "--width 16 is not a multiple of --heads 3"),
        (["--vocabulary", "4"], "4 leaves no room beside fairseq's 4 special symbols"),
        (["--figure", "no/such/folder/x.png"], "no/such/folder is not a folder"),
        (["--resume"], "--resume needs --json"),
        (["--device", "cuda"], "needs a CUDA device"),
    ],
)
def test_mistakes(change, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        bench.main([*TINY, *change])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_the_host_alone(tmp_path, capsys, monkeypatch):
    """With graphs and without; additive attention runs without the decoding kernel."""
    replays, replay = [], measure.Idle.replay
    monkeypatch.setattr(measure.Idle, "replay", lambda self: replays.append(1) or replay(self))
    monkeypatch.setattr(measure, "HOST_STEPS", 8)
    command = ["model", *SIZES, "--host", "--rounds", "1", "--threads", "1"]
    bench.main([*command, "--mixers", "sum", "gated", "--json", str(tmp_path / "host.json")])
    rows = json.loads((tmp_path / "host.json").read_text())["host"]
    assert len(rows) == 4 and sum(row["graph"] for row in rows) == 2 and all(row["seconds"] > 0 for row in rows)
    assert len(replays) == 2 * 2 * 6  # 2 rounds, 6 tokens after the first two
    assert capsys.readouterr().out.count("| fast_weight_lm gated | yes |") == 1
    for name in ("additive", "retnet"):  # without a kernel, and with another one
        with pytest.raises(SystemExit, match=f"--mixers: the decoding kernel does not do a step of {name}"):
            bench.main([*command, "--mixers", name])
    with pytest.raises(SystemExit, match="--host needs --device cpu and --threads 1, not cpu and 2"):
        bench.main([*command[:-1], "2"])
    with pytest.raises(SystemExit):
        bench.main([*command, "--resume", "--json", str(tmp_path / "host.json")])


@pytest.mark.parametrize("name", ["fast_weight_lm delta", "transformer_lm"])
def test_positions_suffice_for_the_longest_context(name):
    sizes = {"layers": 1, "width": 8, "heads": 2, "ffn": 8, "vocabulary": 20, "device": "cpu", "no_decoding_graph": False}
    args = SimpleNamespace(tokens=[4], contexts=[5, 30], steps=2, **sizes)
    model = measure.build_model(args, name)
    assert model.max_decoder_positions() == 32 + measure.UNTIMED_STEPS


def test_each_token_after_the_context_is_timed_once(monkeypatch):
    """The first of them warm up; each starts from the same state, which is not changed."""
    given, lengths = {"layer": {"memory": 3}}, []

    def decoder(tokens, incremental_state):
        lengths.append(tokens.shape[1])
        incremental_state["layer"]["memory"] += 1

    def seconds(call, device):
        call()
        return float(lengths[-1])

    monkeypatch.setattr(measure, "timed", seconds)
    model, text = SimpleNamespace(decoder=decoder), torch.zeros(1, 9 + measure.UNTIMED_STEPS)
    assert measure.time_steps(SimpleNamespace(device="cpu"), model, text, 4, given) == 5 + measure.UNTIMED_STEPS + 2
    assert lengths == [*range(5, 10 + measure.UNTIMED_STEPS)] and given == {"layer": {"memory": 3}}


def test_a_cpu_has_no_graphs_to_leave_out(capsys):
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--no-decoding-graph"])
    assert "--no-decoding-graph needs --device cuda" in capsys.readouterr().err


def test_the_table_of_a_report():
    """A table for each number, a column for each length, with ratios in brackets."""
    m, s = {"device": "a processor", "threads": 2, "torch": "2.0"}, {"layers": 2, "width": 16, "heads": 4, "ffn": 32, "rounds": 3}
    s |= {"vocabulary": 20, "max_tokens": 64, "steps": 5, "hypotheses": 6}
    names = ("own", "transformer_lm")
    ratio = {"name": "own", "times_faster": 10.0, "times_smaller": 2.5}
    report = {
        "machine": m,
        "settings": s,
        "generation": [{"name": n, "context": t, "seconds": t / 1e3, "state_bytes": t * 2e3} for n in names for t in (1, 7)],
        "training": [{"name": n, "tokens": 8, "tokens_per_second": 900.0, "peak_bytes": 3e6} for n in names],
        "ratios": [ratio | {"what": "generation", "tokens": 7}, ratio | {"what": "training", "tokens": 8}],
        "parameters": [{"name": n, "parameters": 1_234_567} for n in names],
    }
    assert language_models.table(report).splitlines() == [
        "a processor, 2 threads, torch 2.0; 2 layers, width 16, 4 heads, ffn 32, 20 words; training with 64 tokens a batch,"
        " generation of 5 tokens for 6 hypotheses; medians of 3 rounds; in brackets: times as fast, or as small, as transformer_lm",
        "",
        "| generation, ms per token | after 1 tokens | after 7 tokens |",
        "|---|---:|---:|",
        "| own | 1.00 | 7.00 (10 x) |",
        "| transformer_lm | 1.00 | 7.00 |",
        "",
        "| generation, state in kB | after 1 tokens | after 7 tokens |",
        "|---|---:|---:|",
        "| own | 2 | 14 (2.50 x) |",
        "| transformer_lm | 2 | 14 |",
        "",
        "| training, tokens/s | 8 tokens |",
        "|---|---:|",
        "| own | 900 (10 x) |",
        "| transformer_lm | 900 |",
        "",
        "| training, peak memory in MB | 8 tokens |",
        "|---|---:|",
        "| own | 3 (2.50 x) |",
        "| transformer_lm | 3 |",
        "",
        "| model | parameters |",
        "|---|---:|",
        "| own | 1,234,567 |",
        "| transformer_lm | 1,234,567 |",
    ]
    rows = [{"name": "own", "graph": graph, "seconds": 3e-4} for graph in (True, False)]
    assert language_models.table({"machine": m, "settings": s, "host": rows}).splitlines() == [
        "a processor, 1 thread, torch 2.0; 2 layers, width 16, 6 hypotheses; medians of 3 rounds",
        "",
        "| model | graph | host, us per token | per layer |",
        "|---|---|---:|---:|",
        "| own | yes | 300 | 150.0 |",
        "| own | no | 300 | 150.0 |",
    ]


def test_ratios_to_the_transformer():
    """A state of no bytes counts as one."""
    rows = language_models.ratios(
        "training", 8, {"a": [2.0], "b": [1.0], "transformer_lm": [6.0]}, {"a": 4, "b": 0, "transformer_lm": 12}
    )
    assert [(row["times_faster"], row["times_smaller"]) for row in rows] == [(3, 3), (6, 12)]


def test_a_report_is_continued_only_where_it_is_asked_for(tmp_path):
    """A switch that one of both does not have yet, or any more, is off."""
    file = tmp_path / "x.json"
    args = SimpleNamespace(device="cpu", threads=1, resume=True, json=file, host=False, steps=2)
    assert language_models.begin(args)["training"] == []
    before = {"settings": {"device": "cpu", "threads": 1, "steps": 2, "older": False}}
    before |= {"training": [{"tokens": 8, "name": "kept"}], "generation": [], "ratios": []}
    for broken in ({"ratios": None}, {"settings": []}, {"training": [{"tokens": "8"}]}, {"generation": 3}):
        file.write_text(json.dumps(before | broken))
        with pytest.raises(ValueError, match=r"--resume: .* is not what fw-bench model --json writes; name another file"):
            language_models.begin(args)
    file.write_text(json.dumps(before))
    assert language_models.begin(args) == before
    args.resume = False
    assert language_models.begin(args)["training"] == []
    language_models.finish_length(args, {"a": 1}, "a length")
    assert json.loads(file.read_text()) == {"a": 1}


def test_what_is_measured_is_written_at_once(tmp_path, monkeypatch, capsys):
    """A run that is stopped leaves the lengths before."""
    path, before = tmp_path / "model.json", []

    def note(models, each):
        report = json.loads(path.read_text()) if path.exists() else {"training": [], "generation": []}
        before.append([[row["name"] for row in report[part]] for part in ("training", "generation")])
        return dict.fromkeys(models, each)

    monkeypatch.setattr(language_models, "build_model", lambda args, name: torch.nn.Linear(2, 3))
    monkeypatch.setattr(language_models, "peak_memory", lambda args, models, length: dict.fromkeys(models, 7))
    monkeypatch.setattr(language_models, "time_training", lambda args, models, length: note(models, [0.5]))
    monkeypatch.setattr(language_models, "time_generation", lambda args, models, context: note(models, ([0.25], 9)))
    given = ["model", "--mixers", "sum", "--tokens", "8", "16", "--max-tokens", "20", "--contexts", "4", "9", "--json", str(path)]
    report = language_models.measure(bench.build_parser().parse_args(given))
    both = ["fast_weight_lm sum", "transformer_lm"]
    assert before == [[[], []], [both, []], [both * 2, []], [both * 2, both]] and json.loads(path.read_text()) == report
    assert capsys.readouterr().err.splitlines() == [
        *(f"training with {length} tokens: done" for length in (8, 16)),
        *(f"generation after {context} tokens: done" for context in (4, 9)),
    ]
    assert [row["tokens_per_second"] for row in report["training"]] == [32] * 4  # 2 rows of 8, or 1 of 16, in half a second
    assert {row["peak_bytes"] for row in report["training"]} == {7} and {row["state_bytes"] for row in report["generation"]} == {9}
    assert report["parameters"] == [{"name": name, "parameters": 2 * 3 + 3} for name in both]


def test_other_libraries_do_not_log_what_they_do():
    """fairseq's import leaves their logs as they are where someone has set them up before."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        root.handlers = []
        root.setLevel(logging.DEBUG)
        importlib.reload(fairseq_parts)
        assert root.level == logging.WARNING and len(root.handlers) == 1
    finally:
        root.handlers = handlers
        root.setLevel(level)


def test_all_rules_and_mixers_are_those_with_a_time_of_their_own():
    assert {*measure.ALL} == {*RULES, *MIXERS} - {"fwm", "fast_weight"} and len(measure.ALL) == len({*measure.ALL})
    assert language_models.vocabulary("5") == 5


def test_a_task_has_as_many_words_as_it_is_told():
    task = measure.make_task(Dictionary(), 20)
    assert len(task.source_dictionary) == 20 and task.source_dictionary is task.target_dictionary
    args = SimpleNamespace(vocabulary=6, device="cpu")
    assert set(measure.draw_tokens(args, 2, 50).flatten().tolist()) == {4, 5}, "without special symbols"


class Embedding(torch.nn.Embedding):
    """The smallest language model; it keeps the shapes of what it reads."""

    def __init__(self):
        super().__init__(6, 6)
        self.read = []

    def forward(self, tokens):
        assert self.training
        self.read.append((*tokens.shape, self.weight.grad is None))
        return super().forward(tokens), None


def test_rows_are_as_long_as_they_are_told(monkeypatch):
    """With one more token as the last target. What was there before, of gradients and of libraries, counts in no measurement."""
    args, model = SimpleNamespace(max_tokens=20, vocabulary=6, device="cpu", rounds=1), Embedding().eval()
    text = measure.draw_tokens(args, 2, 5)
    for _ in range(2):
        measure.forward_backward(model, text)
        torch.testing.assert_close(model.weight.grad.sum(), torch.zeros(()), atol=1e-6, rtol=0)
        kept = model.weight.grad if model.read[1:] else model.weight.grad.clone()
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(model.weight[text[:, :-1]].flatten(0, 1), text[:, 1:].flatten()), model.weight
    )[0]
    torch.testing.assert_close(kept, expected)
    model.read.clear()
    measure.time_training(args, {"a": model}, 8)
    assert [read[:2] for read in model.read] == [(2, 8)] * 2
    model.read.clear()
    monkeypatch.setattr(measure, "peak_beyond", lambda call, device: call() or 77)
    assert measure.measure_memory(args, model, 8) == 77 and model.read == [(1, 8, True), (2, 8, True)]


def test_memory_is_measured_in_a_process_for_each(monkeypatch):
    """They come from one that has imported the models."""
    happened = []

    class Pool:
        def __init__(self, *given, **options):
            happened.append((given, options))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def apply(self, call, given):
            return call(*given)

    context = SimpleNamespace(set_forkserver_preload=happened.append, Pool=Pool)
    monkeypatch.setattr(measure.multiprocessing, "get_context", lambda method: happened.append(method) or context)
    monkeypatch.setattr(measure, "build_model", lambda args, name: name)
    monkeypatch.setattr(measure, "measure_memory", lambda args, model, length: f"{model} {length}")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: happened.append(count))
    args = SimpleNamespace(device="cpu", threads=3)
    assert measure.peak_memory(args, {"a": None, "b": None}, 8) == {"a": "a 8", "b": "b 8"}
    preload = ["fw_fairseq.tools.bench.fairseq_parts"]
    assert happened == ["forkserver", preload, ((1,), {"maxtasksperchild": 1}), 3, 3]


def test_the_steps_that_are_timed_follow_a_prompt(monkeypatch):
    """Which is read without logits; three of them warm up."""
    args, given, taken = SimpleNamespace(hypotheses=2, steps=2, vocabulary=6, device="cpu", rounds=1), [], []
    decoder = SimpleNamespace(take_prompt=lambda tokens, **options: taken.append((tokens.shape, options)))
    model = SimpleNamespace(decoder=decoder, eval=lambda: model)
    monkeypatch.setattr(measure, "time_steps", lambda args, model, text, context, state: given.append((text.shape, context)) or 1.0)
    assert measure.time_generation(args, {"a": model}, 4) == {"a": ([1.0], 0)}
    assert given == [((2, 4 + 3 + 2), 4)] * 2 and taken == [((2, 4), {"incremental_state": {}})]


def test_the_host_is_timed_at_each_of_its_tokens(monkeypatch):
    """The first quarter of them warms up; a token is read without logits, and then the hypotheses change places."""
    read, orders, numbers, build = [], [], iter(range(1, 1000)), measure.build_model

    def noted(args, name):
        model = build(args, name)
        decoder, reorder = model.decoder, model.decoder.reorder_incremental_state_scripting
        decoder.register_forward_pre_hook(
            lambda _, given, options: read.append((given[0].shape[1], options["features_only"])), with_kwargs=True
        )
        decoder.reorder_incremental_state_scripting = lambda state, order: orders.append(order.tolist()) or reorder(state, order)
        return model

    monkeypatch.setattr(measure, "build_model", noted)
    monkeypatch.setattr(measure, "HOST_STEPS", 12)
    monkeypatch.setattr(measure, "timed", lambda call, device: call() or next(numbers))
    sizes = {"layers": 1, "width": 8, "heads": 2, "ffn": 8, "vocabulary": 20, "device": "cpu"}
    args = SimpleNamespace(tokens=[4], contexts=[5], steps=2, hypotheses=3, **sizes)
    torch.manual_seed(5)
    assert measure.time_host(args, "fast_weight_lm sum", True) == 8
    assert read == [(length, True) for length in range(1, 13)] and orders == [[2, 1, 0]] * 12
    assert torch.initial_seed() == 0
