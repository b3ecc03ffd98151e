"""Search: n-grams that were generated do not come again, and hypotheses end at their end."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from support.language_models import build, make_task

import fw_fairseq.models  # noqa: F401

PAD, WORDS = 1, 7


@pytest.mark.parametrize("size", [1, 2, 3])
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


@pytest.mark.parametrize("groups, beam", [(2, 4), (3, 3), (2, 2)])
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


@pytest.mark.parametrize("size", [1, 2, 3])
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
