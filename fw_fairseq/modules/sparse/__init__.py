"""The sparse layers of Jaszczur et al. 2021, and reversible residual connections.

Outside, ``modules.layer_parts`` builds them into layers, the decoder and the encoder check their options and stack them, and
``models.generation.sparse`` runs them for a token.
"""

from .feed_forward import RecurrentUnits, SparseFeedForward
from .options import check_reversible, check_sparse
from .projections import Multiplicative, RecentState, make_sparse
from .reversible import Stack
from .softmax import SparseAttention

__all__ = [
    "Multiplicative",
    "RecentState",
    "RecurrentUnits",
    "SparseAttention",
    "SparseFeedForward",
    "Stack",
    "check_reversible",
    "check_sparse",
    "make_sparse",
]
