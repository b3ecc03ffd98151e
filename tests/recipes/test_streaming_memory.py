"""What a streaming evaluation holds does not grow. ``recipes/streaming/memory.sh`` measures the whole process, at any length."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from fairseq_cli.eval_lm import eval_lm
from support.language_models import build, make_task

from fw_fairseq.data.text import Text
from fw_fairseq.mixers import MIXERS
from fw_fairseq.tasks.stateful_language_modeling import StatefulLanguageModelingConfig, StatefulLanguageModelingTask

TOKENS, SEGMENT = 10_000, 100


def holdings() -> tuple[list[int], int]:
    """The sizes of all new tensors, and how many objects Python has."""
    gc.collect()
    return sorted(x.nbytes for x in gc.get_objects() if issubclass(type(x), torch.Tensor)), sys.getallocatedblocks()


@pytest.fixture
def only_new_objects():
    """Are looked at, in place of the million that imports have made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("one_thread", "only_new_objects")
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_streaming_holds_as_much_at_the_end_as_at_the_start(mixer):
    dictionary = make_task(40).source_dictionary
    task = StatefulLanguageModelingTask(StatefulLanguageModelingConfig(tokens_per_sample=SEGMENT), dictionary)
    model = build(mixer=mixer, decoder_layers=1, no_token_positional_embeddings=True)
    batches, held = task.eval_lm_dataloader(Text(torch.randint(4, 40, (TOKENS,)), "test")), {}

    def watched():
        for segment, batch in enumerate(batches):
            if segment in (10, TOKENS // SEGMENT - 10):
                held[segment] = holdings()
            yield batch

    assert eval_lm([model], dictionary, watched())["perplexity"] > 1
    (tensors, objects), (last_tensors, last_objects) = held.values()
    assert last_tensors == tensors
    assert last_objects < objects + 10 * TOKENS // SEGMENT, "not ten of Python's objects a segment"
