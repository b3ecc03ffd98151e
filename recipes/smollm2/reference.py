"""Perplexity by transformers alone, in segments of TOKENS: python reference.py MODEL TEXT [TOKENS]

Each segment is read alone, so that its first token is not predicted. The second number is that of fairseq's segments, which predict
it from the token before.
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
    length = int(sys.argv[3]) if len(sys.argv) > 3 else 512
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(Path(text).read_text(encoding="utf-8"))["input_ids"])
    print(f"segments alone: {perplexity(library, ids, length, 0):.2f}", flush=True)
    end = torch.tensor([library.config.eos_token_id])
    print(f"fairseq's segments: {perplexity(library, torch.cat([end, ids, end]), length, 1):.2f}")
