"""The parts that the five commands share: how they are asked for help and their version, and how they end on a mistake."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata


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
    try:
        return metadata.version("fw_fairseq")
    except metadata.PackageNotFoundError:
        return "of a folder that is not installed"


@contextlib.contextmanager
def mistakes_as_sentences(prog: str) -> Iterator[None]:
    """Ends the program with exit code 1 and one sentence after a mistake. With FW_TRACEBACK=1 its traceback is shown. A wrong
    option ends it with exit code 2, by argparse."""
    try:
        yield
    except (OSError, ValueError) as error:
        if os.environ.get("FW_TRACEBACK") == "1":
            raise
        sys.exit(f"{prog}: {error}")
