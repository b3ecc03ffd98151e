"""Trains a language model of bytes with a layer of fast weights, in plain PyTorch, and lets it write.

    python examples/from_scratch.py                                 learns this file: a minute on one core
    python examples/from_scratch.py --text book.txt --updates 2000  learns yours

The text runs past the model in 8 streams. Each stream keeps its memory from one update to the next, so the model sees further back
than the 64 bytes of an update. While it writes, every byte costs the same, because the state does not grow.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fw_fairseq.mixers import FastWeight

STREAMS, SEGMENT = 8, 64


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = FastWeight(width, heads, update_rule="gated_delta", feature_map="identity", feature_norm="l2")
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, state):
        y, state = self.mixer(self.norm(x), state)
        x = x + y
        return x + self.ffn(self.ffn_norm(x)), state


class ByteModel(nn.Module):
    def __init__(self, width=128, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, bytes_in, states=None):
        """(T,B) and the states of the layers -> logits (T,B,256) and the next states"""
        x, after = self.embed(bytes_in), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks)):
            x, state = block(x, state)
            after.append(state)
        return self.out(self.norm(x)), after


def train(model, text, updates, lr=0.003):
    """Yields the loss of each update, in nats per byte."""
    streams = text[: len(text) // STREAMS * STREAMS].view(STREAMS, -1).t()  # (T,B)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    states, position = None, 0
    for _ in range(updates):
        if position + SEGMENT >= len(streams):  # the end of the text: begin again, with empty memories
            states, position = None, 0
        segment = streams[position : position + SEGMENT + 1]
        logits, states = model(segment[:-1], states)
        loss = F.cross_entropy(logits.flatten(0, 1), segment[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        states = [state.detach() for state in states]  # gradients stop at the segment
        position += SEGMENT
        yield loss.item()


@torch.no_grad()
def generate(model, prompt, count, temperature=0.7):
    """The prompt and ``count`` bytes more. It is read in one pass; then each byte is one step from the state."""
    logits, states = model(torch.tensor(list(prompt))[:, None])
    written = list(prompt)
    for _ in range(count):
        written.append(int(torch.multinomial((logits[-1, 0] / temperature).softmax(-1), 1)))
        logits, states = model(torch.tensor([[written[-1]]]), states)
    return bytes(written)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default=__file__, help="a file of text; by default this one")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--count", type=int, default=400, help="bytes to write")
    args = parser.parse_args(arguments)
    torch.manual_seed(1)
    text, model = torch.tensor(list(Path(args.text).read_bytes())), ByteModel()
    for update, loss in enumerate(train(model, text, args.updates), 1):
        if update % 50 == 0 or update == args.updates:
            print(f"update {update}: {loss / 0.6931:.2f} bits per byte")
    print(generate(model.eval(), args.prompt.encode(), args.count).decode(errors="replace"))


if __name__ == "__main__":
    main()
