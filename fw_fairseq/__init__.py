"""Fast weights and linear attention for fairseq (``--user-dir fw_fairseq``).

``fw_fairseq.ops``, ``rules``, ``feature_maps`` and ``mixers`` need torch and NumPy alone. fairseq registers the models, tasks,
criterions and schedules when it imports this directory as its user directory; ``import fw_fairseq.models`` registers them in a
program.

The options take their choices from ``rules.RULES``, ``feature_maps.FEATURE_MAPS`` and ``mixers.MIXERS`` at that moment. A package
that adds to them does so first and then imports ``fw_fairseq.models``. It is itself the user directory, ``--user-dir PACKAGE``.
"""

import sys

from .late_registration import WithFairseq, wrap_import


class Mistake(ValueError):
    """Something that the user gave is not allowed: an option, an argument or a file. The message is one sentence that names it and
    says what is allowed. Commands show the sentence alone; any other exception keeps its traceback."""

    exit_code = 1  # of a command that ends with it


HINT = " (FW_TRACEBACK=1 shows where)"  # after an error that is no Mistake: any code may have raised it


if sys.modules.get("fairseq"):
    wrap_import()
else:
    sys.meta_path.insert(0, WithFairseq())
