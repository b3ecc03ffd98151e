"""Beam search of fast_weight_transformer, all attentions linear, against fairseq's transformer of the same size, with random
weights, through fairseq's SequenceGenerator; sources are as long as their translations."""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

import torch
from common import run
from torch import Tensor, nn

from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.tools.bench.contest import machine, parameter_counts, positive, settings, spread, take_turns, timed, times_faster
from fw_fairseq.tools.bench.language_models import add_graph, add_sizes
from fw_fairseq.tools.bench.measure import draw_tokens, make_task, state_bytes

TRANSFORMER = "transformer"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options."""
    add, maps = parser.add_argument, [name for name, phi in FEATURE_MAPS.items() if phi.non_negative]
    add("--feature-maps", nargs="+", default=["elu", "dpfp"], choices=maps, metavar="MAP", help="feature maps, each a model")
    add("--dpfp-nu", type=positive, default=1, help="nu of dpfp")
    add_sizes(parser, layers=3, width=256, heads=4, ffn=512, vocabulary=8000)
    add("--lengths", nargs="+", type=positive, default=[30, 200, 1000], metavar="T", help="tokens of each translation")
    add("--sentences", type=positive, default=8, help="translated together")
    add("--beam", type=positive, default=5, help="hypotheses of each sentence")
    add_graph(parser)


def measure(args: Namespace) -> dict:
    """Times beam search with every model at every length."""
    task, models = build_models(args)
    for model in models.values():
        decode(args, task, model, draw_tokens(args, args.sentences, min(args.lengths)))  # loads libraries
    decoding, ratios = [], []
    for length in args.lengths:
        source = draw_tokens(args, args.sentences, length)
        calls = {name: partial(decode, args, task, model, source) for name, model in models.items()}
        turns = take_turns(calls, args.rounds, f"{length} tokens", untimed=0)
        seconds = {name: [value for value, _ in turn] for name, turn in turns.items()}
        sizes = {name: max(1, turn[-1][1]) for name, turn in turns.items()}  # a translation of one token keeps nothing
        for name, own in seconds.items():
            speed = args.sentences / statistics.median(own)
            row = {"tokens": length, "name": name, "sentences_per_second": speed, "state_bytes": turns[name][-1][1], **spread(own)}
            decoding.append(row)
            if name != TRANSFORMER:
                faster, smaller = times_faster(seconds[TRANSFORMER], own), sizes[TRANSFORMER] / sizes[name]
                ratios.append({"name": name, "tokens": length, "times_faster": faster, "times_smaller": smaller})
    found = {"machine": machine(args), "settings": settings(args), "parameters": parameter_counts(models)}
    return {**found, "decoding": decoding, "ratios": ratios}


def build_models(args: Namespace) -> tuple[Any, dict[str, nn.Module]]:
    """Returns a task with a dictionary, and the models."""
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    from fw_fairseq.models import FastWeightTransformer

    task = make_task(Dictionary(), args.vocabulary)

    def build(kind: Any, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"layers": args.layers, "embed_dim": args.width, "ffn_embed_dim": args.ffn, "attention_heads": args.heads}
        positions = {f"max_{side}_positions": max(args.lengths) + 3 for side in ("source", "target")}
        sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
        cfg = Namespace(share_all_embeddings=True, **positions, **sides, **options)
        base_architecture(cfg)
        return kind.build_model(cfg, task).eval().to(args.device)

    options = {"feature_norm": "none", "attention_norm": True, "dpfp_nu": args.dpfp_nu, "no_decoding_graph": args.no_decoding_graph}
    linear = partial(build, FastWeightTransformer, update_rule="sum", **options)
    models = {f"fast_weight_transformer {name}": linear(feature_map=name) for name in args.feature_maps}
    return task, {**models, TRANSFORMER: build(TransformerModel)}


def decode(args: Namespace, task: Any, model: Any, source: Tensor) -> tuple[float, int]:
    """Returns the seconds of beam search, and the bytes of the state after the last token."""
    from fairseq.sequence_generator import SequenceGenerator

    count, length = source.shape
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((count,), length, device=args.device)}}
    limits = {"beam_size": args.beam, "max_len_b": length - 1, "min_len": length - 1}
    kept: list[dict] = [{}]
    reorder = model.decoder.reorder_incremental_state_scripting

    def keep(incremental_state: dict, new_order: Tensor) -> None:
        kept[0] = incremental_state
        reorder(incremental_state, new_order)

    model.decoder.reorder_incremental_state_scripting = keep
    generator = SequenceGenerator([model], task.target_dictionary, **limits).to(args.device)
    elapsed = timed(lambda: generator.generate([model], sample), args.device)
    del model.decoder.reorder_incremental_state_scripting
    return elapsed, state_bytes(kept[0])


def table(report: dict) -> str:
    """The report as Markdown."""
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, {m['threads']} threads, torch {m['torch']}; {s['layers']}+{s['layers']} layers, width {s['width']}, "
        f"{s['heads']} heads, ffn {s['ffn']}, {s['vocabulary']} words; {s['sentences']} sentences at beam {s['beam']}, as long as "
        f"their translations; medians of {s['rounds']} rounds",
        "",
        "| model | tokens | sentences/s | state in the end, kB |",
        "|---|---:|---:|---:|",
    ]
    for row in report["decoding"]:
        lines.append(f"| {row['name']} | {row['tokens']} | {row['sentences_per_second']:.3g} | {row['state_bytes'] / 1e3:.0f} |")
    lines += ["", f"| model | tokens | against {TRANSFORMER} |", "|---|---:|---|"]
    for row in report["ratios"]:
        smaller = f"{row['times_smaller']:.3g} x smaller state"
        lines.append(f"| {row['name']} | {row['tokens']} | {row['times_faster']:.2f} x as fast, {smaller} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(__doc__, add_arguments, measure, table)
