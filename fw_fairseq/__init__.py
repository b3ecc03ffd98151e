"""Fast weights and linear attention for fairseq (``--user-dir fw_fairseq``).

``fw_fairseq.ops``, ``rules`` and ``feature_maps`` need torch alone. fairseq is set up only where fairseq itself does the import.
"""

import sys

if sys.modules.get("fairseq"):
    from . import registration  # noqa: F401
