"""The folder that an export writes, and the earlier export that it may replace."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from ...errors import Mistake
from ...files import reading, write_atomically
from .. import standalone

TOLERANCE = 1e-4
PROGRAM = Path(__file__).with_name("alone.py")
CODE_FILE = "modeling_fw_fairseq.py"
TARGET = "target"  # the folder of the tokenizer of translations
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "chat_template.jinja")  # fmt: skip
WRITTEN = re.compile("|".join([*map(re.escape, (*TOKENIZER_FILES, CODE_FILE)), r"(generation_)?config\.json", r"model\.onnx",
                               r"model(-\d+-of-\d+)?\.safetensors", r"model\.safetensors\.index\.json"]))  # fmt: skip


def check_output(output: Path, force: bool) -> None:
    """Refuses an existing folder, unless --force is given and the folder is empty or an earlier export, with nothing else in it."""
    if not output.exists():
        return
    if not force:
        raise Mistake(f"OUTPUT {output} exists; name another folder, or give --force to replace an earlier export")
    why = ""
    if not output.is_dir() or (any(output.iterdir()) and not (output / CODE_FILE).exists()):
        why = f"is no earlier export, as it has no {CODE_FILE}, and --force would delete it"
    elif foreign := sorted(path.name for path in output.iterdir() if not _is_written(path)):
        why = f"has {foreign[0]}, which fw-export-hf did not write and --force would delete"
    if why:
        raise Mistake(f"OUTPUT {output} {why}; name another folder")


def _is_written(path: Path) -> bool:
    """Whether a file, or the folder of a second tokenizer, may come from an export."""
    if path.is_dir():
        return path.name == TARGET and all(inside.name in TOKENIZER_FILES and inside.is_file() for inside in path.iterdir())
    return bool(WRITTEN.fullmatch(path.name))


def replace(new: Path, folder: Path) -> None:
    """Puts ``new`` in the place of ``folder``, which is deleted last."""
    old = new.with_suffix(".old")
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load(kind: Any, folder: Path) -> Any:
    """Returns the model that transformers loads of a folder, in evaluation mode. kind: its class, which is not taken from the
    folder's code."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(folder).eval()
    finally:
        if shown:
            logging.enable_progress_bar()


def write(model: Any, tokenizers: dict[str, Any], folder: Path) -> None:
    """Writes the model, its code where it is not transformers' own, and its tokenizers into a new folder. tokenizers: a tokenizer,
    or the folder of one, for each folder inside it, "" for itself."""
    folder.mkdir(parents=True)
    if own := not type(model).__module__.startswith("transformers."):
        kind = "AutoModelForSeq2SeqLM" if model.config.is_encoder_decoder else "AutoModelForCausalLM"
        names = {"AutoConfig": type(model.config).__name__, kind: type(model).__name__}
        model.config.auto_map = {name: f"{CODE_FILE.removesuffix('.py')}.{value}" for name, value in names.items()}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(model.config, name))
    model.generation_config._from_model_config = False
    model.save_pretrained(folder)
    if own:
        _write_code(folder / CODE_FILE, type(model).__name__)
    for place, tokenizer in tokenizers.items():
        if not isinstance(tokenizer, Path):
            tokenizer.save_pretrained(folder / place)
            continue
        for name in TOKENIZER_FILES:
            if (tokenizer / name).exists():
                shutil.copy(tokenizer / name, folder / place / name)
    for path in folder.rglob("*"):  # transformers writes weights that only their owner may read
        if path.is_file():
            path.chmod(folder.stat().st_mode & 0o666)


def check_alone(folder: Path, named: str) -> None:
    """Refuses a folder whose model does not generate what a pass over the same words gives, where there are torch and transformers
    alone. named: what the user gave for it."""
    with tempfile.TemporaryDirectory() as modules:  # where transformers copies the folder's code, in place of the user's home
        environment = os.environ | {"HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", PROGRAM.read_text(encoding="utf-8"), str(folder)]
        done = subprocess.run(command, cwd=modules, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        found = float(done.stdout.split()[-1])
        reason = "" if found <= TOLERANCE else f"its state changes what it generates, by {found:.1e}"
    else:
        reason = done.stderr.strip().splitlines()[-1] if done.returncode == 1 else f"its process ended with {done.returncode}"
    if reason:
        library = f"transformers {metadata.version('transformers')}"
        raise Mistake(f"{named} does not generate in {library} ({reason}); nothing was written")


def renew(folder: Path) -> None:
    """Puts the code of today into an earlier export, once its other files were checked with it; they stay as they are."""
    code = folder / CODE_FILE
    wrong = "" if code.is_file() else f"it has no {CODE_FILE}"
    if not wrong:
        with reading(folder / "config.json", "a model's configuration"):
            places = json.loads((folder / "config.json").read_text(encoding="utf-8"))["auto_map"].values()
        foreign = [place for place in places if not place.startswith(f"{code.stem}.")]  # whose code would be run
        wrong = f"its config.json names {foreign[0]}" if foreign else ""
    if wrong:
        raise Mistake(f"--renew is {folder}, which is no folder of fw-export-hf, as {wrong}")
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "renewed")
        copy.mkdir()
        for path in folder.iterdir():
            if path.is_file() and WRITTEN.fullmatch(path.name) and path.name != CODE_FILE:
                (copy / path.name).symlink_to(path.resolve())
        kind = next(iter(places)).partition(".")[2]
        _write_code(copy / CODE_FILE, kind)
        check_alone(copy, f"--renew {folder}")
    write_atomically(code, lambda path: _write_code(path, kind))


def _write_code(path: Path, kind: str) -> None:
    """Writes the code of the models whose class, or that of their configuration, is ``kind``."""
    start = standalone.start_of(kind)
    path.write_text(standalone.code() if start == standalone.START else standalone.code(start), encoding="utf-8")
