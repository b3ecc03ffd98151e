"""The parts that the five commands share: how they are asked for help and their version, and how they end on a mistake."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from ..errors import HINT, Mistake

TALKATIVE = "fairseq", "matplotlib", "PIL", "fontTools"  # fairseq's first import opens the logs of all libraries


def make_parser(prog: str, description: str, example: str) -> argparse.ArgumentParser:
    """Returns a parser whose help ends with an example, and that knows --version."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{prog} {version()}")
    return parser


def version() -> str:
    """Returns the version of the package."""
    try:
        return metadata.version("fw_fairseq")
    except metadata.PackageNotFoundError:
        return "of a folder that is not installed"


def refuse_folder(name: str, path: Path) -> None:
    """Refuses a folder where a file is written. ``name``: the option."""
    if path.is_dir():
        raise Mistake(f"{name} is {path}, which is a folder; name a file")


def check_figure(name: str, path: Path) -> None:
    """Refuses a file for a figure whose ending is that of no picture. ``name``: the option."""
    if path.suffix not in (".svg", ".pdf", ".png"):
        raise Mistake(f"{name} is {path}; it must end in .svg, .pdf or .png")
    refuse_folder(name, path)


def require_matplotlib(what: str = "figures need") -> None:
    """Refuses to draw without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Mistake(f"{what} matplotlib; install fw_fairseq with the extra [plots]")


def check_outputs(outputs: Iterable[tuple[str, Path]], inputs: Iterable[tuple[str, str | Path]] = ()) -> None:
    """Refuses one file for two outputs, and an output that is an input. Each path has the name of its option or argument."""
    taken = {Path(path).resolve(): name for name, path in inputs}
    for name, path in outputs:
        if other := taken.get(Path(path).resolve()):
            raise Mistake(f"{name} is {path}, which is {'given twice' if other == name else f'{other} too'}; name another file")
        taken[Path(path).resolve()] = name


@contextlib.contextmanager
def mistakes_as_sentences(prog: str) -> Iterator[None]:
    """Ends the program with one sentence after a mistake, and with the mistake's exit code, which is 1 for most. With
    FW_TRACEBACK=1 its traceback is shown. A wrong option ends it with exit code 2, by argparse, and Ctrl-C with 130. fairseq and
    the libraries that draw log nothing but warnings meanwhile."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in TALKATIVE}
    for logger in levels:
        logger.setLevel(logging.WARNING)
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (OSError, ValueError) as error:
        if os.environ.get("FW_TRACEBACK") == "1":
            raise
        said = f"{prog}: {error}{'' if isinstance(error, Mistake) else HINT}"
        if (code := getattr(error, "exit_code", 1)) == 1:
            sys.exit(said)
        print(said, file=sys.stderr)
        sys.exit(code)
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
