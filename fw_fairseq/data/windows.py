"""Overlapping windows of a text, for evaluation with a sliding context."""

from __future__ import annotations

import torch

from .text import Text


class SlidingWindows(torch.utils.data.Dataset):
    """Windows of ``context`` + ``stride`` tokens. Each scores its last ``stride`` tokens, the first one all tokens. That one
    ends after a multiple of ``stride``, as fairseq's windows do."""

    def __init__(self, text: Text, context: int, stride: int, eos: int) -> None:
        self.target, self.context, self.stride = text.targets, context, stride
        self.source = torch.cat([torch.tensor([eos]), text.tokens[:-1]])
        self.first = (context + stride) // stride * stride
        self.starts = [0, *range(self.first, len(text.tokens), stride)]  # of what each scores

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        start = self.starts[index]
        stop = start + (self.stride if index else self.first)
        return index, self.source[max(0, start - self.context) : stop], self.target[start:stop]

    def batches(self, windows: int, shard: int, shards: int) -> list[list[int]]:
        """The first window and the last, which may be shorter, are batches of their own; all others have one length. A shard has
        neighbouring windows."""
        own, ends = range(len(self) * shard // shards, len(self) * (shard + 1) // shards), (0, len(self) - 1)
        middle = [i for i in own if i not in ends]
        grouped = [middle[i : i + windows] for i in range(0, len(middle), windows)]
        return sorted(grouped + [[i] for i in own if i in ends])

    def collater(self, samples: list[tuple[int, torch.Tensor, torch.Tensor]]) -> dict:
        ids, source, target = zip(*samples)
        asked = torch.stack(target)
        net_input = {"src_tokens": torch.stack(source), "score_last": asked.shape[1]}
        counts = {"nsentences": len(ids), "ntokens": asked.numel()}
        return {"id": torch.tensor(ids), **counts, "net_input": net_input, "target": asked}
