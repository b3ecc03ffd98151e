"""A user's mistake ends fairseq's commands in one sentence. FW_TRACEBACK=1 shows where it was found, as for any other error."""

from __future__ import annotations

import builtins
import functools
import os
import re
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

from hydra._internal import utils as hydra_utils
from torch.multiprocessing import ProcessRaisedException

HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the package's folder
FULL = ("FW_TRACEBACK", "HYDRA_FULL_ERROR")


def sentence(error: BaseException) -> str | None:
    """What a file or an option has wrong; None for a fault of the program, whose traceback is worth more."""
    if isinstance(error, ProcessRaisedException):  # has its worker's traceback as text
        frames = re.findall(r'^  File "(.+)", line \d+, in .+\n    (.*)', str(error), re.MULTILINE)
        kind, _, said = str(error).rstrip().rpartition("\n")[2].partition(": ")
        kind = getattr(builtins, kind, BaseException)
    else:
        frames = [(frame.filename, frame.line) for frame in traceback.extract_tb(error.__traceback__)]
        kind, said = type(error), str(error)
    return said if frames and is_mistake(kind, *frames[-1]) else None


def is_mistake(kind: type, file: str, line: str) -> bool:
    """A file that cannot be had, or what this project raises on purpose."""
    on_purpose = file.startswith(HERE) and line.startswith("raise ")
    return issubclass(kind, OSError) or (on_purpose and issubclass(kind, (ValueError, FloatingPointError)))


def shorten() -> None:
    """In fairseq's commands only: another program shows its errors as it likes."""
    if "fairseq_cli" in sys.modules and not hasattr(sys.excepthook, "shortened"):
        sys.excepthook = shortened(sys.excepthook)
        own = vars(traceback) | {"print_exception": shortened(traceback.print_exception)}
        hydra_utils.traceback = SimpleNamespace(**own)  # Hydra shows errors itself, with this module


def shortened(original):
    """Shows a mistake by its sentence, any other error by ``original``."""

    @functools.wraps(original)
    def show(kind, value, tb) -> None:
        said = None if any(os.environ.get(name) == "1" for name in FULL) else sentence(value)
        if not said:
            original(kind, value, tb)
        else:
            print(f"{Path(sys.argv[0]).name}: {said}", file=sys.stderr)

    show.shortened = True
    return show
