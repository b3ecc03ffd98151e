"""Checkpoints, dictionaries and binarised texts that are not what they should be: each is refused in one sentence that names it.
``original`` is fairseq's reader."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy

from ..files import damaged_part, offer, why
from .numpy_in_checkpoints import allowed, without_stand_ins


def load_checkpoint_to_cpu(original, path, *args, **kwargs):
    """A file that is cut short, altered or something else is refused, and another one of its folder offered."""
    try:
        if damaged := damaged_part(path):  # torch does not look at check sums
            raise RuntimeError(f"{damaged} in it is damaged")
        with allowed():
            return without_stand_ins(original(path, *args, **kwargs))
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # the unpickler does what the file says
        raise ValueError(f"{path} cannot be read as a fairseq checkpoint ({why(error)}); {offer(Path(path))}") from error


def load_ema_from_checkpoint(original, path):
    """fairseq reads the file of --ema-seed-model by itself."""
    return load_checkpoint_to_cpu(original, path)


def add_from_file(original, dictionary, file):
    """A dictionary by its path, or as open text, where fairseq calls itself."""
    if not isinstance(file, str):
        return original(dictionary, file)
    try:
        return original(dictionary, file)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        raise ValueError(f"{file} is not a dictionary, a line 'WORD COUNT' for each word ({why(error)})") from error


def make_dataset(original, path, impl, fix_lua_indexing=False, dictionary=None):
    """Binarised text whose index does not fit its tokens, or whose tokens are not the dictionary's, is refused before its use."""
    if impl == "mmap" and is_empty(path):
        raise ValueError(f"{path}.bin has no text: what fairseq-preprocess read for {os.path.basename(path)} was empty")
    try:
        dataset = original(path, impl, fix_lua_indexing, dictionary)
        if impl == "mmap" and dataset is not None:
            check_text(dataset._index, path, dictionary)
    except (AssertionError, AttributeError, KeyError, OverflowError, ValueError, struct.error) as error:
        raise ValueError(
            f"{path}.bin and {path}.idx are not a binarised text ({why(error)}); run fairseq-preprocess again"
        ) from error
    return dataset


def is_empty(path: str) -> bool:
    """No tokens, and an index of no lines: the number of them comes after its name, its version and the type of its tokens."""
    files = f"{path}.bin", f"{path}.idx"
    if not all(map(os.path.exists, files)) or os.path.getsize(files[0]):
        return False
    return Path(files[1]).read_bytes()[:26][18:] == bytes(8)


def check_text(index, path: str, dictionary) -> None:
    dtype, sizes = numpy.dtype(index.dtype), index.sizes.astype(numpy.int64)
    ends, content = sizes.cumsum() * dtype.itemsize, os.path.getsize(f"{path}.bin")
    if (sizes < 0).any() or not numpy.array_equal(index._pointers, ends - sizes * dtype.itemsize):
        raise ValueError("the index contradicts itself")
    if content != (ends[-1] if len(ends) else 0):
        raise ValueError(f"there are {content} bytes of tokens, and the index is of {ends[-1] if len(ends) else 0}")
    if dictionary is None or not content:
        return
    tokens = numpy.memmap(f"{path}.bin", dtype=dtype, mode="r")
    least, most = tokens.min(), tokens.max()
    if least < 0 or most >= len(dictionary) or dtype.kind == "f":
        raise ValueError(f"it has tokens from {least} to {most}, and the dictionary {len(dictionary)} words")
