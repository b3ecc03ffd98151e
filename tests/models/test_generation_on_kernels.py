"""Generation with the decoding kernel, and as CUDA graphs. The emulator starts kernels, and a graph is a call that is repeated."""

from __future__ import annotations

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from support.language_models import build, draw, make_task

from fw_fairseq.decoding import GENERATION, Generation
from fw_fairseq.decoding.captured import CapturedGeneration
from fw_fairseq.decoding.kernel_memory import KernelMemory
from fw_fairseq.ops.kernels import launch

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = [
    {"update_rule": "sum", "feature_map": "dpfp", "attention_norm": True},
    {"update_rule": "gated", "feature_map": "relu", "feature_norm": "none", "attention_norm": True},
    {"update_rule": "delta"},
    {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none", "scale_reads": True},
    {"update_rule": "gated_delta", "feature_map": "rfa", "feature_norm": "l2"},
]


class Repeated:
    """Stands for a graph: what it repeats starts the same kernels at the same addresses."""

    made: list[Repeated] = []  # noqa: RUF012

    def __init__(self, function):
        self.function, self.seen = function, []
        self.made.append(self)

    def replay(self) -> None:
        calls, before = launch.current().pointers, len(launch.current().pointers)
        self.function()
        self.seen.append(calls[before:])


@pytest.fixture
def kernels(emulate, monkeypatch):
    """The emulator, which writes down where each decoding kernel reads and writes its state."""
    launcher = emulate()
    launcher.pointers, start = [], type(launcher).__call__

    def write_down(self, source, name, defines, grid, block, params, *rest):
        if name == "step":
            self.pointers.append((*(int(params[field]["p"]) for field in ("memory", "memory_out")), int(params["order"])))
        return start(self, source, name, defines, grid, block, params, *rest)

    monkeypatch.setattr(type(launcher), "__call__", write_down)
    monkeypatch.setattr(CapturedGeneration, "graph_type", Repeated)
    Repeated.made.clear()
    return launcher


@torch.no_grad()
def generate(model, tokens, prompt: int) -> tuple[list[torch.Tensor], dict]:
    """Logits of hypotheses that change places twice; then one of them ends."""
    state, rows, found = {}, torch.arange(len(tokens)), []
    for t in range(prompt, tokens.shape[1]):
        found.append(model(tokens[rows, : t + 1], incremental_state=state)[0][:, -1])
        if t in (4, 6, 8):
            order = torch.tensor([1, 1, 0] if t < 8 else [0, 2])
            rows = rows[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
    return found, state


@pytest.mark.parametrize("graph", ["0", "1"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["update_rule"])
def test_tokens_are_those_of_the_general_way(kernels, monkeypatch, options, graph):
    monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", graph)
    model, tokens, prompt = build(**options).float(), draw(3, 13), 3 if graph == "1" else 0
    found, state = generate(model, tokens, prompt)
    generation = state[GENERATION]
    assert type(generation) is (CapturedGeneration if graph == "1" else Generation)
    assert all(isinstance(layer.stepper.buffers, KernelMemory) for layer in generation.layers)
    in_order = [order for *_, order in kernels.pointers if order]
    assert len(in_order) == 2 * (13 if graph == "0" else 9)  # those after a prompt of 4 tokens
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    expected, _ = generate(model, tokens, prompt)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_graphs_always_touch_the_same_addresses(kernels):
    """Two graphs, of which each reads what the other one wrote, with the order of beam search in one place."""
    model, tokens = build(update_rule="gated_delta").float(), draw(3, 13)
    generate(model, tokens, 0)
    even, odd = Repeated.made
    assert len(even.seen) + len(odd.seen) == 11
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
