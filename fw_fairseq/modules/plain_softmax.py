"""The adaptive softmax of Transformer-XL's code: its words are rows of the input's embedding, with biases and no projections."""

from __future__ import annotations

from typing import cast

import torch
from fairseq.modules import AdaptiveSoftmax
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Mistake


class Band(nn.Module):
    """The scores of some neighbouring words, and of ``classes`` later bands."""

    def __init__(self, words: nn.Parameter, first: int, last: int, classes: int = 0) -> None:
        super().__init__()
        self.words, self.first, self.last = words, first, last
        self.classes = nn.Parameter(words.new_empty(classes, words.shape[1])) if classes else None
        self.bias = nn.Parameter(words.new_zeros(last - first + classes))
        if self.classes is not None:
            nn.init.xavier_uniform_(self.classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.words[self.first : self.last]
        return F.linear(x, rows if self.classes is None else torch.cat([rows, self.classes]), self.bias)


class PlainAdaptiveSoftmax(AdaptiveSoftmax):
    """fairseq's adaptive softmax with bands of this kind. ``cutoff``: where bands end; the last one ends with the vocabulary."""

    def __init__(self, embedding: nn.Module, cutoff: list[int], dropout: float) -> None:
        nn.Module.__init__(self)  # fairseq's would make weights of its own
        words = cast(nn.Parameter, embedding.weight)
        self.vocab_size, self.input_dim = words.shape
        if not cutoff or not 0 < cutoff[0] <= cutoff[-1] < self.vocab_size or cutoff != sorted(set(cutoff)):
            raise Mistake(
                f"--adaptive-softmax-cutoff is {','.join(map(str, cutoff)) or 'missing'}; with --plain-adaptive-softmax it must"
                f" rise and stay below {self.vocab_size}, the number of words"
            )
        self.cutoff = [*cutoff, self.vocab_size]
        self.dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)
        self.lsm = nn.LogSoftmax(dim=1)
        self.head = Band(words, 0, cutoff[0], classes=len(cutoff))
        self.tail = nn.ModuleList(Band(words, *ends) for ends in zip(self.cutoff, self.cutoff[1:]))
        self.register_buffer("version", torch.LongTensor([1]))
