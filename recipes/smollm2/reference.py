"""Perplexity by transformers alone, in segments of TOKENS: python reference.py MODEL TEXT [TOKENS [FIRST]]

The first number is that of fairseq's segments, which predict their first token from the one before them; the second that of
segments alone, whose first token is not predicted. FIRST: how many tokens are predicted, as with TEST_WORDS of eval.sh; else all.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def perplexity(model, tokens: torch.Tensor, size: int, before: int) -> float:
    """Segments of ``size`` tokens, which begin ``before`` tokens earlier."""
    loss = count = 0.0
    for start in range(before, len(tokens), size):
        segment = tokens[start - before : start + size]
        if len(segment) > 1:
            scores = model(segment[None, :-1]).logits[0]
            loss += float(F.cross_entropy(scores, segment[1:], reduction="sum"))
            count += len(segment) - 1
    return float(torch.tensor(loss / count).exp())


if __name__ == "__main__":
    folder, text = sys.argv[1:3]
    length, first = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((3, 512), (4, None)))
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(Path(text).read_text(encoding="utf-8"))["input_ids"])
    end = torch.tensor([library.config.eos_token_id])
    whole = torch.cat([end, ids, end])[: None if first is None else first + 1]
    print(f"fairseq's segments: {perplexity(library, whole, length, 1):.2f}", flush=True)
    print(f"segments alone: {perplexity(library, ids[:first], length, 0):.2f}")
