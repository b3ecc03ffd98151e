"""A run resumes with the task, the dictionaries and the batches that it began with, and alone in its directory."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, FairseqDataset
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer
from support.commands import USER_DIR, fairseq, succeed
from support.runs import parameters

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches.checkpoints import saving as locks
from fw_fairseq.patches.checkpoints.origin import ORIGIN, dictionary_sums
from fw_fairseq.patches.training import say_what_does_not_fit
from fw_fairseq.patches.workers import suit_workers_to_cpus

SHAPE = (
    "--arch fast_weight_lm --decoder-layers 1 --decoder-embed-dim 8 --decoder-input-dim 8 --decoder-output-dim 8"
    " --decoder-ffn-embed-dim 8 --decoder-attention-heads 1 --optimizer adam --lr 0.01 --tokens-per-sample 16 --batch-size 4"
    " --disable-validation --no-epoch-checkpoints"
)

pytestmark = pytest.mark.usefixtures("one_thread")


def words(*symbols: str) -> Dictionary:
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


class Task:
    def __init__(self, source: Dictionary | None, target: Dictionary | None = None):
        self.source_dictionary, self.target_dictionary = source, source if target is None else target


def trainer(task: object, name: str = "language_modeling", reset_dataloader: bool = False) -> SimpleNamespace:
    cfg = Namespace(task=Namespace(_name=name), checkpoint=Namespace(reset_dataloader=reset_dataloader))
    return SimpleNamespace(task=task, cfg=cfg)


def saved_by(run: SimpleNamespace, position: int, **iterator) -> dict:
    """What the run's checkpoint holds besides the parameters."""
    state = Trainer.state_dict.changed_by(lambda trainer: {"extra_state": {}}, run)["extra_state"]
    return state | {"train_iterator": {"epoch": 1, "iterations_in_epoch": position} | iterator}


def resume(run: SimpleNamespace, saved: dict, **options: bool) -> dict:
    return say_what_does_not_fit(lambda *args, **kwargs: saved, run, "a.pt", **options)


AB, BA = words("a", "b"), words("b", "a")


@pytest.mark.parametrize(
    "task, said",
    [
        (Task(BA, AB), "the source dictionary of the data has other words, or another order, than that of a.pt; resume with"),
        (Task(AB, words("a", "c")), "the target dictionary of the data has other words, or another order"),
        (Task(words("a")), "the source dictionary of the data"),
    ],
)
@pytest.mark.parametrize("position", [0, 3])
def test_another_dictionary_is_refused(task, said, position, caplog):
    saved = saved_by(trainer(Task(AB)), position)
    with pytest.raises(ValueError, match=f"^{said}"):
        resume(trainer(task), saved)
    for same in (Task(words("a", "b")), Task(None)):  # a task without dictionaries has no other ones
        assert resume(trainer(same), saved) is saved
    resetting = trainer(task, reset_dataloader=True)
    for run, reset in ((trainer(task), True), (resetting, False)):  # each goes on with a part of the run
        with pytest.raises(ValueError, match=f"^{said}"):
            resume(run, saved, reset_optimizer=reset)
    tuning = trainer(task)
    tuning.cfg.checkpoint.finetune_from_model = "a.pt"
    for run in (resetting, tuning):
        caplog.clear()
        assert resume(run, saved, reset_optimizer=True) is saved
        assert "that of a.pt; the new run begins with that one's embeddings for its own words" in caplog.text


def test_a_missing_file_to_restore_is_refused():
    run = trainer(Task(AB))
    assert resume(run, None) is None  # a first run
    run.cfg.checkpoint.restore_file = "nope.pt"
    with pytest.raises(ValueError, match=r"^--restore-file is nope.pt, where there is no file; name the checkpoint"):
        resume(run, None)


def test_the_sum_is_of_the_words_and_their_order():
    dictionary = words("a", "b")
    dictionary.add_symbol("a", n=7)  # counts change no number of a word
    assert dictionary_sums(Task(dictionary)) == dictionary_sums(Task(AB)) != dictionary_sums(Task(BA))
    dictionary.add_symbol("c")
    assert dictionary_sums(Task(dictionary)) != dictionary_sums(Task(AB))
    assert dictionary_sums(Task(None)) == dictionary_sums(object()) == {}


def test_another_task_is_refused_within_an_epoch():
    one, other = trainer(Task(AB)), trainer(Task(AB), "stateful_language_modeling")
    for first, second in ((one, other), (other, one)):
        name, before = second.cfg.task._name, first.cfg.task._name
        for position in (1, 3):
            with pytest.raises(
                ValueError, match=f"^--task is {name}, but a.pt stopped within an epoch of {before}; resume with that"
            ):
                resume(second, saved_by(first, position))
        with pytest.raises(ValueError, match=r"^--task is"):
            resume(second, saved_by(first, 3), reset_optimizer=True)  # which keeps the place in the text
        resume(second, saved_by(first, 0))
        resume(second, saved_by(first, 0) | {"train_iterator": {"epoch": 2}})
        second.cfg.checkpoint.reset_dataloader = True
        resume(second, saved_by(first, 3))
        second.cfg.checkpoint.reset_dataloader = False


def test_checkpoints_of_before_load_with_a_line(caplog):
    caplog.set_level(logging.INFO)
    saved = saved_by(trainer(Task(AB)), 3)
    saved.pop(ORIGIN)
    assert resume(trainer(Task(BA)), saved) is saved
    assert "a.pt does not say its task and dictionaries; whether they are those of this run is not checked" in caplog.text
    saved["train_iterator"]["carried"] = []
    with pytest.raises(ValueError, match="stopped within an epoch of stateful_language_modeling"):
        resume(trainer(Task(AB)), saved)
    assert resume(trainer(Task(AB)), None) is None  # there was no checkpoint


class Sentences(FairseqDataset):
    """Twelve of one word, in an order that is drawn."""

    can_reuse_epoch_itr_across_epochs = True

    def __len__(self) -> int:
        return 12

    def num_tokens(self, index: int) -> int:
        return 1

    def ordered_indices(self) -> numpy.ndarray:
        return numpy.random.permutation(len(self))  # noqa: NPY002  (fairseq seeds this one)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("given, epoch", [({}, 1), ({"epoch": 1}, 1), ({"epoch": 3}, 3)], ids=str)
def test_a_run_has_the_batches_of_the_first_epoch_wherever_it_starts(given, epoch):
    """fairseq seeds the draw with the sum of its seed and an epoch."""
    task, sentences = FairseqTask(Namespace()), Sentences()
    iterator = task.get_batch_iterator(sentences, max_sentences=4, seed=7, **given)
    drawn = numpy.random.RandomState(7 + 1).permutation(12).reshape(3, 4)
    assert numpy.array_equal(iterator.frozen_batches, drawn)
    assert iterator.epoch == sentences.epoch == epoch
    assert task.get_batch_iterator(sentences, max_sentences=4, seed=7, epoch=epoch + 1) is iterator
    assert iterator.epoch == sentences.epoch == epoch  # which is its own to count


@pytest.mark.parametrize("why", ["disable_iterator_cache", "update_epoch_batch_itr", "a data set whose batches change"])
def test_batches_that_are_made_anew_are_those_of_their_epoch(why):
    sentences, options = Sentences(), {why: True}
    if why not in inspect.signature(FairseqTask.get_batch_iterator).parameters:
        sentences.can_reuse_epoch_itr_across_epochs, options = False, {}
    iterator = FairseqTask(Namespace()).get_batch_iterator(sentences, max_sentences=4, seed=7, epoch=3, **options)
    drawn = numpy.random.RandomState(7 + 3).permutation(12).reshape(3, 4)
    assert numpy.array_equal(iterator.frozen_batches, drawn) and iterator.epoch == 3


def test_resuming_on_the_command_line(stream_data, tmp_path):
    """Another task, and the same words in another order."""
    shutil.copytree(stream_data, tmp_path / "data")
    command = [tmp_path / "data", *SHAPE.split(), "--save-dir", tmp_path / "run", *USER_DIR]
    streams, blocks = (["--task", name] for name in ("stateful_language_modeling", "language_modeling"))
    succeed(fairseq("train", *command, *streams, "--max-update", 2))
    done = fairseq("train", *command, *blocks, "--max-update", 4)
    assert done.returncode == 1, done.stderr
    assert "--task is language_modeling, but " in done.stderr.splitlines()[-1]
    lines = (tmp_path / "data" / "dict.txt").read_text().splitlines(keepends=True)
    (tmp_path / "data" / "dict.txt").write_text("".join(reversed(lines)))
    done = fairseq("train", *command, *streams, "--max-update", 4)
    assert done.returncode == 1 and "the source dictionary of the data has other words, or another order" in done.stderr
    (tmp_path / "data" / "dict.txt").write_text("".join(lines))
    assert "Loaded checkpoint" in succeed(fairseq("train", *command, *streams, "--max-update", 3))


class Holder:
    """A process that holds the lock of a folder."""

    def __init__(self, folder: Path):
        ready, said = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            locks.lock(str(folder))
            os.write(said, b"locked")
            signal.pause()
        os.close(said)
        assert os.read(ready, 6) == b"locked"
        os.close(ready)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_second_run_in_a_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "held", {})
    holder = Holder(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^--save-dir is .*, where process {holder.pid} of .* is training; give another"):
            checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    holder.kill()
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "." / ""))  # the same run asks again
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} of ")
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "new" / "run"))
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == [".lock"]


def test_only_the_run_itself_has_its_lock(tmp_path, monkeypatch):
    """A loader process may outlive a run that was killed, and a program may train again after a run has ended."""
    monkeypatch.setattr(locks, "held", {})
    locks.lock(str(tmp_path))
    loader = os.fork()
    if not loader:
        signal.pause()
    distributed = Namespace(ddp_backend="legacy_ddp", distributed_backend="gloo")
    config = Namespace(distributed_training=distributed, common=Namespace(cpu=True), dataset=Namespace())
    suit_workers_to_cpus(lambda cfg, main: None, config, None)  # a run that ends
    assert not (tmp_path / ".lock").exists()
    Holder(tmp_path).kill()
    os.kill(loader, signal.SIGKILL)
    os.waitpid(loader, 0)


def test_a_file_that_another_run_removes_is_no_lock(tmp_path, monkeypatch):
    """Between the opening of the file and its lock."""
    monkeypatch.setattr(locks, "held", {})
    original, calls = locks.fcntl.lockf, []

    def lockf(*args):
        calls.append(args)
        if len(calls) < 3:
            (tmp_path / ".lock").unlink()
        if len(calls) == 2:
            (tmp_path / ".lock").write_text("of a third run")
        original(*args)

    monkeypatch.setattr(locks.fcntl, "lockf", lockf)
    locks.lock(str(tmp_path))
    assert len(calls) == 3 and (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} of ")


def test_a_directory_that_cannot_be_locked_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    opened = []

    def refuse(file, how):
        opened.append(file)
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    assert "cannot be locked (Operation not supported)" in caplog.text and len(opened) == 1


def test_averages_of_a_resumed_run(stream_data, tmp_path):
    """They go on from those that were saved, with all that a checkpoint of the model has."""
    command = [stream_data, *SHAPE.split(), "--task", "language_modeling", "--save-dir", tmp_path, *USER_DIR]
    command += ["--decoder-normalize-before", "--store-ema", "--ema-decay", 0.75, "--max-update"]
    before = {}
    for updates in (2, 3):
        succeed(fairseq("train", *command, updates))
        after, saved = parameters(tmp_path), torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["extra_state"]["ema"]
        assert "decoder.layer_norm.weight" in after and saved.keys() == after.keys()
        for name, mean in before.items():
            wanted = after[name] if name == "decoder.version" else 0.75 * mean + 0.25 * after[name]
            torch.testing.assert_close(saved[name], wanted)
        before = saved


def layers_in(state: dict) -> list[str]:
    return [f"{name}={x}" for name, x in sorted(state.items())]


@pytest.mark.parametrize(
    "encoder, decoder, left",
    [
        (None, "0,2", "decoder.layers.0.w=d0 decoder.layers.1.w=d2 decoder.w=d encoder.layers.0.w=e0 encoder.layers.1.w=e1"),
        ("1", None, "decoder.layers.0.w=d0 decoder.layers.1.w=d1 decoder.layers.2.w=d2 decoder.w=d encoder.layers.0.w=e1"),
        ("1", "2", "decoder.layers.0.w=d2 decoder.w=d encoder.layers.0.w=e1"),
        ("0,3", "1", "decoder.layers.0.w=d1 decoder.w=d encoder.layers.0.w=e0 encoder.layers.1.w=e1"),
    ],
)
def test_each_side_is_pruned_once(encoder, decoder, left):
    """The side that has no more layers than are kept was pruned before. The options stay for the next checkpoint."""
    state = {f"decoder.layers.{i}.w": f"d{i}" for i in range(3)} | {f"encoder.layers.{i}.w": f"e{i}" for i in range(2)}
    state["decoder.w"] = "d"
    cfg = Namespace(arch="transformer", encoder_layers_to_keep=encoder, decoder_layers_to_keep=decoder)
    once = checkpoint_utils.prune_state_dict(dict(state), cfg)
    assert layers_in(once) == left.split() == layers_in(checkpoint_utils.prune_state_dict(once, cfg))
    assert (cfg.encoder_layers_to_keep, cfg.decoder_layers_to_keep) == (encoder, decoder)


@pytest.mark.long
def test_a_run_that_keeps_some_layers_is_resumed_and_evaluated(stream_data, tmp_path):
    """From a checkpoint with all of them."""
    task = ["--task", "language_modeling", *SHAPE.split(), "--decoder-layers", 2]
    succeed(fairseq("train", stream_data, *task, "--max-update", 1, "--save-dir", tmp_path / "whole", *USER_DIR))
    pruned = [*task, "--decoder-layers-to-keep", 1, "--save-dir", tmp_path]
    pruned += ["--finetune-from-model", tmp_path / "whole" / "checkpoint_last.pt"]
    for updates in (2, 3):
        log = succeed(fairseq("train", stream_data, *pruned, "--max-update", updates, *USER_DIR))
        assert f"num_updates: {updates} >= max_update" in log
    assert not any(".layers.1." in name for name in parameters(tmp_path))
    options = ["--path", tmp_path / "checkpoint_last.pt", "--task", "language_modeling", "--tokens-per-sample", 16]
    assert "Perplexity: " in succeed(fairseq("eval_lm", stream_data, *options, "--gen-subset", "valid", *USER_DIR))
