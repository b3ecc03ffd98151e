"""fw-bench model: fast_weight_lm against fairseq's transformer_lm, identical in size, with random weights on random tokens."""

from __future__ import annotations

import argparse
import logging
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .bench_tools import machine, positive, progress, timed
from .rules import RULES

TRANSFORMER = "transformer_lm"
UNTIMED_STEPS = 3
SIZES = {
    "layers": "of encoder and decoder each, where there is an encoder", "width": "of the embeddings", "heads": "of each attention",
    "ffn": "width of the feed-forward layers", "vocabulary": "words",
}  # fmt: skip


def add_arguments(parser) -> None:
    parser.add_argument("--rules", nargs="+", default=["delta"], choices=RULES, metavar="RULE")
    add_sizes(parser, layers=4, width=128, heads=8, ffn=512, vocabulary=10000)
    parser.add_argument("--tokens", nargs="+", type=positive, default=[512, 2048], metavar="T", help="lengths to train on")
    parser.add_argument("--max-tokens", type=positive, default=2048, help="tokens of a training batch")
    parser.add_argument("--hypotheses", type=positive, default=5, help="sequences generated together; 5: fairseq's beam")
    parser.add_argument(
        "--contexts", nargs="+", type=positive, default=[256, 1024, 4096], metavar="T", help="tokens before generation"
    )
    parser.add_argument("--steps", type=positive, default=16, help="timed tokens at each context")


def add_sizes(parser, **defaults) -> None:
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=vocabulary if name == "vocabulary" else positive, default=default, help=SIZES[name])


def vocabulary(text: str) -> int:
    if (value := int(text)) < 5:
        raise argparse.ArgumentTypeError(f"{value} leaves no room beside fairseq's 4 special symbols")
    return value


def bench_model(args) -> dict:
    models = build_models(args)
    training, generation = time_training(args, models), time_generation(args, models)
    return {
        "machine": machine(args),
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, (int, str, list))},
        "parameters": [{"name": name, "parameters": sum(p.numel() for p in m.parameters())} for name, m in models.items()],
        "training": [
            {"tokens": t, "name": n, "tokens_per_second": batch_rows(args, t) * t / statistics.median(s), **spread(s)}
            for (t, n), s in training.items()
        ],
        "generation": [
            {"context": c, "name": n, "state_bytes": size, **spread(s)} for (c, n), (s, size) in generation.items()
        ],
        "ratios": ratios(training, generation),
    }  # fmt: skip


def spread(seconds: list[float]) -> dict[str, float]:
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def build_models(args) -> dict[str, nn.Module]:
    logging.basicConfig(level=logging.WARNING)  # first, or fairseq's import makes every library log what it does
    from fairseq.data import Dictionary  # here, because it takes seconds, and fw-bench ops does without
    from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture

    from .models.fast_weight_lm import FastWeightLanguageModel

    task = make_task(Dictionary(), args.vocabulary)

    def build(kind, **options):
        torch.manual_seed(0)
        cfg = argparse.Namespace(
            decoder_layers=args.layers, decoder_embed_dim=args.width, decoder_attention_heads=args.heads,
            decoder_ffn_embed_dim=args.ffn, share_decoder_input_output_embed=True,
            max_target_positions=max(*args.tokens, *(c + UNTIMED_STEPS + args.steps for c in args.contexts)), **options,
        )  # fmt: skip
        base_lm_architecture(cfg)
        return kind.build_model(cfg, task).to(args.device)

    models = {f"fast_weight_lm {rule}": build(FastWeightLanguageModel, update_rule=rule) for rule in args.rules}
    return models | {TRANSFORMER: build(TransformerLanguageModel)}


def make_task(dictionary, words: int) -> SimpleNamespace:
    """What a model asks of its task: here one dictionary for both sides."""
    for index in range(words - len(dictionary)):
        dictionary.add_symbol(str(index))
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def batch_rows(args, length: int) -> int:
    """Of a training batch."""
    return max(1, args.max_tokens // length)


def draw_tokens(args, count: int, length: int) -> Tensor:
    """(count, length), without special symbols."""
    return torch.randint(4, args.vocabulary, (count, length), device=args.device)


def time_training(args, models) -> dict[tuple[int, str], list[float]]:
    """Seconds of forward and backward by length and model, one a round."""
    texts = {length: draw_tokens(args, batch_rows(args, length), length + 1) for length in args.tokens}
    seconds: dict[tuple[int, str], list[float]] = {(length, name): [] for length in texts for name in models}
    for round_ in range(args.rounds + 1):
        for length, name in seconds:
            elapsed = timed(lambda: forward_backward(models[name], texts[length]), args.device)  # noqa: B023
            if round_:
                seconds[length, name].append(elapsed)
        progress(f"training, round {round_} of {args.rounds}")
    return seconds


def forward_backward(model, text: Tensor) -> None:
    model.train()
    model.zero_grad()
    logits, _ = model(text[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()


@torch.no_grad()
def time_generation(args, models) -> dict[tuple[int, str], tuple[list[float], int]]:
    """Seconds of a token, one a round, and bytes of the state, by context and model."""
    found: dict[tuple[int, str], tuple[list[float], int]] = {}
    for context in args.contexts:
        text = draw_tokens(args, args.hypotheses, context + UNTIMED_STEPS + args.steps)
        states = {name: fill_state(model.eval(), text[:, :context]) for name, model in models.items()}
        found |= {(context, name): ([], state_bytes(state)) for name, state in states.items()}
        for round_ in range(args.rounds + 1):
            for name, model in models.items():
                elapsed = time_steps(args, model, text, context, states[name])
                if round_:
                    found[context, name][0].append(elapsed)
            progress(f"generation after {context} tokens, round {round_} of {args.rounds}")
    return found


def time_steps(args, model, text: Tensor, context: int, state: dict) -> float:
    """Median seconds of the steps after ``context``; ``state`` stays as it is.

    The turn of a model is all of its steps: taking turns token by token, each would find its weights pushed out of the processor's
    cache by the other's keys and values.
    """
    state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}
    seconds = []
    for length in range(context + 1, text.shape[1] + 1):
        seconds.append(timed(lambda: model.decoder(text[:, :length], incremental_state=state), args.device))  # noqa: B023
    return statistics.median(seconds[UNTIMED_STEPS:])


def fill_state(model, prompt: Tensor) -> dict:
    """The incremental state after the prompt. Softmax attention gets random keys and values, whose time does not depend on them."""
    state: dict = {}
    if hasattr(model.decoder, "take_prompt"):
        model.decoder(prompt, incremental_state=state)
        return state
    for layer in model.decoder.layers:
        attention = layer.self_attn
        shape = (prompt.shape[0], attention.num_heads, prompt.shape[1], attention.head_dim)
        buffer = {name: torch.randn(shape, device=prompt.device) for name in ("prev_key", "prev_value")}
        attention._set_input_buffer(state, buffer | {"prev_key_padding_mask": None})
    return state


def state_bytes(state) -> int:
    """Of all tensors in there, however deep."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(state_bytes, state.values()))
    return sum(map(state_bytes, state)) if isinstance(state, (tuple, list)) else 0


def ratios(training, generation) -> list[dict]:
    """How many times faster and smaller each fast-weight model is than transformer_lm."""
    found = []
    for (length, name), own in training.items():
        if name != TRANSFORMER:
            times = statistics.median(p / o for p, o in zip(training[length, TRANSFORMER], own))
            found.append({"name": name, "what": "training", "tokens": length, "times_faster": times})
    for (context, name), (own, size) in generation.items():
        if name != TRANSFORMER:
            peer, peer_size = generation[context, TRANSFORMER]
            row = {"name": name, "what": "generation", "tokens": context}
            times = statistics.median(p / o for p, o in zip(peer, own))
            found.append(row | {"times_faster": times, "times_smaller": peer_size / size})
    return found


def table(report: dict) -> str:
    """The report as Markdown."""
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, {m['threads']} threads, torch {m['torch']}; {s['layers']} layers, width {s['width']}, {s['heads']} heads, "
        f"ffn {s['ffn']}, {s['vocabulary']} words; training with {s['max_tokens']} tokens a batch, generation of {s['steps']} "
        f"tokens for {s['hypotheses']} hypotheses; medians of {s['rounds']} rounds",
        "",
        "| model | parameters | " + " | ".join(f"training T={t}, tokens/s" for t in s["tokens"]) + " |",
        "|---|---:|" + "---:|" * len(s["tokens"]),
    ]
    speeds = {(row["name"], row["tokens"]): row["tokens_per_second"] for row in report["training"]}
    for row in report["parameters"]:
        cells = (f"{speeds[row['name'], t]:.0f}" for t in s["tokens"])
        lines.append(f"| {row['name']} | {row['parameters']} | " + " | ".join(cells) + " |")
    lines += ["", "| generation | tokens before | ms per token | state, kB |", "|---|---:|---:|---:|"]
    for row in report["generation"]:
        lines.append(f"| {row['name']} | {row['context']} | {1e3 * row['seconds']:.2f} | {row['state_bytes'] / 1e3:.0f} |")
    lines += ["", f"| model | T | against {TRANSFORMER} |", "|---|---:|---|"]
    for row in report["ratios"]:
        smaller = f", {row['times_smaller']:.3g} x smaller state" if "times_smaller" in row else ""
        lines.append(f"| {row['name']} | {row['tokens']} | {row['what']} {row['times_faster']:.2f} x as fast{smaller} |")
    return "\n".join(lines)


def draw(report: dict, path: Path) -> None:
    """Time per token and bytes of the state against context, told apart in grey by their markers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    rows, whole_decades = report["generation"], ((min, math.floor), (max, math.ceil))
    for axes, key, factor, label in zip(panels, ("seconds", "state_bytes"), (1e3, 1e-3), ("time per token, ms", "state, kB")):
        for name, marker in zip(dict.fromkeys(row["name"] for row in rows), "osD^vPX*"):
            points = [(row["context"], factor * row[key]) for row in rows if row["name"] == name]
            thick = {"lw": 2, "ls": "--"} if name == TRANSFORMER else {"lw": 1}
            axes.plot(*zip(*sorted(points)), marker=marker, ms=5, label=name, **thick)
        ends = [10 ** rounded(math.log10(factor * end(row[key] for row in rows))) for end, rounded in whole_decades]
        axes.set(xscale="log", yscale="log", xlabel="tokens before", ylabel=label, ylim=ends)
        axes.set_xticks(ticks := report["settings"]["contexts"], [str(t) for t in ticks])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
