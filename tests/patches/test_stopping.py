"""Signals that clusters send, and no GPUs: a run saves and says so by its exit code, and workers find each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from argparse import Namespace
from pathlib import Path

import fairseq_cli.train
import pytest
import torch
from support.commands import USER_DIR, Command, fairseq, succeed
from torch.multiprocessing import ProcessExitedException

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches import stopping
from fw_fairseq.patches.workers import suit_workers_to_cpus

TRAIN = (
    "--arch fast_weight_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16"
    " --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --tokens-per-sample 16 --dropout 0.1 --optimizer adam --lr 0.01"
    " --log-format simple --log-interval 1 --no-epoch-checkpoints --disable-validation --task stateful_language_modeling"
)
UPDATES = 100
WORKERS = "--distributed-no-spawn --distributed-world-size 2 --ddp-backend legacy_ddp"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    (folder / "train").write_text("\n".join(" ".join(f"word{draw.randrange(40)}" for _ in range(12)) for _ in range(900)) + "\n")
    both = ["--trainpref", folder / "train", "--validpref", folder / "train"]  # fairseq 0.12.2 opens the second in any case
    succeed(fairseq("preprocess", "--only-source", *both, "--destdir", folder / "bin"))
    return folder / "bin"


def training(data, folder, *more):
    return [data, *TRAIN.split(), "--save-dir", folder, "--max-update", UPDATES, *more, *USER_DIR]


def told_to_stop(workers: list[Command], number: signal.Signals) -> list:
    """What the workers leave behind after one of them gets the signal within an epoch."""
    while workers[0].process.is_alive() and "num_updates=5," not in workers[0].files[1].read_text():
        time.sleep(0.01)
    os.kill(workers[-1].process.pid, number)
    return [worker.wait() for worker in workers]


def parameters(folder) -> dict:
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


def test_a_run_that_is_told_to_stop_saves_and_resumes_as_if_it_had_not(data, tmp_path):
    command = training(data, tmp_path, "--batch-size", 4)
    [done] = told_to_stop([Command("train", *command)], signal.SIGTERM)
    assert done.returncode == stopping.EXIT_CODE == 75, done.stderr[-2000:]
    assert "SIGTERM stopped the run after update" in done.stdout + done.stderr
    stopped = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert 5 <= stopped["optimizer_history"][-1]["num_updates"] < UPDATES
    assert not (tmp_path / ".lock").exists()
    succeed(fairseq("train", *command))
    succeed(fairseq("train", *training(data, tmp_path / "whole", "--batch-size", 4)))
    one, two = parameters(tmp_path), parameters(tmp_path / "whole")
    assert all(one[name].equal(two[name]) for name in one if not name.endswith("_float_tensor"))
    complete = (tmp_path / "checkpoint_last.pt").read_bytes()
    assert f"the run was complete after {UPDATES} updates, by --max-update " in succeed(fairseq("train", *command))
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == complete


def test_all_workers_stop_if_one_is_told_to(data, tmp_path):
    """The second of two workers gets the signal. On CPUs they talk through gloo without being told to."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"tcp://localhost:{free.getsockname()[1]}"
    options = ["--batch-size", 2, *WORKERS.split(), "--distributed-init-method", meeting, "--distributed-rank"]
    workers = [Command("train", *training(data, tmp_path, *options, rank)) for rank in (0, 1)]
    done = told_to_stop(workers, signal.SIGUSR1)
    assert [worker.returncode for worker in done] == [75, 75], done[0].stderr[-2000:]
    assert "another worker's signal stopped the run" in done[0].stdout + done[0].stderr
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["extra_state"]["train_iterator"]
    assert len(state["carried"]) == 2, "the states of both workers' streams"


def stops_with(code: int) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(code))
    Path("ready").touch()
    signal.pause()


def test_a_process_that_starts_workers_passes_the_signals_on(tmp_path, monkeypatch):
    """fairseq-train does so for each of its GPUs. What it passes on ends the workers with a code, which becomes its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    distributed = Namespace(ddp_backend="legacy_ddp", distributed_backend="gloo", distributed_world_size=2)
    config = Namespace(distributed_training=distributed, common=Namespace(cpu=True), dataset=Namespace())

    def start_a_worker(cfg, main) -> None:
        worker = multiprocessing.get_context("fork").Process(target=stops_with, args=(75,))
        worker.start()
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        worker.join()
        raise ProcessExitedException("a worker ended", 0, worker.pid, exit_code=worker.exitcode)

    with pytest.raises(SystemExit) as ended:
        suit_workers_to_cpus(start_a_worker, config, fairseq_cli.train.main)
    assert ended.value.code == 75 and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_run_that_has_ended_is_not_stopped_and_signals_are_given_back():
    handler = signal.getsignal(signal.SIGTERM)
    stopping.listen()
    assert signal.getsignal(signal.SIGTERM) is not handler
    stopping.received.append(signal.SIGTERM)
    distributed = Namespace(ddp_backend="legacy_ddp", distributed_backend="nccl", distributed_world_size=1)
    config = Namespace(distributed_training=distributed, common=Namespace(cpu=True), dataset=Namespace())
    suit_workers_to_cpus(lambda cfg, main: None, config, None)
    assert signal.getsignal(signal.SIGTERM) == handler and not stopping.received
    assert distributed.distributed_backend == "gloo"


def settings(most: int, hours: float = 0, saving: int = 0, validating: int = 0, waits: bool = False) -> Namespace:
    checkpoint = Namespace(no_save=False, no_last_checkpoints=False, write_checkpoints_asynchronously=waits)
    checkpoint.save_interval_updates = saving
    optimization = Namespace(max_update=most, stop_time_hours=hours)
    dataset = Namespace(validate_interval_updates=validating, disable_validation=False)
    return Namespace(optimization=optimization, checkpoint=checkpoint, dataset=dataset)


def trainer_after(updates: int, seconds: float = 0) -> Namespace:
    return Namespace(get_num_updates=lambda: updates, cumulative_training_time=lambda: seconds, device=torch.device("cpu"))


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """What a run that has got a signal does: "saved" where it saves."""
    found = []
    monkeypatch.setattr(stopping, "listen", lambda: None)
    monkeypatch.setattr(stopping, "received", [signal.SIGUSR1])
    monkeypatch.setattr(stopping.checkpoint_utils, "save_checkpoint", lambda *args: found.append("saved"))
    return found


@pytest.mark.parametrize(
    "no_save, no_last, kept",
    [
        (False, False, "with a checkpoint"),
        (True, False, "without a checkpoint"),
        (False, True, "without a checkpoint"),
    ],
)
def test_it_says_whether_a_checkpoint_is_there(done, caplog, no_save, no_last, kept):
    config, trainer = settings(9), trainer_after(3)
    config.checkpoint.no_save, config.checkpoint.no_last_checkpoints = no_save, no_last
    with pytest.raises(SystemExit) as ended, caplog.at_level("INFO"):
        stopping.save_and_exit_if_told(None, config, trainer, None, None, [], False)
    assert ended.value.code == stopping.EXIT_CODE and len(done) == 1
    assert f"SIGUSR1 stopped the run after update 3, {kept}; exit code 75" in caplog.text


def test_the_function_of_fairseq_train_is_replaced_once_wherever_it_is(monkeypatch):
    started, other = Namespace(validate_and_save=lambda *args: None, train=lambda *args: None), Namespace(train=print)
    save, train = started.validate_and_save, started.train
    monkeypatch.setitem(sys.modules, "fairseq_cli.train", other)
    monkeypatch.setitem(sys.modules, "__mp_main__", started)
    for _ in range(2):
        stopping.save_when_told_to_stop()
        stopping.leave_complete_runs_alone()
    assert started.validate_and_save.__wrapped__ is save and started.train.__wrapped__ is train and vars(other) == {"train": print}


def should_stop_early():
    """In place of fairseq's function of this name, which keeps what --patience counts."""


@pytest.mark.parametrize(
    "updates, seconds, most, hours, patience, trains",
    [
        (8, 0, 9, 0, 0, True),
        (9, 0, 9, 0, 0, False),
        (10, 0, 9, 0, 0, False),
        (9, 99, 0, 0, -1, True),
        (9, 1800, 0, 0.5, 0, True),  # fairseq stops after the time, not at it
        (9, 1801, 0, 0.5, 0, False),
        (9, 1801, 9, 0.5, 0, False),
        (8, 0, 9, 0, 3, True),
        (8, 0, 9, 0, 2, False),
        (8, 0, 9, 0, 1, False),
    ],
)
def test_a_complete_run_trains_no_further(updates, seconds, most, hours, patience, trains):
    """No limit is a 0. Two validations have brought nothing."""
    read = {"best": 1.0, "num_runs": 2}
    trainer = Namespace(get_num_updates=lambda: updates, _previous_training_time=seconds, patience_read=read)
    config = Namespace(optimization=Namespace(max_update=most, stop_time_hours=hours), checkpoint=Namespace(patience=patience))
    done = stopping.train_unless_complete(lambda *args: args, config, trainer, "task", "iterator")
    assert done == ((config, trainer, "task", "iterator") if trains else ([None], True))


@pytest.mark.parametrize(
    "updates, most, hours, goes_on",
    [(8, 9, 0, False), (9, 9, 0, True), (10, 9, 0, True), (9, 0, 0, False), (8, 9, 0.5, True), (8, 0, 1.5, False)],
)
def test_a_run_that_has_made_all_updates_ends_as_without_a_signal(updates, most, hours, goes_on, done):
    """Or whose time is over, here after an hour. No limit is a 0."""
    config, trainer = settings(most, hours), trainer_after(updates, 3600)
    with contextlib.nullcontext() if goes_on else pytest.raises(SystemExit):
        stopping.save_and_exit_if_told(lambda *args: done.append("as ever"), config, trainer, None, None, [], False)
    assert done == ["as ever" if goes_on else "saved"]


@pytest.mark.parametrize(
    "main, workers, gpus, launched, passed_on",
    [
        (fairseq_cli.train.main, 2, 2, False, True),
        (fairseq_cli.train.main, 1, 2, False, False),
        (fairseq_cli.train.main, 2, 1, False, False),
        (fairseq_cli.train.main, 2, 2, True, False),
        (print, 2, 2, False, False),
    ],
)
def test_signals_are_passed_on_by_the_parent_of_several_workers_only(main, workers, gpus, launched, passed_on, monkeypatch):
    """fairseq-train starts one for each GPU, unless another program, such as torchrun, has started them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK") if launched else ():
        monkeypatch.setenv(name, "1")
    config = Namespace(distributed_training=Namespace(distributed_world_size=workers))
    with stopping.as_parent_of_workers(main, config):
        assert [signal.getsignal(number) == stopping.pass_on for number in stopping.SIGNALS] == [passed_on] * 2


def test_at_the_end_of_an_epoch_it_waits_for_what_is_being_written(done, monkeypatch):
    """A cluster may not wait for the validation, which the run that resumes makes up for. Workers wait for the one that writes."""
    monkeypatch.setattr(stopping.PathManager, "async_close", lambda: done.append("written"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: done.append("waited"))
    config, trainer = settings(9, waits=True), trainer_after(3)
    with pytest.raises(SystemExit):
        stopping.save_and_exit_if_told(lambda *args: done.append("validated"), config, trainer, None, Namespace(epoch=2), [], True)
    assert done == ["saved", "written", "waited"] and trainer.validation_due == 2


@pytest.mark.parametrize("of", ["a process that loads data", "a process without workers"])
def test_signals_end_other_processes_as_before(of, monkeypatch):
    def ended_by_it() -> None:
        signal.signal(signal.SIGTERM, stopping.note if of == "a process that loads data" else stopping.pass_on)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)  # not reached

    monkeypatch.setattr(stopping, "listening", [os.getpid()])
    process = multiprocessing.get_context("fork").Process(target=ended_by_it)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize(
    "updates, saving, validating, validates",
    [(6, 0, 0, False), (6, 3, 0, True), (6, 0, 2, True), (6, 4, 0, False), (6, 0, 5, False), (6, 4, 3, True)],
)
def test_a_validation_that_is_due_is_not_lost(updates, saving, validating, validates, done):
    """Within an epoch: the run that resumes begins with it."""
    config, trainer = settings(9, saving=saving, validating=validating), trainer_after(updates)
    with pytest.raises(SystemExit):
        stopping.save_and_exit_if_told(lambda *args: done.append("validated"), config, trainer, None, None, [], False)
    assert done == ["saved"] and getattr(trainer, "validation_due", None) == (0 if validates else None)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("interval", [7, 0], ids=["within an epoch", "at the end of all updates"])
def test_a_validation_ends_at_the_next_batch_and_is_made_up_for(interval, data, tmp_path):
    """The run that resumes has the best checkpoint and the validations of a run that was not stopped."""
    command = ["--batch-size", 4, "--save-interval-updates", interval, "--keep-interval-updates", 1, "--max-update", 14]
    command = [word for word in training(data, tmp_path / "stopped", *command) if word != "--disable-validation"]
    run = Command("train", *command)
    while run.process.is_alive() and 'begin validation on "valid"' not in run.files[1].read_text():
        time.sleep(0.01)
    os.kill(run.process.pid, signal.SIGTERM)
    done = run.wait()
    log = done.stdout + done.stderr
    assert done.returncode == 75 and "SIGTERM received: the run saves and stops" in done.stderr, log[-2000:]
    assert f"SIGTERM stopped the run after update {interval or 14}, with a checkpoint" in log and "valid | epoch" not in log
    resumed = succeed(fairseq("train", *command))
    command[command.index(tmp_path / "stopped")] = tmp_path / "whole"
    whole = succeed(fairseq("train", *command))
    found, expected = (re.findall(r"valid \| epoch.* loss ([\d.]+) .*num_updates (\d+)", text) for text in (resumed, whole))
    assert found == expected and len(found) == (2 if interval else 1)
    for name in ("best", "last"):
        one, two = (
            torch.load(tmp_path / run / f"checkpoint_{name}.pt", weights_only=True)["model"] for run in ("stopped", "whole")
        )
        assert all(one[key].equal(two[key]) for key in one if not key.endswith("_float_tensor")), name
    assert not interval or re.findall(r" wall[= ](\d+)", resumed)[-1] != "0"


def test_a_validation_that_is_due_is_left_out_where_there_is_none():
    trainer, options = Namespace(validation_due=2), Namespace(dataset=Namespace(disable_validation=True))
    assert stopping.validate_first({}, options, trainer, None, None) == ([None], False) and trainer.validation_due is None
