"""Texts, batches and search: every batch is read once, lines are counted whole, n-grams do not repeat, hypotheses end."""

from __future__ import annotations

import math
from argparse import Namespace

import numpy
import pytest
import torch
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils, iterators
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingTask
from support.language_models import build, make_task
from torch.utils.data import TensorDataset

import fw_fairseq.models  # noqa: F401
from fw_fairseq import Mistake
from fw_fairseq.data.loading import BatchIterator

PAD, WORDS = 1, 7


def numbers(items: list) -> tuple[int, ...]:
    return tuple(int(number) for (number,) in items)


def iterator(workers: int, worker: int, kind=iterators.EpochBatchIterator, batches: int = 46):
    data = TensorDataset(torch.arange(3 * batches))
    cut = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(batches)]
    return kind(data, numbers, cut, seed=5, num_shards=workers, shard_id=worker)


def read(of, count: int | None = None) -> list[tuple]:
    batches = of.next_epoch_itr(shuffle=True)
    return [batch for batch in (batches if count is None else (next(batches) for _ in range(count))) if batch]


@pytest.mark.parametrize("kind", [iterators.EpochBatchIterator, BatchIterator])
@pytest.mark.parametrize(
    "before, place, after, twice",
    [(2, 16, 1, 0), (3, 4, 2, 0), (2, 7, 2, 0), (4, 5, 3, 2), (1, 1, 2, 1)],
)
def test_the_workers_of_a_resumed_epoch_read_what_is_left(kind, before, place, after, twice):
    """What they cannot share they read again; nothing is left out."""
    first = [iterator(before, worker, kind) for worker in range(before)]
    seen = [batch for of in first for batch in read(of, place)]
    resumed = [iterator(after, worker, kind) for worker in range(after)]
    for of in resumed:
        of.load_state_dict(first[0].state_dict())
    rest = [batch for of in resumed for batch in read(of)]
    assert {*seen, *rest} == {*read(iterator(1, 0))} and len(seen) + len(rest) == 46 + twice
    assert len({*seen} & {*rest}) == twice and all(of.end_of_epoch() for of in resumed)
    assert resumed[0].state_dict()["iterations_in_epoch"] == 0


def test_an_epoch_of_other_batches_is_refused():
    """Its place would be another one. Between epochs any size of batches goes on; so does a checkpoint of fairseq itself."""
    of, other = iterator(1, 0), iterator(1, 0, batches=23)
    read(of)
    ended = of.state_dict()
    read(of, 8)
    said = (
        "^the epoch has 23 batches, but the checkpoint stopped within one of 46; resume with the same data and size of batches, or"
    )
    with pytest.raises(Mistake, match=said):
        other.load_state_dict(of.state_dict())
    other.load_state_dict(ended)
    assert (other.next_epoch_idx, len(read(other))) == (2, 23)
    other = iterator(1, 0, batches=23)
    other.load_state_dict({name: value for name, value in of.state_dict().items() if name not in ("workers", "batches")})
    assert len(read(other)) == 15


def test_no_texts_make_no_batches():
    assert data_utils.batch_by_size([], lambda i: 1, max_sentences=4, required_batch_size_multiple=8) == []


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
        ([40000, 7], {"max_sentences": 1, "max_tokens": 40000}),
        ([40000, 7], {"max_sentences": 1, "tokens": 40000}),
    ],
)
def test_longer_lines_that_the_options_allow_are_batches(lengths, given):
    assert sorted(batches(lengths, **given)) == [[0], [1]]


def test_lines_longer_than_the_positions_are_left_out_as_before():
    assert batches([40000, 7], max_positions=64, max_sentences=8) == [[1]]


@pytest.mark.parametrize("size", [1, 2])
def test_every_repeated_ngram_is_forbidden_and_nothing_else(size):
    """The buffer is longer than what was generated, as in search, and padded."""
    draw = torch.Generator().manual_seed(size)
    for step in range(1, 12):
        tokens = torch.full((6, 20), PAD)
        tokens[:, 0] = 2
        tokens[:, 1 : step + 1] = torch.randint(3, WORDS, (6, step), generator=draw)
        scores = NGramRepeatBlock(size)(tokens, torch.zeros(6, WORDS), 2, 3, step)
        for row, allowed in zip(tokens.tolist(), scores):
            written = row[1 : step + 1] if size == 1 else row[: step + 1]
            before = [tuple(written[i : i + size]) for i in range(len(written) - size + 1)]
            expected = [-math.inf if (*written[len(written) - size + 1 :], word) in before else 0.0 for word in range(WORDS)]
            assert allowed.tolist() == expected


@pytest.mark.parametrize("groups, beam", [(2, 4), (3, 3)])
def test_diverse_hypotheses_end_at_their_end(groups, beam):
    """Also where others of the sentence are still searched for."""
    torch.manual_seed(0)
    model, dictionary = build(no_token_positional_embeddings=True).eval(), make_task(40).source_dictionary
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(6)
        model.decoder.output_projection.weight[2] *= 2
    search = DiverseBeamSearch(dictionary, groups, 0.5)
    generator = SequenceGenerator([model], dictionary, beam_size=beam, max_len_b=15, search_strategy=search)
    prompts = torch.randint(4, 40, (24, 3))
    sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.full((24,), 3)}}
    found = [hypothesis["tokens"] for row in generator.generate([model], sample, prefix_tokens=prompts) for hypothesis in row]
    ends = [tokens[:-1].eq(2).any() for tokens in found]
    assert len(found) == 24 * beam and len({len(tokens) for tokens in found}) > 1 and not any(ends)


@pytest.mark.parametrize("size", [1, 2])
def test_a_prescribed_word_is_allowed_though_it_repeats_an_ngram(size):
    """The first sentence may go on with word 3 only, as in a prefix, and every size forbids it; the second may take all words."""
    tokens = torch.tensor([[2, 3, 4, 3, 4, PAD, PAD], [2, 3, 4, 3, 4, PAD, PAD]])
    scores = torch.zeros(2, WORDS)
    scores[0] = -math.inf
    scores[0, 3] = -0.5
    prescribed, free = NGramRepeatBlock(size)(tokens, scores, 2, 1, 4).tolist()
    assert prescribed == [-0.5 if word == 3 else -math.inf for word in range(WORDS)]
    forbidden = {3, 4} if size == 1 else {3}
    assert free == [-math.inf if word in forbidden else 0.0 for word in range(WORDS)]
