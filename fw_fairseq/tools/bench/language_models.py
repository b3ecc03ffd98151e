"""fw-bench model: fast_weight_lm with its rules and mixers against fairseq's transformer_lm of the same size, and its report."""

from __future__ import annotations

import argparse
import json
import statistics
from argparse import ArgumentParser, Namespace
from typing import Any

from ...errors import Mistake
from ...mixers import MIXERS
from ...rules import RULES
from ..plot.style import draw_lengths
from .contest import machine, parameter_counts, positive, say, settings, spread, times_faster, write_json
from .measure import ALL, TRANSFORMER, batch_rows, build_model, model_names, peak_memory, time_generation, time_training

HELP = "whole language models, training and generation: time and memory of any rule or mixer"
DESCRIPTION = "fast_weight_lm with any rules and mixers against fairseq's transformer_lm of the same size, with random weights."
PLOT = "time and state against context"
SIZES = {
    "layers": "of encoder and decoder each, where there is an encoder", "width": "of the embeddings", "heads": "of each attention",
    "ffn": "width of the feed-forward layers", "vocabulary": "words",
}  # fmt: skip


PARTS = (  # tables: which rows, against which length, which number with its factor, digits and title, and which ratio in brackets
    ("generation", "context", "seconds", 1e3, ".2f", "generation, ms per token", "times_faster"),
    ("generation", "context", "state_bytes", 1e-3, ".0f", "generation, state in kB", "times_smaller"),
    ("training", "tokens", "tokens_per_second", 1, ".0f", "training, tokens/s", "times_faster"),
    ("training", "tokens", "peak_bytes", 1e-6, ".0f", "training, peak memory in MB", "times_smaller"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options of model."""
    add, names = parser.add_argument, [*RULES, *(name for name in MIXERS if name != "fast_weight")]
    said = f"update rules and other mixers, each a model: {', '.join(names)}; all: all but fwm"
    add("--mixers", nargs="+", default=["delta"], choices=[*names, "all"], metavar="NAME", help=said)
    add_sizes(parser, layers=4, width=128, heads=8, ffn=512, vocabulary=10000)
    add("--tokens", nargs="+", type=positive, default=[512, 2048], metavar="T", help="lengths to train on")
    add("--max-tokens", type=positive, default=2048, help="tokens of a training batch")
    add("--hypotheses", type=positive, default=5, help="sequences generated together; 5: fairseq's beam")
    add("--contexts", nargs="+", type=positive, default=[256, 1024, 4096], metavar="T", help="tokens before generation")
    add("--steps", type=positive, default=16, help="timed tokens at each context")
    add_graph(parser)
    add("--resume", action="store_true", help="continue the report in --json, which is written after each length")


def add_graph(parser: ArgumentParser) -> None:
    """Adds --no-decoding-graph."""
    parser.add_argument("--no-decoding-graph", action="store_true", help="generate on a GPU without CUDA graphs")


def add_sizes(parser: ArgumentParser, **defaults: int) -> None:
    """Adds options for the sizes of a model."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=vocabulary if name == "vocabulary" else positive, default=default, help=SIZES[name])


def vocabulary(text: str) -> int:
    """An option that is a number of words."""
    if (value := int(text)) < 5:
        raise argparse.ArgumentTypeError(f"{value} leaves no room beside fairseq's 4 special symbols")
    return value


def measure(args: Namespace) -> dict:
    """Times training and generation with every model, and measures their memory."""
    args.mixers = list(dict.fromkeys(name for given in args.mixers for name in (ALL if given == "all" else [given])))
    report = _begin(args)
    models = {name: build_model(args, name) for name in model_names(args)}
    report["parameters"] = parameter_counts(models)
    for length in _missing(report["training"], "tokens", args.tokens):
        sizes, seconds = peak_memory(args, models, length), time_training(args, models, length)
        tokens = batch_rows(args, length) * length
        report["training"] += [
            {"tokens": length, "name": n, "tokens_per_second": tokens / statistics.median(s), "peak_bytes": sizes[n], **spread(s)}
            for n, s in seconds.items()
        ]
        report["ratios"] += _ratios("training", length, seconds, sizes)
        _finish_length(args, report, f"training with {length} tokens")
    for context in _missing(report["generation"], "context", args.contexts):
        seconds, sizes = time_generation(args, models, context)
        report["generation"] += [{"context": context, "name": n, "state_bytes": sizes[n], **spread(s)} for n, s in seconds.items()]
        report["ratios"] += _ratios("generation", context, seconds, sizes)
        _finish_length(args, report, f"generation after {context} tokens")
    return report


def _begin(args: Namespace) -> dict:
    """Returns an empty report, or with --resume the report in the file."""
    now = settings(args)
    report: dict[str, Any] = {
        "machine": machine(args),
        "settings": now,
        "parameters": [],
        "training": [],
        "generation": [],
        "ratios": [],
    }
    if not args.resume or not args.json or not args.json.exists():
        return report
    report |= json.loads(args.json.read_text())
    before = report["settings"]
    for name in sorted(now.keys() | before.keys()):
        if now.get(name, False) != before.get(name, False):  # an older report lacks newer switches
            said = f"--resume: {args.json} was measured with {name} {before.get(name)}, not {now.get(name)}"
            raise Mistake(f"{said}; repeat its options, or name another file")
    return report


def _missing(rows: list[dict], key: str, lengths: list[int]) -> list[int]:
    return [length for length in lengths if length not in {row[key] for row in rows}]


def _finish_length(args: Namespace, report: dict, what: str) -> None:
    say(f"{what}: done")
    if args.json:
        write_json(args.json, report)


def _ratios(what: str, length: int, seconds: dict[str, list[float]], sizes: dict[str, int]) -> list[dict]:
    """Returns by what factor each model is faster (the median over rounds) and smaller than transformer_lm."""
    peer, peer_size = seconds[TRANSFORMER], sizes[TRANSFORMER]
    return [
        {
            "name": name, "what": what, "tokens": length, "times_smaller": peer_size / max(1, sizes[name]),
            "times_faster": times_faster(peer, own),
        }
        for name, own in seconds.items() if name != TRANSFORMER
    ]  # fmt: skip


def table(report: dict) -> str:
    """The report as Markdown."""
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, {m['threads']} threads, torch {m['torch']}; {s['layers']} layers, width {s['width']}, {s['heads']} heads, "
        f"ffn {s['ffn']}, {s['vocabulary']} words; training with {s['max_tokens']} tokens a batch, generation of {s['steps']} "
        f"tokens for {s['hypotheses']} hypotheses; medians of {s['rounds']} rounds; "
        f"in brackets: times as fast, or as small, as {TRANSFORMER}",
    ]
    for part in PARTS:
        lines += ["", *_part_table(report, *part)]
    lines += ["", "| model | parameters |", "|---|---:|"]
    lines += [f"| {row['name']} | {row['parameters']:,} |" for row in report["parameters"]]
    return "\n".join(lines)


def _part_table(report: dict, what: str, length: str, key: str, factor: float, digits: str, title: str, ratio: str) -> list[str]:
    """A row for each model, a column for each length."""
    rows = report[what]
    cells = {(row["name"], row[length]): format(factor * row[key], digits) for row in rows}
    for row in report["ratios"]:
        if row["what"] == what:
            cells[row["name"], row["tokens"]] += f" ({row[ratio]:.2f} x)" if row[ratio] < 10 else f" ({row[ratio]:.0f} x)"
    lengths = list(dict.fromkeys(row[length] for row in rows))
    after = "after " if length == "context" else ""
    lines = [" | ".join([f"| {title}", *(f"{after}{t} tokens" for t in lengths)]) + " |", "|---|" + "---:|" * len(lengths)]
    for name in dict.fromkeys(row["name"] for row in rows):
        lines.append(" | ".join([f"| {name}", *(cells[name, t] for t in lengths)]) + " |")
    return lines


def draw(report: dict) -> Any:
    """Time per token and bytes of the state against context."""
    panels = [("seconds", 1e3, "ms per token"), ("state_bytes", 1e-6, "state, MB")]
    return draw_lengths(report["generation"], "context", panels, "tokens before")
