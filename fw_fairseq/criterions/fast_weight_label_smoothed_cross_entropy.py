"""fast_weight_label_smoothed_cross_entropy: fairseq's criterion of translation. It also logs statistics of the memories."""

from dataclasses import dataclass

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)

from ..config import option
from ..errors import Mistake
from .chunks import InChunks, checked_chunk
from .fast_weight_cross_entropy import PENALTY_HELP, InChunksConfig
from .memory_logging import MemoryLogging, checked_penalty


@dataclass
class FastWeightLabelSmoothedCrossEntropyConfig(InChunksConfig, LabelSmoothedCrossEntropyCriterionConfig):
    """The options of --criterion fast_weight_label_smoothed_cross_entropy."""

    state_norm_penalty: float = option(0.0, PENALTY_HELP)


@register_criterion("fast_weight_label_smoothed_cross_entropy", dataclass=FastWeightLabelSmoothedCrossEntropyConfig)
class FastWeightLabelSmoothedCrossEntropy(MemoryLogging, InChunks, LabelSmoothedCrossEntropyCriterion):
    """fairseq's label-smoothed cross entropy, with statistics of the memories in the log and a penalty on their norm."""

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing,
        ignore_prefix_size,
        report_accuracy,
        state_norm_penalty,
        ddp_backend="legacy_ddp",
        find_unused_parameters=False,
        loss_chunk=0,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.state_norm_penalty = checked_penalty(state_norm_penalty)
        self.loss_chunk = checked_chunk(loss_chunk, ddp_backend, find_unused_parameters)
        if loss_chunk and report_accuracy:
            raise Mistake("--report-accuracy needs all logits, which --loss-chunk does not keep; leave one of them out")
