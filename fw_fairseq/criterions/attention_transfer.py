"""attention_transfer: the heads of a pretrained_lm learn what the softmax gave whose place they take, layer by layer (LoLCATs)."""

from typing import Any

from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel

from ..errors import Mistake


@register_criterion("attention_transfer", dataclass=CrossEntropyCriterionConfig)
class AttentionTransfer(CrossEntropyCriterion):
    """In training the distance of attention outputs; in validation the cross entropy, which can be compared with other runs."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple:
        if not model.training:
            return super().forward(model, sample, reduce)
        decoder: Any = model.decoder
        if not hasattr(decoder, "attention_distance"):
            raise Mistake("--criterion attention_transfer is for --arch pretrained_lm; other models have t2r_distillation")
        count = sample["ntokens"]
        size = sample["target"].size(0) if self.sentence_avg else count
        loss = size * decoder.attention_distance(sample["net_input"]["src_tokens"])
        log = {"loss": loss.detach(), "ntokens": count, "nsentences": sample["target"].size(0), "sample_size": size}
        return loss, size, log | {"distance": loss.detach()}

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs the distance, too, which is no number of bits."""
        super().reduce_metrics(logging_outputs)
        size = utils.item(sum(log.get("sample_size", 0) for log in logging_outputs))
        if any("distance" in log for log in logging_outputs):
            total = utils.item(sum(log.get("distance", 0) for log in logging_outputs))
            metrics.log_scalar("distance", total / size, size, round=4)
