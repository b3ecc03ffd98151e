"""Adaptive vocabularies whose words are sorted by band: the equations in float64, and the bits of fairseq's own functions."""

from __future__ import annotations

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from support.launches import Counted
from torch import nn

import fw_fairseq.models  # noqa: F401

PAD, WORDS, ENDS = 1, 60, [10, 25, 40]
TEXTS = {
    "all bands": torch.tensor([[3, 59, 12, 24], [25, 9, 10, 40]]),
    "one band": torch.tensor([[3, 4, 4, 9]]),
    "the last band": torch.tensor([[40, 59, 42]]),
    "no first band": torch.tensor([[10, 42, 27, 10]]),
    "second words of bands": torch.tensor([[11, 26, 41]]),
    "padding": torch.tensor([[3, 59, PAD], [12, PAD, PAD]]),
}


def modules(dtype=torch.float64) -> tuple[AdaptiveInput, AdaptiveSoftmax]:
    torch.manual_seed(2)
    embedded = AdaptiveInput(WORDS, PAD, 8, 2, 8, ENDS)
    return embedded.to(dtype), AdaptiveSoftmax(WORDS, 8, ENDS, 0.0, factor=2, adaptive_inputs=embedded, tie_proj=True).to(dtype)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_embeddings(text):
    embedded, _ = modules()
    found = embedded(text)
    for i, word in enumerate(text.flatten().tolist()):
        band = sum(word >= end for end in ENDS)
        table, projection = embedded.weights_for_band(band)
        row = table[word - (ENDS[band - 1] if band else 0)]
        torch.testing.assert_close(found.flatten(0, 1)[i], projection @ row, atol=1e-13, rtol=0)


class Model(nn.Module):
    """A language model without layers."""

    def __init__(self):
        super().__init__()
        self.embedded, softmax = modules()
        self.decoder = nn.Module()
        self.decoder.adaptive_softmax = softmax

    def forward(self, src_tokens):
        return self.embedded(src_tokens), None

    def get_targets(self, sample, output):
        return sample["target"]


def lose(text, reduce=True) -> tuple:
    model = Model()
    criterion = AdaptiveLoss.__new__(AdaptiveLoss)
    nn.Module.__init__(criterion)
    criterion.padding_idx, criterion.sentence_avg = PAD, False
    sample = {"net_input": {"src_tokens": text.flip(1)}, "target": text, "ntokens": int(text.ne(PAD).sum())}
    loss, size, log = criterion(model, sample, reduce)
    loss.sum().backward()
    return model, loss.detach(), size, log


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_losses(text):
    """-log p(word) = -log p(word among the frequent) or -log p(band) - log p(word in the band)."""
    model, loss, size, log = lose(text)
    softmax, expected = model.decoder.adaptive_softmax, 0.0
    x = model.embedded(text.flip(1)).flatten(0, 1)
    for i, word in enumerate(text.flatten().tolist()):
        if word == PAD:
            continue
        band = sum(word >= end for end in ENDS)
        words, classes = model.embedded.weights_for_band(0)[0], softmax.head.class_proj.weight
        head = (torch.cat([words, classes]) @ x[i]).log_softmax(0)
        expected = expected - head[word if not band else ENDS[0] + band - 1]
        if band:
            table, projection = model.embedded.weights_for_band(band)
            expected = expected - (table @ (projection.t() @ x[i])).log_softmax(0)[word - ENDS[band - 1]]
    torch.testing.assert_close(loss[0], expected.detach(), atol=1e-12, rtol=0)
    assert size == log["ntokens"] == int(text.ne(PAD).sum()) and log["nsentences"] == len(text)


@pytest.mark.parametrize("text", [text for name, text in TEXTS.items() if "second" not in name])
def test_the_bits_are_those_of_fairseq(text, monkeypatch):
    model, *found = lose(text)
    for owner, name in ((AdaptiveInput, "forward"), (AdaptiveSoftmax, "adapt_target"), (AdaptiveLoss, "forward")):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    other, *expected = lose(text)
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
    for (name, x), y in zip(model.named_parameters(), other.parameters()):
        assert (x.grad is None) == (y.grad is None) and (x.grad is None or torch.equal(x.grad, y.grad)), name


def test_the_host_waits_once_for_all_bands():
    embedded, softmax = modules()
    for run in (lambda: embedded(TEXTS["all bands"]).sum().backward(), lambda: softmax.adapt_target(TEXTS["all bands"])):
        with Counted() as counted, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", counted.tolist)
            run()
        assert counted.waits == {"tolist": 1}
