"""What a fast-weight layer remembers between calls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class FastWeightState(NamedTuple):
    """Moved, reordered and detached as a whole; its size does not depend on how many tokens were seen."""

    memory: Tensor  # (B,H,K,V), fp32 (float64 for float64 inputs)
    normaliser: Tensor | None = None  # (B,H,K): n_t of attention normalisation
    log_scale: Tensor | None = None  # (B,H): memory and normaliser are kept divided by exp(log_scale)

    def index_select(self, order: Tensor) -> FastWeightState:
        """The state of the sequences ``order`` (long, along B): beam reordering, batch compaction."""
        return self._map(lambda x: x.index_select(0, order))

    def detach(self) -> FastWeightState:
        return self._map(lambda x: x.detach())

    def to(self, *args, **kwargs) -> FastWeightState:
        return self._map(lambda x: x.to(*args, **kwargs))

    def _map(self, change) -> FastWeightState:
        return FastWeightState(*(None if x is None else change(x) for x in self))
