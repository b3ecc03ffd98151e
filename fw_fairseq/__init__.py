"""Fast weights and linear attention for fairseq (``--user-dir fw_fairseq``).

``fw_fairseq.ops``, ``rules`` and ``feature_maps`` need torch alone. What fairseq needs is registered where fairseq imports this.
"""

import sys

if sys.modules.get("fairseq"):
    from . import models  # noqa: F401
else:
    from .late_registration import WithFairseq

    sys.meta_path.insert(0, WithFairseq())
