"""The readers and the writer of files that the commands share."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch

from fw_fairseq import Mistake, files


def test_a_file_is_written_beside_its_place(tmp_path):
    """Its folders are made, a link stays one, and what fails leaves the earlier file alone."""
    path, link, places = tmp_path / "a" / "b" / "c.txt", tmp_path / "link", []
    link.symlink_to(path)
    for text in ("one", "two"):
        files.write_atomically(link, lambda place: places.append(place) or place.write_text(text))  # noqa: B023
        assert link.is_symlink() and path.read_text() == text
    assert {place.parent for place in places} == {path.parent} and path not in places

    def fail(place: Path) -> None:
        place.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(Mistake, match=r"c\.txt cannot be written \(No space left on device\)"):
        files.write_atomically(path, fail)
    assert [entry.name for entry in path.parent.iterdir()] == ["c.txt"] and path.read_text() == "two"


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa b\n".encode())
    assert files.read_text(tmp_path / "a.txt", "a table") == "a b\n"


def test_the_place_in_torchs_code_is_no_reason():
    error = RuntimeError("[enforce fail at inline_container.cc:747] . open file failed with strerror: Permission denied")
    assert files.why(error) == "open file failed with strerror: Permission denied"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    files.write_atomically(tmp_path / "pipe", lambda place: place.write_text("text"))
    assert os.read(end, 9) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(end)


def test_the_tokens_of_a_tokenizer_are_counted_once(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    assert files.tokenizer_size(tmp_path) == 2
    (tmp_path / "added_tokens.json").write_text(json.dumps({"b": 1, "c": 2}))
    assert files.tokenizer_size(tmp_path) == 3
    whole = {"model": {"vocab": {"a": 0, "b": 1, "d": 2, "e": 3}}, "added_tokens": [{"content": "e"}, {"content": "f"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert files.tokenizer_size(tmp_path) == 5


def safetensors_of(header: dict, content: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def test_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "I16", "shape": [2, 2], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [1], "data_offsets": [8, 10]},
    }
    content = bytes([1, 0, 2, 0, 3, 0, 255, 255, 0x80, 0x3F])
    path.write_bytes(safetensors_of(header, content))
    found = dict(files.safetensors(path))
    assert list(found) == ["a", "b"] and found["a"].tolist() == [[1, 2], [3, -1]] and found["b"].tolist() == [1.0]
    assert (found["a"].dtype, found["b"].dtype) == (torch.int16, torch.bfloat16)
    path.write_bytes(safetensors_of(header, content[:-1]))
    with pytest.raises(Mistake, match="cannot be read as weights"), files.reading(path, "weights"):
        list(files.safetensors(path))
    path.write_bytes(safetensors_of({}, b""))
    assert list(files.safetensors(path)) == []
    for size in (7, 9):
        path.write_bytes(safetensors_of({}, b"")[:size])
        with pytest.raises(Mistake, match="cannot be read as weights"), files.reading(path, "weights"):
            list(files.safetensors(path))
    path.write_bytes(safetensors_of({"a": {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}}, b"0"))
    with pytest.raises(Mistake, match="a has dtype F8; fw-convert takes: F64, "):
        list(files.safetensors(path))


@pytest.mark.parametrize("content", [{"a": 1}, {1: torch.ones(1)}])
def test_weights_are_tensors_with_names(content, tmp_path):
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(Mistake, match="it holds other things than tensors with names"):
        list(files.pickled(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    "error, said",
    [
        (RuntimeError("Weights: GLOBAL os.system was not allowed"), "it holds os.system, which is neither a tensor nor an option,"),
        (KeyError("x"), "it has no 'x'"),
        (EOFError("Ran out of input"), "it ends too early"),
        (EOFError(), "it ends too early"),
        (RuntimeError(" "), "RuntimeError"),
        (RuntimeError("x: WeightsUnpickler error: no mark\nmore"), "it is not what torch.save writes: no mark"),
        (RuntimeError("x: WeightsUnpickler error: "), "it is not what torch.save writes: its instructions do not fit"),
        (TypeError("one. two\nthree"), "its parts do not fit together: one. two"),
        (ValueError("one. two\nthree"), "one"),
        (RuntimeError("several errors:\n\tone. two\nthree"), "several errors: one. two"),
    ],
)
def test_the_reason_is_a_phrase(error, said):
    why = files.why(error)
    assert why.startswith(said) and (why == said or said.endswith(","))


def test_the_newest_whole_checkpoint_is_offered(tmp_path):
    def save(name: str, time: int, change: tuple[bytes, bytes] | None = None) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr("data", "numbers")
        if change:
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(*change, 1))
        os.utime(tmp_path / name, (time, time))
        return tmp_path / name

    damaged = save("damaged.pt", 4, (b"numbers", b"numbing"))
    headless = save("headless.pt", 5, (b"PK\3\4", b"XXXX"))
    assert files.damaged_part(damaged) == "data" and not files.is_whole(headless)
    assert files.offer(tmp_path) == "it has no other one that is whole"
    assert files.offer(damaged) == "its folder has no other one that is whole"
    newer, older = save("b.pt", 3), save("a.pt", 2)
    save("c.pt", 1)
    assert files.offer(tmp_path) == "the newest whole one in it is b.pt"
    assert files.offer(damaged) == files.offer(older) == "the newest whole one in its folder is b.pt"
    assert files.offer(newer) == "the newest whole one in its folder is a.pt"
    (tmp_path / "text").write_text("text")
    assert files.damaged_part(tmp_path / "text") is None and not files.is_whole(tmp_path / "text")


def test_an_error_of_reading_names_the_file():
    with (
        pytest.raises(Mistake, match=r"x\.bin cannot be read as weights \(no number\); download it again"),
        files.reading(Path("x.bin"), "weights"),
    ):
        raise ValueError("no number")
    with pytest.raises(FileNotFoundError), files.reading(Path("x.bin"), "weights"):
        raise FileNotFoundError
