"""fw-bench mixers: one layer each, forward and backward, against the peer of the same width in the same rounds."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...mixers import Additive, Leap, Sru
from ...ops.scans.pooling import pool
from ...ops.scans.sru import sru
from . import authors
from .contest import machine, positive, settings, spread, take_turns, timed, times_faster

LSTM, ATTENTION = "torch.nn.LSTM", "softmax attention"
STEPS = 256  # tokens that are timed together


def add_arguments(parser) -> None:
    parser.add_argument("--width", type=positive, default=128, help="of every layer")
    parser.add_argument("--heads", type=positive, default=4, help="of additive, leap and softmax attention")
    parser.add_argument("--batch", type=positive, default=32, help="sequences for sru and the LSTM")
    parser.add_argument("--length", type=positive, default=128, help="tokens of each of these sequences")
    parser.add_argument("--tokens", type=positive, default=2048, metavar="T", help="tokens of one sequence for the others")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 1024, 0], help="of additive; 0: all of the past")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="measure against the authors' packages, sru and leap-transformer, in place of the others, where they are installed",
    )


class Attention(nn.Module):
    """Causal softmax attention without bias, as (T,B,C) -> (T,B,C)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.in_proj = heads, nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3) for part in self.in_proj(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.permute(2, 0, 1, 3).flatten(2)), None


def measure(args) -> dict:
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
def tokens(args) -> list[dict]:
    """One token after another, from a state that has read as many as a window holds; every window in turn."""
    texts, states = {}, {}
    for kind in (Additive, Leap):
        for window in args.windows:
            layer = kind(args.width, args.heads, window=window).to(args.device)
            before = torch.randn(max(1, window), 1, args.width, device=args.device)
            name = f"{kind.__name__.lower()}, {seen(window)}"
            texts[name], states[name] = layer, layer(before)[1]
    token = torch.randn(1, 1, args.width, device=args.device)

    def read(name: str) -> float:
        def some() -> None:
            for _ in range(STEPS):
                states[name] = texts[name](token, states[name])[1]

        return timed(some, args.device) / STEPS

    found = take_turns({name: partial(read, name) for name in texts}, args.rounds, "one token")
    return [{"name": name, **spread(seconds)} for name, seconds in found.items()]


def scans(args) -> list[dict]:
    """The elementwise scans alone, forward and backward, and the least that they have to move."""
    shape = (args.length, args.batch)
    unit = [torch.randn(*shape, width, device=args.device, requires_grad=True) for width in (3 * args.width, args.width)]
    weights = [torch.randn(args.width, device=args.device, requires_grad=True) for _ in range(2)]
    size = (1, args.heads, args.tokens)
    scores = torch.randn(size, device=args.device, requires_grad=True)
    values = torch.randn(*size, args.width // args.heads, device=args.device, requires_grad=True)
    # sru reads u, F, R and x, writes h and c; then reads those 4, c and the gradient of h, writes 4. pool: x, g; x, g, dg, dx.
    calls = {"sru": (16 * unit[1].nbytes, partial(sru, *unit, *weights), [*unit, *weights])}
    for window in args.windows:
        calls[f"pool, {seen(window)}"] = (6 * values.nbytes, partial(pool, scores, values, window), [scores, values])
    found = []
    for name, (moved, call, leaves) in calls.items():
        seconds = statistics.median(timed(partial(differentiate, call, leaves), args.device) for _ in range(args.rounds + 1))
        found.append({"name": name, "seconds": seconds, "bytes": moved, "bytes_per_second": moved / seconds})
    return found


def differentiate(call, leaves) -> None:
    torch.autograd.grad(call()[0].sum(), leaves)


def seen(window: int) -> str:
    return f"window {window}" if window else "all of the past"


def contenders(args) -> dict[str, tuple[nn.Module, Tensor]]:
    short = torch.randn(args.length, args.batch, args.width, device=args.device, requires_grad=True)
    long = torch.randn(args.tokens, 1, args.width, device=args.device, requires_grad=True)
    found = {"sru": (Sru(args.width, args.heads), short), LSTM: (nn.LSTM(args.width, args.width), short)}
    for window in args.windows:
        found[f"additive, {seen(window)}"] = (Additive(args.width, args.heads, window=window), long)
        found[f"leap, {seen(window)}"] = (Leap(args.width, args.heads, window=window), long)
    return found | {ATTENTION: (Attention(args.width, args.heads), long)}


def forward_backward(layer: nn.Module, x: Tensor) -> None:
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


def draw(report: dict, path: Path) -> None:
    """One bar for each layer."""
    from ..plot.style import canvas, save

    figure, [axes] = canvas(2.2)
    peers = [row | {"name": f"{row['name']}: {row['layer']}"} for row in report.get("peers", [])]
    rows = (peers or report["layers"])[::-1]
    axes.barh([row["name"] for row in rows], [1e3 * row["seconds"] for row in rows], color="0.6", height=0.7)
    axes.set(xlabel="forward + backward, ms")
    axes.grid(visible=False, axis="y")
    save(figure, [path])
