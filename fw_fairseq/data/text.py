"""The tokens of one split, and the checks that every task that reads them shares."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from fairseq import utils
from fairseq.data import FairseqDataset, data_utils
from fairseq.tasks.language_modeling import LanguageModelingConfig
from torch import Tensor, nn

from ..config import option_name
from ..errors import Mistake

CUTTING: tuple[str, ...] = (
    "sample_break_mode",
    "add_bos_token",
    "shorten_method",
    "shorten_data_split_list",
    "pad_to_fixed_length",
)
CUTTING += ("pad_to_fixed_bsz",)


class Text(FairseqDataset):
    """All tokens of a split, not yet cut into streams. ``targets``: the tokens to predict, where words without an output are
    unknown words."""

    def __init__(self, tokens: Tensor, split: str, targets: Tensor | None = None) -> None:
        self.tokens, self.split, self.targets = tokens, split, tokens if targets is None else targets

    def __len__(self) -> int:
        return len(self.tokens)


def load_text(task: Any, split: str, epoch: int, combine: bool) -> Text:
    """Reads a split of a task like language_modeling. Options that cut a text into samples are refused."""
    for name in CUTTING:
        value = getattr(task.args, name, None)
        if value is not None and str(value) != str(getattr(LanguageModelingConfig, name)):
            raise Mistake(f"{option_name(name)} is {value}; this task reads all of {split} as one text, leave the option out")
    paths = utils.split_paths(task.args.data)
    path = os.path.join(paths[(epoch - 1) % len(paths)], split)
    data = data_utils.load_indexed_dataset(path, task.dictionary, task.args.dataset_impl, combine=combine)
    if data is None:
        raise FileNotFoundError(f"Dataset not found: {split} ({path})")
    tokens = torch.cat([data[i] for i in range(len(data))])
    predicted = task.output_dictionary
    if len(predicted) == len(task.dictionary):
        return Text(tokens, split)
    return Text(tokens, split, tokens.where(tokens < len(predicted), predicted.unk()))


def check_positions(tokens: int, most: object) -> None:
    """Refuses more tokens at once than the model has positions. fairseq checks only the samples that it cuts itself."""
    if isinstance(most, int) and tokens > most:
        raise Mistake(f"{tokens} tokens at once are more than the model's {most} positions; give a shorter --tokens-per-sample")


def has_keyword(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has this keyword. Those of fairseq's own models do not."""
    return name in inspect.signature(getattr(model, "decoder", model).forward).parameters
