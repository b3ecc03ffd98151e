"""Seconds of a token, unbatched, of a dense Transformer and of models that read fewer and fewer weights, on a CPU.

The models are large, so that one at a time is in memory: they are built, measured at every context with every number of threads,
and deleted. Beside each, the speed of memory is measured.
"""

from __future__ import annotations

import gc
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from common import run
from torch import Tensor, nn

from fw_fairseq.generation.kv_cache import Past
from fw_fairseq.models.generation import GENERATION
from fw_fairseq.modules.sparse import SparseFeedForward
from fw_fairseq.ops import native
from fw_fairseq.tools.bench.contest import machine, positive, say, settings, spread, take_turns, timed, write_json
from fw_fairseq.tools.bench.language_models import vocabulary
from fw_fairseq.tools.bench.measure import make_task

BASE = "dense"
FEED_FORWARD = {"ffn_sparsity": 64, "ffn_sru": 32}
PROJECTIONS = {"qkv_sparsity": 16}
OUTPUT = {"output_sparsity": 4}
RECURRENT = {"mixer": "fast_weight", "update_rule": "gated_delta", "fast_weight_backend": "recurrent"}
MODELS = {  # each has what the one before has
    BASE: {"mixer": "softmax"},
    "+ sparse feed-forward": {"mixer": "softmax"} | FEED_FORWARD,
    "+ sparse q, k, v": {"mixer": "softmax"} | FEED_FORWARD | PROJECTIONS,
    "+ sparse loss": {"mixer": "softmax"} | FEED_FORWARD | PROJECTIONS | OUTPUT,
    "+ gated_delta for softmax": RECURRENT | FEED_FORWARD | PROJECTIONS | OUTPUT,
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = 8  # of one kind that take turns
PROBE = 2**26  # bytes of the matrix and of the copy that measure the speed of memory


class Size(NamedTuple):
    """The sizes of a model; its vocabulary has 32,000 words."""

    layers: int
    width: int
    heads: int
    ffn: int


SIZES = {
    "tiny": Size(2, 64, 2, 128),
    "110M": Size(12, 768, 12, 3072),
    "470M": Size(24, 1024, 16, 6144),
    "1.6B": Size(30, 2048, 16, 8192),
    "3.9B": Size(34, 3072, 24, 12288),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options. --try-threads takes the place of --threads."""
    add = parser.add_argument
    add("--sizes", nargs="+", default=["110M"], choices=list(SIZES), metavar="SIZE", help=", ".join(SIZES))
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL", help="; ".join(MODELS))
    add("--contexts", nargs="+", type=positive, default=[1, 512, 4096], metavar="T", help="tokens read before")
    add("--try-threads", nargs="+", type=positive, default=[1], metavar="N", help="numbers of CPU threads")
    add("--type", choices=list(TYPES), default="fp32", help="type of the weights")
    add("--steps", type=positive, default=4, help="tokens of a round")
    add("--vocabulary", type=vocabulary, default=32000, help="words")


def measure(args: Namespace) -> dict:
    """Times a token of every model, and measures the speed of memory beside it."""
    args.threads = max(args.try_threads)
    report: dict = {"machine": machine(args), "settings": settings(args), "products": [], "models": [], "tokens": []}
    for size in args.sizes:
        for threads in args.try_threads:
            torch.set_num_threads(threads)
            report["products"] += measure_products(args, size, threads)
        for name in args.models:
            measure_model(args, size, name, report)
            gc.collect()  # what refers to itself would still be there with the next model
            say(f"{size}, {name}: done")
            if args.json:
                write_json(args.json, report)
    return report


@torch.no_grad()
def measure_products(args: Namespace, size: str, threads: int) -> list[dict]:
    """The rows of one sparse feed-forward layer: its compiled loops, PyTorch in their place, and a dense layer of its sizes. Layers
    take turns, so that their weights come from memory."""
    _, width, _, units = SIZES[size]
    block = FEED_FORWARD["ffn_sparsity"]
    dtype = TYPES[args.type]
    layers = [SparseFeedForward(width, units, block).to(dtype).eval() for _ in range(LAYERS)]
    dense = [(nn.Linear(width, units).to(dtype), nn.Linear(units, width).to(dtype)) for _ in range(2)]
    sparse_bytes = sum(p.numel() for p in layers[0].parameters()) - 2 * (units - units // block) * width

    def each(call: Callable, of: list) -> float:
        found = [timed(partial(call, layer, torch.randn(1, width, dtype=dtype)), args.device) for layer in of]
        return statistics.median(found)

    calls = {
        "compiled": partial(each, lambda layer, x: layer(x), layers),
        "PyTorch": partial(each, without_compiler, layers),
        "dense": partial(each, lambda pair, x: pair[1](pair[0](x).relu_()), dense),
        **probes(args),
    }
    found = take_turns(calls, args.rounds, f"{size}, products")
    speeds = {f"{probe}_speed": PROBE / statistics.median(found.pop(probe)) for probe in ("read", "copy")}
    read = {"dense": sum(p.numel() for layer in dense[0] for p in layer.parameters())}
    return [
        {"size": size, "name": name, "threads": threads, "bytes": dtype.itemsize * read.get(name, sparse_bytes), **spread(seconds)}
        | speeds
        for name, seconds in found.items()
    ]


def without_compiler(layer: SparseFeedForward, x: Tensor) -> Tensor:
    """Runs a layer in PyTorch."""
    library = native.library
    try:
        native.library = lambda: None
        return layer(x)
    finally:
        native.library = library


@torch.no_grad()
def measure_model(args: Namespace, size: str, name: str, report: dict) -> None:
    """Adds the rows of one model to the report."""
    model = build_model(args, SIZES[size], MODELS[name])
    read = weights_read(model.decoder)
    bytes_read = read * TYPES[args.type].itemsize
    parameters = sum(p.numel() for p in model.parameters())
    report["models"].append({"size": size, "name": name, "parameters": parameters, "weights_read": read})
    for threads in args.try_threads:
        torch.set_num_threads(threads)
        for context in args.contexts:
            state = state_after(model, context)
            calls = {"token": partial(time_tokens, args, model, state, context), **probes(args)}
            found = take_turns(calls, args.rounds, f"{size}, {name}, {context} tokens")
            row = {"size": size, "name": name, "threads": threads, "context": context, **spread(found["token"])}
            speeds = {f"{probe}_speed": PROBE / statistics.median(found[probe]) for probe in ("read", "copy")}
            report["tokens"].append(row | {"bytes_of_weights": bytes_read, "bytes_of_state": state_bytes(state), **speeds})


def build_model(args: Namespace, size: Size, options: dict) -> nn.Module:
    """A language model of that size with random weights, which are made in their type."""
    from fw_fairseq.tools.bench.fairseq_parts import Dictionary, FastWeightLanguageModel, base_lm_architecture

    cfg = Namespace(
        decoder_layers=size.layers, decoder_embed_dim=size.width, decoder_attention_heads=size.heads,
        decoder_ffn_embed_dim=size.ffn, decoder_normalize_before=True, no_token_positional_embeddings=True,
        max_target_positions=max(args.contexts) + 10**4, **options,
    )  # fmt: skip
    base_lm_architecture(cfg)
    before = torch.get_default_dtype()
    torch.set_default_dtype(TYPES[args.type])
    try:
        with torch.device("meta"):
            model = FastWeightLanguageModel.build_model(cfg, make_task(Dictionary(), args.vocabulary)).eval()
    finally:
        torch.set_default_dtype(before)
    return fill(model.to_empty(device="cpu"))


def fill(model: nn.Module) -> nn.Module:
    """Gives all weights numbers from one block of random ones: drawing billions of them would take longer than the measurement."""
    block = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(1))
    for x in model.buffers():
        x.zero_()
    for name, x in model.named_parameters():
        scale = x.shape[-1] ** -0.5 if x.dim() > 1 else 0.0
        offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        for part in x.data.view(-1).split(len(block)):
            part.copy_(block[: len(part)]).mul_(scale).add_(offset)
    return model


def weights_read(decoder: Any) -> int:
    """The number of weights that a token reads: of a sparse feed-forward layer its controller and the chosen rows."""
    unread = decoder.embed_tokens.weight.numel() - decoder.embed_dim
    for module in decoder.modules():
        if isinstance(module, SparseFeedForward):
            both = module.weight_in.numel() + module.weight_out.numel()
            unread += both - both // module.block
    return sum(p.numel() for p in decoder.parameters()) - unread


def state_after(model: Any, context: int) -> dict:
    """The incremental state after so many tokens. Softmax attention gets random keys and values, and a memory of fast weights is a
    matrix where so many tokens make it one; no time depends on their values."""
    state: dict = {}
    tokens = torch.full((1, 1), 4)
    model.decoder(tokens, incremental_state=state)
    generation = state[GENERATION]
    for part in generation.parts():
        stepper = getattr(part, "stepper", None)
        if isinstance(getattr(stepper, "last", None), Past):
            past = stepper.last
            shape = (1, past.keys.shape[1], context, past.keys.shape[3])
            stepper.last = Past(*(torch.randn(shape, dtype=past.keys.dtype) for _ in range(2)), context, [context])
        elif stepper is not None:
            for _ in range(min(context, part.stepper.mixer.head_dim)):
                part(torch.randn(1, model.decoder.embed_dim, dtype=model.decoder.embed_tokens.weight.dtype))
    model.decoder(tokens.expand(1, context + 1), incremental_state=state)  # gives the buffers room
    return state


def state_bytes(state: dict) -> int:
    """The bytes of the state that a token reads."""
    return sum(x.nbytes for part in state[GENERATION].parts() for _, kept in part.states() for x in flat(kept))


def flat(state: Any) -> list[Tensor]:
    """The tensors of nested containers. A buffer counts without its room."""
    if isinstance(state, Past):
        return list(state.tokens()[:2])
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    return [state] if isinstance(state, Tensor) else [x for value in values for x in flat(value)]


def time_tokens(args: Namespace, model: Any, state: dict, context: int) -> float:
    """Median seconds of a token after ``context`` others."""
    seconds = []
    for step in range(args.steps):
        tokens = torch.randint(4, args.vocabulary, (1, context + 2 + step))
        seconds.append(timed(lambda: model.decoder(tokens, incremental_state=state), args.device))  # noqa: B023
    return statistics.median(seconds)


def probes(args: Namespace) -> dict:
    """Calls that time how fast a matrix is read by a product, and how fast bytes are copied."""
    dtype = TYPES[args.type]
    width = 2048
    weight, x = torch.zeros(PROBE // width // dtype.itemsize, width, dtype=dtype), torch.zeros(1, width, dtype=dtype)
    source, target = (torch.zeros(PROBE // 4) for _ in range(2))
    return {
        "read": lambda: timed(lambda: nn.functional.linear(x, weight), args.device),
        "copy": lambda: timed(lambda: target.copy_(source), args.device),
    }


def table(report: dict) -> str:
    """The report as Markdown: a table for each size and number of threads."""
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, torch {m['torch']}, {s['type']}, {s['vocabulary']} words; milliseconds per token, medians of {s['rounds']}"
        f" rounds of {s['steps']} tokens; in brackets: times as fast as {BASE} after as many tokens"
    ]
    lines += products_table(report)
    weights = {(row["size"], row["name"]): row for row in report["models"]}
    for size, threads in dict.fromkeys((row["size"], row["threads"]) for row in report["tokens"]):
        rows = {(r["name"], r["context"]): r for r in report["tokens"] if (r["size"], r["threads"]) == (size, threads)}
        contexts = list(dict.fromkeys(context for _, context in rows))
        title = f"| {size}, {threads} thread{'s' * (threads > 1)}"
        lines += ["", " | ".join([title, "parameters", "weights read", *(f"after {t}" for t in contexts)]) + " |"]
        lines.append("|---|" + "---:|" * (len(contexts) + 2))
        for name in dict.fromkeys(name for name, _ in rows):
            counts = weights[size, name]
            cells = [f"{1e3 * rows[name, t]['seconds']:.2f}{faster(rows, name, t)}" for t in contexts]
            numbers = [f"{counts[key] / 1e6:.1f}M" for key in ("parameters", "weights_read")]
            lines.append(" | ".join([f"| {name}", *numbers, *cells]) + " |")
    return "\n".join(lines)


def products_table(report: dict) -> list[str]:
    """The time of one feed-forward layer, and the speed at which it reads its weights beside that of memory."""
    lines = ["", "| feed-forward layer of a token | microseconds | read | GB/s | a matrix is read at | a copy reads at |"]
    lines.append("|---|" + "---:|" * 5)
    for row in report["products"]:
        title = f"{row['size']}, {row['threads']} thread{'s' * (row['threads'] > 1)}, {row['name']}"
        speeds = [row["bytes"] / row["seconds"], row["read_speed"], row["copy_speed"]]
        cells = [f"{1e6 * row['seconds']:.0f}", f"{row['bytes'] / 1e6:.2f} MB", *(f"{speed / 1e9:.1f}" for speed in speeds)]
        lines.append(" | ".join([f"| {title}", *cells]) + " |")
    return lines


def faster(rows: dict, name: str, context: int) -> str:
    """By what factor a model is faster than the dense one, in brackets; nothing where that was not measured."""
    if name == BASE or (BASE, context) not in rows:
        return ""
    ratio = rows[BASE, context]["seconds"] / rows[name, context]["seconds"]
    return f" ({ratio:.1f} x)"


if __name__ == "__main__":
    run(__doc__, add_arguments, measure, table)
