"""fairseq's commands as a user runs them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
USER_DIR = ["--user-dir", ROOT / "fw_fairseq", "--cpu", "--num-workers", 0]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run(*command, cwd=None, **options):
    return subprocess.run([*map(str, command)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, **options)


def fairseq(tool, *args, cwd=None, **options):
    return run(sys.executable, "-m", f"fairseq_cli.{tool}", *args, cwd=cwd, **options)


def succeed(done) -> str:
    """What a command printed, logs included."""
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def train_two_workers(*args) -> str:
    """fairseq-train in two processes of this machine; what the first one printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = [
        "--distributed-world-size",
        2,
        "--distributed-no-spawn",
        "--distributed-backend",
        "gloo",
        "--ddp-backend",
        "legacy_ddp",
    ]
    options += ["--distributed-init-method", f"tcp://localhost:{port}"]
    command = [*map(str, (sys.executable, "-m", "fairseq_cli.train", *args, *USER_DIR, *options, "--distributed-rank"))]
    workers = [
        subprocess.Popen([*command, rank], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in "01"
    ]
    printed = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(text[-3000:] for text in printed)
    return printed[0]
