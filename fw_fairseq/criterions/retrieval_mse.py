"""retrieval_mse: half the squared distance of what is read from the one-hot value asked for, a mean over queries."""

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch.nn import functional as F


@register_criterion("retrieval_mse", dataclass=FairseqDataclass)
class RetrievalMse(FairseqCriterion):
    """Queries whose target is -1 do not count. Logs the share of answers whose largest entry is the right value, too."""

    def forward(self, model, sample, reduce=True):
        asked = sample["target"] >= 0
        read, target = model(**sample["net_input"])[asked], sample["target"][asked]
        loss = 0.5 * (read - F.one_hot(target, read.shape[-1])).square().sum()
        count = len(target)
        right = (read.argmax(-1) == target).sum()
        log = {"loss": loss.detach(), "right": right, "ntokens": count, "nsentences": sample["nsentences"], "sample_size": count}
        return loss, count, log

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        loss, right, count = (
            utils.item(sum(torch.as_tensor(log[key]) for log in logging_outputs)) for key in ("loss", "right", "sample_size")
        )
        metrics.log_scalar("loss", loss / count, count, round=7)
        metrics.log_scalar("accuracy", right / count, count, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
