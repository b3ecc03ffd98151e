"""fw-bench translate: beam search with linear attention against softmax attention, identical in size, with random weights."""

from __future__ import annotations

import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...feature_maps import FEATURE_MAPS
from .contest import machine, positive, progress, timed
from .language_models import add_sizes, spread
from .measure import draw_tokens, make_task, state_bytes

TRANSFORMER = "transformer"
RULE = "sum"


def add_arguments(parser) -> None:
    maps = [name for name, phi in FEATURE_MAPS.items() if phi.non_negative]
    parser.add_argument("--feature-maps", nargs="+", default=["elu", "dpfp"], choices=maps, metavar="MAP")
    parser.add_argument("--dpfp-nu", type=positive, default=1, help="nu of dpfp")
    add_sizes(parser, layers=3, width=256, heads=4, ffn=512, vocabulary=8000)
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=[30, 200, 1000], metavar="T", help="tokens of each translation"
    )
    parser.add_argument("--sentences", type=positive, default=8, help="translated together")
    parser.add_argument("--beam", type=positive, default=5)


def bench_translate(args) -> dict:
    task, models = build_models(args)
    found = time_decoding(args, task, models)
    return {
        "machine": machine(args),
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, (int, str, list))},
        "parameters": [{"name": name, "parameters": sum(p.numel() for p in m.parameters())} for name, m in models.items()],
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

    linear = partial(build, FastWeightTransformer, update_rule=RULE, feature_norm="none", attention_norm=True, dpfp_nu=args.dpfp_nu)
    models = {f"fast_weight_transformer {name}": linear(feature_map=name) for name in args.feature_maps}
    return task, models | {TRANSFORMER: build(TransformerModel)}


def time_decoding(args, task, models) -> dict[tuple[int, str], tuple[list[float], int]]:
    """Seconds of a batch, one a round, and bytes of the state in the end, by length and model."""
    found: dict[tuple[int, str], tuple[list[float], int]] = {}
    decode(args, task, models, min(args.lengths))
    for length in args.lengths:
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for round_ in range(args.rounds):
            rows = decode(args, task, models, length)
            for name, (elapsed, _) in rows.items():
                seconds[name].append(elapsed)
            progress(f"{length} tokens, round {round_ + 1} of {args.rounds}")
        found |= {(length, name): (seconds[name], size) for name, (_, size) in rows.items()}
    return found


def decode(args, task, models, length: int) -> dict[str, tuple[float, int]]:
    """Each model in its turn: seconds, and bytes of the state after the last token."""
    from .fairseq_parts import SequenceGenerator

    source, rows = draw_tokens(args, args.sentences, length), {}
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((args.sentences,), length, device=args.device)}}
    for name, model in models.items():
        keeper = StateKeeper(model.decoder)
        generator = SequenceGenerator(
            [model], task.target_dictionary, beam_size=args.beam, max_len_b=length - 1, min_len=length - 1
        ).to(args.device)
        elapsed = timed(lambda: generator.generate([model], sample), args.device)  # noqa: B023
        rows[name] = elapsed, keeper.release()
    return rows


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
    """How many times faster and smaller each linear model is than fairseq's transformer."""
    rows = []
    for (length, name), (own, size) in found.items():
        if name != TRANSFORMER:
            peer, peer_size = found[length, TRANSFORMER]
            times = statistics.median(p / o for p, o in zip(peer, own))
            rows.append({"name": name, "tokens": length, "times_faster": times, "times_smaller": peer_size / size})
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
