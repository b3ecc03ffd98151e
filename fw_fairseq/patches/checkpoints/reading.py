"""Reading files

Checkpoints, dictionaries and binarised texts that are damaged or of another kind are refused in one sentence that names the file.
"""

from __future__ import annotations

import os
import struct
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from pathlib import Path

import numpy
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, indexed_dataset
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.modules.sinusoidal_positional_embedding import SinusoidalPositionalEmbedding
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from omegaconf import DictConfig, open_dict

from ...errors import Mistake
from ...files import building, damaged_part, offer, why
from ...mixers import FastWeight
from ..literals import plain, read_literal
from ..replacing import replaces
from .numpy_numbers import allowed, without_stand_ins

ORIGIN = "origin"  # an entry of a checkpoint's extra_state
model_options: dict[str, dict] = {}  # of the checkpoint that was read last, by its path
origins: dict[str, dict] = {}  # what that checkpoint says of its task and dictionaries, by its path


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def load_only_data(original, path, arg_overrides=None, **kwargs) -> dict:
    """fairseq's checkpoints hold options that `torch.load` refuses since torch 2.6, and torch does not compare check sums. Now a
    checkpoint may hold tensors, plain data, options and NumPy's numbers. One that holds anything else, or that is cut short or
    altered, is refused, nothing in it is run, and the newest whole checkpoint of the folder is named. fairseq ignores a name in
    `--model-overrides` that the checkpoint's options lack. Now an option of its model that is newer than the checkpoint is set, and
    any other name is refused. A newer option whose default computes something else is added as the checkpoint was trained."""
    if os.path.isdir(path):
        raise Mistake(f"{path} is a folder, not a checkpoint; {offer(Path(path))}")
    try:
        if damaged := damaged_part(path):
            raise Mistake(f"{damaged} in it is damaged")
        with allowed():
            state = without_stand_ins(original(path, **kwargs))
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # the unpickler does what the file says
        raise Mistake(f"{path} cannot be read as a fairseq checkpoint ({why(error)}); {offer(Path(path))}") from error
    if state.get("cfg") is not None:
        model = state["cfg"].get("model")
        add_options(model, newer_options(plain(model)))
    override(state, arg_overrides or {}, path)
    model_options.clear()
    origins.clear()
    if state.get("cfg") is not None:
        model_options[str(path)] = plain(state["cfg"].get("model"))
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
    groups, model = plain(cfg), cfg.get("model")
    there = {*groups}.union(*map(plain, groups.values()))
    newer = options_of(plain(model)) - there
    named = overrides if isinstance(overrides, ModelOverrides) else overrides.get("model_overrides")  # fairseq-validate joins all
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
    """Returns what a model's options that are older than others lack to mean what they did."""
    positions = {"positions_from_end": False} if "plain_adaptive_softmax" in options else {}
    return {name: value for name, value in positions.items() if name not in options} | FastWeight.of_before(options)


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
def load_only_data_for_ema(original, path) -> dict:
    """fairseq reads the file of `--ema-seed-model` with a second reader. Now it is read as any other checkpoint."""
    return load_only_data(original, path)


@replaces(TransformerEncoderLayerBase, "_load_from_state_dict")
def leave_the_fused_layer_unused(original, layer, *args, **kwargs) -> None:
    """fairseq 0.12.2 computes the encoder of a loaded `transformer` by a fused function whose arguments today's torch refuses.
    Now it computes the layer as in training."""
    original(layer, *args, **kwargs)
    layer.load_to_BT = False


@replaces(SinusoidalPositionalEmbedding, "_load_from_state_dict")
@replaces(SinusoidalPositionalEmbedding, "__init__")
def set_what_checkpoints_hold(original, embedding, *args, **kwargs) -> None:
    """fairseq 0.12.2 saves a number that it never sets, and does not keep when it loads, so that checkpoints of equal runs differ.
    Now the number is 0."""
    original(embedding, *args, **kwargs)
    if hasattr(embedding, "_float_tensor"):
        embedding._float_tensor.zero_()


@replaces(Dictionary, "add_from_file")
def name_a_file_that_is_no_dictionary(original, dictionary, file) -> None:
    """fairseq shows a traceback for a file that is not a dictionary. Now one sentence names the file and the format of its
    lines."""
    if not isinstance(file, str):  # open text: fairseq calls itself
        return original(dictionary, file)
    try:
        return original(dictionary, file)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        raise Mistake(f"{file} is not a dictionary, a line 'WORD COUNT' for each word ({why(error)})") from error


@replaces(indexed_dataset, "make_dataset")
def check_binarised_text(original, path, impl, fix_lua_indexing=False, dictionary=None):
    """fairseq opens a binarised text whose index does not fit its tokens, or whose tokens are not in the dictionary, and fails
    later or trains on nonsense. Now such a text is refused when it is opened."""
    if impl == "mmap" and is_empty(path):
        raise Mistake(f"{path}.bin has no text: what fairseq-preprocess read for {os.path.basename(path)} was empty")
    try:
        dataset = original(path, impl, fix_lua_indexing, dictionary)
        if impl == "mmap" and dataset is not None:
            check_text(dataset._index, path, dictionary)
    except (AssertionError, AttributeError, KeyError, OverflowError, ValueError, struct.error) as error:
        raise Mistake(f"{path}.bin and {path}.idx are not a binarised text ({why(error)}); run fairseq-preprocess again") from error
    return dataset


def is_empty(path: str) -> bool:
    """Whether there are no tokens and an index of no lines. The number of lines follows the format's name, its version and the type
    of the tokens."""
    files = f"{path}.bin", f"{path}.idx"
    if not all(map(os.path.exists, files)) or os.path.getsize(files[0]):
        return False
    return Path(files[1]).read_bytes()[18:] == bytes(8)


def check_text(index, path: str, dictionary) -> None:
    """Refuses an index that contradicts itself, the size of the tokens' file or the dictionary."""
    dtype, sizes = numpy.dtype(index.dtype), index.sizes.astype(numpy.int64)
    ends, content = sizes.cumsum() * dtype.itemsize, os.path.getsize(f"{path}.bin")
    if (sizes < 0).any() or not numpy.array_equal(index._pointers, ends - sizes * dtype.itemsize):
        raise Mistake("the index contradicts itself")
    if content != (ends[-1] if len(ends) else 0):
        raise Mistake(f"there are {content} bytes of tokens, and the index names {ends[-1] if len(ends) else 0}")
    if dictionary is None:
        return
    tokens = numpy.memmap(f"{path}.bin", dtype=dtype, mode="r")
    least, most = tokens.min(), tokens.max()
    if least < 0 or most >= len(dictionary) or dtype.kind == "f":
        raise Mistake(f"it has tokens from {least} to {most}, and the dictionary has {len(dictionary)} words")
