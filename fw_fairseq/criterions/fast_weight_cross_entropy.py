"""fast_weight_cross_entropy and fast_weight_label_smoothed_cross_entropy: fairseq's losses, with statistics of the memories."""

from dataclasses import dataclass

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as LabelSmoothed
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterionConfig as LabelSmoothedConfig
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import II

from ..config import option
from ..errors import Mistake
from .chunks import InChunks, checked_chunk
from .memory_logging import MemoryLogging

PENALTY_HELP = "weight of the mean norm of the layers' memories in the loss"


@dataclass
class PlainOrAdaptiveConfig(CrossEntropyCriterionConfig):
    """The options of cross entropy with statistics of the memories."""

    ddp_backend: str = II("distributed_training.ddp_backend")
    log_interval: int = II("common.log_interval")
    state_norm_penalty: float = option(0.0, PENALTY_HELP)


@dataclass
class InChunksConfig(FairseqDataclass):
    """The options of ``InChunks``."""

    find_unused_parameters: bool = II("distributed_training.find_unused_parameters")
    loss_chunk: int = option(
        0,
        "N: compute the logits of N tokens at a time, and their gradients, which saves memory; 0: all at once",
    )


@dataclass
class FastWeightCrossEntropyConfig(InChunksConfig, PlainOrAdaptiveConfig):
    """The options of --criterion fast_weight_cross_entropy."""


class PlainOrAdaptive(CrossEntropyCriterion):
    """The cross entropy of the model's softmax, be it plain or adaptive."""

    def __init__(self, task: FairseqTask, sentence_avg: bool, ddp_backend: str) -> None:
        super().__init__(task, sentence_avg)
        self.ddp_backend, self.adaptive = ddp_backend, AdaptiveLoss(task, sentence_avg)

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple:
        """Returns the loss, the sample size and the log of one batch, as fairseq's criterions do."""
        if getattr(model.decoder, "adaptive_softmax", None) is None:
            return super().forward(model, sample, reduce)
        if self.ddp_backend in ("c10d", "pytorch_ddp") and torch.distributed.is_initialized():
            raise Mistake(f"--ddp-backend {self.ddp_backend} cannot train an adaptive softmax; use legacy_ddp")
        return self.adaptive(model, sample, reduce)


@register_criterion("fast_weight_cross_entropy", dataclass=FastWeightCrossEntropyConfig)
class FastWeightCrossEntropy(MemoryLogging, InChunks, PlainOrAdaptive):
    """The cross entropy of language models, with statistics of the memories in the log and a penalty on their norm."""

    def __init__(
        self,
        task: FairseqTask,
        sentence_avg: bool,
        ddp_backend: str,
        state_norm_penalty: float,
        find_unused_parameters: bool = False,
        loss_chunk: int = 0,
    ) -> None:
        super().__init__(task, sentence_avg, ddp_backend)
        self.state_norm_penalty = state_norm_penalty
        self.loss_chunk = checked_chunk(loss_chunk, find_unused_parameters)


@dataclass
class FastWeightLabelSmoothedCrossEntropyConfig(InChunksConfig, LabelSmoothedConfig):
    """The options of --criterion fast_weight_label_smoothed_cross_entropy."""

    log_interval: int = II("common.log_interval")
    state_norm_penalty: float = option(0.0, PENALTY_HELP)


@register_criterion("fast_weight_label_smoothed_cross_entropy", dataclass=FastWeightLabelSmoothedCrossEntropyConfig)
class FastWeightLabelSmoothedCrossEntropy(MemoryLogging, InChunks, LabelSmoothed):
    """fairseq's label-smoothed cross entropy, with statistics of the memories in the log and a penalty on their norm."""

    def __init__(
        self,
        task: FairseqTask,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int,
        report_accuracy: bool,
        state_norm_penalty: float,
        find_unused_parameters: bool = False,
        loss_chunk: int = 0,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.state_norm_penalty = state_norm_penalty
        self.loss_chunk = checked_chunk(loss_chunk, find_unused_parameters)
        if loss_chunk and report_accuracy:
            raise Mistake("--report-accuracy needs all logits, which --loss-chunk does not keep; leave one of them out")
