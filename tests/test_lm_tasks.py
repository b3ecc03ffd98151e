"""The tasks of language models in Python: prompts, windows and streams, and what they refuse."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from test_lm_model import build, make_task

from fw_fairseq import registration  # noqa: F401
from fw_fairseq.tasks.generation import PromptedGenerator

EOS = 2
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("prompts", [[[5, 6, EOS, 7, 8], [9, 10, 11, 12, 13]], [[5, EOS], [5, EOS]]])
def test_an_end_of_sentence_inside_a_prompt(prompts):
    """It finishes its row of the batch, as with fairseq's own generator."""
    dictionary, prompts = make_task(40).source_dictionary, torch.tensor(prompts)
    model = build(no_token_positional_embeddings=True).eval()
    sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.full((2,), prompts.shape[1])}}
    wanted, found = (
        kind([model], dictionary, beam_size=2, max_len_b=12).generate([model], sample, prefix_tokens=prompts)
        for kind in (SequenceGenerator, PromptedGenerator)
    )
    for own, fairseqs in zip(chain(*found), chain(*wanted), strict=True):
        assert torch.equal(own["tokens"], fairseqs["tokens"])
        torch.testing.assert_close(own["positional_scores"], fairseqs["positional_scores"])
