"""Reading files

A checkpoint that is damaged or of another kind is refused in one sentence that names the file.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from omegaconf import DictConfig, open_dict

from ...errors import Mistake
from ...files import building, offer, refuse_damaged, why
from ...mixers import FastWeight
from ..literals import as_dict, read_literal
from ..replacing import replaces
from .numpy_numbers import allowed, without_stand_ins

ORIGIN = "origin"  # an entry of a checkpoint's extra_state
model_options: dict[str, dict] = {}  # of the checkpoint that was read last, by its path
origins: dict[str, dict] = {}  # what that checkpoint says of its task and dictionaries, by its path


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def load_only_data(original: Callable, path: Any, arg_overrides: dict | None = None, **kwargs) -> dict:
    """`torch.load` refuses the options in fairseq's checkpoints since torch 2.6, and does not compare check sums. Now a checkpoint
    may hold tensors, plain data, options and NumPy's numbers. Anything else, and a file that is cut short or altered, is refused
    and not run; the message names the newest whole checkpoint of the folder. fairseq ignores names in `--model-overrides` that the
    checkpoint lacks; now an option of its model is set, and any other name is refused. Options that are newer than the checkpoint
    get the values that it was trained with."""
    if os.path.isdir(path):
        raise Mistake(f"{path} is a folder, not a checkpoint; {offer(Path(path))}")
    try:
        refuse_damaged(path)
        with allowed():
            state = without_stand_ins(original(path, **kwargs))
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # the unpickler does what the file says
        raise Mistake(f"{path} cannot be read as a fairseq checkpoint ({why(error)}); {offer(Path(path))}") from error
    model = None if state.get("cfg") is None else state["cfg"].get("model")
    add_options(model, newer_options(as_dict(model)))
    override(state, arg_overrides or {}, path)
    model_options.clear()
    origins.clear()
    if state.get("cfg") is not None:
        model_options[str(path)] = as_dict(model)
    if isinstance(origin := (state.get("extra_state") or {}).get(ORIGIN), dict):
        origins[str(path)] = origin
    return state


class ModelOverrides(dict):
    """Holds what `--model-overrides` gives, and nothing else."""


def override(state: dict, overrides: dict, path: object) -> None:
    """Gives a checkpoint's options other values."""
    old = state.get("args")
    cfg = state.get("cfg") if old is None else {"model": old}
    if cfg is None or not overrides:
        return
    groups, model = as_dict(cfg), cfg.get("model")
    there = {*groups}.union(*map(as_dict, groups.values()))
    newer = options_of(as_dict(model)) - there
    named: Any = (
        overrides if isinstance(overrides, ModelOverrides) else overrides.get("model_overrides")
    )  # fairseq-validate joins all
    named = read_literal(named) if isinstance(named, str) else named or {}
    if unknown := named.keys() - there - newer:
        name = min(unknown)
        like = get_close_matches(name, there | newer, 1)
        raise Mistake(f"--model-overrides names {name!r}, which is no option of {path}" + (f"; is it {like[0]}?" if like else ""))
    with building(f"the options of {path} cannot be overridden by {dict(overrides)}"):
        if old is not None:
            vars(old).update(overrides)
            return
        overwrite_args_by_name(cfg, overrides)
        if isinstance(model, DictConfig):
            add_options(model, {name: overrides[name] for name in newer.intersection(overrides)})


def newer_options(options: dict) -> dict:
    """Returns what a model's stored options that are older than others lack, to mean what they did."""
    older = "plain_adaptive_softmax" in options and "positions_from_end" not in options
    return ({"positions_from_end": False} if older else {}) | FastWeight.of_before(options)


def add_options(model: object, options: dict) -> None:
    """Adds options to those of a model, of either of fairseq's kinds."""
    if isinstance(model, DictConfig):
        with open_dict(model):
            model.update(options)
    elif isinstance(model, Namespace):
        vars(model).update(options)


def options_of(model: dict) -> set[str]:
    """Returns the names of all options that a model with these options has today."""
    name = model.get("_name") or model.get("arch")
    kind = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name)
    parser = ArgumentParser(add_help=False, conflict_handler="resolve")
    if kind is not None:
        kind.add_args(parser)
    return {action.dest for action in parser._actions}


@replaces(checkpoint_utils, "load_ema_from_checkpoint")
def load_only_data_for_ema(original: Callable, path: Any) -> dict:
    """`--ema-seed-model` is read by a second reader. Now it is read as any other checkpoint."""
    return load_only_data(original, path)


@replaces(TransformerEncoderLayerBase, "_load_from_state_dict")
def leave_the_fused_layer_unused(original: Callable, layer: TransformerEncoderLayerBase, *args, **kwargs) -> None:
    """fairseq 0.12.2 computes the encoder of a loaded `transformer` by a fused function whose arguments today's torch refuses. Now
    it computes the layer as in training."""
    original(layer, *args, **kwargs)
    layer.load_to_BT = False
