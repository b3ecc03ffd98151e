"""Fast weights and linear attention for fairseq (``--user-dir fw_fairseq``).

``fw_fairseq.ops``, ``rules``, ``feature_maps`` and ``mixers`` need torch and NumPy alone. fairseq registers the models, tasks,
criterions and schedules when it imports this directory as its user directory; ``import fw_fairseq.models`` registers them in a
program.

The options take their choices from ``rules.RULES``, ``feature_maps.FEATURE_MAPS`` and ``mixers.MIXERS`` at that moment. A package
that adds to them does so first and then imports ``fw_fairseq.models``. It is itself the user directory, ``--user-dir PACKAGE``.
"""

import sys
from typing import Any

from .errors import Mistake
from .late_registration import WithFairseq, wrap_import

__all__ = ["Mistake", "__version__", "accelerate"]
__version__ = "1.0.0"


def accelerate(on: bool = True) -> Any:
    """Lets transformers' recurrent layers compute with ``fast_weight`` in place of their reference code; see ``acceleration``."""
    from .acceleration import accelerate as accelerate_transformers

    return accelerate_transformers(on)


if sys.modules.get("fairseq"):
    wrap_import()
else:
    sys.meta_path.insert(0, WithFairseq())
