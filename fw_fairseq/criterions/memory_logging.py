"""The mixin that this project's criterions share: it logs statistics of the memories, and a penalty can keep their norm small."""

from __future__ import annotations

from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.utils import safe_getattr
from torch import Tensor

from ..errors import Mistake
from ..mixers import FastWeight
from ..modules import MixerAttention

PREFIX, RAN = "fw_", "ran_"


class MemoryLogging(FairseqCriterion):
    """A mixin that stands before one of fairseq's criterions among the bases of a class. For each layer it logs the mean gates, the
    write strength and the norm of the memory; fairseq's metrics show them as fw_LAYER_NAME. They are those of the updates after
    which fairseq writes a line of its log, and of the first update of a run."""

    state_norm_penalty = 0.0
    log_interval = 1
    first_update: int | None = None

    @classmethod
    def build_criterion(cls, cfg: Any, task: FairseqTask) -> MemoryLogging:
        criterion = super().build_criterion(cfg, task)
        interval = safe_getattr(cfg, "log_interval", 1)
        criterion.log_interval = interval if isinstance(interval, int) else 1  # without fairseq's options it names one of them
        return criterion

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple:
        """Returns the loss, the sample size and the log of one batch; in training with the statistics and the penalty."""
        mixers = [module for module in model.modules() if isinstance(module, MixerAttention)] if model.training else []
        logs, penalty = bool(mixers) and self.logs(model), self.state_norm_penalty if reduce and model.training else 0
        if logs or penalty:
            for mixer in mixers:
                mixer.mixer.watch(penalty > 0)
        loss, size, log = super().forward(model, sample, reduce)
        if logs:
            for mixer in mixers:
                self.log_statistics(mixer, loss, log)
        if penalty:
            loss = loss + penalty * size * self.mean_state_norm(mixers, loss)
        return loss, size, log

    def logs(self, model: BaseFairseqModel) -> bool:
        """Whether fairseq writes its log after this update, or whether it is the first one. A model that does not know its updates
        logs all of them."""
        done = getattr(model, "num_updates", None)
        if done is None:
            return True
        self.first_update = done if self.first_update is None else self.first_update
        return done == self.first_update or (done + 1) % self.log_interval == 0

    @staticmethod
    def log_statistics(mixer: MixerAttention, loss: Tensor, log: dict) -> None:
        """Adds the statistics of one layer to ``log``. Workers add up their logs entry by entry, so a layer that LayerDrop
        left out has entries too: 0 of 0 tokens."""
        statistics = mixer.mixer.statistics()
        for name, value in statistics.items():
            log[f"{PREFIX}{mixer.layer}_{name}"] = loss.new_zeros(()) if value is None else value * log["ntokens"]
        if statistics:
            log[f"{RAN}{mixer.layer}"] = 0 if None in statistics.values() else log["ntokens"]

    @staticmethod
    def mean_state_norm(mixers: list[MixerAttention], loss: Tensor) -> Tensor:
        """Returns the mean norm of the memories, over the layers that LayerDrop did not leave out."""
        memories = [mixer.mixer for mixer in mixers if isinstance(mixer.mixer, FastWeight)]
        if not memories:
            raise Mistake("--state-norm-penalty needs fast-weight layers, and the model has none; leave it out")
        norms = [norm for memory in memories if (norm := memory.take_state_norm()) is not None]
        if not all(norm.requires_grad for norm in norms):
            raise Mistake("--state-norm-penalty does not work with --checkpoint-activations or --reversible; leave them out")
        return torch.stack(norms).mean() if norms else loss.new_zeros(())

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs the mean of each statistic over the tokens of all workers."""
        super().reduce_metrics(logging_outputs)
        for key in dict.fromkeys(key for log in logging_outputs for key in log if key.startswith(PREFIX)):
            layer = key[len(PREFIX) :].partition("_")[0]
            total, tokens = (utils.item(sum(log.get(name, 0) for log in logging_outputs)) for name in (key, RAN + layer))
            if tokens:
                metrics.log_scalar(key, total / tokens, tokens, round=4)
