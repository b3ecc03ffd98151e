"""Checkpoints with small changes, read in a process of their own, so that a signal that ends it is seen."""

from __future__ import annotations

import io
import itertools
import os
import pickletools
import random
import resource
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from support.commands import preloaded

FACTOR = int(os.environ.get("FW_ALTERED", "1"))  # 20 makes 6,000 changes
MEMORY = 24 * 2**30
DATA = (str, bytes, bytearray, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, numpy.number, numpy.bool_)


def with_pickle(content, change: Callable[[bytes], bytes]) -> bytes:
    """A checkpoint whose pickled part is another one; check sums fit."""
    out = io.BytesIO()
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name.endswith("/data.pkl") else old.read(name))
    return out.getvalue()


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def reordered(pickled: bytes, draw: random.Random) -> bytes:
    """Instructions left out, doubled, or in the place of others."""
    ends = [position for _, _, position in pickletools.genops(pickled)] + [len(pickled)]
    steps = [pickled[one:other] for one, other in zip(ends, ends[1:])]
    for _ in range(draw.choice((1, 1, 2, 4))):
        here, there = draw.randrange(len(steps)), draw.randrange(len(steps))
        kind = draw.randrange(4)
        if kind == 0:
            del steps[here]
        elif kind == 1:
            steps.insert(here, steps[there])
        elif kind == 2:
            steps[here] = steps[there]
        else:
            steps[here], steps[there] = steps[there], steps[here]
    return b"".join(steps)


def exchanged(pickled: bytes, draw: random.Random) -> bytes:
    """An instruction's argument in the place of one of the same kind: another size, name, key or number."""
    kinds: dict[str, list[slice]] = {}
    steps = list(pickletools.genops(pickled))
    for (kind, argument, start), (_, _, stop) in zip(steps, steps[1:]):
        if argument is not None and "PUT" not in kind.name:
            kinds.setdefault(kind.name, []).append(slice(start, stop))
    places = kinds[draw.choice([name for name, found in kinds.items() if len(found) > 1])]
    here, there = draw.sample(places, 2)
    return pickled[: here.start] + pickled[there] + pickled[here.stop :]


def end_of(read: Callable[[Path], object], path: Path) -> str:
    """How the reading of a file ends: ``data``, a sentence, or the fault of the program."""
    try:
        found = foreign(read(path), set())
    except ValueError as error:
        return str(error).replace("\n", " ")
    except Exception as error:
        return f"fault: {error!r}"
    return "data" if found is None else f"fault: {found}"


def foreign(content: object, seen: set[int]) -> str | None:
    """The first type within ``content`` that is not data; every number is read."""
    if id(content) in seen:
        return None
    if isinstance(content, DictConfig | ListConfig):
        content = OmegaConf.to_container(content, resolve=False)
    if isinstance(content, dict | list | tuple | set | frozenset | Namespace):
        seen.add(id(content))
        content = vars(content) if isinstance(content, Namespace) else content
        parts = itertools.chain(*content.items()) if isinstance(content, dict) else content
        return next(filter(None, (foreign(part, seen) for part in parts)), None)
    if isinstance(content, torch.Tensor):
        content.clone()
        return None
    if isinstance(content, numpy.ndarray):
        content.tobytes()
        return "numpy's objects" if content.dtype.hasobject else None
    return None if isinstance(content, (*DATA, numpy.dtype)) else repr(type(content))


def read_changes(source: bytes, change: Callable, count: int, read: Callable, path: Path, said: Path) -> None:
    """Writes a line about each change, the number of it before it is read."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with said.open("w", buffering=1) as out:
        for number in range(count):
            path.write_bytes(change(source, random.Random(number)))
            out.write(f"{number} ")
            out.write(end_of(read, path) + "\n")


def ends_of_changes(source: bytes, change: Callable, count: int, read: Callable, folder: Path) -> list[str]:
    """How the reading of each of ``count`` changes of a file ends; no signal may end it. ``change``: of the file and a draw."""
    path, said = folder / "changed.pt", folder / "said"
    process = preloaded().Process(target=read_changes, args=(source, change, count, read, path, said))
    process.start()
    process.join(60 + count)
    lines = said.read_text().splitlines()
    assert process.exitcode == 0, (process.exitcode, lines[-1])
    return [line.partition(" ")[2] for line in lines]
