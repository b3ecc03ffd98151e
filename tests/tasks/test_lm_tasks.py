"""The tasks of language models in Python: prompts, windows and streams, and what they refuse."""

from __future__ import annotations

from argparse import Namespace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import TruncatedDictionary, data_utils
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq_cli.eval_lm import eval_lm
from support.language_models import SMALL, build, make_task, options_of

import fw_fairseq.models  # noqa: F401
from fw_fairseq.data.text import Text
from fw_fairseq.tasks.sliding_language_modeling import SlidingLanguageModelingTask
from fw_fairseq.tasks.stateful_language_modeling import (
    PromptedGenerator,
    StatefulLanguageModelingConfig,
    StatefulLanguageModelingTask,
    check_across_workers,
)

EOS = 2
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


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
    found, wanted = list(chain(*found)), list(chain(*wanted))
    assert len(found) == len(wanted)
    for own, fairseqs in zip(found, wanted):
        assert torch.equal(own["tokens"], fairseqs["tokens"])
        torch.testing.assert_close(own["positional_scores"], fairseqs["positional_scores"])


@pytest.mark.parametrize("options", [{}, {"mixer_pattern": "softmax,fast_weight"}], ids=["delta", "hybrid"])
def test_prompts_of_unequal_length_go_on_as_one_by_one(options, monkeypatch):
    """Several hypotheses share the pass over their prompt. No sentence ends, since min_len does not hold within prompts."""
    dictionary, model, passes = make_task(40).source_dictionary, build(update_rule="delta", **options).eval(), []
    model.max_positions = lambda: 64
    prompts = [torch.randint(4, 40, (length,)) for length in (3, 7, 4)]
    chances, never = model.get_normalized_probs, torch.zeros(40).index_fill(0, torch.tensor([EOS]), 99)
    monkeypatch.setattr(model, "get_normalized_probs", lambda output, *rest, **given: chances(output, *rest, **given) - never)

    def search(*rows):
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
        sample = {"net_input": {"src_tokens": batch, "src_lengths": batch.ne(1).sum(1)}}
        generator = PromptedGenerator([model], dictionary, beam_size=3, max_len_b=12)
        return [[h["tokens"] for h in found] for found in generator.generate([model], sample, prefix_tokens=batch)]

    alone = [search(row)[0] for row in prompts]
    take = model.decoder.take_prompt
    monkeypatch.setattr(model.decoder, "take_prompt", lambda rows, **given: passes.append(rows.shape) or take(rows, **given))
    together = search(*prompts)
    assert len(together) == len(alone)
    for found, expected in zip(together, alone):
        assert torch.stack(found).equal(torch.stack(expected))
    assert passes == [(3, 4)]


def test_a_model_of_fairseq_reads_a_prompt_word_by_word():
    task, prompts = sliding(), torch.randint(4, 40, (2, 3))
    model = of_fairseq("transformer_lm", task)
    sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.full((2,), 3)}}
    wanted, found = (
        kind([model], task.dictionary, beam_size=2, max_len_b=9).generate([model], sample, prefix_tokens=prompts)
        for kind in (SequenceGenerator, PromptedGenerator)
    )
    assert [h["tokens"].tolist() for h in chain(*found)] == [h["tokens"].tolist() for h in chain(*wanted)]


def sliding(**options) -> SlidingLanguageModelingTask:
    return SlidingLanguageModelingTask(LanguageModelingConfig(**options), make_task(40).source_dictionary)


def stateful(**options) -> StatefulLanguageModelingTask:
    return StatefulLanguageModelingTask(StatefulLanguageModelingConfig(**options), make_task(40).source_dictionary)


@pytest.mark.parametrize("reset_at_eos", [False, True])
def test_a_text_that_is_scored_begins_anew_after_each_sentence(reset_at_eos):
    """As in training."""
    task, model = stateful(reset_at_eos=reset_at_eos), build(no_token_positional_embeddings=True).eval()
    scorer = task.build_generator([model], Namespace(score_reference=True))
    sentences = [[5, 6, 7, EOS], [8, 9, EOS]]

    def scores(target: list[int]) -> torch.Tensor:
        target = torch.tensor([target])
        source = torch.cat([torch.tensor([[EOS]]), target[:, :-1]], 1)
        sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([source.shape[1]])}, "target": target}
        [[found]] = task.inference_step(scorer, [model], sample)
        return found["positional_scores"]

    alone, together = torch.cat([*map(scores, sentences)]), scores([*chain(*sentences)])
    torch.testing.assert_close(together[:4], alone[:4])
    assert torch.allclose(together, alone) == reset_at_eos


def test_streams_that_are_scored_carry_their_states():
    """Whoever asks for the scores, as fairseq-generate --score-reference does. Nothing goes on from a stream."""
    text, model = random_text(), build(no_token_positional_embeddings=True).eval()
    task = stateful(tokens_per_sample=16)
    scorer = task.build_generator([model], Namespace(score_reference=True))
    found = [
        hypothesis["positional_scores"]
        for batch in task.streams(text, max_sentences=1).next_epoch_itr(shuffle=False)
        for [hypothesis] in task.inference_step(scorer, [model], batch)
    ]
    source = torch.cat([torch.tensor([EOS]), text.tokens[:-1]])[None]
    with torch.no_grad():
        wanted = model.get_normalized_probs(model(source), log_probs=True)[0].gather(1, text.tokens[:, None])[:, 0]
    torch.testing.assert_close(torch.cat(found), wanted)
    [batch, *_] = task.streams(text, max_sentences=1).next_epoch_itr(shuffle=False)
    with pytest.raises(
        ValueError, match=r"^stateful_language_modeling reads a text as streams, which nothing goes on from; generate"
    ):
        task.inference_step(task.build_generator([model], Namespace(beam=2)), [model], batch)


@pytest.mark.parametrize("reset_at_eos", [False, True])
def test_only_the_first_segment_empties_the_states(reset_at_eos):
    """In training and in each validation; a batch of another task, or a dummy, has no streams."""
    task, restarts = stateful(reset_at_eos=reset_at_eos), []
    streams = SimpleNamespace(restart=lambda: restarts.append(segment))
    for segment in (0, 1, 2, 0):
        sample = {"streams": streams, "segment": segment, "net_input": {"src_tokens": torch.tensor([[5, EOS, 6]])}}
        task.bring_state(sample)
        assert sample["net_input"]["streams"] is streams
        assert ("reset_mask" in sample["net_input"]) == reset_at_eos
        if reset_at_eos:
            assert sample["net_input"]["reset_mask"].tolist() == [[False, True, False]]
    assert restarts == [0, 0]
    task.bring_state(sample := {"net_input": {}})
    assert sample == {"net_input": {}}


def random_text() -> Text:
    return Text(torch.randint(4, 40, (100,)), "train")


def windows(tokens=138, segment=8, context=5, **options):
    """As fairseq-eval-lm asks for them: the segment without its context."""
    task = sliding(tokens_per_sample=segment - context)
    return task.eval_lm_dataloader(Text(torch.arange(tokens), "test"), context_window=context, **options)


@pytest.mark.parametrize("shards", [1, 2, 3, 60])
def test_the_shards_of_the_windows_score_every_token_once(shards):
    loaders = [windows(num_shards=shards, shard_id=shard, max_tokens=50) for shard in range(shards)]
    batches = [batch for loader in loaders for batch in loader]
    assert torch.equal(torch.cat([batch["target"].flatten() for batch in batches]), torch.arange(138))
    assert max(len(batch["id"]) for batch in batches) == (1 if shards == 60 else 50 // 8)


def test_each_token_is_predicted_from_as_many_as_in_fairseqs_windows():
    """Of pieces of 3 tokens with the 5 before them; the context is no multiple of 3."""
    read = {}
    for batch in windows():
        for source, target in zip(batch["net_input"]["src_tokens"], batch["target"].tolist()):
            read |= {token: len(source) - len(target) + place for place, token in enumerate(target, 1)}
    assert read == {token: token % 3 + 1 + min(5, token - token % 3) for token in range(138)}


def test_the_least_that_windows_may_be():
    """No context, one token, and one window at a time."""
    batches = list(windows(6, 1, 0, batch_size=1, max_tokens=50))
    assert [batch["target"].tolist() for batch in batches] == [[[token]] for token in range(6)]
    assert [batch["net_input"]["src_tokens"].tolist() for batch in batches] == [[[EOS]], *([[token]] for token in range(5))]


@pytest.mark.parametrize(
    "options, most", [({}, 64), ({"batch_size": 70}, 70), ({"max_tokens": 16}, 2), ({"max_tokens": 15}, 1), ({"max_tokens": 3}, 1)]
)
def test_the_number_of_windows_at_once(options, most):
    """As many as --max-tokens and --batch-size allow, and one where the first is less than a window."""
    assert max(len(batch["id"]) for batch in windows(300, **options)) == most


def test_windows_have_36000_tokens_if_nothing_else_is_said():
    """As fairseq-eval-lm's batches: 36 windows of 973, since 37 have one token more."""
    loader = windows(1100, 973, 972)
    assert max(map(len, loader.batch_sampler)) == 36 and loader.num_workers == 0


def test_validation_on_the_text_of_training_has_memories_of_its_own():
    """With fewer rows, and in the middle of the training text."""
    task, model, text = stateful(tokens_per_sample=8), build(no_token_positional_embeddings=True), random_text()

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
        ({"max_positions": 7}, "8 tokens at once are more than the model's 7 positions; give a shorter --tokens-per-sample"),
    ],
)
def test_windows_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        windows(**options)


@pytest.mark.parametrize(
    "segment, options, message",
    [
        (16, {"max_tokens": 8}, "--max-tokens, or --max-tokens-valid, is 8; a segment of each stream takes 16 tokens"),
        (16, {"max_tokens": 63, "max_sentences": 4}, "is 63; a segment of each stream takes 64 tokens"),
        (16, {"max_positions": 8}, "16 tokens at once are more than the model's 8 positions; give a shorter --tokens-per-sample"),
    ],
)
def test_segments_that_are_refused(segment, options, message):
    with pytest.raises(ValueError, match=message):
        stateful(tokens_per_sample=segment).get_batch_iterator(random_text(), **options)


def rows(**options) -> int:
    return len(stateful(tokens_per_sample=8).get_batch_iterator(random_text(), **options).dataset.rows)


def test_the_number_of_streams():
    assert rows() == 1 and rows(max_tokens=8) == 1 and rows(max_tokens=39) == 4 and rows(max_sentences=3) == 3
    assert rows(max_tokens=24, max_sentences=3) == 3 and rows(max_sentences=3, required_batch_size_multiple=8) == 3
    assert len(stateful(tokens_per_sample=1).get_batch_iterator(random_text(), max_tokens=3).dataset.rows) == 3


def test_streams_are_read_from_the_first_epoch_on_and_by_no_other_process_if_nothing_else_is_said():
    iterator = stateful(tokens_per_sample=8).get_batch_iterator(random_text())
    assert (iterator.epoch, iterator.num_workers, iterator.buffer_size) == (1, 0, 0)
    assert StatefulLanguageModelingConfig().reset_at_eos is False


def test_one_loader_process_would_only_delay_the_streams():
    task = stateful(tokens_per_sample=8)
    started = [task.get_batch_iterator(random_text(), num_workers=count).num_workers for count in (0, 1, 2, 3)]
    assert started == [0, 0, 2, 3]


@pytest.mark.parametrize(
    "segment, options, workers, message",
    [
        (8, {"sequence_parallel": 3}, 6, r"--sequence-parallel is 3; it must divide .* \(6\) and --tokens-per-sample \(8\)"),
        (6, {"sequence_parallel": 3}, 4, "--sequence-parallel is 3; it must divide the number of workers"),
        (8, {"sequence_parallel": 2}, 1, "--sequence-parallel is 2; it must divide the number of workers"),
        (8, {"sequence_parallel": 2, "sentence_avg": True}, 2, "--sequence-parallel cuts streams into parts that are not"),
    ],
)
def test_parts_of_segments_that_are_refused(segment, options, workers, message):
    task = stateful(**{"tokens_per_sample": segment, "sentence_avg": False} | options)
    with pytest.raises(ValueError, match=f"^{message}"):
        task.get_batch_iterator(random_text(), num_shards=workers)


@pytest.mark.parametrize("count, workers", [(2, 4), (3, 3)])
def test_neighbouring_workers_have_the_parts_of_a_segment(count, workers, monkeypatch):
    """Each group of them has streams of its own."""
    monkeypatch.setattr(torch.distributed, "new_subgroups", lambda size: ((size, "group"), None))
    task, seen = stateful(tokens_per_sample=6, sequence_parallel=count, sentence_avg=False), []
    for worker in range(workers):
        iterator = task.get_batch_iterator(random_text(), num_shards=workers, shard_id=worker)
        assert iterator.streams.group == (count, "group")
        seen.append((iterator.shard, iterator.shards, iterator.dataset.share, iterator.dataset.shares))
    assert seen == [(worker // count, workers // count, worker % count, count) for worker in range(workers)]


def test_texts_cannot_end_within_softmax_layers():
    """--reset-at-eos and --sequence-parallel empty states or pass them on, and softmax layers have none."""
    for mixers in ({"mixer_pattern": "fast_weight,softmax"}, {"mixer": "softmax"}):
        model = build(no_token_positional_embeddings=True, **mixers)
        task = stateful(reset_at_eos=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LanguageModelingTask, "build_model", lambda *args, model=model: model)
            with pytest.raises(ValueError, match=r"^--reset-at-eos empties states, and softmax layers would read"):
                task.build_model(Namespace())
            stateful().build_model(Namespace())
            with pytest.raises(ValueError, match=r"^--sequence-parallel: softmax attention sees only its own worker's tokens; "):
                stateful(sequence_parallel=2).build_model(Namespace())


def test_curriculum_is_refused():
    with pytest.raises(ValueError, match=r"^--curriculum keeps the order of batches for some epochs, and streams always keep it"):
        stateful(curriculum=2)
    older = {name: value for name, value in vars(StatefulLanguageModelingConfig()).items() if name != "curriculum"}
    StatefulLanguageModelingTask(Namespace(**older), make_task(40).source_dictionary)  # of a checkpoint


@pytest.mark.parametrize("task, window", [(sliding, 0), (stateful, 64)])
def test_a_window_of_all_positions_is_not_all_of_a_stream(task, window):
    """Learned positions limit a text, whose past a window of as many tokens has; a stream goes on."""
    options = SMALL | {"decoder_learned_pos": True, "max_target_positions": 64, "mixer": "additive", "window_sizes": "63,64"}
    args = Namespace(arch="fast_weight_lm", criterion="cross_entropy", **vars(options_of("fast_weight_lm", **options)))
    assert [layer.self_attn.mixer.window for layer in task().build_model(args).decoder.layers] == [63, window]


def test_prompts_are_read_in_one_pass_if_no_generator_is_named():
    task, models = stateful(), [build()]
    kinds = [type(task.build_generator(models, Namespace(), **given)) for given in ({}, {"seq_gen_cls": SequenceGenerator})]
    assert kinds == [PromptedGenerator, SequenceGenerator]


def test_a_text_shorter_than_the_model_has_any_segment():
    task = stateful(tokens_per_sample=1000)
    assert len(task.get_batch_iterator(random_text(), max_sentences=2, max_positions=50)) == 1
    assert len(windows(tokens=7, max_positions=7)) == 2


@pytest.mark.parametrize("task", [sliding, stateful])
@pytest.mark.parametrize("option", [{"sample_break_mode": "eos"}, {"add_bos_token": True}, {"shorten_method": "truncate"}])
def test_a_text_is_not_cut_into_samples(task, option):
    [(name, value)] = option.items()
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {value}; this task reads all of test as one text"):
        task(data="nowhere", **option).load_dataset("test")


@pytest.mark.parametrize("task", [sliding, stateful])
def test_an_epoch_reads_its_folder(task, monkeypatch):
    """The first one, and one file of a split, if nothing else is said."""
    task, asked = task(data="a:b:c"), []
    monkeypatch.setattr(
        data_utils, "load_indexed_dataset", lambda path, *args, combine: asked.append((path, combine)) or [torch.arange(4, 9)]
    )
    task.load_dataset("test")
    for epoch in (1, 2, 3, 4):
        task.load_dataset("train", epoch=epoch, combine=True)
    assert asked == [("a/test", False), ("a/train", True), ("b/train", True), ("c/train", True), ("a/train", True)]


@pytest.mark.parametrize("task", [sliding, stateful])
def test_words_without_an_output_are_predicted_as_unknown(task, monkeypatch):
    task = task(tokens_per_sample=6, data="nowhere")
    task.output_dictionary = TruncatedDictionary(task.dictionary, 20)
    monkeypatch.setattr(data_utils, "load_indexed_dataset", lambda *args, **options: [torch.arange(4, 30), torch.arange(30, 40)])
    task.load_dataset("test")
    batches = list(task.eval_lm_dataloader(task.dataset("test")))
    assert torch.cat([x["target"].flatten() for x in batches]).tolist() == [*range(4, 20)] + [task.dictionary.unk()] * 20
    assert torch.cat([x["net_input"]["src_tokens"].flatten() for x in batches]).tolist() == [EOS, *range(4, 39)]


def of_fairseq(arch: str, task, **options):
    return task.build_model(Namespace(arch=arch, criterion="cross_entropy", **vars(options_of(arch, **SMALL))), **options).eval()


def test_windows_take_any_model():
    """Those that have outputs at every token, too, and in an ensemble."""
    task = sliding(tokens_per_sample=3)
    text, models = random_text(), [of_fairseq(arch, task) for arch in ("transformer_lm", "lstm_lm", "fast_weight_lm")]
    batches = list(task.eval_lm_dataloader(text, context_window=5))
    for model in models:
        for batch in batches:
            every, _ = type(model).forward(model, batch["net_input"]["src_tokens"])
            torch.testing.assert_close(model(**batch["net_input"])[0], every[:, -batch["target"].shape[1] :])
            torch.testing.assert_close(model(batch["net_input"]["src_tokens"])[0], every)
    assert sum(batch["ntokens"] for batch in batches) == 100
    assert eval_lm(models, task.dictionary, batches)["perplexity"] > 1


def test_streams_of_a_shard_that_is_not_there():
    """Nothing would be scored, which passes for a perplexity of 1."""
    with pytest.raises(ValueError, match="--shard-id is 2; it must be at least 0 and less than --num-shards, 2"):
        stateful(tokens_per_sample=8).eval_lm_dataloader(random_text(), shard_id=2, num_shards=2)


def test_streams_need_a_model_with_memories(monkeypatch):
    monkeypatch.setattr("fw_fairseq.patches.checkpoints.origin.origins", {})  # no other test's checkpoint was read last
    task, message = stateful(tokens_per_sample=8), "TransformerLanguageModel has none; use --task language_modeling"
    with pytest.raises(ValueError, match=message):
        of_fairseq("transformer_lm", task)
    model = of_fairseq("transformer_lm", task, from_checkpoint=True)
    model(torch.ones(1, 5, dtype=torch.long))  # single texts
    with pytest.raises(ValueError, match=message):  # before anything is loaded
        task.eval_lm_dataloader(random_text())
    with pytest.raises(ValueError, match=message):
        model(torch.ones(1, 5, dtype=torch.long), streams=None)
    with pytest.raises(ValueError, match=r"^--sequence-parallel: softmax attention sees only its own worker's tokens"):
        check_across_workers(model)
