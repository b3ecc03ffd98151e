"""fw-bench ops: every rule against its step loop, softmax attention, a cumulative sum and, on a GPU, flash-linear-attention."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from ...feature_maps import AS_IS, ROW_MAPS
from ...ops import RowMap, fast_weight
from ...ops.checks import BACKENDS
from ...rules import RULES
from .contest import machine, peak_beyond, positive, progress, repeated, settings, spread, take_turns, timed, times_faster
from .peers import peer_name, running_peers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SOFTMAX, CUMSUM = "softmax attention", "cumulative sum"
PLACES = ("with", "after")  # a rule with the feature map in the operation, or after it


def add_arguments(parser) -> None:
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the inputs")
    parser.add_argument(
        "--rules",
        nargs="+",
        default=[n for n, r in RULES.items() if r.step is None],
        choices=RULES,
        metavar="RULE",
        help="update rules to measure",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=positive, default=[512, 1024, 8192], metavar="T", help="lengths of the sequences"
    )
    parser.add_argument("--batch", type=positive, default=4, help="sequences computed together")
    parser.add_argument("--heads", type=positive, default=8, help="heads of each sequence")
    parser.add_argument("--key-width", type=positive, default=64, help="width of queries and keys per head")
    parser.add_argument("--value-width", type=positive, default=64, help="width of values per head")
    parser.add_argument(
        "--backend", default="auto", choices=BACKENDS, help="what runs the rules; on a GPU their chunk form runs too"
    )
    parser.add_argument(
        "--feature-map",
        choices=ROW_MAPS,
        help="also time every rule with this map and its norm twice: applied inside the operation, and before it",
    )
    parser.add_argument("--dpfp-nu", type=positive, default=1, help="nu of --feature-map dpfp")
    parser.add_argument(
        "--no-peers", action="store_true", help="without flash-linear-attention, whose kernels may be tuned for minutes at first"
    )
    parser.add_argument("--loop-up-to", type=int, default=512, metavar="T", help="longest sequence for the step loop")
    parser.add_argument("--softmax-up-to", type=int, default=1024, metavar="T", help="longest sequence for softmax attention")
    parser.add_argument("--cumsum-up-to", type=int, default=512, metavar="T", help="longest sequence for the cumulative sum")


def measure(args) -> dict:
    """Times every rule and its peers at every length, and measures their memory and the time of one token."""
    torch.manual_seed(0)
    refused: list[dict] = []
    seconds: dict[tuple[int, str], list[float]] = {}
    for tokens in args.tokens:  # each length by itself: the tensors of all of them would fill a small machine's memory
        calls = build_contenders(args, tokens, refused)
        turns = {(tokens, name): partial(timed, call, args.device) for name, call in calls.items()}
        seconds |= take_turns(turns, args.rounds, f"{tokens} tokens")
        del calls, turns
    longest = max(args.tokens)
    return {
        "machine": machine(args),
        "settings": settings(args),
        "forward_backward": [{"tokens": t, "name": n, **spread(s)} for (t, n), s in seconds.items()],
        "not_measured": refused,
        "ratios": ratios(args, seconds),
        "memory": [{"rule": r, "tokens": longest, **peak_memory(args, r, longest)} for r in args.rules],
        "one_token": one_token(args),
    }


def draw_inputs(args, rule: str, tokens: int, grad: bool = True, row_map: RowMap = AS_IS):
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


def forward_backward(args, rule: str, tokens: int, backend: str):
    q, k, v, gates = draw_inputs(args, rule, tokens)
    dy = torch.randn_like(v)
    return lambda: torch.autograd.grad(fast_weight(q, k, v, rule, gates, backend=backend)[0], (q, k, v, *gates.values()), dy)


def mapped(args, rule: str, tokens: int, inside: bool):
    """Forward and backward from q and k as they are before the feature map."""
    row_map = map_of(args)
    q, k, v, gates = draw_inputs(args, rule, tokens, row_map=row_map)
    dy = torch.randn_like(v)

    def call():
        features = (q, k) if inside else (row_map(q), row_map(k))
        y, _ = fast_weight(*features, v, rule, gates, backend=args.backend, feature_map=row_map if inside else None)
        return torch.autograd.grad(y, (q, k, v, *gates.values()), dy)

    return call


def map_of(args) -> RowMap:
    return RowMap(args.feature_map, args.dpfp_nu, "l2" if args.feature_map == "identity" else "sum")


def build_contenders(args, tokens: int, refused: list[dict]) -> dict[str, object]:
    """``refused`` collects the peers that do not run, and why."""
    calls = {rule: forward_backward(args, rule, tokens, args.backend) for rule in args.rules}
    if args.device != "cpu":
        calls |= {f"{rule} chunks": forward_backward(args, rule, tokens, "chunkwise") for rule in args.rules}
    if args.device != "cpu" and not args.no_peers:
        found, errors = running_peers(args.rules, partial(draw_inputs, args, tokens=tokens), args.device)
        calls |= found
        refused += [{"name": name, "tokens": tokens, "error": error} for name, error in errors.items()]
    if args.feature_map:
        for rule in args.rules:
            calls |= {f"{rule} {place} {args.feature_map}": mapped(args, rule, tokens, place == "with") for place in PLACES}
    if tokens <= args.loop_up_to:
        calls |= {f"{rule} step loop": forward_backward(args, rule, tokens, "recurrent") for rule in args.rules}
    q, k, v, _ = draw_inputs(args, "sum", tokens)
    dy = torch.randn_like(v)

    def softmax():
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dy)

    def cumulative_sum():
        memories = torch.einsum("bhtk,bhtv->bhtkv", k, v).cumsum(2)
        return torch.autograd.grad(torch.einsum("bhtk,bhtkv->bhtv", q, memories), (q, k, v), dy)

    if tokens <= args.softmax_up_to:
        calls[SOFTMAX] = softmax
    if tokens <= args.cumsum_up_to and "sum" in args.rules:
        calls[CUMSUM] = cumulative_sum
    return calls


def ratios(args, seconds) -> list[dict]:
    """Returns by what factor each rule is faster than each peer, and how its time grows with length."""
    found = []
    for rule in args.rules:
        for tokens in args.tokens:
            own = seconds[tokens, rule]
            for peer in (f"{rule} step loop", f"{rule} chunks", SOFTMAX, CUMSUM, peer_name(rule)):
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


def one_token(args) -> list[dict]:
    """Microseconds to generate one token: update and read of the memory; softmax attention over a cache of each length."""
    rows = []
    with torch.no_grad():
        for rule in args.rules:
            q, k, v, gates = draw_inputs(args, rule, 1, grad=False)
            _, state = fast_weight(q, k, v, rule, gates)
            call = partial(fast_weight, q, k, v, rule, gates, state)
            rows.append({"name": rule, "tokens": "any", "microseconds": repeated(call, args)})
        for tokens in args.tokens:
            q, k, v, _ = draw_inputs(args, "sum", tokens, grad=False)
            call = partial(F.scaled_dot_product_attention, q[:, :, :1], k, v)
            rows.append({"name": SOFTMAX, "tokens": tokens, "microseconds": repeated(call, args)})
    return rows


def peak_memory(args, rule: str, tokens: int) -> dict:
    """Peak memory of forward and backward beyond the inputs, in bytes and as a multiple of the inputs' bytes."""
    progress(f"memory of {rule}")
    if args.device != "cpu":
        peak, inputs = measure_memory(args, rule, tokens)
    else:  # a process of its own: its high-water mark is that of this one call
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak, inputs = pool.apply(measure_memory, (args, rule, tokens))
    return {"bytes": peak, "input_bytes": inputs, "times_inputs": peak / inputs}


def measure_memory(args, rule: str, tokens: int) -> tuple[int, int]:
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
        f"K{s['key_width']} V{s['value_width']}; medians of {s['rounds']} rounds",
        "",
        "| forward + backward | " + " | ".join(f"T={t}, ms" for t in s["tokens"]) + " |",
        "|---|" + "---:|" * len(s["tokens"]),
    ]
    times = {(row["name"], row["tokens"]): row["seconds"] for row in report["forward_backward"]}
    for name in dict.fromkeys(name for name, _ in times):
        cells = (f"{1e3 * times[name, t]:.1f}" if (name, t) in times else "" for t in s["tokens"])
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for key, title in (("times_faster", "times as fast"), ("times_slower", "times the time at the length before")):
        cells = {(contest(row), row["tokens"]): f"{row[key]:.1f}" for row in report["ratios"] if key in row}
        lengths = sorted({t for _, t in cells})
        lines += ["", f"| {title} | " + " | ".join(f"T={t}" for t in lengths) + " |", "|---|" + "---:|" * len(lengths)]
        for name in dict.fromkeys(name for name, _ in cells):
            lines.append(f"| {name} | " + " | ".join(cells.get((name, t), "") for t in lengths) + " |")
    lines += ["", "| peak memory beyond the inputs | T | MB | times the inputs |", "|---|---:|---:|---:|"]
    for row in report["memory"]:
        lines.append(f"| {row['rule']} | {row['tokens']} | {row['bytes'] / 1e6:.0f} | {row['times_inputs']:.1f} |")
    lines += ["", "| one token | history | us |", "|---|---:|---:|"]
    lines += [f"| {row['name']} | {row['tokens']} | {row['microseconds']:.0f} |" for row in report["one_token"]]
    return "\n".join(lines)


def contest(row: dict) -> str:
    """Who against whom."""
    return f"{row['rule']} against {row['peer'].removeprefix(row['rule'] + ' ')}" if "times_faster" in row else row["rule"]


def draw(report: dict, path: Path) -> None:
    """Time of forward and backward against length, both axes logarithmic."""
    from ..plot.cost import Panel, draw_rows
    from ..plot.style import save

    left_out = ("step loop", CUMSUM, *(f" {place} " for place in PLACES))
    rows = [row for row in report["forward_backward"] if not any(part in row["name"] for part in left_out)]
    save(draw_rows(rows, "tokens", [Panel("seconds", 1e3, "forward + backward, ms")], SOFTMAX), [path])
