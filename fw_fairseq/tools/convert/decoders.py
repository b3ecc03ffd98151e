"""fw-convert of a folder of transformers: everything stays, and some layers get heads of their own (``fw_fairseq.pretrained``)."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary

from ...config import FastWeightConfig
from ...files import reading
from ...models.pretrained_lm import PretrainedLanguageModel, PretrainedLanguageModelConfig
from .pretrained import Source, language_modeling_cfg, origin_of

ARCHITECTURE, HEADS = "pretrained_lm", ".heads."


def is_decoder(source: Path) -> bool:
    """Whether a folder has a model of transformers other than GPT-2, which becomes a fast_weight_lm."""
    path = source / "config.json"
    if not path.exists():
        return source.is_dir() and any(source.glob("*.gguf"))
    with reading(path, "a configuration"):
        return json.loads(path.read_text()).get("model_type") != "gpt2"


def convert_decoder(folder: Path, config: FastWeightConfig, memory_window: int, drop_rotary: bool) -> tuple[Source, list[tuple]]:
    """The model with its new parts, and for each of its tensors the name, what became of it, its size and how."""
    from ...pretrained.folders import load_config, symbols_of

    symbols = symbols_of(load_config(folder))
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    made = asdict(config) if config.mixer == "fast_weight" else {name: getattr(config, name) for name in ("mixer", "local_window")}
    options: dict[str, Any] = {**asdict(PretrainedLanguageModelConfig()), **made, "pretrained": str(folder)}
    options |= {"memory_window": memory_window, "drop_rotary": drop_rotary, "tokens_per_sample": 1024}
    task: Any = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = PretrainedLanguageModel.build_model(Namespace(**options), task)
    model.refuse_without_effect(Namespace(**options))
    options |= model.found_options | {"pretrained": ""}
    own = {f.name for f in fields(PretrainedLanguageModelConfig) if not f.name.startswith("_")}
    lines: list[tuple] = []
    for name, x in model.named_parameters():
        new = HEADS in name
        lines.append((name.removeprefix("decoder.model."), "new" if new else "copied", x.numel(), start(name, x) if new else ""))
    kept = {name: value for name, value in options.items() if name in own}
    length = min(model.max_positions() or 1024, 1024)
    return Source(kept, model.state_dict(), language_modeling_cfg(length, length), symbols, origin_of(symbols)), lines


def start(name: str, x: Any) -> str:
    """How a new parameter starts, as the report says it."""
    if name.endswith("feature_map.weight"):
        return "starts as the identity"
    if x.dim() == 1 and name.endswith("in_proj.bias"):
        return "gates start at their rule's biases"
    return "zero" if not x.any() else ""
