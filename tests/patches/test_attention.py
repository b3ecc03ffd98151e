"""Causal attention gets no mask of numbers, and equals fairseq's, which does."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq.models import MODEL_REGISTRY
from fairseq.models.transformer import base_architecture
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from support.language_models import build, draw, make_task, options_of
from torch.utils._python_dispatch import TorchDispatchMode

import fw_fairseq.models  # noqa: F401

ORIGINAL = TransformerDecoderBase.buffered_future_mask.__wrapped__
PADDING, LENGTH = 1, 37  # no other size of the models is a multiple of it

SIZES = {
    "decoder_layers": 2, "decoder_embed_dim": 32, "decoder_ffn_embed_dim": 48, "decoder_attention_heads": 4, "dropout": 0.0,
    "tokens_per_sample": 64, "max_target_positions": 64,
}  # fmt: skip


def fairseqs(**options):
    args = options_of("transformer_lm", **{**SIZES, **options})
    return MODEL_REGISTRY["transformer_lm"].build_model(args, make_task(40)).double()


def with_softmax(**options):
    return build(mixer="softmax", **options)


def hybrid(**options):
    return build(mixer_pattern="softmax,fast_weight", **options)


class Record(TorchDispatchMode):
    """Whether the calls of attention were causal, and the sizes of all results."""

    def __init__(self):
        super().__init__()
        self.causal, self.sizes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in str(func) and "backward" not in str(func):
            self.causal.append(args[4:] == (True,) and "attn_mask" not in (kwargs or {}))
        made = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)]
        self.sizes += [x.untyped_storage().nbytes() // x.element_size() for x in made]
        return result


def both(model, tokens, monkeypatch, **keywords):
    """Logits at the words and gradients, with fairseq's mask and without."""

    def run():
        torch.manual_seed(1)
        model.zero_grad()
        logits = model(tokens, **keywords)[0][tokens.ne(PADDING)]
        logits.square().sum().backward()
        return [logits.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    found = run()
    with monkeypatch.context() as patch:
        patch.setattr(TransformerDecoderBase, "buffered_future_mask", ORIGINAL)
        return found, run()


@pytest.mark.parametrize("make", [fairseqs, with_softmax, hybrid])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_numbers_are_fairseqs(make, padding, dropout, monkeypatch):
    model, tokens = make(attention_dropout=dropout).train(), draw(3, LENGTH)
    if padding != "none":
        tokens[1, slice(-5, None) if padding == "right" else slice(5)] = PADDING
    found, expected = both(model, tokens, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_checkpointed_layers_compute_the_same_again(monkeypatch):
    for dropout in (0.1, 0.0):
        model = fairseqs(attention_dropout=dropout).train()
        for index, layer in enumerate(model.decoder.layers):
            model.decoder.layers[index] = checkpoint_wrapper(layer)
        found, expected = both(model, draw(3, LENGTH), monkeypatch)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with Record() as record:
        model(draw(2, LENGTH))[0].sum().backward()
    assert record.causal == [True] * 4 and LENGTH**2 not in record.sizes


@pytest.mark.parametrize("make", [fairseqs, with_softmax])
def test_attention_is_causal_without_numbers(make):
    """Attention alone decides what it computes, and nothing of the size of the mask is made."""
    model = make()
    with Record() as record:
        model(draw(2, LENGTH))[0].sum().backward()
    assert record.causal == [True] * 2 and LENGTH**2 not in record.sizes
    tokens = draw(2, LENGTH)
    tokens[0, -1] = PADDING
    with Record() as record:
        model(tokens)
    assert record.causal == [False] * 2


@pytest.mark.parametrize("make", [fairseqs, with_softmax])
def test_tokens_one_by_one(make):
    model, tokens = make().eval(), draw(2, 9)
    whole, state = model(tokens)[0], {}
    for end in range(1, 10):
        found = model.decoder(tokens[:, :end], incremental_state=state)[0][:, -1]
        torch.testing.assert_close(found, whole[:, end - 1], rtol=1e-5, atol=1e-6)  # fairseq's steps have a softmax in float32


def test_a_prompt_in_one_pass(monkeypatch):
    """Its attention keeps keys and values, and adds the numbers of the mask to its scores."""
    model, tokens = with_softmax(), draw(2, 9)

    def decode():
        state = {}
        return [model.decoder(tokens[:, :end], incremental_state=state)[0] for end in (8, 9)]

    found = decode()
    with monkeypatch.context() as patch:
        patch.setattr(TransformerDecoderBase, "buffered_future_mask", ORIGINAL)
        torch.testing.assert_close(found, decode(), rtol=1e-10, atol=1e-10)


def test_whatever_else_reads_the_mask_gets_numbers():
    decoder, x = fairseqs().decoder, torch.zeros(5, 2, 32, dtype=torch.float64)
    expected = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    mask = decoder.buffered_future_mask(x)
    assert mask.shape == (5, 5) and mask.dtype == torch.float64
    for numbers in (
        mask + 0,
        mask[:],
        mask.clone(),
        mask.contiguous(),
        torch.cat([mask, mask])[5:],
        mask.detach().unsqueeze(0)[0],
        x[:, 0, :5] + mask,
    ):
        assert type(numbers) is torch.Tensor
        torch.testing.assert_close(numbers, expected, rtol=0, atol=0)
    scores = torch.zeros(5, 5, dtype=torch.float64)
    scores += mask
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)
    assert mask.half().dtype == torch.float16 and mask.to(torch.bool).sum() == 10


def test_weights_of_attention_are_those_of_the_mask():
    """Where weights are asked for, torch's attention adds the mask to the scores."""
    layer, x = fairseqs().decoder.layers[0].self_attn.eval(), torch.randn(5, 2, 32, dtype=torch.float64)
    mask = fairseqs().decoder.buffered_future_mask(x)
    _, weights = layer(x, x, x, attn_mask=mask, need_weights=True)
    assert weights.triu(1).abs().max() == 0 and weights.sum(-1).sub(1).abs().max() < 1e-12


def test_cross_self_attention(monkeypatch):
    """Its mask has columns for the source in front."""
    task = Namespace(source_dictionary=make_task(40).source_dictionary, target_dictionary=make_task(40).target_dictionary)
    args = Namespace(
        encoder_layers=1, decoder_layers=1, encoder_embed_dim=32, decoder_embed_dim=32, encoder_ffn_embed_dim=32,
        decoder_ffn_embed_dim=32, encoder_attention_heads=4, decoder_attention_heads=4, cross_self_attention=True,
        no_cross_attention=True, dropout=0.0, max_source_positions=64, max_target_positions=64,
    )  # fmt: skip
    base_architecture(args)
    model = MODEL_REGISTRY["transformer"].build_model(args, task).double()
    source, target = draw(2, 6), draw(2, 7)
    found = model(source, torch.full((2,), 6), target)[0]
    with monkeypatch.context() as patch:
        patch.setattr(TransformerDecoderBase, "buffered_future_mask", ORIGINAL)
        torch.testing.assert_close(found, model(source, torch.full((2,), 6), target)[0], rtol=1e-10, atol=1e-10)
