"""How chunks of a model with decay per channel run (``cuda/gates.cuh``), from its gates on the first tokens of a text.

    PYTHONPATH=.:tests python -m counts.tiers CHECKPOINT DATA [TOKENS]

DATA is a folder of fairseq's with a test text in the checkpoint's dictionary. Prints the share of the chunks in each tier, of all
layers, heads and tiles of values, in the forward with keys up to 64.
"""

from __future__ import annotations

import collections
import sys
from unittest import mock

import torch
from torch import Tensor

from fw_fairseq.mixers import fast_weight as layer
from fw_fairseq.ops import fast_weight
from fw_fairseq.pretrained import heads
from fw_fairseq.rules import RULES
from fw_fairseq.tools.checkpoints import load_model

CHUNK, TILE = 16, 64  # tokens, and columns of values
ONE_FRAME, UNEVEN, SPLIT_PAIRS = 1e-14, 1e4, 1e-30


def smallest(gate: Tensor, tokens: int) -> Tensor:
    """The smallest product of so many gates, about which a frame lies, of each chunk: (B,H,chunks)."""
    left = -gate.shape[2] % CHUNK
    whole = torch.nn.functional.pad(gate.double(), (0, 0, 0, left), value=1.0)
    return whole.unflatten(2, (-1, CHUNK // tokens, tokens)).prod(4).amin((3, 4))


def in_range(key: Tensor, value: Tensor) -> Tensor:
    pairs = ((1.0, 1.0), (1 / UNEVEN, UNEVEN), (UNEVEN, 1 / UNEVEN))
    return torch.stack([(key >= ONE_FRAME * low) & (value >= ONE_FRAME * high) for low, high in pairs]).any(0)


def tiers(f: Tensor, z: Tensor) -> Tensor:
    """Of each chunk 0 for one round, 1 for halves, 2 for split pairs, 3 for levels; gates (B,H,T,K) and (B,H,T,V)."""
    found = []
    for values in z.split(TILE, -1):
        (key, of_half), (value, of_half_value) = ((smallest(x, 8), smallest(x, 4)) for x in (f, values))
        several = torch.where(torch.minimum(key, value) >= SPLIT_PAIRS, 2, 3)
        halves = torch.where(in_range(of_half, of_half_value), 1, several)
        found.append(torch.where(in_range(key, value), 0, halves))
    return torch.stack(found)


def main() -> None:
    checkpoint, data, *more = sys.argv[1:]
    model, task = load_model(checkpoint, data, "counts.tiers", ("fast_weight_lm", "pretrained_lm"))
    task.load_dataset("test")
    tokens = task.dataset("test")[0]["source"][: int(*more or [512])]
    counted: collections.Counter = collections.Counter()

    def count(q, k, v, rule, gates, *others, **options):
        coefficients = RULES[rule].coefficients(**gates)
        ones = {"f": torch.ones_like(q), "z": torch.ones_like(v)}
        f, z = (ones[name] if x is None else x for name, x in zip("fz", coefficients[:2]))
        counted.update(tiers(f, z).flatten().tolist())
        return fast_weight(q, k, v, rule, gates, *others, **options)

    with torch.no_grad(), mock.patch.object(layer, "fast_weight", count), mock.patch.object(heads, "fast_weight", count):
        model(tokens[None])
    for n, name in enumerate(("one round", "halves", "split", "levels")):
        print(f"{name}: {counted[n] / sum(counted.values()):.1%}")


if __name__ == "__main__":
    main()
