"""One run at a time in a save directory.

The system holds the lock for the process: it ends when the process does, however that happens, and no process that this one starts
has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from typing import IO

from ...errors import Mistake

NAME = ".lock"
logger = logging.getLogger(__name__)
held: dict[tuple[int, str], IO] = {}  # by the process, as a process that is started as a copy of this one does not have the lock


def lock(folder: str) -> None:
    """Takes the lock of a save directory for this process, or refuses the directory if another process has it."""
    path, holder = os.path.realpath(os.path.join(folder, NAME)), ""
    if (os.getpid(), path) in held:
        return
    try:
        file = opened_and_locked(path)
    except BlockingIOError:
        with contextlib.suppress(OSError), open(path) as other:
            holder = other.read().strip()
        help_ = "give another --save-dir, or wait until that run has ended"
        raise Mistake(f"--save-dir is {folder}, where {holder or 'another process'} is training; {help_}") from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s); do not start a second run in %s", path, error.strerror, folder)
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
    file.flush()
    held[os.getpid(), path] = file


def opened_and_locked(path: str) -> IO:
    """Returns the file, which keeps its lock as long as it is open. Another run that ends removes its file: then the one that was
    opened may be no longer there."""
    while True:
        file = open(path, "a+")  # noqa: SIM115
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            raise
        file.close()


def release() -> None:
    """Gives up all locks of this process and removes their files."""
    for key in [key for key in held if key[0] == os.getpid()]:
        with contextlib.suppress(OSError), held.pop(key):
            os.remove(key[1])
