"""A learning rate or an end that follows the validation loss comes after a stop as if there had been none."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from support.commands import USER_DIR, fairseq, succeed
from support.runs import parameters, updates

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches.checkpoints.saving import go_on_counting, judge_the_last_epoch, patience_of
from fw_fairseq.tasks.until_solved import UntilSolved

MODEL = (
    "--task language_modeling --tokens-per-sample 16 --batch-size 16 --optimizer adam --lr 0.3 --arch fast_weight_lm"
    " --decoder-layers 1 --decoder-embed-dim 8 --decoder-input-dim 8 --decoder-output-dim 8 --decoder-ffn-embed-dim 8"
    " --decoder-attention-heads 1"
)
PLATEAU = "--lr-scheduler reduce_lr_on_plateau --lr-shrink 0.5 --lr-patience 1 --lr-threshold 0.2"

pytestmark = pytest.mark.usefixtures("one_thread")


def train(data, folder, epochs: int, *more) -> dict[int, float]:
    """The learning rate of each update."""
    options = [*MODEL.split(), *PLATEAU.split(), "--max-epoch", epochs, "--save-dir", folder, "--no-epoch-checkpoints", *more]
    logged = updates(succeed(fairseq("train", data, *options, "--log-format", "json", "--log-interval", 1, *USER_DIR)))
    return {update: float(entry["lr"]) for update, entry in logged.items()}


@pytest.mark.long
def test_a_run_that_stops_between_epochs_keeps_its_learning_rates(stream_data, tmp_path):
    whole = train(stream_data, tmp_path / "whole", 6)
    assert len(set(whole.values())) == 3  # no epoch is better than the one before by a fifth: the rate falls after every second one
    parts = {}
    for epochs in (2, 3, 6):
        parts |= train(stream_data, tmp_path / "parts", epochs)
    assert parts == whole
    expected, found = parameters(tmp_path / "whole"), parameters(tmp_path / "parts")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_new_run_from_old_parameters_does_not_follow_their_loss(stream_data, tmp_path):
    train(stream_data, tmp_path / "old", 3)
    old = tmp_path / "old" / "checkpoint_last.pt"
    fresh = train(stream_data, tmp_path / "new", 2, "--finetune-from-model", old)
    shutil.copytree(tmp_path / "old", tmp_path / "reset")
    reset = train(stream_data, tmp_path / "reset", 4, "--reset-lr-scheduler", "--reset-optimizer")
    assert set(fresh.values()) == {0.3} == {next(iter(reset.values()))}


@pytest.mark.parametrize(
    "iterations, epoch, following, loss, judged",
    [
        (0, 3, 3, 5.0, [(2, 5.0)]),
        (0, 2, 2, 5.0, [(1, 5.0)]),
        (1, 3, 3, 5.0, []),
        (7, 3, 3, 5.0, []),
        (0, 3, 4, 5.0, []),
        (0, 1, 1, 5.0, []),
        (0, 3, 3, None, []),
    ],
    ids=["between epochs", "after the first", "after an update", "within an epoch", "at its end", "before the first", "no loss"],
)
def test_the_scheduler_sees_a_loss_that_it_has_not_seen(iterations, epoch, following, loss, judged):
    """That of the epoch before, once: a checkpoint within an epoch has a loss, too, if validation ran there."""
    seen = []
    scheduler = ReduceLROnPlateauLRSchedule.__new__(ReduceLROnPlateauLRSchedule)
    trainer = SimpleNamespace(lr_scheduler=scheduler, lr_step=lambda *args: seen.append(args))
    extra = {"train_iterator": {"iterations_in_epoch": iterations, "epoch": epoch}, "val_loss": loss}
    found = extra, SimpleNamespace(next_epoch_idx=following)
    config = SimpleNamespace(reset_optimizer=False, reset_lr_scheduler=False)
    assert judge_the_last_epoch(lambda cfg, trainer: found, config, trainer) == found
    assert seen == judged
    for option in ("reset_optimizer", "reset_lr_scheduler"):
        seen.clear()
        judge_the_last_epoch(lambda cfg, trainer: found, SimpleNamespace(**vars(config) | {option: True}), trainer)
        assert seen == []
    trainer.lr_scheduler = UntilSolved.__new__(UntilSolved)
    judge_the_last_epoch(lambda cfg, trainer: found, config, trainer)
    assert seen == judged
    seen.clear()
    trainer.lr_scheduler = object()
    assert judge_the_last_epoch(lambda cfg, trainer: found, config, trainer) == found and seen == []


def test_bad_epochs_are_counted_from_0_where_a_checkpoint_has_no_count():
    """As in the checkpoints of fairseq itself."""
    scheduler = SimpleNamespace(lr_scheduler=SimpleNamespace(num_bad_epochs=4))
    load = ReduceLROnPlateauLRSchedule.load_state_dict.changed_by
    for state, count in (({}, 0), ({"num_bad_epochs": 3}, 3)):
        load(lambda *args: None, scheduler, state)
        assert scheduler.lr_scheduler.num_bad_epochs == count


def epochs_of(data, folder, last: int, *more) -> list[int]:
    """The epochs that a run of up to ``last`` trains, one validation each."""
    options = [*MODEL.split(), "--max-epoch", last, "--save-dir", folder, "--no-epoch-checkpoints", *more]
    printed = succeed(fairseq("train", data, *options, "--log-format", "json", *USER_DIR))
    return [json.loads(line)["epoch"] for line in re.findall(r"\| valid \| (\{.*\})", printed)]


@pytest.mark.long
def test_patience_counts_on_after_a_stop(stream_data, tmp_path):
    """Without learning no validation is better than the first one. A run that has ended trains on where more patience is given, or
    as a new run."""
    still = ("--lr", 0, "--patience")
    runs = [(2, 3), (9, 3), (9, 3), (9, 5)]
    assert [epochs_of(stream_data, tmp_path / "parts", last, *still, patience) for last, patience in runs] == [
        [1, 2], [3, 4], [], [5, 6]
    ]  # fmt: skip
    extra = torch.load(tmp_path / "parts" / "checkpoint_last.pt", weights_only=True)["extra_state"]
    assert extra["patience"] == {"best": extra["best"], "num_runs": 5}
    old = tmp_path / "parts" / "checkpoint_last.pt"
    assert epochs_of(stream_data, tmp_path / "new", 9, *still, 2, "--finetune-from-model", old) == [1, 2, 3]


def test_a_solved_run_trains_no_further(stream_data, tmp_path):
    options = ["--lr-scheduler", "until_solved", "--target-loss", 100, "--stop-min-lr", 0]
    assert [epochs_of(stream_data, tmp_path, 3, *options) for _ in range(2)] == [[1], []]


def test_what_was_counted_belongs_to_one_run():
    """The next one in the same process begins with what its own checkpoint says, and this once."""

    def counter():
        pass

    counter.best, counter.num_runs = 1.0, 4
    trainer = SimpleNamespace(patience_read={"best": 3.0, "num_runs": 2, "other": 1})
    go_on_counting(counter, trainer)
    assert vars(counter) == {"best": 3.0, "num_runs": 2} == patience_of(trainer)
    counter.num_runs = 3
    go_on_counting(counter, trainer)
    assert patience_of(trainer)["num_runs"] == 3
    go_on_counting(counter, SimpleNamespace(patience_read={}))
    assert vars(counter) == {} == patience_of(SimpleNamespace())
