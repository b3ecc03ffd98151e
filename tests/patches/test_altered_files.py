"""Small changes of real checkpoints and weights: each ends in a sentence or is read as data, and none ends the process.

FW_ALTERED=20 tries 6,000 changes in place of 300.
"""

from __future__ import annotations

import functools
import io
import random
import shutil
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch
from fairseq import checkpoint_utils
from support.altered import FACTOR, ends_of_changes, exchanged, flipped, reordered, with_pickle
from support.checkpoints import save_format

import fw_fairseq.models  # noqa: F401
from fw_fairseq import files

ARCHIVE = Path(__file__).parents[1] / "files" / "first_generation" / "files.tar.xz"
CHANGES = {"bytes": flipped, "instructions": reordered, "arguments": exchanged}
CHECKPOINTS = "stopped", "translation", "decay_adaptive"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    shutil.unpack_archive(ARCHIVE, folder)
    for name in CHECKPOINTS:
        state = read_plainly(folder / f"{name}.pt")
        state["cfg"] = {group: state["cfg"][group] for group in ("model", "task", "optimizer")}  # the others take most of the time
        torch.save(state, folder / f"{name}.pt")
    return folder


def read_plainly(path: Path) -> dict:
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


def read_checkpoint(path: Path) -> dict:
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))


def change_pickle(change, source: bytes, draw: random.Random) -> bytes:
    return with_pickle(io.BytesIO(source), lambda pickled: change(pickled, draw))


def assert_read_or_refused(said: list[str], sentence: str) -> None:
    assert [text for text in said if text != "data" and sentence not in text] == []
    assert any(text == "data" for text in said) and any(sentence in text for text in said)


def numbers() -> dict:
    """NumPy's numbers and arrays, among what else fairseq's checkpoints hold."""
    kinds = "?", "i1", "<i2", ">i4", "u8", "f2", "f8", "c16"
    arrays = [numpy.arange(-3, 9).astype(kind).reshape(3, 4) for kind in kinds]
    content = {
        "arrays": [*arrays, numpy.zeros((0, 3))],
        "scalars": [array[1, 1] for array in arrays],
        "options": Namespace(a=arrays[0]),
    }
    return save_format({"weight": torch.arange(6.0).view(2, 3)[:, 1:]}, cfg={"model": {"a": 1}}) | {"extra": content}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_numbers(change, tmp_path):
    torch.save(numbers(), tmp_path / "source.pt")
    source = (tmp_path / "source.pt").read_bytes()
    altered = functools.partial(change_pickle, CHANGES[change])
    said = ends_of_changes(source, altered, 30 * FACTOR, read_checkpoint, tmp_path)
    assert_read_or_refused(said, f"{tmp_path / 'changed.pt'} cannot be read as a fairseq checkpoint (")


@pytest.mark.parametrize("name, change", [pytest.param(*pair, id="-".join(pair)) for pair in zip(CHECKPOINTS, CHANGES)])
def test_changed_pickles(name, change, checkpoints, tmp_path):
    source = (checkpoints / f"{name}.pt").read_bytes()
    count = 30 * FACTOR
    said = ends_of_changes(source, functools.partial(change_pickle, CHANGES[change]), count, read_checkpoint, tmp_path)
    assert_read_or_refused(said, f"{tmp_path / 'changed.pt'} cannot be read as a fairseq checkpoint (")


def test_changed_checkpoints_of_torchs_older_format(checkpoints, tmp_path):
    """It has neither check sums nor names of tensors: numbers of tensors follow the pickle."""
    content = io.BytesIO()
    torch.save(read_plainly(checkpoints / "stopped.pt"), content, _use_new_zipfile_serialization=False)
    said = ends_of_changes(content.getvalue(), flipped, 30 * FACTOR, read_checkpoint, tmp_path)
    assert_read_or_refused(said, f"{tmp_path / 'changed.pt'} cannot be read as a fairseq checkpoint (")


def weights() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.arange(6.0).view(2, 3) + i for i in range(8)}


def read_weights(kind, path: Path) -> list:
    with files.reading(path, "weights"):
        return list(kind(path))


def as_safetensors(tensors: dict) -> bytes:
    from safetensors.torch import save

    return save(tensors)


def as_pickle(tensors: dict) -> bytes:
    content = io.BytesIO()
    torch.save(tensors, content)
    return content.getvalue()


@pytest.mark.parametrize(
    "write, kind, change",
    [
        (as_safetensors, files.safetensors, flipped),
        (as_pickle, files.pickled, functools.partial(change_pickle, flipped)),
        (as_pickle, files.pickled, functools.partial(change_pickle, reordered)),
    ],
    ids=["safetensors", "bytes", "instructions"],
)
def test_changed_weights(write, kind, change, tmp_path):
    """Of a GPT-2, which fw-convert reads."""
    said = ends_of_changes(write(weights()), change, 30 * FACTOR, functools.partial(read_weights, kind), tmp_path)
    assert_read_or_refused(said, f"{tmp_path / 'changed.pt'} cannot be read as weights (")
