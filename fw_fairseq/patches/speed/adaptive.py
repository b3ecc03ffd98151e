"""Adaptive vocabularies

Words are sorted by their bands, so that the host waits for the device once and not for each band.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from torch import Tensor
from torch.nn import functional as F

from ...autograd import PLAIN
from ..replacing import replaces


def beside(words: Tensor, *numbers: int) -> Tensor:
    """These numbers on the device of the words, which keeps them unless a program is traced."""
    return (on_device if words.__class__ in PLAIN else on_device.__wrapped__)(words.device, *numbers)


@cache
def on_device(device: torch.device, *numbers: int) -> Tensor:
    """These numbers."""
    return torch.tensor(numbers, device=device, dtype=torch.int64)


def by_bands(words: Tensor, ends: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the band of each word (N), the places of the words of the first band, the second and so on, each in their order, and
    how many words each band has. ``ends``: where the bands end."""
    bands = torch.bucketize(words, beside(words, *ends[:-1]), right=True)
    found, places = bands.sort(stable=True)
    begins = torch.searchsorted(found, beside(words, *range(1, len(ends)))).tolist()
    return bands, places, [end - begin for begin, end in zip([0, *begins], [*begins, len(words)])]


@replaces(AdaptiveInput, "forward")
def embed_by_bands(original: Callable, module: AdaptiveInput, input: Tensor) -> Tensor:
    """For each band of words, fairseq asks the device again and again how many words are in it. Now the host asks once for all
    bands, and never in the backward pass. The results have the same bits."""
    words, kind = input.flatten(), module._float_tensor.dtype
    _, places, sizes = by_bands(words, module.cutoff)
    parts = zip(module.embeddings, [0, *module.cutoff], words.index_select(0, places).split(sizes))
    rows = torch.cat([embedding(part - begin).to(kind) for embedding, begin, part in parts if len(part)])
    return torch.empty_like(rows).index_copy(0, places, rows).view(*input.shape, -1)


@replaces(AdaptiveSoftmax, "adapt_target")
def find_targets_by_bands(original: Callable, module: AdaptiveSoftmax, target: Tensor) -> tuple[list, list]:
    """The same for the targets: now the host asks once."""
    words = target.view(-1)
    bands, places, sizes = by_bands(words, module.cutoff)
    found = [part if len(part) else None for part in places.split(sizes)[1:]]
    head = torch.where(bands > 0, bands + (module.cutoff[0] - 1), words)
    tails = [None if part is None else words.index_select(0, part) - begin for part, begin in zip(found, module.cutoff)]
    return [head, *tails], found


@replaces(AdaptiveLoss, "forward")
def lose_without_waiting(original: Callable, criterion: AdaptiveLoss, model: Any, sample: dict, reduce: bool = True) -> tuple:
    """fairseq's checks of targets, and its count of words, wait for each band. Now torch checks the targets where the loss is
    computed. fairseq also takes the second word of each rare band for padding, so its probability within the band is in no loss.
    Now only padding is left out."""
    output = model(**sample["net_input"])
    target = model.get_targets(sample, output)
    logits, targets = model.decoder.adaptive_softmax(output[0], target.view(-1))
    how, ignored = "sum" if reduce else "none", [criterion.padding_idx] + [-100] * len(logits)
    parts = zip(logits, targets, ignored)
    losses = [F.cross_entropy(x, words, ignore_index=pad, reduction=how) for x, words, pad in parts if words is not None]
    loss = output[0].new_zeros(1 if reduce else target.numel())
    for each in losses:
        loss = loss + each
    size = len(sample["target"]) if criterion.sentence_avg else sample["ntokens"]
    log = {"loss": loss.data, "ntokens": sample["ntokens"], "nsentences": len(target), "sample_size": size}
    return loss, size, log
