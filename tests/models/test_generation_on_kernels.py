"""Generation with the decoding kernel, and as CUDA graphs. The emulator starts kernels, and a graph is a call that is repeated."""

from __future__ import annotations

import pytest
import torch
from fairseq import options
from fairseq.sequence_generator import SequenceGenerator
from support.graphs import Repeated, emulate_graphs, generate
from support.language_models import build, draw, make_task

from fw_fairseq.buffers.kernel_memory import KernelMemory
from fw_fairseq.buffers.steppers import InPlaceStepper
from fw_fairseq.decoding import GENERATION, Generation
from fw_fairseq.decoding.captured import CapturedGeneration
from fw_fairseq.ops.kernels.launch import CupyLaunch

pytestmark = pytest.mark.usefixtures("one_thread")
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


@pytest.mark.parametrize("graph", ["0", "1"])
@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: given["update_rule"])
def test_tokens_are_those_of_the_general_way(kernels, monkeypatch, given, graph):
    monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", graph)
    model, tokens, prompt = build(**given).float(), draw(3, 13), 3 if graph == "1" else 0
    found, state = generate(model, tokens, prompt)
    generation = state[GENERATION]
    assert type(generation) is (CapturedGeneration if graph == "1" else Generation)
    assert all(isinstance(layer.stepper.buffers, KernelMemory) for layer in generation.layers)
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


def test_the_commands_that_generate_switch_graphs_off(kernels, monkeypatch):
    monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", "1")
    monkeypatch.setattr("sys.argv", ["fairseq-interactive"])
    parser = options.get_interactive_generation_parser()
    for arguments, graphs in ([], 2), (["--no-decoding-graph"], 0):
        Repeated.made.clear()
        parser.parse_known_args(arguments)
        generate(build().float(), draw(3, 9), 0)
        assert len(Repeated.made) == graphs


def test_a_checkpoints_option_switches_graphs_off(kernels):
    generate(build(no_decoding_graph=True).float(), draw(3, 9), 0)
    assert not Repeated.made
