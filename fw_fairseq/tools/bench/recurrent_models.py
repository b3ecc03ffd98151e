"""fw-bench transformers: transformers' recurrent models on a CPU with ``accelerate()`` and with their reference code."""

from __future__ import annotations

import importlib
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...acceleration import REPLACED, accelerate, marked_functions, replacement
from ...errors import Mistake
from ..plot.colours import BLUE, SKY, VERMILLION
from ..plot.style import canvas, legend
from .contest import machine, positive, progress, settings, spread, take_turns, timed, times_faster

HELP = "recurrent models of transformers, with accelerate() and with their own reference code"
DESCRIPTION = "Small models of every type of transformers that accelerate() knows, with random weights."
PLOT = "how many times as fast each model is"
WIDTHS = {"hidden_size": 1, "intermediate_size": 2, "moe_intermediate_size": 1, "shared_expert_intermediate_size": 1}  # of --width
HEAD = (
    "head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_d_head", "mamba_head_dim", "state_size",
    "ssm_state_size", "mamba_headdim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank",
    "indexer_head_dim",
)  # fmt: skip
HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
OF_MAMBA = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")  # which have twice the width together
FIXED = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "mamba_n_groups": 2, "n_groups": 2,
    "mamba_ngroups": 2, "n_group": 1, "topk_group": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHORT = "causal_conv1d_update"  # which some models have without a recurrence
MIXED = ["linear_attention", "full_attention"]
FUNCTION_HEADS, FUNCTION_HEAD = 16, 128  # of the functions by themselves
WHATS = ("forward", "training step", "generated token")
SHADES = BLUE, VERMILLION, SKY


def model_types() -> list[str]:
    """Returns the types of transformers' language models that have a recurrence to replace."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    found = {module.split(".")[2] for module, kernel, _ in marked_functions() if kernel in REPLACED and kernel != SHORT}
    return sorted(name for name in found if name in known or f"{name}_text" in known)


def build(name: str, width: int, heads: int, layers: int, words: int) -> nn.Module:
    """Returns a model of this type with random weights: half of its layers attend, where it has such layers."""
    import transformers

    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind, head = f"{name}_text" if f"{name}_text" in known else name, width // heads
    half = layers // 2
    sizes: dict[str, Any] = FIXED | dict.fromkeys(HEAD, head) | dict.fromkeys(HEADS, heads)
    sizes |= dict.fromkeys(OF_MAMBA, 2 * heads) | {key: factor * width for key, factor in WIDTHS.items()}
    sizes |= {"vocab_size": words, "num_hidden_layers": layers, "mamba_d_ssm": 2 * width}
    default = transformers.AutoConfig.for_model(kind)
    sizes = {option: value for option, value in sizes.items() if hasattr(default, option)}
    indexer = {"indexer_n_heads": heads, "indexer_kv_heads": 1, "indexer_head_dim": head}
    indexer |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
    otherwise: dict[str, dict[str, Any]] = {  # where layers are named in another way
        "bamba": {"attn_layer_indices": [*range(1, layers, 2)]},
        "falcon_h1": {},
        "falcon_mamba": {"state_size": 16},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16},
        "lara_mini": {"layer_types": [*MIXED[:1], "sliding_attention"] * half},
        "mamba": {"state_size": 16},
        "mamba2": {"num_heads": 2 * heads, "head_dim": head},
        "qwen4_exp": {"layer_types": MIXED * half, **indexer},
        "zamba": {"layer_types": ["hybrid"] * layers, "head_dim": 2 * head, "mamba_d_state": 16},
        "zamba2": {"layer_types": [*MIXED[:1], "hybrid"] * half, "hybrid_layer_ids": [*range(1, layers, 2)]},
    }
    sizes |= otherwise.get(name, {"layer_types": MIXED * half})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options of transformers."""
    parser.add_argument("--models", nargs="+", metavar="TYPE", help="types of models; all that accelerate() knows without it")
    sizes = {
        "layers": (4, "half of which attend, where a model has such layers"), "width": (256, "of the model"),
        "heads": (4, "of each layer"), "vocabulary": (1000, "words"), "batch": (1, "sequences"), "tokens": (512, "of each"),
        "steps": (16, "tokens that are generated"),
    }  # fmt: skip
    for name, (default, said) in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=said)


def measure(args: Namespace) -> dict:
    """Times forward, training step and generation of each model in both ways, which take turns."""
    names = args.models or model_types()
    if unknown := {*names}.difference(model_types()):
        raise Mistake(
            f"--models has {min(unknown)}, which is no model that accelerate() knows; it knows {', '.join(model_types())}"
        )
    rows: list[dict] = []
    logging.getLogger("fw_fairseq.acceleration").setLevel(logging.WARNING)
    for name in names:
        progress(name)
        model = build(name, args.width, args.heads, args.layers, args.vocabulary).to(args.device)
        tokens = torch.randint(3, args.vocabulary, (args.batch, args.tokens), device=args.device)
        calls: list[Callable[..., None]] = [_forward, _train, partial(_generate, args.steps)]
        for what, call in zip(WHATS, calls):
            ways = {own: partial(_timed, own, partial(call, model, tokens), args.device) for own in (False, True)}
            found = take_turns(ways, args.rounds, f"{name}, {what}")
            scale = args.steps if what == WHATS[2] else 1
            seconds = {own: [s / scale for s in times] for own, times in found.items()}
            ratio = times_faster(seconds[False], seconds[True])
            rows.append(
                {"name": name, "what": what, "reference": spread(seconds[False]), **spread(seconds[True]), "times_faster": ratio}
            )
    return {"machine": machine(args), "settings": settings(args), "functions": _functions(args), "models": rows}


def _functions(args: Namespace) -> list[dict]:
    """Times each function by itself, in two ways that take turns, at the sizes of a large layer."""
    rows = []
    for kernel in REPLACED:
        module, name = next((module, name) for module, found, name in marked_functions() if found == kernel)
        reference = getattr(importlib.import_module(module), name)
        operands, given, whole = _operands(kernel, args.batch, args.tokens)
        operands = [x.to(args.device).requires_grad_(whole) for x in operands]
        ways = {False: reference, True: replacement(kernel, reference)}
        for what, step in (("forward" if whole else "one token", _call), ("forward and backward", _call_and_back))[: 1 + whole]:
            calls = {own: partial(timed, partial(step, way, operands, given), args.device) for own, way in ways.items()}
            found = take_turns(calls, args.rounds, f"{kernel}, {what}")
            row = {"name": kernel, "what": what, **spread(found[True]), "times_faster": times_faster(found[False], found[True])}
            rows.append(row | {"reference": spread(found[False])})
    return rows


def _operands(kernel: str, batch: int, tokens: int) -> tuple[list[torch.Tensor], dict[str, Any], bool]:
    """What a function is called with, and whether that is a whole text or one token."""
    shape = batch, tokens, FUNCTION_HEADS, FUNCTION_HEAD
    heads, channels = shape[2:], FUNCTION_HEADS * FUNCTION_HEAD
    if kernel == SHORT:
        return [torch.randn(batch, channels, width) for width in (1, 4)] + [torch.randn(channels, 4)], {"activation": "silu"}, False
    if kernel == "selective_state_update":  # of Mamba 2
        state, A = torch.zeros(batch, *heads, heads[1]), -torch.rand(heads[0], 1, 1).expand(*heads, heads[1])
        dt = torch.rand(batch, heads[0], 1).expand(batch, *heads)
        return [state, torch.randn(batch, *heads), dt, A, *torch.randn(2, batch, 1, heads[1])], {}, False
    if kernel == "selective_scan_fn":  # whose reference takes long
        channels = channels // 4
        x, dt = torch.randn(batch, channels, tokens), torch.rand(batch, channels, tokens)
        return [x, dt, -torch.rand(channels, 16), *torch.randn(2, batch, 16, tokens)], {}, True
    x, dt = torch.randn(shape), torch.rand(shape[:3])
    if kernel.startswith("mamba"):
        given = {"chunk_size": 256, "return_final_states": True}
        return [x, dt, -torch.rand(heads[0]), torch.randn(shape), torch.randn(shape)], given, True
    g = -torch.rand(shape if kernel.endswith("kda") else shape[:3])
    operands, options = [x, *torch.randn(2, *shape), g, dt], {"output_final_state": True}
    if not kernel.startswith("fused"):
        return operands, {"initial_state": None} | options, True
    return [x[:, :1] for x in operands], {"initial_state": torch.zeros(batch, heads[0], heads[1], heads[1])} | options, False


@torch.no_grad()
def _call(function: Callable, operands: list, given: dict) -> None:
    function(*operands, **given)


def _call_and_back(function: Callable, operands: list, given: dict) -> None:
    function(*operands, **given)[0].sum().backward()


def _timed(own: bool, call: partial, device: str) -> float:
    accelerate(own)
    try:
        return timed(call, device)
    finally:
        accelerate(False)


@torch.no_grad()
def _forward(model: Any, tokens: torch.Tensor) -> None:
    model.eval()(tokens, use_cache=False)


def _train(model: Any, tokens: torch.Tensor) -> None:
    model.train().zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()


@torch.no_grad()
def _generate(steps: int, model: Any, tokens: torch.Tensor) -> None:
    model.eval().generate(tokens[:, :2], max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0)


def table(report: dict) -> str:
    """The report as Markdown."""
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['device']}, {m['threads']} threads, torch {m['torch']}; {s['layers']} layers of width {s['width']}, {s['heads']} heads"
        f", {s['batch']} x {s['tokens']} tokens; medians of {s['rounds']} rounds, in ms, and times as fast as the reference",
        "",
        "| model | forward | | training step | | generated token | |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += _rows(report["models"])
    lines += ["", f"One function by itself, {FUNCTION_HEADS} heads of width {FUNCTION_HEAD}:", ""]
    lines += ["| function | forward | | forward and backward | |", "|---|---:|---:|---:|---:|"]
    return "\n".join(lines + _rows(report["functions"]))


def _rows(rows: list[dict]) -> list[str]:
    """A line for each name, with milliseconds and ratios."""
    found: dict[str, str] = {}
    for row in rows:
        cell = f" | {1e3 * row['seconds']:.3g} | {row['times_faster']:.2f} x"
        found[row["name"]] = found.get(row["name"], f"| {row['name']}") + cell
    return [f"{line} |" for line in found.values()]


def draw(report: dict) -> Any:
    """How many times as fast each model is in each way of use."""
    names = list(dict.fromkeys(row["name"] for row in report["models"]))
    figure, [axis] = canvas(0.7 + 0.36 * len(names))
    for number, what in enumerate(WHATS):
        ratios = {row["name"]: row["times_faster"] for row in report["models"] if row["what"] == what}
        places = [y + 0.27 * (number - 1) for y in range(len(names))]
        axis.barh(places, [ratios[name] for name in names], 0.25, label=what, color=SHADES[number])
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)  # from above
    axis.set_xscale("log")
    axis.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axis.minorticks_off()
    axis.axvline(1, color="0.2", linewidth=1)
    axis.set_xlabel("times as fast")
    legend(figure, axis)
    return figure
