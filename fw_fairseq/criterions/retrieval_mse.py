"""retrieval_mse: half the squared distance between the value that is read and the one-hot value asked for, a mean over queries."""

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from torch.nn import functional as F


@register_criterion("retrieval_mse", dataclass=FairseqDataclass)
class RetrievalMse(FairseqCriterion):
    """The loss of retrieval. Queries whose target is -1 do not count. It also logs the accuracy, which is the share of queries for
    which the largest entry is at the right value."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple:
        """Returns the summed loss, the number of queries and the log of one batch."""
        asked = sample["target"] >= 0
        read, target = model(**sample["net_input"])[asked], sample["target"][asked]
        loss = 0.5 * (read - F.one_hot(target, read.shape[-1])).square().sum()
        count = len(target)
        right = (read.argmax(-1) == target).sum()
        log = {"loss": loss.detach(), "right": right, "ntokens": count, "nsentences": sample["nsentences"], "sample_size": count}
        return loss, count, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs the loss and the accuracy over all workers."""
        loss, right, count = (
            utils.item(sum(torch.as_tensor(log[key]) for log in logging_outputs)) for key in ("loss", "right", "sample_size")
        )
        metrics.log_scalar("loss", loss / count, count, round=7)
        metrics.log_scalar("accuracy", right / count, count, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Returns True: fairseq may add up the logs of the workers, entry by entry."""
        return True
