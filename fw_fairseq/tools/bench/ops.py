"""fw-bench ops: every rule against its step loop, softmax attention and a cumulative sum."""

from __future__ import annotations

import multiprocessing
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...feature_maps import AS_IS, ROW_MAPS
from ...ops import RowMap, fast_weight
from ...ops.checks import BACKENDS
from ...rules import RULES
from ..plot.style import draw_lengths
from .contest import machine, peak_beyond, positive, progress, say, settings, spread, take_turns, timed, times_faster

HELP = "the recurrence itself, forward and backward"
DESCRIPTION = "Every rule against its step loop, softmax attention and a cumulative sum."
PLOT = "time against length"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SOFTMAX, CUMSUM = "softmax attention", "cumulative sum"
PEERS: dict[str, tuple[str, Callable]] = {}  # by rule the name of another kernel, and a function that makes its call of the inputs
PLACES = ("with", "after")  # a rule with the feature map in the operation, or after it


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options of ops."""
    add, rules = parser.add_argument, [name for name, rule in RULES.items() if rule.step is None]
    add("--dtype", default="float32", choices=DTYPES, help="type of the inputs")
    add("--rules", nargs="+", default=rules, choices=RULES, metavar="RULE", help="update rules to measure")
    add("--tokens", nargs="+", type=positive, default=[512, 1024, 8192], metavar="T", help="lengths of the sequences")
    add("--batch", type=positive, default=4, help="sequences computed together")
    add("--heads", type=positive, default=8, help="heads of each sequence")
    add("--key-width", type=positive, default=64, help="width of queries and keys per head")
    add("--value-width", type=positive, default=64, help="width of values per head")
    add("--backend", default="auto", choices=BACKENDS, help="what runs the rules; on a GPU their chunk form runs too")
    said = "also time every rule with this map and its norm twice: applied inside the operation, and before it"
    add("--feature-map", choices=ROW_MAPS, help=said)
    add("--dpfp-nu", type=positive, default=1, help="nu of --feature-map dpfp")
    add("--no-peers", action="store_true", help="without other kernels, which a program may have put into PEERS")
    add("--loop-up-to", type=int, default=512, metavar="T", help="longest sequence for the step loop")
    add("--softmax-up-to", type=int, default=1024, metavar="T", help="longest sequence for softmax attention")
    add("--cumsum-up-to", type=int, default=512, metavar="T", help="longest sequence for the cumulative sum")


def measure(args: Namespace) -> dict:
    """Times every rule and its peers at every length, and measures their memory and the time of one token."""
    torch.manual_seed(0)
    refused: list[dict] = []
    seconds: dict[tuple[int, str], list[float]] = {}
    for tokens in args.tokens:  # each length by itself: the tensors of all of them would fill a small machine's memory
        calls = _contenders(args, tokens, refused)
        turns = {(tokens, name): partial(timed, call, args.device) for name, call in calls.items()}
        seconds |= take_turns(turns, args.rounds, f"{tokens} tokens")
        del calls, turns
    longest = max(args.tokens)
    return {
        "machine": machine(args),
        "settings": settings(args),
        "forward_backward": [{"tokens": t, "name": n, **spread(s)} for (t, n), s in seconds.items()],
        "not_measured": refused,
        "ratios": _ratios(args, seconds),
        "memory": [{"rule": r, "tokens": longest, **_peak_memory(args, r, longest)} for r in args.rules],
        "one_token": _one_token(args),
    }


Inputs = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]


def draw_inputs(args: Namespace, rule: str, tokens: int, grad: bool = True, row_map: RowMap = AS_IS) -> Inputs:
    """q, unit keys, v and gates in the range of uniform gate initialisation, or of length 1 where they are."""
    like, key = {"device": args.device, "dtype": DTYPES[args.dtype]}, row_map.width(args.key_width)
    leading = (args.batch, args.heads, tokens)
    sizes = (*leading, key, args.value_width)
    q, v = torch.randn(*leading, args.key_width, **like), torch.randn(*leading, args.value_width, **like)
    k = F.normalize(torch.randn(*leading, args.key_width, **like), dim=-1)
    gates = {n: torch.rand(g.shape(sizes), **like) * 62 / 64 + 1 / 64 for n, g in RULES[rule].gates.items()}
    gates = {n: F.normalize(x, dim=-1) if RULES[rule].gates[n].form == "unit" else x for n, x in gates.items()}
    for x in (q, k, v, *gates.values()):
        x.requires_grad_(grad)
    return q, k, v, gates


def forward_backward(args: Namespace, rule: str, tokens: int, backend: str) -> Callable:
    """Returns a call that computes outputs and gradients."""
    q, k, v, gates = draw_inputs(args, rule, tokens)
    dy = torch.randn_like(v)
    return lambda: torch.autograd.grad(fast_weight(q, k, v, rule, gates, backend=backend)[0], (q, k, v, *gates.values()), dy)


def _mapped(args: Namespace, rule: str, tokens: int, inside: bool) -> Callable:
    """Forward and backward from q and k as they are before the feature map."""
    row_map = RowMap(args.feature_map, args.dpfp_nu, "l2" if args.feature_map == "identity" else "sum")
    q, k, v, gates = draw_inputs(args, rule, tokens, row_map=row_map)
    dy = torch.randn_like(v)

    def call() -> tuple[Tensor, ...]:
        features = (q, k) if inside else (row_map(q), row_map(k))
        y, _ = fast_weight(*features, v, rule, gates, backend=args.backend, feature_map=row_map if inside else None)
        return torch.autograd.grad(y, (q, k, v, *gates.values()), dy)

    return call


def _contenders(args: Namespace, tokens: int, refused: list[dict]) -> dict[str, Callable]:
    """``refused`` collects the peers that do not run, and why."""
    calls = {rule: forward_backward(args, rule, tokens, args.backend) for rule in args.rules}
    if args.device != "cpu":
        calls |= {f"{rule} chunks": forward_backward(args, rule, tokens, "chunkwise") for rule in args.rules}
        for rule in [] if args.no_peers else filter(PEERS.get, args.rules):
            name, make = PEERS[rule]
            try:
                call = make(*draw_inputs(args, rule, tokens))
                timed(call, args.device)
                calls[name] = call
            except Exception as error:  # of any kind: it is their code, which refuses some devices at the first call
                refused.append({"name": name, "tokens": tokens, "error": f"{type(error).__name__}: {error}".split("\n")[0]})
                say(f"{name}: not measured: {refused[-1]['error']}")
    if args.feature_map:
        for rule in args.rules:
            calls |= {f"{rule} {place} {args.feature_map}": _mapped(args, rule, tokens, place == "with") for place in PLACES}
    if tokens <= args.loop_up_to:
        calls |= {f"{rule} step loop": forward_backward(args, rule, tokens, "recurrent") for rule in args.rules}
    q, k, v, _ = draw_inputs(args, "sum", tokens)
    dy = torch.randn_like(v)

    def softmax() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dy)

    def cumulative_sum() -> object:
        memories = torch.einsum("bhtk,bhtv->bhtkv", k, v).cumsum(2)
        return torch.autograd.grad(torch.einsum("bhtk,bhtkv->bhtv", q, memories), (q, k, v), dy)

    if tokens <= args.softmax_up_to:
        calls[SOFTMAX] = softmax
    if tokens <= args.cumsum_up_to and "sum" in args.rules:
        calls[CUMSUM] = cumulative_sum
    return calls


def _ratios(args: Namespace, seconds: dict[tuple[int, str], list[float]]) -> list[dict]:
    """Returns by what factor each rule is faster than each peer, and how its time grows with length."""
    found = []
    for rule in args.rules:
        for tokens in args.tokens:
            own = seconds[tokens, rule]
            for peer in (f"{rule} step loop", f"{rule} chunks", SOFTMAX, CUMSUM, *PEERS.get(rule, [""])[:1]):
                if (tokens, peer) in seconds and (peer != CUMSUM or rule == "sum"):
                    times = times_faster(seconds[tokens, peer], own)
                    found.append({"rule": rule, "tokens": tokens, "peer": peer, "times_faster": times})
            if args.feature_map:
                inside, peer = (f"{rule} {place} {args.feature_map}" for place in PLACES)
                times = times_faster(seconds[tokens, peer], seconds[tokens, inside])
                found.append({"rule": inside, "tokens": tokens, "peer": peer, "times_faster": times})
        for short, long in zip(args.tokens, args.tokens[1:]):
            growth = times_faster(seconds[long, rule], seconds[short, rule])
            found.append({"rule": rule, "tokens": long, "peer": f"itself at {short} tokens", "times_slower": growth})
    return found


@torch.no_grad()
def _one_token(args: Namespace) -> list[dict]:
    """Microseconds to generate one token: update and read of the memory; softmax attention over a cache of each length."""
    rows: list[dict] = []
    call: Callable
    for rule in args.rules:
        q, k, v, gates = draw_inputs(args, rule, 1, grad=False)
        _, state = fast_weight(q, k, v, rule, gates)
        call = partial(fast_weight, q, k, v, rule, gates, state)
        rows.append({"name": rule, "tokens": "any", "microseconds": _microseconds(call, args)})
    for tokens in args.tokens:
        q, k, v, _ = draw_inputs(args, "sum", tokens, grad=False)
        call = partial(F.scaled_dot_product_attention, q[:, :, :1], k, v)
        rows.append({"name": SOFTMAX, "tokens": tokens, "microseconds": _microseconds(call, args)})
    return rows


def _microseconds(call: Callable[[], object], args: Namespace) -> float:
    """Returns the median of many calls."""
    for _ in range(10):
        call()
    return 1e6 * statistics.median(timed(call, args.device) for _ in range(20 * args.rounds))


def _peak_memory(args: Namespace, rule: str, tokens: int) -> dict:
    """Peak memory of forward and backward beyond the inputs, in bytes and as a multiple of the inputs' bytes."""
    progress(f"memory of {rule}")
    if args.device != "cpu":
        peak, inputs = _measure_memory(args, rule, tokens)
    else:  # a process of its own: its high-water mark is that of this one call
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak, inputs = pool.apply(_measure_memory, (args, rule, tokens))
    return {"bytes": peak, "input_bytes": inputs, "times_inputs": peak / inputs}


def _measure_memory(args: Namespace, rule: str, tokens: int) -> tuple[int, int]:
    torch.set_num_threads(args.threads)
    forward_backward(args, rule, 64, args.backend)()  # loads libraries
    q, k, v, gates = draw_inputs(args, rule, tokens)

    def call() -> None:
        y, _ = fast_weight(q, k, v, rule, gates, backend=args.backend)
        torch.autograd.grad(y, (q, k, v, *gates.values()), torch.ones_like(y))

    return peak_beyond(call, args.device), sum(x.nbytes for x in (q, k, v, *gates.values()))


def table(report: dict) -> str:
    """The report as Markdown."""
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, {m['threads']} threads, torch {m['torch']}; {s['dtype']}, B{s['batch']} H{s['heads']} "
        f"K{s['key_width']} V{s['value_width']}; medians of {s['rounds']} rounds"
    ]
    times = {(row["name"], row["tokens"]): f"{1e3 * row['seconds']:.1f}" for row in report["forward_backward"]}
    lines += _grid("forward + backward", times, s["tokens"], "T={}, ms")
    for key, title in (("times_faster", "times as fast"), ("times_slower", "times the time at the length before")):
        cells = {(_names(row), row["tokens"]): f"{row[key]:.1f}" for row in report["ratios"] if key in row}
        lines += _grid(title, cells, sorted({t for _, t in cells}), "T={}")
    lines += ["", "| peak memory beyond the inputs | T | MB | times the inputs |", "|---|---:|---:|---:|"]
    for row in report["memory"]:
        lines.append(f"| {row['rule']} | {row['tokens']} | {row['bytes'] / 1e6:.0f} | {row['times_inputs']:.1f} |")
    lines += ["", "| one token | history | us |", "|---|---:|---:|"]
    lines += [f"| {row['name']} | {row['tokens']} | {row['microseconds']:.0f} |" for row in report["one_token"]]
    return "\n".join(lines)


def _grid(title: str, cells: dict[tuple[str, int], str], lengths: list[int], head: str) -> list[str]:
    """A row for each name and a column for each length."""
    lines = ["", f"| {title} | " + " | ".join(head.format(t) for t in lengths) + " |", "|---|" + "---:|" * len(lengths)]
    for name in dict.fromkeys(name for name, _ in cells):
        lines.append(f"| {name} | " + " | ".join(cells.get((name, t), "") for t in lengths) + " |")
    return lines


def _names(row: dict) -> str:
    """Who against whom."""
    return f"{row['rule']} against {row['peer'].removeprefix(row['rule'] + ' ')}" if "times_faster" in row else row["rule"]


def draw(report: dict) -> Any:
    """Time of forward and backward against length."""
    left_out = ("step loop", CUMSUM, *(f" {place} " for place in PLACES))
    rows = [row for row in report["forward_backward"] if not any(part in row["name"] for part in left_out)]
    return draw_lengths(rows, "tokens", [("seconds", 1e3, "forward + backward, ms")], "tokens")
