"""fairseq's commands as a user runs them."""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
USER_DIR = ["--user-dir", ROOT / "fw_fairseq", "--cpu"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run(*command, cwd=None, **options):
    return subprocess.run([*map(str, command)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, **options)


def install_sdist(folder: Path) -> Path:
    """The package as it is distributed, made of what git has here and installed without its dependencies."""
    source, site = folder / "source", folder / "site"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    succeed(run(sys.executable, "-c", build, cwd=source))
    [sdist] = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    succeed(run(*pip, "--target", site, sdist))
    return site


@functools.cache
def preloaded():
    """Its processes are forks of one that has imported support.preload: a command starts without its imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preload"])
    with mock.patch.dict(os.environ, ENVIRONMENT | {"PYTHONPATH": str(ROOT / "tests")}, clear=True):
        forkserver.ensure_running()
    return context


class Command:
    """``python -m fairseq_cli.TOOL ARGS``, running."""

    def __init__(self, tool, *args, cwd=None, input="", target=None):
        self.args, self.folder = [f"fairseq_cli.{tool}", *map(str, args)], tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("stdin", "stdout", "stderr")]
        for path, text in zip(self.files, (input, "", "")):
            path.write_text(text)
        self.process = preloaded().Process(target=target or run_here, args=(self.args, cwd or os.getcwd(), self.files))
        self.process.start()

    def wait(self, timeout=300) -> subprocess.CompletedProcess:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout)
        with self.folder:
            return subprocess.CompletedProcess(self.args, self.process.exitcode, *(path.read_text() for path in self.files[1:]))


def fairseq(tool, *args, **options) -> subprocess.CompletedProcess:
    return Command(tool, *args, **options).wait()


def run_here(command: list[str], folder: str, files: list[Path]) -> None:
    for number, path in enumerate(files):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.stdin = os.fdopen(0)  # multiprocessing has closed it
    multiprocessing.set_start_method("fork", force=True)  # for processes of its own, as in a shell
    logging.root.handlers.clear()  # of imports; the command sets up its own
    os.chdir(folder)
    sys.argv = command
    try:
        importlib.import_module(command[0]).cli_main()
    except Exception:
        sys.excepthook(*sys.exc_info())  # multiprocessing would show it its own way
        sys.exit(1)


def succeed(done) -> str:
    """What a command printed, logs included."""
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def train_two_workers(*args) -> str:
    """fairseq-train in two processes of this machine; what the first one printed."""
    options = "--distributed-no-spawn --distributed-backend gloo --distributed-world-size 2 --distributed-rank"
    options = [
        "--ddp-backend",
        "legacy_ddp",
        *args,
        "--distributed-init-method",
        f"tcp://localhost:{free_port()}",
        *options.split(),
    ]
    workers = [Command("train", *options, rank, *USER_DIR) for rank in "01"]
    first, _ = [succeed(worker.wait()) for worker in workers]
    return first
