"""fast_weight_cross_entropy: cross entropy, plain or adaptive, that also logs what the memories do."""

from dataclasses import dataclass

import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from omegaconf import II

from ..config import option
from ..modules import MixerAttention

PREFIX = "fw_"


@dataclass
class FastWeightCrossEntropyConfig(CrossEntropyCriterionConfig):
    ddp_backend: str = II("distributed_training.ddp_backend")
    state_norm_penalty: float = option(0.0, "weight of the mean norm of the layers' memories in the loss of a token")


@register_criterion("fast_weight_cross_entropy", dataclass=FastWeightCrossEntropyConfig)
class FastWeightCrossEntropy(CrossEntropyCriterion):
    """Per layer: mean gates, write strength and norm of the memory, under fw_LAYER_NAME in fairseq's metrics."""

    def __init__(self, task, sentence_avg, ddp_backend, state_norm_penalty):
        super().__init__(task, sentence_avg)
        self.ddp_backend, self.state_norm_penalty = ddp_backend, state_norm_penalty
        self.adaptive = AdaptiveLoss(task, sentence_avg)

    def forward(self, model, sample, reduce=True):
        mixers = [module for module in model.modules() if isinstance(module, MixerAttention)]
        for mixer in mixers:
            mixer.mixer.watched = True
            mixer.mixer.keeps_state_norm = self.state_norm_penalty > 0
        if getattr(model.decoder, "adaptive_softmax", None) is None:
            loss, size, log = super().forward(model, sample, reduce)
        else:
            if self.ddp_backend in ("c10d", "pytorch_ddp") and torch.distributed.is_initialized():
                raise ValueError(f"--ddp-backend {self.ddp_backend} cannot train an adaptive softmax; use legacy_ddp")
            loss, size, log = self.adaptive(model, sample, reduce)
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
        CrossEntropyCriterion.reduce_metrics(logging_outputs)
        tokens = utils.item(sum(log.get("ntokens", 0) for log in logging_outputs))
        for key in dict.fromkeys(key for log in logging_outputs for key in log if key.startswith(PREFIX)):
            total = utils.item(sum(log.get(key, 0) for log in logging_outputs))
            metrics.log_scalar(key, total / tokens, tokens, round=4)
