"""How far a memory that is rounded between tokens is from one in float64: bf16, int8, and int8 with the error of rounding.

python examples/int8_state.py --tokens 32000 --every 64
"""

import argparse

import torch

from fw_fairseq.huggingface.small import shrunk

HEADS, WIDTH, LAST = 4, 32, 256
ROUNDED = {
    "bf16": lambda memory: memory.bfloat16().float(),
    "int8": lambda memory: shrunk(memory, feedback=False).dense(),
    "int8 with its error": lambda memory: shrunk(memory, feedback=True).dense(),
}


def token() -> tuple[torch.Tensor, ...]:
    """A query, a key and a value, decay near 0.9975 and write strength near 0.5."""
    q, k, v = torch.randn(3, HEADS, 1, WIDTH, dtype=torch.float64)
    g, beta = torch.randn(2, HEADS, 1, 1, dtype=torch.float64)
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, (g + 6).sigmoid(), beta.sigmoid()


def step(memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The gated delta rule."""
    memory = g * memory
    return memory + k.mT @ (beta * (v - k @ memory))


def errors(tokens: int, every: int) -> dict[str, float]:
    """The root mean square error of the last outputs, in units of the outputs'."""
    torch.manual_seed(0)
    exact = torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64)
    memories = {name: exact.float() for name in ROUNDED}
    sums = dict.fromkeys([*ROUNDED, ""], 0.0)
    for t in range(1, tokens + 1):
        q, *made = token()
        exact = step(exact, *made)
        for name, round_off in ROUNDED.items():
            memory = step(memories[name], *(x.float() for x in made))
            memories[name] = memory if t % every else round_off(memory)
        if t > tokens - LAST:
            sums[""] += (q @ exact).square().sum().item()
            for name, memory in memories.items():
                sums[name] += (q @ (memory.double() - exact)).square().sum().item()
    whole = sums.pop("")
    return {name: (found / whole) ** 0.5 for name, found in sums.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32000)
    parser.add_argument("--every", type=int, default=1, help="tokens after which the memory is rounded")
    args = parser.parse_args()
    for name, error in errors(args.tokens, args.every).items():
        print(f"{name}: {error:.1e}")
