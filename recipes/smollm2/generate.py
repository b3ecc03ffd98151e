"""What a generated token takes, and how models continue texts: python generate.py TOKENS PROMPTS FOLDER...

FOLDER: of fw-export-hf. TOKENS: the lengths of text before the measured tokens, such as 256,4096. PROMPTS: one a line. Prints
processor time for a token in one thread, the models in turn token by token, the numbers that are kept of the text, and greedy
continuations.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from fw_fairseq.huggingface.parts import CACHE

MEASURED, LONGEST = 32, 40


def kept(cache) -> int:
    """The numbers that a cache holds."""
    count = 0
    for layer in cache.layers:
        parts = [layer.keys, layer.values] if not hasattr(layer, "state") else layer.state
        count += sum(part.numel() for part in parts if isinstance(part, torch.Tensor))
    return count


@torch.no_grad()
def measure(models: dict[str, Any], tokens: torch.Tensor) -> dict[str, tuple[float, int]]:
    """Seconds of processor time for each token after these, and the numbers that are kept."""
    asked = {"use_cache": True, "logits_to_keep": 1}
    last = {name: model(tokens[None], **asked, **{CACHE: DynamicCache()}) for name, model in models.items()}
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(MEASURED):
        for name, model in models.items():
            start, word = time.process_time(), last[name].logits[:, -1:].argmax(-1)
            last[name] = model(word, **asked, **{CACHE: last[name][CACHE]})
            taken[name].append(time.process_time() - start)
    return {name: (statistics.median(taken[name]), kept(last[name][CACHE])) for name in models}


if __name__ == "__main__":
    lengths, prompts, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    counts = [*map(int, lengths.split(","))]
    found: dict[str, Any] = {}
    for folder in folders:
        found[Path(folder).parent.name] = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    words = AutoTokenizer.from_pretrained(folders[0], trust_remote_code=True)
    given = torch.randint(100, len(words), (max(counts),), generator=torch.Generator().manual_seed(0))
    for length in counts:
        for row, (seconds, numbers) in measure(found, given[:length]).items():
            print(f"{row}, {length} tokens: {1000 * seconds:.1f} ms a token, {numbers:,} numbers kept", flush=True)
    for prompt in prompts.splitlines():
        text = words(prompt, return_tensors="pt", add_special_tokens=False)
        for row, model in found.items():
            continued = model.generate(**text, max_new_tokens=LONGEST, do_sample=False)[0]
            print(f"{row}: {words.decode(continued)!r}", flush=True)
