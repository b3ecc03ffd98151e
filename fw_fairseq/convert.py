"""fw-convert: a pretrained softmax Transformer language model becomes a fast-weight one, to be fine-tuned.

Everything but attention is copied. In each layer (Mao 2022, sec. 3):

- queries and keys keep their projections, the 1/sqrt(head width) of softmax attention in those of the queries; with --feature-dim
  below the head width they are projected to it so that q . k changes least for all inputs (the linear map of eq. 8, subsumed);
- values keep theirs, scaled so that the memory starts in range: by 1 - sigmoid(b_z) for decay, 1/512 for sum without a feature map;
- gates are new, with the initial biases of the rule.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import OmegaConf
from torch import Tensor

from . import registration  # noqa: F401
from .config import FEATURE_NORMS, SOFTMAX, FastWeightConfig
from .convert_source import Source, read_source
from .feature_maps import FEATURE_MAPS
from .mixers.fast_weight import FastWeight
from .models.fast_weight_lm import FastWeightLanguageModel, FastWeightLanguageModelConfig
from .rules import RULES

SUM_SCALE = 1 / 512
ATTENTION = re.compile(r"decoder\.layers\.(\d+)\.self_attn\.")
BESIDE = re.compile(r"(version|_float_tensor)$")  # what fairseq keeps in a state dict beside parameters


class Row(NamedTuple):
    """What became of a tensor; layers of one kind are one row of the table."""

    name: str
    action: str
    numbers: int


@dataclass(frozen=True)
class Options:
    rule: str
    feature_dim: int = 0
    feature_map: str = "identity"
    feature_norm: str = ""  # "" what suits the rule and the map
    attention_norm: bool = False

    def config(self) -> FastWeightConfig:
        if self.rule == SOFTMAX:
            return FastWeightConfig(mixer=SOFTMAX)
        norm = self.feature_norm or self.usual_norm()
        return FastWeightConfig(
            update_rule=self.rule, feature_map=self.feature_map, feature_norm=norm, feature_dim=self.feature_dim,
            attention_norm=self.attention_norm,
        )  # fmt: skip

    def usual_norm(self) -> str:
        """Keys of unit length, or that sum to 1, where an erase would diverge with longer ones."""
        erases = RULES[self.rule].coefficients is not None and "beta" in RULES[self.rule].gates
        return "none" if not erases or self.attention_norm else "sum" if FEATURE_MAPS[self.feature_map].non_negative else "l2"


def convert(source: str | Path, output: str | Path, options: Options, force: bool = False, seed: int = 1) -> list[Row]:
    """Writes a fast_weight_lm checkpoint for --finetune-from-model or --restore-file; for GPT-2 a dict.txt beside it."""
    output = Path(output)
    taken = [path for path in (output, output.with_name("dict.txt")) if path.exists()]
    found = read_source(Path(source))
    for path in taken:
        if not force and (path == output or found.dictionary):
            raise ValueError(f"OUTPUT: {path} exists; give another name, or --force to replace it")
    torch.manual_seed(seed)
    config = options.config()
    rows = convert_attention(found, options, config)
    given = {f.name: found.options[f.name] for f in fields(TransformerLanguageModelConfig) if f.name in found.options}
    chosen = {f.name: getattr(config, f.name) for f in fields(FastWeightConfig)}
    model_options = FastWeightLanguageModelConfig(**given | chosen)
    check_parameters(found, model_options)
    write(output, lambda part: torch.save(checkpoint(found, model_options), part))
    if found.dictionary:
        write(output.with_name("dict.txt"), lambda part: part.write_text(found.dictionary))
    return rows


def convert_attention(source: Source, options: Options, config: FastWeightConfig) -> list[Row]:
    """In place, layer by layer, so that only one layer is there twice."""
    rows = [
        Row(name, "copied", x.numel())
        for name, x in source.parameters.items()
        if options.rule == SOFTMAX or not ATTENTION.match(name)
    ]
    if options.rule == SOFTMAX:
        return rows
    width, heads = source.options["decoder_embed_dim"], source.options["decoder_attention_heads"]
    if options.feature_dim > width // heads:
        raise ValueError(f"--feature-dim is {options.feature_dim}; it must be at most the width of a head, {width // heads}")
    for layer in range(source.options["decoder_layers"]):
        prefix = f"decoder.layers.{layer}.self_attn."
        old = {
            name.removeprefix(prefix): source.parameters.pop(name) for name in list(source.parameters) if name.startswith(prefix)
        }
        mixer, layer_rows = new_mixer(old, prefix, width, heads, options, config)
        source.parameters.update({f"{prefix}mixer.{name}": x for name, x in mixer.state_dict().items()})
        rows += [row._replace(name=f"{prefix}{row.name}") for row in layer_rows]
    return rows


@torch.no_grad()
def new_mixer(
    old: dict[str, Tensor], prefix: str, width: int, heads: int, options: Options, config
) -> tuple[FastWeight, list[Row]]:
    mixer = FastWeight(width, heads, config)
    parts = dict(zip(mixer.sizes, zip(*(x.split(list(mixer.sizes.values())) for x in (mixer.in_proj.weight, mixer.in_proj.bias)))))
    given = {}
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        weight, bias = old.pop(f"{part}.weight", None), old.pop(f"{part}.bias", None)
        if weight is None or weight.shape != (width, width):
            shape = "missing" if weight is None else f"of shape {tuple(weight.shape)}"
            raise ValueError(f"SOURCE: {prefix}{part}.weight is {shape}; it must be {(width, width)}")
        bias = torch.zeros(width) if bias is None else bias
        given[part] = torch.cat([weight.float(), bias.float().unsqueeze(1)], dim=1)  # (width, width + 1)
    if old:
        raise ValueError(f"SOURCE: {prefix}{next(iter(old))} is not part of softmax attention as fairseq's transformer_lm has it")

    q, k = given["q_proj"] * (width // heads) ** -0.5, given["k_proj"]
    head_dim = mixer.feature_map.head_dim
    narrower = head_dim < width // heads
    if narrower:
        q, k = project_heads(q, k, heads, head_dim)
    scale = value_scale(options, config, parts)
    new = {"q": q, "k": k, "v": given["v_proj"] * scale}
    for name, x in new.items():
        parts[name][0].copy_(x[:, :-1])
        parts[name][1].copy_(x[:, -1])
    mixer.out_proj.weight.copy_(given["out_proj"][:, :-1])
    mixer.out_proj.bias.copy_(given["out_proj"][:, -1])
    projected = f", projected from {width // heads} to {head_dim} a head" if narrower else ""
    rows = [
        Row("q_proj", f"changed: times {(width // heads) ** -0.5:.4g}{projected}", q.numel()),
        Row("k_proj", f"changed: {projected[2:]}" if narrower else "copied", k.numel()),
        Row("v_proj", "copied" if isinstance(scale, float) and scale == 1 else f"changed: {scale_name(options)}", new["v"].numel()),
        Row("out_proj", "copied", given["out_proj"].numel()),
    ]
    rows += [Row(f"gate {name}", "new", sum(x.numel() for x in parts[name])) for name in mixer.rule.gates]
    return mixer, rows + [Row(f"feature map {name}", "new", x.numel()) for name, x in mixer.feature_map.state_dict().items()]


def value_scale(options: Options, config: FastWeightConfig, parts) -> Tensor | float:
    """Of each row of the value projection."""
    if "z" in parts and RULES[options.rule].gates["z"].axis == "V":
        return 1 - torch.sigmoid(parts["z"][1]).unsqueeze(1)
    unmapped = options.rule == "sum" and options.feature_map == "identity" and config.feature_norm == "none"
    return SUM_SCALE if unmapped else 1.0


def scale_name(options: Options) -> str:
    return f"times {SUM_SCALE:.4g}" if options.rule == "sum" else "times 1 - sigmoid(b_z)"


def project_heads(q: Tensor, k: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """(H D, E), biases as their last column -> (H M, E): in each head the best approximation of rank M to all products q . k."""
    narrow_q, narrow_k = [], []
    for head_q, head_k in zip(q.chunk(heads), k.chunk(heads)):
        basis_q, small_q = torch.linalg.qr(head_q.mT)
        basis_k, small_k = torch.linalg.qr(head_k.mT)
        left, strength, right = torch.linalg.svd(small_q @ small_k.mT)
        root = strength[:width].sqrt()
        narrow_q.append((basis_q @ left[:, :width] * root).mT)
        narrow_k.append((basis_k @ right[:width].mT * root).mT)
    return torch.cat(narrow_q), torch.cat(narrow_k)


class Words:
    """A dictionary as far as building a model looks at it."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def pad(self) -> int:
        return 1


def check_parameters(source: Source, options: FastWeightLanguageModelConfig) -> None:
    """The converted parameters are exactly those of the model, by name and shape."""
    task = SimpleNamespace(source_dictionary=Words(source.words), target_dictionary=Words(source.words))
    with torch.device("meta"):
        model = FastWeightLanguageModel.build_model(options, task)
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items() if not BESIDE.search(name)}
    for name, x in source.parameters.items():
        if not BESIDE.search(name) and wanted.pop(name, None) != tuple(x.shape):
            raise ValueError(f"SOURCE: {name} of shape {tuple(x.shape)} has no place in the model that its options describe")
    old = source.parameters.get("decoder.version", torch.ones(1)).item() <= 2  # then fairseq takes the last layer norm out
    for name in wanted:
        if old and name.startswith("decoder.layer_norm."):
            continue
        raise ValueError(f"SOURCE: {name} is missing")


def checkpoint(source: Source, options: FastWeightLanguageModelConfig) -> dict:
    """As fairseq-train writes them, before the first update."""
    cfg = source.cfg
    OmegaConf.set_struct(cfg, False)
    cfg.model = OmegaConf.create({f.name: getattr(options, f.name) for f in fields(options)} | {"_name": "fast_weight_lm"})
    cfg.model.arch = "fast_weight_lm"
    start = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg),
        "model": source.parameters,
        "optimizer_history": [{"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}],
        "extra_state": {"train_iterator": start, "val_loss": None},
        "task_state": {},
        "last_optimizer_state": None,
    }


def write(path: Path, save) -> None:
    """The file appears whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        save(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def table(rows: list[Row]) -> str:
    """Layers of one kind in one line."""
    kinds, numbers = Counter(), Counter()
    for row in rows:
        kind = (re.sub(r"\.\d+\.", ".*.", row.name), row.action)
        kinds[kind] += 1
        numbers[kind] += row.numbers
    lines = ["| parameters | | tensors | numbers |", "|---|---|---:|---:|"]
    return "\n".join(lines + [f"| {name} | {action} | {n} | {numbers[name, action]} |" for (name, action), n in kinds.items()])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fw-convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", metavar="SOURCE", help="a checkpoint of fairseq's transformer_lm, or a folder with a Hugging Face GPT-2"
    )
    parser.add_argument("output", metavar="OUTPUT", help="the checkpoint to write, for --finetune-from-model or --restore-file")
    parser.add_argument("--rule", required=True, choices=[*RULES, SOFTMAX], help="softmax: nothing changes but the model's name")
    parser.add_argument(
        "--feature-dim", type=int, default=0, metavar="M", help="width of queries and keys per head; 0: that of the source"
    )
    parser.add_argument("--feature-map", default="identity", choices=[*FEATURE_MAPS])
    parser.add_argument("--feature-norm", default="", choices=[*FEATURE_NORMS], help="default: what suits the rule and the map")
    parser.add_argument("--attention-norm", action="store_true")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT")
    parser.add_argument("--seed", type=int, default=1, help="of the new parameters")
    args = parser.parse_args(arguments)
    options = Options(args.rule, args.feature_dim, args.feature_map, args.feature_norm, args.attention_norm)
    try:
        print(table(convert(args.source, args.output, options, args.force, args.seed)))
    except (OSError, ValueError) as error:
        sys.exit(f"fw-convert: error: {error}")


if __name__ == "__main__":
    main()
