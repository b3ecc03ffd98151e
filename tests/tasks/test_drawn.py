"""mqar and state_tracking: what they ask for, and that a language model trains on them."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from fairseq.tasks.language_modeling import LanguageModelingConfig
from support.commands import USER_DIR, fairseq, succeed
from support.recipes import recipe

from fw_fairseq.tasks.drawn import DrawnBatches, DrawnTextConfig
from fw_fairseq.tasks.mqar import MqarConfig, MqarTask
from fw_fairseq.tasks.state_tracking import StateTrackingConfig, StateTrackingTask

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(task, split="train", index=0) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The numbers of the symbols of source and target, -1 where nothing is scored, and the batch."""
    task.load_dataset(split)
    found = task.dataset(split)[index]
    first = task.source_dictionary.nspecial
    target = found["target"].masked_fill(found["target"] == task.source_dictionary.pad(), first - 1) - first
    return found["net_input"]["src_tokens"] - first, target, found


def mqar(**options) -> MqarTask:
    return MqarTask(MqarConfig(**{"batch_size": 3, "seed": 1, "pairs": 5, "symbols": 20} | options))


def tracking(**options) -> StateTrackingTask:
    return StateTrackingTask(StateTrackingConfig(**{"batch_size": 3, "seed": 1, "length": 9} | options))


def test_every_pair_is_asked_for_once():
    source, target, found = batch(mqar())
    assert source.shape == target.shape == (3, 15) and (target[:, :10] == -1).all() and found["ntokens"] == 15
    for tokens, answers in zip(source.tolist(), target.tolist()):
        told = dict(zip(tokens[:10:2], tokens[1:10:2]))
        assert len(told) == 5 and all(key < 10 <= value < 20 for key, value in told.items())
        assert sorted(tokens[10:]) == sorted(told) and tokens[10:] != tokens[:10:2]
        assert [told[key] for key in tokens[10:]] == answers[10:]
    assert not torch.equal(batch(mqar(), index=1)[0], source) and not torch.equal(batch(mqar(seed=2))[0], source)


def test_validation_has_its_own_size():
    source, _, found = batch(mqar(evaluation_pairs=7, evaluation_sequences=4), "valid")
    assert source.shape == (4, 21) and found["nsentences"] == 4
    assert batch(mqar(), "valid")[0].shape == (64, 15)
    assert batch(tracking(), "valid")[0].shape == (64, 512) and batch(tracking(evaluation_length=0), "test")[0].shape == (64, 9)


def test_no_batch_is_drawn_twice_but_those_that_score():
    """Of three epochs of two updates, by all splits and two seeds. An epoch's batches are the same ones when it is run again."""
    drawn = []
    for seed in (1, 2):
        task = mqar(seed=seed, updates_per_epoch=2)
        for split in ("train", "valid", "test"):
            task.load_dataset(split)
        assert len(task.dataset("valid")) == len(task.dataset("test")) == 1
        for epoch in (1, 2, 3):
            iterator = task.get_batch_iterator(task.dataset("train"), epoch=epoch).next_epoch_itr(shuffle=False)
            drawn += [found["net_input"]["src_tokens"] for found in iterator]
            scored = [batch(task, split)[2]["net_input"]["src_tokens"] for split in ("valid", "test")]
            if epoch == 1:
                drawn += [x[:3] for x in scored]
                first = scored
            assert all(map(torch.equal, scored, first))
    assert len({tuple(x.flatten().tolist()) for x in drawn}) == len(drawn) == 2 * (3 * 2 + 2)
    again = task.get_batch_iterator(task.dataset("train"), epoch=3).next_epoch_itr(shuffle=False)
    assert [next(again)["net_input"]["src_tokens"].tolist() for _ in range(2)] == [x.tolist() for x in drawn[-2:]]


@pytest.mark.parametrize(
    "split, epoch, index, seed",
    [("train", 1, 0, 3_000_000_000), ("train", 3, 1, 3_000_000_005), ("valid", 3, 0, 4_000_000_000), ("test", 1, 0, 5_000_000_000)],
)
def test_a_run_of_another_version_draws_the_same_batches(split, epoch, index, seed):
    """Results can be had again, and a checkpoint, which has the number of its batch only, goes on with the next one."""
    task = tracking(updates_per_epoch=2, evaluation_sequences=3, evaluation_length=0)
    task.load_dataset(split)
    if epoch != 1:  # which it is at first
        task.dataset(split).set_epoch(epoch)
    expected = torch.randint(2, (3, 9), generator=torch.Generator().manual_seed(seed))
    found = task.dataset(split)[index]["net_input"]["src_tokens"] - task.source_dictionary.nspecial
    assert torch.equal(found, expected)


def test_a_batch_as_fairseq_takes_it():
    task = mqar()
    *_, found = batch(task)
    assert found["id"].tolist() == [0, 1, 2] and found["net_input"]["src_lengths"].tolist() == [15] * 3
    assert found["net_input"]["src_tokens"].min() >= task.dictionary.nspecial and task.target_dictionary is task.dictionary
    assert task.max_positions() is None and task.dataset("train").collater([]) == {}


@pytest.mark.parametrize("group, modulus, size", [("parity", 5, 2), ("modular", 7, 7)])
def test_sums(group, modulus, size):
    source, target, _ = batch(tracking(group=group, modulus=modulus))
    assert torch.equal(target, source.cumsum(1) % size) and source.max() == size - 1


@pytest.mark.parametrize("group, things", [("s3", 3), ("s5", 5)])
def test_products_of_permutations(group, things):
    """Element i is the i-th in the order of Python: applying one after the other to the things gives the state."""
    elements, unit = list(itertools.permutations(range(things))), torch.eye(things)
    source, target, _ = batch(tracking(group=group))
    for tokens, states in zip(source.tolist(), target.tolist()):
        product = unit
        for token, state in zip(tokens, states):
            product = product @ unit[list(elements[token])].T
            assert torch.equal(product, unit[list(elements[state])].T)


@pytest.mark.parametrize(
    "make, options, message",
    [
        (mqar, {"evaluation_pairs": 11}, "^a sequence has 11 pairs, and --symbols 20 makes 10 keys; use at most that many$"),
        (mqar, {"batch_size": None}, "^mqar needs --batch-size, the sequences of a mini-batch$"),
        (tracking, {"shortest_length": 10}, "^--shortest-length is 10; it must be at most --length, 9$"),
        (mqar, {"add_bos_token": True}, "^--add-bos-token has no effect on sequences that mqar draws; leave it out$"),
        (tracking, {"max_tokens": 64}, "^--max-tokens has no effect on sequences that state_tracking draws; leave it out$"),
        (tracking, {"length": 0}, "^--length is 0; it must be at least 1$"),
        (tracking, {"group": "modular", "modulus": -5}, "^--modulus is -5; it must be at least 2$"),
    ],
)
def test_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(ValueError, match="has no split 'dev'; it has: train, valid, test"):
        mqar().load_dataset("dev")


OPTIONS = {"batch_size": 2, "seed": 2, "updates_per_epoch": 3, "evaluation_sequences": 7}


@pytest.mark.parametrize(
    "make, name, value",
    [(make, *given) for make in (mqar, tracking) for given in OPTIONS.items()]
    + [(mqar, "pairs", 6), (mqar, "evaluation_pairs", 4), (mqar, "symbols", 30)]
    + [(tracking, "group", "s5"), (tracking, "length", 8), (tracking, "shortest_length", 2), (tracking, "evaluation_length", 11)],
)
def test_every_option_changes_the_batches(make, name, value):
    def drawn(task):
        counts = [len(DrawnBatches(task, split)) for split in ("train", "valid")]
        return counts, [batch(task, split)[0].tolist() for split in ("train", "valid")]

    assert drawn(make()) == drawn(make()) != drawn(make(**{name: value}))


def test_training(tmp_path):
    """Parity by a write that turns around: sequences four times as long as those of training are right to the end."""
    sizes = [f"--decoder-{name}-dim" for name in ("embed", "input", "output", "ffn-embed")]
    command = f"""--task state_tracking --length 8 --evaluation-length 32 --evaluation-sequences 16
        --arch fast_weight_lm --decoder-layers 1 {" 16 ".join(sizes)} 16 --decoder-attention-heads 1
        --no-token-positional-embeddings --update-rule delta --feature-map identity --feature-norm l2 --negative-eigenvalues
        --write-strength-init 0.5 --dropout 0 --criterion label_smoothed_cross_entropy --report-accuracy --label-smoothing 0
        --optimizer adam --lr 0.02 --batch-size 32 --max-update 100 --log-format simple --no-save --save-dir {tmp_path}"""
    found = succeed(fairseq("train", *USER_DIR, *command.split()))
    scores = re.findall(r"valid on.*accuracy ([\d.]+)", found)
    assert scores and float(scores[-1]) > 99


def test_drawn_text_has_the_defaults_of_fairseqs_language_models():
    for name in ("tokens_per_sample", "add_bos_token", "max_target_positions"):
        assert getattr(DrawnTextConfig(), name) == LanguageModelingConfig.__dataclass_fields__[name].default, name


def test_sizes_if_nothing_else_is_said():
    mqar, group = MqarConfig(), StateTrackingConfig()
    assert (mqar.pairs, mqar.evaluation_pairs, mqar.symbols) == (64, 0, 8192)
    assert (str(group.group), group.modulus) == ("parity", 5)
    assert (group.length, group.shortest_length, group.evaluation_length) == (128, 0, 512)
    assert (group.updates_per_epoch, group.evaluation_sequences) == (100, 64)


def test_the_smallest_sizes():
    """One pair of two symbols; one element of a group of two. One worker reads the first epoch itself, if nothing else is said."""
    least = {"updates_per_epoch": 1, "evaluation_sequences": 1}
    task = mqar(pairs=1, symbols=2, **least)
    assert batch(task, "valid")[0].tolist() == [[0, 1, 0]]
    iterator = task.get_batch_iterator(task.dataset("valid"))
    assert (iterator.epoch, iterator.num_shards, iterator.shard_id, iterator.num_workers) == (1, 1, 0, 0)
    assert batch(tracking(group="modular", modulus=2, length=1, **least))[0].shape == (3, 1)
    assert batch(tracking(group="modular", modulus=2, evaluation_length=1, **least), "valid")[0].shape == (1, 1)


@pytest.mark.long
def test_probes_by_the_recipe(tmp_path):
    """Each training is asked at all sizes; a second call trains nothing, and prints the same."""
    rows = "s3-delta_product-3-negative", "recall-sum_elu-w32"
    printed = succeed(recipe("synthetic/probe.sh", tmp_path / "out", *rows))
    out = tmp_path / "out_toy"
    lines = [line for name in ("s3", "recall") for line in (out / f"{name}.txt").read_text().splitlines()]
    assert [line.rpartition(" ")[0] for line in lines] == [
        *("delta_product-3-negative 8", "delta_product-3-negative 16", "sum_elu-w32 4", "sum_elu-w32 8")
    ]
    assert all(line in printed for line in lines)
    asked = [(out / "probes" / name).read_text() for name in ("s3-delta_product-3-negative/16.log", "recall-sum_elu-w32-8/8.log")]
    assert all(f'"test_accuracy": "{line.split()[-1]}"' in log for log, line in zip(asked, (lines[1], lines[3])))
    assert '"test_total": "64"' in asked[0]  # 4 sequences of 16 elements
    trained = [
        (out / "probes" / name / "train.log").read_text() for name in ("s3-delta_product-3-negative", "recall-sum_elu-w32-8")
    ]
    assert ["--decoder-embed-dim 16 " in trained[0], "--decoder-embed-dim 32 " in trained[1]] == [True, True]
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.log")}
    assert succeed(recipe("synthetic/probe.sh", tmp_path / "out", *rows)).splitlines() == lines
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.log")}
    assert succeed(recipe("synthetic/probe.sh", tmp_path / "out", *rows, SIZES="8")).splitlines() == [lines[0], lines[3]]
    probe = out / "probes" / "s3-delta_product-3-negative"
    other = "--lr", 0.01
    done = recipe("synthetic/probe.sh", tmp_path / "out", rows[0], *other, UPDATES="9")
    assert done.returncode == 1 and done.stdout == ""
    assert f"{probe} was made with no options, not with UPDATES=9 --lr 0.01; set OUT to another folder" in done.stderr
    (probe / "options").unlink()
    assert (
        f"{probe} was made with unknown options, not with" in recipe("synthetic/probe.sh", tmp_path / "out", rows[0], *other).stderr
    )


@pytest.mark.long
def test_a_probe_that_could_not_begin_is_not_held_to_its_options(tmp_path):
    row = "parity-delta-negative"
    assert recipe("synthetic/probe.sh", tmp_path / "out", row, "--lrr", 3).returncode
    assert succeed(recipe("synthetic/probe.sh", tmp_path / "out", row)).startswith("delta-negative 8 ")


@pytest.mark.parametrize(
    "row, message",
    [
        ("parity", "ROW is parity; it must be TASK-MODEL, for example recall-delta"),
        ("recall-softmax", "MODEL must be a rule of recipes/mixers.sh: "),
        ("recall-delta-w0", "MODEL must be a rule of recipes/mixers.sh: "),
        ("s5-delta-parts-x", "MODEL must be a rule of recipes/mixers.sh: "),
    ],
)
def test_probes_that_are_not_there(row, message, tmp_path):
    done = recipe("synthetic/probe.sh", tmp_path, "parity-delta", row)
    assert done.returncode and message in done.stderr and not list(tmp_path.iterdir())
