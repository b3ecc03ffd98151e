"""The programs that recipes call, as forks of one process that has imported fairseq: each starts in a moment instead of seconds.

``folder()`` is a BIN for recipes; ``python -m support.programs SOCKET`` is the process behind it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.commands import ENVIRONMENT

FAIRSEQ = {
    f"fairseq-{name.replace('_', '-')}": f"fairseq_cli.{name}"
    for name in ("train", "eval_lm", "generate", "interactive", "preprocess", "validate")
}
PRELOADED = ("fairseq.trainer", "fairseq.tasks.translation", "fairseq.models.transformer_lm")
CALLER = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    said = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(said).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(said)
    sys.exit(int(server.recv(8) or b"70"))
"""


@functools.cache
def folder() -> str:
    """Made when it is first asked for; its process ends with this one."""
    path = Path(tempfile.mkdtemp())
    address = str(path / "socket")
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "support.programs", address]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, cwd=path)
    atexit.register(shutil.rmtree, path)
    for name in ("python", *FAIRSEQ):
        (path / name).write_text(CALLER.format(python=sys.executable, path=address))
        (path / name).chmod(0o755)
    for name in ("sacremoses", "sacrebleu", "subword-nmt", "torchrun"):
        (path / name).symlink_to(Path(sys.executable).with_name(name))
    while not Path(address).exists():
        assert process.poll() is None
        time.sleep(0.1)
    return str(path)


def serve(address: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    logging.root.handlers.clear()  # of imports; each program sets up its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no program waits to be asked how it ended
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.part")
        server.listen()
        os.rename(f"{address}.part", address)
        while select.select([server, sys.stdin], [], [])[0] == [server]:  # at the end of the tests stdin ends
            caller, _ = server.accept()
            length, files, *_ = socket.recv_fds(caller, 4, 3)
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                said = caller.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
                caller.sendall(b"%d" % run(files, *json.loads(said)))
                os._exit(0)
            caller.close()
            for file in files:
                os.close(file)


def run(files: list[int], arguments: list[str], where: str, environment: dict[str, str]) -> int:
    """Its exit status."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [part for part in sys.path if not part.endswith("/tests")]
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(":"))
    code = 0
    try:
        start(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def start(arguments: list[str]) -> None:
    name = os.path.basename(arguments[0])
    if name in FAIRSEQ:
        sys.argv = arguments
        importlib.import_module(FAIRSEQ[name]).cli_main()
    elif arguments[1] == "-m":
        sys.argv = arguments[2:]
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments[1:]
        sys.path.insert(0, os.path.dirname(arguments[1]))
        runpy.run_path(arguments[1], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
