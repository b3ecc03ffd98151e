"""The sparse layers of Jaszczur et al. 2021, and reversible residual connections."""

from .feed_forward import SparseFeedForward
from .multiplicative import Multiplicative
from .projections import Convolutions, SparseSource, make_sparse
from .recent import RecentState, with_recent
from .recurrence import RecurrentUnits
from .reversible import Update, run_updates

__all__ = [
    "Convolutions",
    "Multiplicative",
    "RecentState",
    "RecurrentUnits",
    "SparseFeedForward",
    "SparseSource",
    "Update",
    "make_sparse",
    "run_updates",
    "with_recent",
]
