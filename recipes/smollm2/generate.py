"""What a generated token takes, and how models continue a text: python generate.py TOKENS PROMPT FOLDER...

FOLDER: of fw-export-hf. TOKENS: the lengths of text before the measured tokens, such as 256,4096. Prints processor time for a token
in one thread, the numbers that are kept of the text, and a greedy continuation of PROMPT.
"""

import sys
import time
from pathlib import Path

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
def measure(model, tokens: torch.Tensor) -> tuple[float, int]:
    """Seconds of processor time for each token after these, and the numbers that are kept."""
    output, taken = model(tokens[None], use_cache=True, logits_to_keep=1, **{CACHE: DynamicCache()}), []
    for _ in range(MEASURED):
        start, word = time.process_time(), output.logits[:, -1:].argmax(-1)
        output = model(word, use_cache=True, **{CACHE: output[CACHE]})
        taken.append(time.process_time() - start)
    return sorted(taken)[len(taken) // 2], kept(output[CACHE])


if __name__ == "__main__":
    lengths, prompt, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    counts = [*map(int, lengths.split(","))]
    for folder in map(Path, folders):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        words = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        given = torch.randint(100, model.config.vocab_size, (max(counts),), generator=torch.Generator().manual_seed(0))
        for length in counts:
            seconds, numbers = measure(model, given[:length])
            print(f"{folder.name}, {length} tokens: {1000 * seconds:.1f} ms a token, {numbers:,} numbers kept", flush=True)
        text = words(prompt, return_tensors="pt", add_special_tokens=False)
        found = model.generate(**text, max_new_tokens=LONGEST, do_sample=False)[0]
        print(f"{folder.name}: {words.decode(found)!r}", flush=True)
