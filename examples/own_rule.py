"""Adds an update rule of one's own, compares it with its equation, and trains a layer with it.

    python examples/own_rule.py      some seconds on one core

The rule is a delta rule with two gates: how much of the old value a token erases, and how much of its own value it writes. The
plain delta rule has one gate for both. docs/extending.md trains whole models with such a rule.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from fw_fairseq.mixers import FastWeight
from fw_fairseq.ops import fast_weight
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule

RULES["erase_and_write"] = Rule(
    equation="W_t = W_{t-1} - e_t k_t (W_{t-1}^T k_t)^T + w_t k_t v_t^T",
    source="examples/own_rule.py",
    gates={"e": Gate(erases=True), "w": Gate(writes=True)},  # one number each per token and head, a sigmoid of the layer's input
    coefficients=lambda e, w: Coefficients(e=e, w=w),
)


def by_its_equation(q, k, v, e, w):
    """q, k (T,K), v (T,V), e, w (T) -> y (T,V): the equation above, and y_t = W_t^T q_t."""
    memory, outputs = torch.zeros(k.shape[1], v.shape[1], dtype=k.dtype), []
    for q_t, k_t, v_t, e_t, w_t in zip(q, k, v, e, w):
        memory = memory - e_t * torch.outer(k_t, memory.T @ k_t) + w_t * torch.outer(k_t, v_t)
        outputs.append(memory.T @ q_t)
    return torch.stack(outputs)


def difference(tokens=100, width=8):
    """The largest difference between the operation, which computes in chunks, and the equation."""
    q, k, v = torch.randn(3, tokens, width, dtype=torch.float64)
    k, gates = F.normalize(k, dim=-1), torch.rand(2, tokens, dtype=torch.float64)
    e, w = gates
    y, _ = fast_weight(*(x[None, None] for x in (q, k, v)), "erase_and_write", {"e": e[None, None], "w": w[None, None]})
    return (y[0, 0] - by_its_equation(q, k, v, e, w)).abs().max().item()


class Recall(nn.Module):
    """Reads pairs of a key and a value, then a key, and gives the last value of that key."""

    def __init__(self, keys, values, width=32):
        super().__init__()
        self.keys, self.values = nn.Embedding(keys, width), nn.Embedding(values + 1, width)  # the last value is the question
        self.mixer = FastWeight(2 * width, heads=2, update_rule="erase_and_write", feature_map="identity", feature_norm="l2")
        self.out = nn.Linear(2 * width, values)

    def forward(self, keys, values):
        y, _ = self.mixer(torch.cat([self.keys(keys), self.values(values)], dim=-1))  # (T,B,C)
        return self.out(y[-1])


def train(updates, keys=8, values=8, pairs=16, batch=32):
    """Yields the share of right answers in each update."""
    model = Recall(keys, values)
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    for _ in range(updates):
        asked = torch.randint(keys, (pairs + 1, batch))
        asked[-1] = asked[:-1].gather(0, torch.randint(pairs, (1, batch)))[0]  # a key that was there
        given = torch.cat([torch.randint(values, (pairs, batch)), torch.full((1, batch), values)])
        last = pairs - 1 - (asked[:-1] == asked[-1]).flip(0).int().argmax(0)  # where it was last
        answer = given.gather(0, last[None])[0]
        scores = model(asked, given)
        optimizer.zero_grad()
        F.cross_entropy(scores, answer).backward()
        optimizer.step()
        yield (scores.argmax(-1) == answer).float().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    args = parser.parse_args(arguments)
    torch.manual_seed(1)
    print(f"largest difference from the equation: {difference():.0e}")
    for update, share in enumerate(train(args.updates), 1):
        if update % 50 == 0 or update == args.updates:
            print(f"update {update}: {share:.0%} of the answers are right")


if __name__ == "__main__":
    main()
