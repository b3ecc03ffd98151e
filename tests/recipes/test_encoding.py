"""recipes/gpt2/encode.py: several processes write what one writes, and an unfinished file is continued."""

from __future__ import annotations

import json
import os
import random
import sys

import pytest
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder
from support.commands import ROOT, run, succeed
from support.recipes import load

RECIPE = ROOT / "recipes" / "gpt2"
SMALL = "import sys; sys.path.insert(0, {!r}); import encode; from pathlib import Path; encode.BLOCK = 300; " + (
    "encode.main(*map(Path, sys.argv[1:4]), *sys.argv[4:])"
)


@pytest.mark.long
def test_processes_write_every_document_once_and_continue_where_one_was_killed(tmp_path):
    model, data, draw = tmp_path / "model", tmp_path / "data", random.Random(0)
    succeed(run(sys.executable, RECIPE / "toy.py", model))
    data.mkdir()
    texts = ["".join(draw.choices("abc é\n", k=draw.randrange(90))) for _ in range(100)]
    for split, count in (("train", 100), ("valid", 1), ("test", 0)):
        (data / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:count]))
    encoder = get_encoder(model / "vocab.json", model / "merges.txt")
    expected = [" ".join(map(str, encoder.encode(text))) for text in texts if text]

    def encode(output):
        done = run(sys.executable, "-c", SMALL.format(str(RECIPE)), model, data, output, 2)
        assert (output / "train").read_text().splitlines() == expected, done.stderr
        assert sorted(os.listdir(output)) == ["test", "train", "valid"] and (output / "test").read_text() == ""
        return done.stderr

    assert encode(tmp_path / "whole").count("train, ") > 1
    killed = tmp_path / "killed"
    killed.mkdir()
    blocks = 0
    while sum(map(len, texts[:blocks])) < 300:  # the first block ends with the document that fills it
        blocks += 1
    written = "".join(f"{line}\n" for text in texts[:blocks] if text for line in [" ".join(map(str, encoder.encode(text)))])
    (killed / ".train.part").write_text(written + "17 1")
    (killed / ".train.place").write_text(f"1 {len(written)}")
    encode(killed)


@pytest.fixture(scope="module")
def encode():
    return load("gpt2/encode.py")


def test_blank_lines_are_no_documents(encode, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a b"}\n\n \t\n{"text": ""}\n{"text": "c"}\n\n')
    assert [*encode.documents(tmp_path, "train")] == ["a b", "", "c"]


@pytest.mark.parametrize("line", ["words", '{"words": "a"}', '{"text": null}', '["text"]', '{"text": "a', '{"a":' * 9999])
def test_a_line_without_a_text_is_named(line, encode, tmp_path):
    (tmp_path / "train.jsonl").write_text(f'{{"text": "a b"}}\n\n{line}\n')
    with pytest.raises(SystemExit) as end:
        list(encode.documents(tmp_path, "train"))
    place = f"line 3 of {tmp_path}/train.jsonl"
    assert end.value.code == f'encode.py: {place} is no JSON object with a text; it must be like {{"text": "some words"}}'


@pytest.mark.parametrize("name", ["train.txt", "train.jsonl"])
def test_a_text_in_another_encoding_is_named(name, encode, tmp_path):
    (tmp_path / name).write_text('{"text": "a b"}\n{"text": "café"}\n', encoding="latin-1")
    with pytest.raises(SystemExit, match=f"^encode.py: {tmp_path}/{name} is not in UTF-8 .*; write it in UTF-8 first"):
        list(encode.documents(tmp_path, "train"))
