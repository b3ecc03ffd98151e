"""A user's mistake ends fairseq's commands in one sentence. With FW_TRACEBACK=1 its traceback is shown too."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from hydra._internal import utils
from omegaconf.errors import OmegaConfBaseException
from torch.multiprocessing import ProcessRaisedException

from ..errors import HINT, Mistake

hydra_utils: Any = utils  # whose names are replaced
FULL = ("FW_TRACEBACK", "HYDRA_FULL_ERROR")
FILES = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


def sentence(error: BaseException) -> str | None:
    """Returns the message of a user's mistake, and None for a fault of the program, whose traceback says more."""
    kind, said = kind_and_message(error)
    if issubclass(kind, OmegaConfBaseException):  # the second line names the option
        return "; ".join(map(str.strip, said.splitlines()[:2]))
    return said if is_mistake(kind, said) else None


def kind_and_message(error: BaseException) -> tuple[type, str]:
    """Returns the class of an exception and what it says. That of a worker has a traceback as text, whose last line is
    "module.Kind: message"."""
    if not isinstance(error, ProcessRaisedException):
        return type(error), str(error)
    name, _, said = str(error).rstrip().rpartition("\n")[2].partition(": ")
    module, _, name = name.rpartition(".")
    found = getattr(sys.modules.get(module or "builtins"), name, None)
    return found if isinstance(found, type) else BaseException, said


def is_mistake(kind: type, said: str) -> bool:
    """Whether an exception is raised for what the user gave. fairseq raises a plain OSError for a file that is not there; for much
    else a plain Exception, or an assertion or a ValueError that names an option."""
    names_option = kind in (AssertionError, ValueError) and re.search(r"--[a-z]", said)
    return issubclass(kind, (Mistake, *FILES)) or kind in (OSError, Exception) or bool(names_option)


def shorten() -> None:
    """Shows mistakes by their sentences in fairseq's commands; another program shows errors in its own way."""
    if "fairseq_cli" in sys.modules and not hasattr(sys.excepthook, "shortened"):
        sys.excepthook = shortened(sys.excepthook)
        own = vars(traceback) | {"print_exception": shortened(traceback.print_exception)}
        hydra_utils.traceback = SimpleNamespace(**own)  # Hydra prints errors itself, with this module
        hydra_utils.print_exception = print_for_hydra  # 1.0, with this function


def print_for_hydra(etype: object = None, value: Any = None, tb: TracebackType | None = None) -> None:
    """Prints an exception; Hydra 1.0 calls the first argument as Python did before 3.10."""
    hydra_utils.traceback.print_exception(type(value), value, tb)


def shortened(original: Callable) -> Callable:
    """Returns a function that prints a mistake's sentence and leaves any other error to ``original``."""

    @functools.wraps(original)
    def show(kind: type, value: BaseException, tb: TracebackType | None) -> None:
        of_worker, _ = kind_and_message(value)
        said = None if any(os.environ.get(name) == "1" for name in FULL) else sentence(value)
        if said:
            print(f"{Path(sys.argv[0]).name}: {said}{'' if issubclass(of_worker, Mistake) else HINT}", file=sys.stderr)
        else:
            original(kind, value, tb)
        code = getattr(of_worker, "exit_code", 1)
        if code != 1:
            raise SystemExit(code)  # Python's own code for an exception is 1

    show.shortened = original  # type: ignore[attr-defined]
    return show
