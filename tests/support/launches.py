"""What an update asks of a GPU, counted on a CPU: its launches, and how often the host waits for it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from unittest import mock

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer
from hostcuda import EmulatorLaunch
from support.emulated import emulated
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, TOKENS = 2, 16
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "repeat_interleave"}
NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias", "_unsafe_view",
    "_local_scalar_dense", "_record_function_enter_new", "_record_function_exit", "set_", "item", "is_same_size", "resize_",
    "is_nonzero",
}  # fmt: skip


def starts_a_kernel(operator) -> bool:
    """Whether an operator of torch does on a GPU."""
    return not (operator.is_view or operator.overloadpacket.__name__ in NOTHING or operator.namespace == "prim")


class Counted(TorchDispatchMode):
    """Counts the operators that start a kernel, those that make the host wait, and the launches of this project's kernels. What
    ``torch._foreach`` and fused optimisers do for all tensors counts as one."""

    def __init__(self):
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        filled = name.startswith("index_put") and args[2].numel() == 1  # by a mask
        if name in WAITS or (any(map(is_mask, indices)) and not filled):
            self.waits[name] += 1
        kernel = func.namespace == "fw_fairseq"  # counts its launches itself
        if not kernel and starts_a_kernel(func):
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def tolist(self):
        """torch's, which makes the host wait, but no operator is seen where the tensor is on a CPU."""
        original = torch.Tensor.tolist

        def tolist(x):
            self.waits["tolist"] += 1
            return original(x)

        return tolist

    def __str__(self):
        return f"{self.launches.total()} launches, {self.waits.total()} waits: {self.launches.most_common()}; {dict(self.waits)}"


class Launch(EmulatorLaunch):
    """Counts the launches of this project's kernels, too."""

    def __init__(self, counted: Counted):
        super().__init__()
        self.counted = counted

    def __call__(self, source, name, *rest, **keywords):
        self.counted.launches[name] += 1
        super().__call__(source, name, *rest, **keywords)


def is_mask(index) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def fused_dropout(x, p=0.5, training=True, inplace=False):
    """As on a GPU, where it is one kernel."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def trainer_of(words: int, *given: str) -> Trainer:
    """fairseq's trainer of a language model on drawn words. ``given``: options of fairseq-train."""
    known = ["none", "--task", "language_modeling", "--cpu", "--ddp-backend", "legacy_ddp", "--max-update", "1000"]
    known += ["--tokens-per-sample", str(TOKENS), "--batch-size", str(BATCH), "--optimizer", "adam", "--lr", "1e-3"]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), [*known, *given]))
    dictionary = Dictionary()
    for index in range(words - len(dictionary)):
        dictionary.add_symbol(str(index))
    task = LanguageModelingTask(cfg.task, dictionary, dictionary)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    trainer._dummy_batch = batch(words)
    return trainer


def batch(words: int) -> dict:
    text = torch.randint(4, words, (BATCH, TOKENS + 1))
    source = {"src_tokens": text[:, :-1].contiguous(), "src_lengths": torch.full((BATCH,), TOKENS)}
    sizes = {"nsentences": BATCH, "ntokens": BATCH * TOKENS}
    return {"id": torch.arange(BATCH), "net_input": source, "target": text[:, 1:].contiguous(), **sizes}


def count_update(trainer: Trainer, words: int) -> Counted:
    """One update, with this project's kernels."""
    counted, sample = Counted(), batch(words)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "dropout", fused_dropout))
        stack.enter_context(mock.patch.object(torch.Tensor, "tolist", counted.tolist))
        stack.enter_context(emulated(Launch(counted)))
        stack.enter_context(counted)
        trainer.train_step([sample])
    return counted
