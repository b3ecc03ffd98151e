"""fast_weight_cross_entropy: cross entropy, plain or adaptive. It also logs statistics of the memories."""

from dataclasses import dataclass

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from ..config import option
from ..errors import Mistake
from .chunks import InChunks, checked_chunk
from .memory_logging import MemoryLogging, checked_penalty

PENALTY_HELP = "weight of the mean norm of the layers' memories in the loss of a token"


@dataclass
class PlainOrAdaptiveConfig(CrossEntropyCriterionConfig):
    """The options of cross entropy with statistics of the memories."""

    ddp_backend: str = II("distributed_training.ddp_backend")
    state_norm_penalty: float = option(0.0, PENALTY_HELP)


@dataclass
class InChunksConfig(FairseqDataclass):
    """The options of ``InChunks``."""

    ddp_backend: str = II("distributed_training.ddp_backend")
    find_unused_parameters: bool = II("distributed_training.find_unused_parameters")
    loss_chunk: int = option(
        0,
        "N: compute the logits of N tokens at a time, and their gradients, so that those of a whole batch are never in memory; 0:"
        " all at once",
    )


@dataclass
class FastWeightCrossEntropyConfig(InChunksConfig, PlainOrAdaptiveConfig):
    """The options of --criterion fast_weight_cross_entropy."""


class PlainOrAdaptive(CrossEntropyCriterion):
    """The cross entropy of the model's softmax, be it plain or adaptive."""

    def __init__(self, task, sentence_avg, ddp_backend):
        super().__init__(task, sentence_avg)
        self.ddp_backend, self.adaptive = ddp_backend, AdaptiveLoss(task, sentence_avg)

    def forward(self, model, sample, reduce=True):
        """Returns the loss, the sample size and the log of one batch, as fairseq's criterions do."""
        if getattr(model.decoder, "adaptive_softmax", None) is None:
            return super().forward(model, sample, reduce)
        if self.ddp_backend in ("c10d", "pytorch_ddp") and torch.distributed.is_initialized():
            raise Mistake(f"--ddp-backend {self.ddp_backend} cannot train an adaptive softmax; use legacy_ddp")
        return self.adaptive(model, sample, reduce)


@register_criterion("fast_weight_cross_entropy", dataclass=FastWeightCrossEntropyConfig)
class FastWeightCrossEntropy(MemoryLogging, InChunks, PlainOrAdaptive):
    """The cross entropy of language models, with statistics of the memories in the log and a penalty on their norm."""

    def __init__(self, task, sentence_avg, ddp_backend, state_norm_penalty, find_unused_parameters=False, loss_chunk=0):
        super().__init__(task, sentence_avg, ddp_backend)
        self.state_norm_penalty = checked_penalty(state_norm_penalty)
        self.loss_chunk = checked_chunk(loss_chunk, ddp_backend, find_unused_parameters)
