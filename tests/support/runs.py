"""Reads back what a training run leaves: its log, with --log-format json, and its last checkpoint."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import torch


def updates(log: str) -> dict[int, dict]:
    """The logged numbers of each update, with those of the layers from the save directory that the command in it names."""
    lines = [line[line.index("{") :] for line in log.splitlines() if "train_inner" in line and "{" in line]
    found = {int(entry["num_updates"]): entry for entry in map(json.loads, lines)}
    command = next(line for line in log.splitlines() if re.search(r"[.-]save[-_]dir", line))
    layers = Path(re.findall(r"[.-]save[-_]dir[ =]'?([^' ]+)", command)[-1], "layers.jsonl")
    for entry in map(json.loads, layers.read_text().splitlines() if layers.exists() else ()):
        if int(entry.get("num_updates", 0)) in found:
            found[int(entry["num_updates"])].update(entry)
    return found


def losses(logs: dict[int, dict]) -> dict[int, str]:
    return {update: entry["loss"] for update, entry in logs.items()}


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The model of ``checkpoint_last.pt``; for some optimizers fairseq saves their options as a Namespace."""
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]
