"""Generation with the decoding kernel, and as CUDA graphs. The emulator starts kernels, and a graph is a call that is repeated."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from support.graphs import Repeated, emulate_graphs, generate
from support.language_models import build, draw, make_task

from fw_fairseq.generation.base import InPlaceStepper, Stepper
from fw_fairseq.generation.graphs import CudaGraph
from fw_fairseq.generation.kernel_memory import KernelMemory
from fw_fairseq.generation.pools import Pools
from fw_fairseq.models.generation import GENERATION, Generation, start
from fw_fairseq.models.generation.captured import CapturedGeneration
from fw_fairseq.ops.kernels.compiler import CupyLaunch

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
OPTIONS = [
    {"update_rule": "sum", "feature_map": "dpfp", "attention_norm": True},
    {"update_rule": "gated", "feature_map": "relu", "feature_norm": "none", "attention_norm": True},
    {"update_rule": "delta"},
    {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none", "scale_reads": True},
    {"update_rule": "gated_delta", "feature_map": "rfa", "feature_norm": "l2"},
]


@pytest.fixture
def kernels(emulate, monkeypatch):
    return emulate_graphs(emulate(), monkeypatch)


@pytest.mark.parametrize(
    "given, graph",
    [*((given, "1") for given in OPTIONS), (OPTIONS[0], "0")],
    ids=lambda x: x if isinstance(x, str) else x["update_rule"],
)
def test_tokens_are_those_of_the_general_way(kernels, monkeypatch, given, graph):
    monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", graph)
    model, tokens, prompt = build(**given).float(), draw(3, 13), 3 if graph == "1" else 0
    found, state = generate(model, tokens, prompt)
    generation = state[GENERATION]
    assert type(generation) is (CapturedGeneration if graph == "1" else Generation)
    assert all(isinstance(layer.stepper, KernelMemory) for layer in generation.layers)
    in_order = [order for *_, order in kernels.pointers if order]
    assert len(in_order) == 2 * (13 if graph == "0" else 9)  # those after a prompt of 4 tokens
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    expected, _ = generate(model, tokens, prompt)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_read_that_divides_what_it_erases_takes_the_general_way(kernels, monkeypatch):
    """With --attention-norm, a token of the delta rule first reads what it erases, which no kernel divides."""
    model, tokens = build(update_rule="delta", feature_map="relu", feature_norm="none", attention_norm=True).float(), draw(3, 7)
    found, state = generate(model, tokens, 0)
    assert not any(isinstance(layer.stepper, InPlaceStepper) for layer in state[GENERATION].layers)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    for ours, theirs in zip(found, generate(model, tokens, 0)[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


HELD = [
    ({"fast_weight_backend": "cuda"}, KernelMemory, CapturedGeneration),
    ({"fast_weight_backend": "recurrent"}, None, Generation),
    ({"short_conv": 2}, None, Generation),
    ({"qkv_sparsity": 4}, None, Generation),
    ({"mixer": "leap"}, Pools, Generation),
    ({"feature_dim": 512}, KernelMemory, CapturedGeneration),
    ({"feature_dim": 513}, None, Generation),  # as wide as the keys of the kernel are 512
    ({"ffn_sru": 4}, KernelMemory, Generation),
    ({"decoder_normalize_before": True, "reversible": True}, KernelMemory, Generation),
]


@pytest.mark.parametrize("options, kind, way", HELD, ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "")
@torch.no_grad()
def test_what_the_kernel_and_graphs_take(kernels, options, kind, way):
    model, state = build(**options).float(), {}
    assert type(start(model.decoder, {}, None)) is way
    if options.get("feature_dim", 0) < 512:
        model(draw(2, 1), incremental_state=state)
        assert type(state[GENERATION].layers[0].stepper) is (kind or Stepper)
    else:
        assert KernelMemory.can_hold(model.decoder.layers[0].self_attn.mixer) == (kind is KernelMemory)


@torch.no_grad()
def test_one_layer_has_its_graphs_alone(kernels):
    model, tokens = build(decoder_layers=1).float(), draw(2, 6)
    found, _ = generate(model, tokens[:, :4], 0)
    assert len(Repeated.made) == 2
    torch.testing.assert_close(torch.stack(found, 1), model(tokens[:, :4])[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_positions_beyond_the_table(kernels):
    """Tokens 1 to 6 have the rows 2 to 7 of the table; fairseq's module makes the others."""
    model, tokens, state = build().float(), draw(2, 9), {}
    whole = model(tokens)[0]
    model.decoder.embed_positions.weights = model.decoder.embed_positions.weights[:8]
    found = [model(tokens[:, : t + 1], incremental_state=state)[0] for t in range(9)]
    assert sum(len(graph.seen) for graph in Repeated.made) == 7, "2 tokens before the graphs"
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "given", [{}, {"update_rule": "sum", "feature_norm": "none", "attention_norm": True}], ids=["plain", "sums"]
)
@pytest.mark.parametrize("graph", ["0", "1"])
@torch.no_grad()
def test_a_state_has_the_order_of_its_rows(kernels, monkeypatch, given, graph):
    """Before the next token, which reads the memories in this order, and with a new one that has fewer rows."""
    monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", graph)
    model, tokens, state = build(**given).float(), draw(3, 5), {}
    for t in range(4):
        model(tokens[:, : t + 1], incremental_state=state)
    generation = state[GENERATION]
    before = generation.states()
    for order in (torch.tensor([2, 0, 0]), torch.tensor([2, 1])):
        model.decoder.reorder_incremental_state_scripting(state, order)
        before, tokens = [part.index_select(order) for part in before], tokens[order]
        for found, want in zip(generation.states(), before, strict=True):
            torch.testing.assert_close(found.memory, want.memory, rtol=0, atol=0)
            assert (found.normaliser is None) == (want.normaliser is None)
            if want.normaliser is not None:
                torch.testing.assert_close(found.normaliser, want.normaliser, rtol=0, atol=0)
    found = model(tokens, incremental_state=state)[0]
    torch.testing.assert_close(found, model(tokens)[0][:, -1:], rtol=1e-4, atol=1e-4)


def test_a_graph_captures_its_function_and_repeats_it_alone(monkeypatch):
    events = []

    class Graph:
        def replay(self):
            events.append("replayed")

    @contextlib.contextmanager
    def capture(graph):
        events.append("begins")
        yield
        events.append("ends")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    graph = CudaGraph(lambda: events.append("works"))
    assert events == ["begins", "works", "ends"]
    graph.replay()
    assert events[3:] == ["replayed"]


def test_graphs_always_touch_the_same_addresses(kernels):
    """Two graphs, of which each reads what the other one wrote, with the order of beam search in one place."""
    model, tokens = build(update_rule="gated_delta").float(), draw(3, 13)
    generate(model, tokens, 0)
    even, odd = Repeated.made
    assert len(even.seen) + len(odd.seen) == 11
    memory = 3 * model.state_size() // 2  # of a layer
    assert 0 < even.largest < memory and 0 < odd.largest < memory
    for graph in (even, odd):
        assert all(launches == graph.seen[0] for launches in graph.seen) and len(graph.seen[0]) == 2
    for (source, target, order), (other_source, other_target, other_order) in zip(even.seen[0], odd.seen[0]):
        assert (source, target, order) == (other_target, other_source, other_order) and source != target


def test_a_padded_token_leaves_the_graphs_with_their_states(kernels):
    model, tokens, state = build().float(), draw(2, 9), {}
    model.decoder.embed_positions = None  # which count padding
    with torch.no_grad():
        for t in range(6):
            model(tokens[:, : t + 1], incremental_state=state)
        model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1]))
        padded = torch.cat([tokens[1:, :6], torch.tensor([[1]]), tokens[1:, 6:]], 1)
        for t in range(6, 10):
            found = model(padded[:, : t + 1], incremental_state=state)[0]
        expected = model(tokens[1:])[0][:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: given["update_rule"])
def test_graphs_on_a_device(given, monkeypatch):
    if reason := CupyLaunch().why_not(torch.device("cuda")):
        pytest.skip(reason)
    model, tokens = build(**given).float().cuda(), draw(3, 13).cuda()
    found, state = generate(model, tokens, 0)
    assert type(state[GENERATION]) is CapturedGeneration and state[GENERATION].graphs is not None
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    for ours, theirs in zip(found, generate(model, tokens, 0)[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_beam_search_finds_the_same_sentences(kernels, monkeypatch):
    task = make_task(40)
    model = build(task, update_rule="delta").float()
    model.max_positions = lambda: 64
    sample = {"net_input": {"src_tokens": draw(3, 4), "src_lengths": torch.full((3,), 4)}}

    def search():
        generator = SequenceGenerator([model], task.target_dictionary, beam_size=3, max_len_b=12)
        found = generator.generate([model], sample, prefix_tokens=sample["net_input"]["src_tokens"][:, :2])
        return [[h["tokens"].tolist() for h in hypotheses] for hypotheses in found]

    found = search()
    assert len(Repeated.made) == 2
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert found == search()


@pytest.mark.parametrize("value, graphs", [("1", 2), ("0", 0)])
def test_the_environment_switches_graphs_off(value, graphs, kernels, monkeypatch):
    """As --no-decoding-graph of the commands that generate does."""
    monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", value)
    Repeated.made.clear()
    generate(build().float(), draw(3, 9), 0)
    assert len(Repeated.made) == graphs


def test_a_checkpoints_option_switches_graphs_off(kernels):
    generate(build(no_decoding_graph=True).float(), draw(3, 9), 0)
    assert not Repeated.made
