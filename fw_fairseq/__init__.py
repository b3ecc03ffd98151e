"""Fast weights and linear attention for fairseq (``--user-dir fw_fairseq``).

``fw_fairseq.ops``, ``rules``, ``feature_maps`` and ``mixers`` need torch and NumPy alone. fairseq registers the models, tasks,
criterions and schedules when it imports this directory as its user directory; ``import fw_fairseq.models`` registers them in a
program.

The options take their choices from ``rules.RULES``, ``feature_maps.FEATURE_MAPS`` and ``mixers.MIXERS`` at that moment. A package
that adds to them does so first and then imports ``fw_fairseq.models``. It is itself the user directory, ``--user-dir PACKAGE``.
"""

import sys

from .errors import Mistake
from .late_registration import WithFairseq, wrap_import

__all__ = ["Mistake", "__version__"]
__version__ = "1.0.0"

if sys.modules.get("fairseq"):
    wrap_import()
else:
    sys.meta_path.insert(0, WithFairseq())
