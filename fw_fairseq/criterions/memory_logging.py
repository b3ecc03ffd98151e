"""What the criterions of this project share: they log what the memories do, and can keep them small."""

from __future__ import annotations

import torch
from fairseq import utils
from fairseq.logging import metrics

from ..modules import MixerAttention

PREFIX = "fw_"


class MemoryLogging:
    """Goes before one of fairseq's criterions. Per layer: mean gates, write strength and norm of the memory, under fw_LAYER_NAME
    in fairseq's metrics."""

    state_norm_penalty = 0.0

    def forward(self, model, sample, reduce=True):
        mixers = [module for module in model.modules() if isinstance(module, MixerAttention)]
        for mixer in mixers:
            mixer.mixer.watched = True
            mixer.mixer.keeps_state_norm = self.state_norm_penalty > 0
        loss, size, log = super().forward(model, sample, reduce)
        if not model.training:
            return loss, size, log
        for mixer in mixers:
            for name, value in mixer.mixer.statistics().items():
                log[f"{PREFIX}{mixer.layer}_{name}"] = value * log["ntokens"]
        if self.state_norm_penalty and reduce:
            loss = loss + self.state_norm_penalty * size * self.mean_state_norm(mixers)
        return loss, size, log

    @staticmethod
    def mean_state_norm(mixers):
        norms = [mixer.mixer.state_norm for mixer in mixers if mixer.mixer.state_norm is not None]
        if not norms or not all(norm.requires_grad for norm in norms):
            raise ValueError("--state-norm-penalty needs fast-weight layers and does not work with --checkpoint-activations")
        return torch.stack(norms).mean()

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        super().reduce_metrics(logging_outputs)
        tokens = utils.item(sum(log.get("ntokens", 0) for log in logging_outputs))
        for key in dict.fromkeys(key for log in logging_outputs for key in log if key.startswith(PREFIX)):
            total = utils.item(sum(log.get(key, 0) for log in logging_outputs))
            metrics.log_scalar(key, total / tokens, tokens, round=4)
