"""Fast weights and linear attention for fairseq (``--user-dir fw_fairseq``).

``fw_fairseq.ops``, ``rules`` and ``feature_maps`` need torch alone. When fairseq imports this package, its models, tasks,
criterions and schedules are registered."""

import sys


class Mistake(ValueError):
    """Something that the user gave is not allowed: an option, an argument or a file. The message is one sentence that names it and
    says what is allowed. Commands show the sentence alone; any other exception keeps its traceback."""


if sys.modules.get("fairseq"):
    from . import models  # noqa: F401
else:
    from .late_registration import WithFairseq

    sys.meta_path.insert(0, WithFairseq())
