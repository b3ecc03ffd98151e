"""Reads back what a training run leaves: its log, with --log-format json, and its last checkpoint."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import torch


def updates(log: str) -> dict[int, dict]:
    """The logged numbers of each update."""
    lines = [line[line.index("{") :] for line in log.splitlines() if "train_inner" in line and "{" in line]
    return {int(entry["num_updates"]): entry for entry in map(json.loads, lines)}


def losses(logs: dict[int, dict]) -> dict[int, str]:
    return {update: entry["loss"] for update, entry in logs.items()}


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The model of ``checkpoint_last.pt``; for some optimizers fairseq saves their options as a Namespace."""
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]
