"""SRU against LSTM, additive attention and LEAP against softmax attention: one layer, one token, the scans alone."""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial

import authors
import torch
from common import run
from torch import Tensor, nn
from torch.nn import functional as F

from fw_fairseq.mixers import Additive, Leap, Sru
from fw_fairseq.ops.scans.pooling import pool
from fw_fairseq.ops.scans.sru import sru
from fw_fairseq.tools.bench.contest import machine, positive, settings, spread, take_turns, timed, times_faster

LSTM, ATTENTION = "torch.nn.LSTM", "softmax attention"
STEPS = 256  # tokens that are timed together


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--width", type=positive, default=128, help="of every layer")
    add("--heads", type=positive, default=4, help="of additive, leap and softmax attention")
    add("--batch", type=positive, default=32, help="sequences for sru and the LSTM")
    add("--length", type=positive, default=128, help="tokens of each of these sequences")
    add("--tokens", type=positive, default=2048, metavar="T", help="tokens of one sequence for the others")
    add("--windows", type=int, nargs="+", default=[4, 1024, 0], help="of additive and leap; 0: all of the past")
    add("--peers", action="store_true", help="against the authors' packages, sru and leap-transformer, where they are installed")


class Attention(nn.Module):
    """Causal softmax attention without bias, as (T,B,C) -> (T,B,C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.in_proj = heads, nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3) for part in self.in_proj(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.permute(2, 0, 1, 3).flatten(2)), None


def measure(args: Namespace) -> dict:
    """Times every layer, and the scans alone."""
    if args.peers:
        return authors.measure(args)
    torch.manual_seed(0)
    calls = {name: partial(forward_backward, layer.to(args.device), x) for name, (layer, x) in contenders(args).items()}
    seconds = take_turns({name: partial(timed, call, args.device) for name, call in calls.items()}, args.rounds)
    peers = {name: LSTM if name in ("sru", LSTM) else ATTENTION for name in calls}
    rows = [
        {"name": name, "peer": peers[name], **spread(own), "times_faster": times_faster(seconds[peers[name]], own)}
        for name, own in seconds.items()
    ]
    return {"machine": machine(args), "settings": settings(args), "layers": rows, "scans": scans(args), "tokens": tokens(args)}


@torch.no_grad()
def tokens(args: Namespace) -> list[dict]:
    """One token after another, from a state that has read as many as a window holds; every window in turn."""
    layers: dict[str, nn.Module] = {}
    states = {}
    for kind in (Additive, Leap):
        for window in args.windows:
            layer = kind(args.width, args.heads, window=window).to(args.device)
            name = f"{kind.__name__.lower()}, {seen(window)}"
            layers[name], states[name] = layer, layer(torch.randn(max(1, window), 1, args.width, device=args.device))[1]
    token = torch.randn(1, 1, args.width, device=args.device)

    def some(name: str) -> None:
        for _ in range(STEPS):
            states[name] = layers[name](token, states[name])[1]

    calls = {name: lambda name=name: timed(partial(some, name), args.device) / STEPS for name in layers}
    return [{"name": name, **spread(seconds)} for name, seconds in take_turns(calls, args.rounds, "one token").items()]


def scans(args: Namespace) -> list[dict]:
    """The elementwise scans alone, forward and backward, and the least that they have to move."""
    draw = partial(torch.randn, device=args.device, requires_grad=True)
    unit = [draw(args.length, args.batch, width) for width in (3 * args.width, args.width)]
    weights, size = [draw(args.width) for _ in range(2)], (1, args.heads, args.tokens)
    scores, values = draw(size), draw(*size, args.width // args.heads)
    # sru reads u, F, R and x, writes h and c; then reads those 4, c and the gradient of h, writes 4. pool: x, g; x, g, dg, dx.
    calls: dict[str, tuple] = {"sru": (16 * unit[1].nbytes, partial(sru, *unit, *weights), [*unit, *weights])}
    for window in args.windows:
        calls[f"pool, {seen(window)}"] = (6 * values.nbytes, partial(pool, scores, values, window), [scores, values])
    found = []
    for name, (moved, call, leaves) in calls.items():
        seconds = statistics.median(timed(partial(differentiate, call, leaves), args.device) for _ in range(args.rounds + 1))
        found.append({"name": name, "seconds": seconds, "bytes": moved, "bytes_per_second": moved / seconds})
    return found


def differentiate(call: Callable, leaves: list[Tensor]) -> None:
    """Forward and backward of a scan."""
    torch.autograd.grad(call()[0].sum(), leaves)


def seen(window: int) -> str:
    """Returns what a token reads."""
    return f"window {window}" if window else "all of the past"


def contenders(args: Namespace) -> dict[str, tuple[nn.Module, Tensor]]:
    """Returns each layer with its input."""
    short = torch.randn(args.length, args.batch, args.width, device=args.device, requires_grad=True)
    long = torch.randn(args.tokens, 1, args.width, device=args.device, requires_grad=True)
    found = {"sru": (Sru(args.width, args.heads), short), LSTM: (nn.LSTM(args.width, args.width), short)}
    for window in args.windows:
        found[f"additive, {seen(window)}"] = (Additive(args.width, args.heads, window=window), long)
        found[f"leap, {seen(window)}"] = (Leap(args.width, args.heads, window=window), long)
    return {**found, ATTENTION: (Attention(args.width, args.heads), long)}


def forward_backward(layer: nn.Module, x: Tensor) -> None:
    """Forward and backward of a layer."""
    layer.zero_grad()
    x.grad = None
    layer(x)[0].sum().backward()


def table(report: dict) -> str:
    """The report as Markdown."""
    if "peers" in report:
        return authors.table(report)
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, {m['threads']} threads, torch {m['torch']}; width {s['width']}; sru and LSTM: batch {s['batch']}, "
        f"length {s['length']}; the others: one sequence of {s['tokens']}, {s['heads']} heads; medians of {s['rounds']} rounds",
        "",
        "| forward + backward | ms | against | times as fast |",
        "|---|---:|---|---:|",
    ]
    for row in report["layers"]:
        lines.append(f"| {row['name']} | {1e3 * row['seconds']:.1f} | {row['peer']} | {row['times_faster']:.1f} |")
    lines += ["", "| one token, no gradients | ms |", "|---|---:|"]
    lines += [f"| {row['name']} | {1e3 * row['seconds']:.3f} |" for row in report["tokens"]]
    lines += ["", "| scan alone, forward + backward | ms | GB/s of the least it has to move |", "|---|---:|---:|"]
    for row in report["scans"]:
        lines.append(f"| {row['name']} | {1e3 * row['seconds']:.2f} | {row['bytes_per_second'] / 1e9:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(__doc__, add_arguments, measure, table)
