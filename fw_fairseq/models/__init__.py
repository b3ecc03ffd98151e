"""The models that fairseq finds under --arch. Importing them makes fairseq ready: its patches are applied and the tasks,
criterions and schedules registered, so that a script may import a model before fairseq imports the user directory."""

from ..patches import apply
from ..patches.mistakes import shorten

apply()
shorten()

from .. import criterions, tasks  # noqa: E402
from ..criterions import attention_transfer  # noqa: E402
from ..data import pretrained_tokens  # noqa: E402
from ..tasks import until_solved  # noqa: E402
from . import field_architectures, lm_architectures  # noqa: E402
from .fast_weight_decoder import FastWeightDecoder  # noqa: E402
from .fast_weight_lm import FastWeightLanguageModel  # noqa: E402
from .fast_weight_transformer import FastWeightTransformer  # noqa: E402
from .pretrained_lm import PretrainedLanguageModel  # noqa: E402
from .retrieval import RetrievalModel  # noqa: E402

__all__ = [
    "FastWeightDecoder",
    "FastWeightLanguageModel",
    "FastWeightTransformer",
    "PretrainedLanguageModel",
    "RetrievalModel",
    "attention_transfer",
    "criterions",
    "field_architectures",
    "lm_architectures",
    "pretrained_tokens",
    "tasks",
    "until_solved",
]
