"""fw-bench translate: beam search with linear attention against softmax attention, identical in size, with random weights."""

from __future__ import annotations

import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...feature_maps import FEATURE_MAPS
from .contest import machine, parameter_counts, positive, settings, spread, take_turns, timed, times_faster
from .language_models import add_graph, add_sizes
from .measure import draw_tokens, make_task, state_bytes

TRANSFORMER = "transformer"
RULE = "sum"


def add_arguments(parser) -> None:
    maps = [name for name, phi in FEATURE_MAPS.items() if phi.non_negative]
    parser.add_argument(
        "--feature-maps", nargs="+", default=["elu", "dpfp"], choices=maps, metavar="MAP", help="feature maps, each a model"
    )
    parser.add_argument("--dpfp-nu", type=positive, default=1, help="nu of dpfp")
    add_sizes(parser, layers=3, width=256, heads=4, ffn=512, vocabulary=8000)
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=[30, 200, 1000], metavar="T", help="tokens of each translation"
    )
    parser.add_argument("--sentences", type=positive, default=8, help="translated together")
    parser.add_argument("--beam", type=positive, default=5, help="hypotheses of each sentence")
    add_graph(parser)


def measure(args) -> dict:
    """Times beam search with every model at every length."""
    task, models = build_models(args)
    found = time_decoding(args, task, models)
    return {
        "machine": machine(args),
        "settings": settings(args),
        "parameters": parameter_counts(models),
        "decoding": [
            {
                "tokens": t,
                "name": n,
                "sentences_per_second": args.sentences / statistics.median(s),
                "state_bytes": size,
                **spread(s),
            }
            for (t, n), (s, size) in found.items()
        ],
        "ratios": ratios(found),
    }


def build_models(args) -> tuple[Namespace, dict[str, nn.Module]]:
    from .fairseq_parts import Dictionary, FastWeightTransformer, TransformerModel, transformer_base

    task = make_task(Dictionary(), args.vocabulary)

    def build(kind, **options):
        torch.manual_seed(0)
        sizes = {"layers": args.layers, "embed_dim": args.width, "ffn_embed_dim": args.ffn, "attention_heads": args.heads}
        positions = {f"max_{side}_positions": max(args.lengths) + 3 for side in ("source", "target")}
        sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
        cfg = Namespace(share_all_embeddings=True, **positions, **sides, **options)
        transformer_base(cfg)
        return kind.build_model(cfg, task).eval().to(args.device)

    options = {"feature_norm": "none", "attention_norm": True, "dpfp_nu": args.dpfp_nu, "no_decoding_graph": args.no_decoding_graph}
    linear = partial(build, FastWeightTransformer, update_rule=RULE, **options)
    models = {f"fast_weight_transformer {name}": linear(feature_map=name) for name in args.feature_maps}
    return task, models | {TRANSFORMER: build(TransformerModel)}


def time_decoding(args, task, models) -> dict[tuple[int, str], tuple[list[float], int]]:
    """Returns by length and model the seconds of a batch, one for each round, and the bytes of the state after the last token."""
    found: dict[tuple[int, str], tuple[list[float], int]] = {}
    for model in models.values():
        decode(args, task, model, draw_tokens(args, args.sentences, min(args.lengths)))  # loads libraries
    for length in args.lengths:
        source = draw_tokens(args, args.sentences, length)
        calls = {name: partial(decode, args, task, model, source) for name, model in models.items()}
        turns = take_turns(calls, args.rounds, f"{length} tokens", untimed=0)
        found |= {(length, name): ([seconds for seconds, _ in turn], turn[-1][1]) for name, turn in turns.items()}
    return found


def decode(args, task, model, source: Tensor) -> tuple[float, int]:
    """Returns the seconds of beam search, and the bytes of the state after the last token."""
    from .fairseq_parts import SequenceGenerator

    count, length = source.shape
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((count,), length, device=args.device)}}
    limits = {"beam_size": args.beam, "max_len_b": length - 1, "min_len": length - 1}
    keeper = StateKeeper(model.decoder)
    generator = SequenceGenerator([model], task.target_dictionary, **limits).to(args.device)
    elapsed = timed(lambda: generator.generate([model], sample), args.device)
    return elapsed, keeper.release()


class StateKeeper:
    """Remembers the incremental state that beam search works with."""

    def __init__(self, decoder):
        self.decoder, self.reorder, self.state = decoder, decoder.reorder_incremental_state_scripting, {}
        decoder.reorder_incremental_state_scripting = self

    def __call__(self, incremental_state, new_order: Tensor) -> None:
        self.state = incremental_state
        self.reorder(incremental_state, new_order)

    def release(self) -> int:
        del self.decoder.reorder_incremental_state_scripting
        return state_bytes(self.state)


def ratios(found) -> list[dict]:
    """Returns by what factor each linear model is faster and smaller than fairseq's transformer."""
    rows = []
    for (length, name), (own, size) in found.items():
        if name != TRANSFORMER:
            peer, peer_size = found[length, TRANSFORMER]
            smaller = max(1, peer_size) / max(1, size)  # a translation of one token keeps nothing
            rows.append({"name": name, "tokens": length, "times_faster": times_faster(peer, own), "times_smaller": smaller})
    return rows


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


def draw(report: dict, path: Path) -> None:
    """Sentences per second against length, both axes logarithmic."""
    from ..plot.cost import Panel, draw_rows
    from ..plot.style import save

    panels = [Panel("sentences_per_second", 1, "sentences/s"), Panel("state_bytes", 1e-6, "state in the end, MB")]
    save(draw_rows(report["decoding"], "tokens", panels, TRANSFORMER, "tokens of source and translation"), [path])
