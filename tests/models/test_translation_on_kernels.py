"""Translation with the kernels of decoding, and as CUDA graphs: sources in place, with and without finished sentences."""

from __future__ import annotations

import pytest
import torch
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from support.graphs import Repeated, emulate_graphs
from support.language_models import make_task
from support.translation_models import build, draw

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import FastWeightTransformerConfig
from fw_fairseq.mixers.parts import source as parts_source
from fw_fairseq.models.generation import GENERATION, Generation
from fw_fairseq.models.generation.captured import CapturedGeneration
from fw_fairseq.models.generation.cross import KernelSource
from fw_fairseq.modules import LinearAttention
from fw_fairseq.modules.sparse import make_sparse
from fw_fairseq.ops.kernels.compiler import CupyLaunch

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
OPTIONS = {
    "elu": {"update_rule": "sum", "feature_norm": "none", "attention_norm": True},
    "dpfp": {"update_rule": "delta", "feature_map": "dpfp", "dpfp_nu": 2},
    "relu": {"update_rule": "gated", "feature_map": "relu", "feature_norm": "none"},
    "favor": {"update_rule": "gated_delta", "feature_map": "favor"},
    "rfa": {"update_rule": "decay", "feature_map": "rfa", "feature_norm": "none"},
}


@pytest.fixture
def kernels(emulate, monkeypatch):
    return emulate_graphs(emulate(), monkeypatch)


@torch.no_grad()
def decode(model, target) -> tuple[list[torch.Tensor], dict]:
    """Logits of three sentences with two hypotheses each, which change places; then the second sentence is done."""
    device = target.device
    source, state, found = draw(6, 9, 4).to(device), {}, []
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), torch.tensor([0, 0, 1, 1, 2, 2], device=device))
    rows = torch.arange(6, device=device)
    for t in range(target.shape[1]):
        found.append(model.decoder(target[rows, : t + 1], encoder_out=encoded, incremental_state=state)[0][:, -1])
        if t in (1, 4, 6, 8):
            order = torch.tensor([1, 0, 2, 2, 5, 4] if t < 6 else [1, 1, 5, 4] if t < 8 else [0, 0, 2, 3], device=device)
            rows = rows[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
    return found, state


@pytest.mark.parametrize("name, graph", [*((name, True) for name in OPTIONS), ("elu", False)])
def test_tokens_are_those_of_the_general_way(kernels, monkeypatch, name, graph):
    model, target = build(**OPTIONS[name], no_decoding_graph=not graph), torch.randint(4, 40, (6, 11))
    torch.manual_seed(1)
    found, state = decode(model, target)
    assert type(state[GENERATION]) is (CapturedGeneration if graph else Generation)
    assert all(isinstance(layer.parts[1].stepper, KernelSource) for layer in state[GENERATION].layers)
    assert len(Repeated.made) == 2 * graph
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    torch.manual_seed(1)
    for ours, theirs in zip(found, decode(model, target)[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, takes", [("elu", 1), ("dpfp", 1), ("relu", 1), ("favor", 0)])
def test_training_reads_sources_in_kernels(emulate, monkeypatch, name, takes):
    """Logits and gradients are those of features in PyTorch, with padding in the sources."""
    launcher, asked = emulate(), []
    model, source, target = build(**OPTIONS[name]), draw(6, 9, 4), torch.randint(4, 40, (3, 11))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(source, None, target)[0]
        logits.square().sum().backward()
        return [logits.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]

    torch.manual_seed(1)
    found = run()
    launched = [made["FW_SUMS"] for _, kernel, made in launcher.calls if kernel == "linear_forward" and made.get("FW_MAP")]
    monkeypatch.setattr(parts_source, "attend_to_source", lambda *given: asked.append(given))
    torch.manual_seed(1)
    for ours, theirs in zip(found, run(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    layers = [*model.encoder.layers, *model.decoder.layers]
    assert len(asked) == takes * len(layers) and launched.count(1) >= len(asked)


@torch.no_grad()
def test_a_source_that_no_token_has_read_is_no_state(kernels):
    """Its sums are made for the first token; before it, hypotheses may change places."""
    model = build(**OPTIONS["elu"])
    encoded, attention = model.encoder(draw(6, 9)), model.decoder.layers[0].encoder_attn
    source = KernelSource(attention, None, encoded)
    source.reorder(torch.tensor([1, 0]))
    assert source.state() is None
    source(torch.randn(4, 32))
    state = source.state()
    want = attention.summarise(encoded["encoder_out"][0], encoded["encoder_padding_mask"][0])
    assert state.beam == 2
    torch.testing.assert_close((state.memory, state.normaliser), (want.memory, want.normaliser))


@pytest.mark.parametrize(
    "order, sentences, beam",
    [([1, 0, 3, 2], [0, 1], 2), ([0, 2, 1, 3], [0, 1, 0, 1], 1), ([3, 2, 1], [1, 1, 0], 1), ([2, 3], [1], 2)],
    ids=str,
)
@torch.no_grad()
def test_rows_of_a_sentence_share_its_memory_while_they_stand_side_by_side(kernels, order, sentences, beam):
    model = build(**OPTIONS["elu"])
    encoded, attention = model.encoder(draw(6, 9)), model.decoder.layers[0].encoder_attn
    source = KernelSource(attention, None, encoded)
    source(torch.randn(4, 32))
    source.reorder(torch.tensor(order))
    state = source.state()
    want = attention.summarise(encoded["encoder_out"][0], encoded["encoder_padding_mask"][0])
    assert state.beam == beam
    torch.testing.assert_close((state.memory, state.normaliser), (want.memory[sentences], want.normaliser[sentences]))


def test_which_sources_the_kernel_reads(kernels, monkeypatch):
    """Those of linear attention whose features are at most as wide as its keys, 512; and its queries are a dense product."""

    def attention(sparsity=0, **options):
        made = LinearAttention(32, 4, FastWeightTransformerConfig(update_rule="sum", **options))
        if sparsity:
            make_sparse(made, sparsity)
        return made

    assert KernelSource.can_read(attention(feature_dim=512))
    assert not KernelSource.can_read(attention(feature_dim=513))
    assert not KernelSource.can_read(attention().to(torch.float64))
    assert not KernelSource.can_read(attention(sparsity=4))
    assert not KernelSource.can_read(MultiheadAttention(32, 4, encoder_decoder_attention=True))


@torch.no_grad()
def test_a_batch_without_padding_has_no_mask(kernels):
    """fairseq's encoder leaves the list of masks empty, or it has one."""
    model = build(**OPTIONS["elu"])
    encoded, attention, x = model.encoder(draw(6, 6)), model.decoder.layers[0].encoder_attn, torch.randn(2, 32)
    want = KernelSource(attention, None, encoded)(x)
    found = KernelSource(attention, None, encoded | {"encoder_padding_mask": []})(x)
    torch.testing.assert_close(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_graphs_on_a_device(name, monkeypatch):
    if reason := CupyLaunch().why_not(torch.device("cuda")):
        pytest.skip(reason)
    model, target = build(**OPTIONS[name]).cuda(), torch.randint(4, 40, (6, 11)).cuda()
    torch.manual_seed(1)
    found, state = decode(model, target)
    assert type(state[GENERATION]) is CapturedGeneration and state[GENERATION].graphs is not None
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    torch.manual_seed(1)
    for ours, theirs in zip(found, decode(model, target)[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_graphs_always_touch_the_same_addresses(kernels):
    """Memories take turns; the sources stay, and sentences that are done leave them where they are."""
    model = build(**OPTIONS["elu"])
    decode(model, torch.randint(4, 40, (6, 11)))
    even, odd = Repeated.made
    assert len(even.seen) + len(odd.seen) == 9
    for graph in (even, odd):
        assert all(launches == graph.seen[0] for launches in graph.seen) and len(graph.seen[0]) == 4
        assert 0 < graph.largest < 6 * 4 * 8 * 8
    for layer in (0, 2):
        (source, target, order), other = even.seen[0][layer], odd.seen[0][layer]
        assert (target, source, order) == other and source != target
        assert even.seen[0][layer + 1] == odd.seen[0][layer + 1]


@torch.no_grad()
def search(model, source, **options):
    generator = SequenceGenerator([model], make_task(40).target_dictionary, beam_size=3, max_len_b=14, **options)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    return [[h["tokens"].tolist() for h in found] for found in generator._generate(sample)]


@pytest.mark.parametrize("ends", [True, False])
def test_beam_search_finds_the_same_sentences(kernels, monkeypatch, ends):
    """Where sentences end, they leave the batch before the others."""
    torch.manual_seed(7)  # of weights with which three sentences end
    model, source, rows = build(**OPTIONS["dpfp"]), draw(6, 9, 4, 7), set()
    reorder = CapturedGeneration.reorder
    monkeypatch.setattr(CapturedGeneration, "reorder", lambda self, order: rows.add(len(order)) or reorder(self, order))
    min_len = 1 if ends else 13
    if ends:
        model.decoder.output_projection.weight.data[2] *= 4
    found = search(model, source, min_len=min_len)
    assert len(Repeated.made) == 2 and rows == ({12, 6, 3} if ends else {12})
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert found == search(model, source, min_len=min_len)


def test_a_padded_token_finds_the_states_and_sources(kernels):
    """The general way goes on where the graphs were."""
    model, source = build(**OPTIONS["elu"]), draw(6, 9)
    model.decoder.embed_positions = None  # which count padding
    target, state = torch.randint(4, 40, (4, 8)), {}
    target[1, 6] = 1
    with torch.no_grad():
        encoded = model.encoder.reorder_encoder_out(model.encoder(source), torch.tensor([0, 0, 1, 1]))
        steps = [model.decoder(target[:, : t + 1], encoder_out=encoded, incremental_state=state)[0] for t in range(8)]
        expected = model.decoder(target[:, target[1] != 1][1:2], encoder_out=model.encoder(source[:1]))[0]
    torch.testing.assert_close(steps[-1][1], expected[0, -1:], rtol=1e-4, atol=1e-4)
