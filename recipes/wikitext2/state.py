"""Prints how many numbers a model keeps of one text after it has read N tokens one by one: state.py CHECKPOINT DATA N"""

import sys

import torch

from fw_fairseq.models.generation import Generation
from fw_fairseq.tools.checkpoints import load_language_model


def count(kept) -> int:
    if isinstance(kept, torch.Tensor):
        return kept.numel()
    if isinstance(kept, Generation):
        kept = kept.states()
    parts = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, (tuple, list)) else ()
    return sum(map(count, parts))


@torch.no_grad()
def main(checkpoint: str, data: str, length: int) -> None:
    model, _, first = load_language_model(checkpoint, data, "state.py", ("fast_weight_lm", "transformer_lm"))
    tokens, kept = torch.full((1, length), first), {}
    for end in range(1, length + 1):
        model(tokens[:, :end], incremental_state=kept)
    print(count(kept))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
