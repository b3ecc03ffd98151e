"""Reads and writes files for the commands. An error is one sentence with the file's name."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import struct
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .errors import Mistake

SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
               "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}  # fmt: skip
CRASH = "crash.pt"  # fairseq writes it when a run ends in an error


@contextlib.contextmanager
def reading(file: Path, what: str) -> Iterator[None]:
    """Within this block, an error names the file. ``what``: the kind of file that it should be."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (*UNREADABLE, AttributeError) as error:
        raise Mistake(f"{file} cannot be read as {what} ({why(error)}); download it again if it is damaged") from error


@contextlib.contextmanager
def building(said: str) -> Iterator[None]:
    """Within this block, what other libraries raise for options or parameters that make no model becomes a sentence that begins
    with ``said``."""
    try:
        yield
    except (Mistake, OSError):
        raise
    except Exception as error:
        raise Mistake(f"{said} ({textwrap.shorten(why(error), 200, placeholder=' ...')})") from error


def read_text(file: Path, what: str) -> str:
    """Returns the text of a file. ``what``: the kind of file that it should be."""
    try:
        return file.read_text(encoding="utf-8-sig")  # which other programs begin with a byte-order mark
    except UnicodeDecodeError:
        raise Mistake(f"{file} is not {what}, as it is no text in UTF-8") from None


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` with a temporary file beside ``path``, which then takes its place. A device or a pipe is written directly."""
    itself = path.exists() and not path.is_file()
    place = path if itself else path.resolve()  # a link stays one
    temporary = path if itself else place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        if not itself:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())  # or a loss of power could leave a part of it under its name
            os.replace(temporary, place)
    except (OSError, RuntimeError) as error:  # torch's
        raise Mistake(f"{path} cannot be written ({getattr(error, 'strerror', None) or why(error)})") from error
    finally:
        if not itself:
            with contextlib.suppress(OSError):
                temporary.unlink()


def tokenizer_size(folder: Path) -> int:
    """Returns the number of tokens of a GPT-2 tokenizer, with the tokens that were added to its vocabulary."""
    whole = folder / "tokenizer.json"
    tokens: set[str] = set()
    for file in [whole] if whole.exists() else filter(Path.exists, (folder / "vocab.json", folder / "added_tokens.json")):
        with reading(file, "a tokenizer"):
            content = json.loads(file.read_text(encoding="utf-8"))
            added = [token["content"] for token in content["added_tokens"]] if file == whole else []
            tokens |= {*added, *(content["model"]["vocab"] if file == whole else content)}
    return len(tokens)


def pickled(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a dictionary that torch has written."""
    refuse_damaged(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        tensors = {name: x for name, x in content.items() if isinstance(name, str) and isinstance(x, Tensor)}
    except Exception as error:  # the unpickler does what the file says
        raise Mistake(why(error)) from error
    if len(tensors) < len(content):
        raise Mistake("it holds other things than tensors with names")
    yield from tensors.items()


def safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file that holds a length, a JSON header with each tensor's place, and the tensors."""
    content = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    start = 8 + int.from_bytes(bytes(content[:8].tolist()), "little")
    for name, entry in json.loads(bytes(content[8:start].numpy())).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in SAFETENSORS:
            raise Mistake(f"{name} has dtype {entry['dtype']}; fw-convert takes: {', '.join(SAFETENSORS)}")
        yield name, content[start + begin : start + end].clone().view(SAFETENSORS[entry["dtype"]]).view(entry["shape"])


PROGRAM = (LookupError, AssertionError, AttributeError, TypeError, struct.error)  # of a reader that finds something else
UNREADABLE = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError, ValueError, TypeError)


def refuse_damaged(path: str | Path) -> None:
    """Refuses a zip file, such as torch writes, of which a part does not have its check sum. torch does not look at them."""
    if damaged := damaged_part(path):
        raise Mistake(f"{damaged} in it is damaged")


def damaged_part(path: str | Path) -> str | None:
    """Returns the first part of a zip file that does not have its check sum."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def why(error: Exception) -> str:
    """Returns the reason for which a file cannot be read."""
    said = re.sub(r"^\[enforce fail at [^]]*\]\s*\.?\s*", "", str(error).strip())  # torch's, before what it says
    if foreign := re.search(r"GLOBAL (\S+)", said):
        return f"it holds {foreign[1]}, which is neither a tensor nor an option, and is not run"
    if isinstance(error, KeyError):
        return f"it has no {said}"
    if isinstance(error, EOFError) or not said:
        return "it ends too early" if isinstance(error, EOFError) else type(error).__name__
    if found := re.search(r"WeightsUnpickler error: ?(.*)", said):
        return f"it is not what torch.save writes: {found[1] or 'its instructions do not fit'}"
    if isinstance(error, PROGRAM):
        return f"its parts do not fit together: {said.splitlines()[0]}"
    first, *rest = said.splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first.split(". ")[0]


def offer(path: Path) -> str:
    """Returns words that name the newest other checkpoint of the folder that is whole; ``path`` may be the folder. The parameters
    with which a run crashed are none to go on from."""
    folder = path if path.is_dir() else path.parent
    others = sorted(folder.glob("*.pt"), key=lambda other: other.stat().st_mtime, reverse=True)
    found = next((other for other in others if other not in (path, folder / CRASH) and is_whole(other)), None)
    place = "it" if path.is_dir() else "its folder"
    return f"the newest whole one in {place} is {found.name}" if found else f"{place} has no other one that is whole"


def is_whole(path: Path) -> bool:
    """Whether a zip file has all its parts, with their check sums."""
    try:
        return zipfile.is_zipfile(path) and not damaged_part(path)
    except UNREADABLE:
        return False
