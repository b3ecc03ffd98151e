"""--graph-training: layers that train as CUDA graphs have the same bits as layers that do not. A recording stands for a graph."""

from __future__ import annotations

import copy

import pytest
import torch
from support.emulated import emulated
from support.language_models import build, draw
from support.launches import batch, count_update, trainer_of
from support.recorded import Recorded, RecordingLaunch
from support.translation_models import build as build_translation
from support.translation_models import draw as draw_sentences

import fw_fairseq.models  # noqa: F401
from fw_fairseq.errors import Mistake
from fw_fairseq.mixers import MIXERS
from fw_fairseq.modules import Streams, training_graphs
from fw_fairseq.rules import RULES

WORDS = 200
LAYERS = (
    "--arch fast_weight_lm_wiki103_small --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2"
    " --decoder-ffn-embed-dim 48 --adaptive-input-cutoff 50,100 --adaptive-softmax-cutoff 50,100 --clip-norm 0.25 --dropout 0.1"
    " --criterion fast_weight_cross_entropy --log-interval 1000"
)
WITHOUT_GATES = "--update-rule delta --feature-norm sum"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def recorded(monkeypatch, in_pytorch):
    """Graphs as recordings, which loops in C++ would bypass; layers on a CPU are taken for such on a GPU."""
    monkeypatch.setattr(training_graphs.Passes, "graph_type", Recorded)
    monkeypatch.setattr(training_graphs, "has_kernels", lambda x: True)
    Recorded.made.clear()
    Recorded.launcher = RecordingLaunch()
    return Recorded


def passes() -> list[tuple[Recorded, Recorded]]:
    return [*zip(Recorded.made[::2], Recorded.made[1::2], strict=True)]


def train(given: str, sizes: list[int], often: int = 1) -> dict:
    """The parameters after an update for each size, in rows; each has ``often`` batches."""
    torch.manual_seed(1)
    trainer = trainer_of(WORDS, *given.split())
    for update, rows in enumerate(sizes):
        torch.manual_seed(update)
        batches = [batch(WORDS) for _ in range(often)]
        for sample in batches:
            for part in (sample["net_input"], sample):
                part |= {name: part[name][:rows] for name in ("src_tokens", "src_lengths", "target", "id") if name in part}
            sample |= {"nsentences": rows, "ntokens": sample["target"].numel()}
        trainer.train_step(batches)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("often", [1, 2], ids=["", "update-freq"])
@pytest.mark.parametrize("options", [WITHOUT_GATES, "--update-rule gated_delta", "--mixer-pattern softmax,sru"])
def test_updates_have_the_same_bits(recorded, options, often):
    """With dropout, two shapes, several batches for an update, and one with statistics, the first. Kernels run on the emulator."""
    sizes = [2, 2, 1, 2, 1]
    with emulated(recorded.launcher):
        plain = train(f"{LAYERS} {options}", sizes, often)
        assert not recorded.made
        graphs = train(f"{LAYERS} {options} --graph-training", sizes, often)
    (first, back), (second, _) = passes()
    logged = 0 if "softmax" in options else 1
    assert (first.replays, second.replays) == ((3 - logged) * often, 2 * often) and back.replays == first.replays
    assert plain.keys() == graphs.keys()
    for name, x in plain.items():
        assert torch.equal(x, graphs[name]), name


def gradients(model, loss) -> list:
    found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [None if x is None else x.clone() for x in found]


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("streams", [False, True], ids=["", "streams"])
def test_every_mixer(recorded, mixer, streams):
    """Three segments, whose states are carried over from one to the next or not; dropout draws the same numbers."""
    check_segments(recorded, {"mixer": mixer, "dropout": 0.1}, streams)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(recorded, rule):
    check_segments(recorded, {"update_rule": rule}, True)


def check_segments(recorded, options: dict, streams: bool) -> None:
    found = []
    for on in (False, True):
        torch.manual_seed(1)
        model, texts = build(**options, graph_training=on).train(), [draw(2, 12) for _ in range(3)]
        carried = {"streams": Streams()} if streams else {}
        found.append([])
        for text in texts:
            y, _ = model(text, **carried)
            found[-1] += [y.detach(), *gradients(model, y.square().mean())]
    assert [forward.replays for forward, _ in passes()] == ([1, 2] if streams else [3])
    for plain, graph in zip(*found, strict=True):
        torch.testing.assert_close(plain, graph, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"linear_attention": "cross"}, {"source_in_front": True, "linear_attention": "decoder"}])
def test_translation(recorded, options):
    """Encoder and decoder, with padding and without; sentences of the same lengths share graphs."""
    found = []
    for on in (False, True):
        torch.manual_seed(1)
        model = build_translation(**options, graph_training=on).train()
        found.append([])
        for source, target in [((6, 9), (5, 7)), ((7, 7), (7, 7)), ((9, 3), (7, 2))]:
            source, target = draw_sentences(*source), draw_sentences(*target)
            y, _ = model(source, torch.tensor([9, 6]), target)
            found[-1] += [y.detach(), *gradients(model, y.square().mean())]
    assert sorted(forward.replays for forward, _ in passes()) == [1, 1, 2, 2]
    for plain, graph in zip(*found, strict=True):
        torch.testing.assert_close(plain, graph, rtol=0, atol=0)


@pytest.mark.long
def test_what_an_update_asks_of_the_host(recorded, monkeypatch):
    """Launches of an update do not grow with the number of layers: each graph is one."""
    counts = []
    for layers in (2, 4):
        given = f"{LAYERS} {WITHOUT_GATES} --graph-training".replace("--decoder-layers 2", f"--decoder-layers {layers}")
        trainer = trainer_of(WORDS, *given.split())
        with emulated(recorded.launcher):
            for _ in range(2):
                trainer.train_step([batch(WORDS)])
        with monkeypatch.context() as patched:
            patched.setattr(Recorded, "replay", lambda graph: torch.zeros(()))  # one launch
            counts.append(count_update(trainer, WORDS))
    few, many = counts
    assert few.launches.total() == many.launches.total() < 250
    assert few.waits.total() == many.waits.total()


def test_a_loss_with_two_forward_passes_is_refused(recorded):
    model = build(graph_training=True).train()
    first, second = (model(draw(2, 12))[0] for _ in range(2))
    with pytest.raises(Mistake, match="two before a backward"):
        (first + second).sum().backward()


def test_what_runs_as_it_is(recorded):
    """Evaluation, generation, and shapes after the first ones."""
    model = build(graph_training=True)
    model(draw(2, 12))
    model(draw(2, 5), incremental_state={})
    assert not recorded.made
    model.train()
    for length in range(4, 4 + training_graphs.SHAPES + 2):
        model(draw(2, length))[0].sum().backward()
    assert len(passes()) == training_graphs.SHAPES
    again = copy.deepcopy(model)
    again(draw(2, 4))[0].sum().backward()
    assert len(passes()) == training_graphs.SHAPES + 1, "a copy has graphs of its own"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"decoder_layerdrop": 0.1}, "--decoder-layerdrop"),
        ({"checkpoint_activations": True}, "--checkpoint-activations"),
        ({"reversible": True, "decoder_normalize_before": True}, "--reversible"),
        ({"quant_noise_pq": 0.1}, "--quant-noise-pq"),
        ({"feature_map": "favor", "update_rule": "sum"}, "random features"),
    ],
)
def test_refused(options, message):
    with pytest.raises(Mistake, match=message):
        build(graph_training=True, **options)


def test_a_wait_within_the_layers_is_named(recorded, monkeypatch):
    model = build(graph_training=True).train()
    layer = next(model.decoder.layers.children())
    feed = layer.fc1.forward
    monkeypatch.setattr(layer.fc1, "forward", lambda x: feed(x) if bool(x.sum() > -1e9) else x)
    with pytest.raises(Mistake, match="cannot capture these layers"):
        model(draw(2, 12))
