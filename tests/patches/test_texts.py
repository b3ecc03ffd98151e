"""Texts that are not in UTF-8 are refused by name, and lines that are longer than a batch."""

from __future__ import annotations

from argparse import Namespace

import numpy
import pytest
import torch
from fairseq.data import MonolingualDataset, TokenBlockDataset
from fairseq.tasks.language_modeling import LanguageModelingTask
from support.commands import USER_DIR, fairseq, succeed
from support.language_models import make_task

import fw_fairseq.models  # noqa: F401
from fw_fairseq import Mistake


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_in_another_encoding_is_refused_by_name(workers, tmp_path):
    """Before a word of it is read: the wrong line is far from where a worker would start."""
    text = "".join(f"the old cat of {number}\n" for number in range(500))
    (tmp_path / "good").write_text(f"größer\n{text}", encoding="utf-8")
    (tmp_path / "latin").write_bytes(f"{text}größer\n{text}".encode("latin-1"))
    common = ["--only-source", "--destdir", tmp_path / "bin", "--workers", workers, *USER_DIR]
    said = f"{tmp_path / 'latin'} is no text in UTF-8 (line 501); convert it, for example with iconv -f latin1 -t utf8"
    for options in (["--trainpref", tmp_path / "latin"], ["--trainpref", tmp_path / "good", "--testpref", tmp_path / "latin"]):
        done = fairseq("preprocess", *common, *options)
        assert done.returncode == 1 and done.stderr.strip() == f"fairseq_cli.preprocess: {said}"
    succeed(fairseq("preprocess", *common, "--srcdict", tmp_path / "bin" / "dict.txt", "--trainpref", tmp_path / "good"))


def language_modeling(lengths: list[int], mode: str, tokens: int) -> tuple[LanguageModelingTask, MonolingualDataset]:
    """The task, and a text with lines of these lengths, as the task cuts it."""
    words = make_task(8).source_dictionary
    args = Namespace(sample_break_mode=mode, tokens_per_sample=tokens)
    lines = [torch.full((length,), 5) for length in lengths]
    blocks = TokenBlockDataset(lines, numpy.array(lengths), tokens, words.pad(), words.eos(), mode, include_targets=True)
    return LanguageModelingTask(args, words), MonolingualDataset(blocks, blocks.sizes, words, targets=["future"])


@pytest.mark.parametrize("mode", ["eos", "complete"])
def test_a_line_of_more_than_65535_tokens_is_counted_whole(mode):
    _, text = language_modeling([65600, 7], mode, 64)
    assert text.sizes.tolist() == [65600, 7] and len(text[0]["source"]) == 65600


def batches(lengths, mode="eos", tokens=64, **limits) -> list[list[int]]:
    task, text = language_modeling(lengths, mode, tokens)
    limits = {"max_positions": 10**9, "ignore_invalid_inputs": True, **limits}
    found = task.get_batch_iterator(text, required_batch_size_multiple=1, **limits).frozen_batches
    return [sorted(map(int, batch)) for batch in found]


@pytest.mark.parametrize(
    "lengths, given, most, longest, shorter",
    [
        ([40000, 7], {"max_sentences": 8}, 36000, 40000, "--sample-break-mode none"),
        ([40000], {"max_tokens": 36000}, 36000, 40000, "--sample-break-mode none"),
        ([700], {"max_tokens": 512, "mode": "complete"}, 512, 700, "--sample-break-mode none"),
        ([700], {"max_tokens": 50, "mode": "none"}, 50, 64, "a shorter --tokens-per-sample"),
    ],
)
def test_a_sample_longer_than_a_batch_is_refused(lengths, given, most, longest, shorter):
    said = f"a batch holds at most {most} tokens, and a sample has {longest}; give {shorter} or a larger --max-tokens"
    with pytest.raises(Mistake, match=f"^{said}$"):
        batches(lengths, **given)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"max_positions": 128}, "all 1 texts are longer than the model's 128 positions; give --sample-break-mode none"),
        (
            {"max_positions": 32, "mode": "none"},
            "all 11 texts are longer than the model's 32 positions; give a shorter --tokens-per-sample",
        ),
        (
            {"max_positions": 512, "max_tokens": 512},
            "all 1 texts are longer than --max-tokens, 512; give --sample-break-mode none",
        ),
    ],
)
def test_what_makes_samples_shorter(given, said):
    with pytest.raises(Mistake, match=f"^{said}$"):
        batches([700], **given)


@pytest.mark.parametrize(
    "lengths, given",
    [
        ([700, 7], {"max_sentences": 1}),  # lines that are a few times --tokens-per-sample
        ([40000, 7], {"max_sentences": 1, "max_tokens": 40000}),
        ([40000, 7], {"max_sentences": 1, "tokens": 40000}),
    ],
)
def test_longer_lines_that_the_options_allow_are_batches(lengths, given):
    assert sorted(batches(lengths, **given)) == [[0], [1]]


def test_lines_longer_than_the_positions_are_left_out_as_before():
    assert batches([40000, 7], max_positions=64, max_sentences=8) == [[1]]
