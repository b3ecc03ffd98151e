"""The tasks of language models in Python: prompts, windows and streams, and what they refuse."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig
from test_lm_model import build, make_task

from fw_fairseq import registration  # noqa: F401
from fw_fairseq.tasks.generation import PromptedGenerator
from fw_fairseq.tasks.sliding_language_modeling import SlidingLanguageModelingTask
from fw_fairseq.tasks.stateful_language_modeling import StatefulLanguageModelingConfig, StatefulLanguageModelingTask
from fw_fairseq.tasks.streams import Text

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


def windows(tokens=138, segment=8, context=5, **options):
    """As fairseq-eval-lm asks for them: the segment without its context."""
    task = SlidingLanguageModelingTask(LanguageModelingConfig(tokens_per_sample=segment - context), make_task(40).source_dictionary)
    return task.eval_lm_dataloader(Text(torch.arange(tokens), "test"), context_window=context, **options)


@pytest.mark.parametrize("shards", [1, 2, 3, 60])
def test_the_shards_of_the_windows_score_every_token_once(shards):
    loaders = [windows(num_shards=shards, shard_id=shard, max_tokens=50) for shard in range(shards)]
    batches = [batch for loader in loaders for batch in loader]
    assert torch.equal(torch.cat([batch["target"].flatten() for batch in batches]), torch.arange(138))
    assert max(len(batch["id"]) for batch in batches) == (1 if shards == 60 else 50 // 8)


def test_validation_on_the_text_of_training_has_memories_of_its_own():
    """With fewer rows, and in the middle of the training text."""
    task = StatefulLanguageModelingTask(StatefulLanguageModelingConfig(tokens_per_sample=8), make_task(40).source_dictionary)
    model, text = build(no_token_positional_embeddings=True), Text(torch.randint(4, 40, (100,)), "train")

    def losses(validate):
        iterator = task.get_batch_iterator(text, max_sentences=4)
        criterion = CrossEntropyCriterion(task, sentence_avg=False)
        batches = iterator.next_epoch_itr()
        for number, batch in enumerate(batches):
            if validate and number == 2:
                for other in task.get_batch_iterator(text, max_sentences=2).next_epoch_itr():
                    task.valid_step(other, model, criterion)
            yield float(task.valid_step(batch, model, criterion)[0])

    assert list(losses(validate=True)) == list(losses(validate=False))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"segment": 4, "context": 8}, "--tokens-per-sample is 4; it must be larger than --context-window, 8"),
        ({"segment": 8, "context": 8}, "--tokens-per-sample is 8; it must be larger than --context-window, 8"),
        ({"context": -1}, "--context-window is -1; it must be at least 0"),
        ({"num_shards": 2, "shard_id": 2}, "--shard-id is 2; it must be at least 0 and less than --num-shards, 2"),
    ],
)
def test_windows_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        windows(**options)
