"""The compiled step for layers that are not plain: a layer makes queries, keys, values and gates as it always does, and the loop of
``compiled_memory`` does the recurrence.

These are the layers with any rule that has coefficients, whatever its gates are made of, and any part around the recurrence.
"""

from __future__ import annotations

from torch import Tensor

from ..feature_maps import RowMap
from ..mixers import FastWeight
from ..ops import FastWeightState
from ..ops.native import takes
from .compiled_memory import CompiledMemory
from .memory import in_columns, steps_here


class OperandMemory(CompiledMemory):
    """The memory of a layer, and what the parts around the recurrence keep."""

    def __init__(self, mixer: FastWeight, state: FastWeightState | None, x: Tensor):
        super().__init__(mixer, state, x)
        before = {} if state is None else state._replace(memory=None, normaliser=None)._asdict()
        self.kept = {name: part for name, part in before.items() if part is not None}  # by the layer itself

    @staticmethod
    def fits(mixer: FastWeight) -> bool:
        """Whether the loop knows the recurrence of this mixer, and no kernel does the step."""
        rule = mixer.rule
        if not in_columns(mixer) or not steps_here(mixer) or (rule.removal is not None and rule.erases):
            return False
        return (rule.simple or not mixer.attention_norm) and takes(next(mixer.in_proj.parameters()).detach())

    def prepare(self, *sizes) -> None:
        """Fills in what does not change from token to token. The layer scales what was read."""
        super().prepare(*sizes)
        self.arguments.scale = 1.0

    def map_of_loop(self) -> RowMap | None:
        """The map that the loop applies to rows; none where a rule makes another key of the features."""
        return None if self.rule.key is not None else super().map_of_loop()

    def step(self, x: Tensor, shared: dict[str, Tensor] | None = None) -> Tensor:
        """Writes and reads: x (R,C) -> y (R,C). shared: see ``Mixer.forward``."""
        mixer, rule = self.mixer, self.rule
        made = mixer.operands(x.unsqueeze(0), FastWeightState(None, **self.kept))
        q, k, v, gates, *_ = made
        self.kept = made.kept
        if mixer.takes_shared:
            v = mixer.with_first_values(v, made.mixing, shared)
        if mixer.row_map is not None and not self.arguments.maps_rows:
            q, k = mixer.row_map(q), mixer.row_map(k)
        k = k if rule.key is None else rule.key(k, **gates)
        f, z, e, w = rule.coefficients(**gates)
        written = v
        if w is not None and w.dim() == 4:  # a strength per channel
            written, w = v * w, None
        u = None if rule.bonus is None else rule.bonus(**gates)
        a, p = (None, None) if rule.removal is None else rule.removal(**gates)
        y = self.read((q, k, written, f, z, e, w, u, a, p))
        y = y if rule.skip is None else y + rule.skip(**gates).unsqueeze(-1) * v
        return mixer.output(y, made.output).squeeze(0)

    def read(self, parts: tuple[Tensor | None, ...]) -> Tensor:
        """Takes what ``compiled_memory.VIEWS`` names, (R,H,n) or (R,H,n,X) for n writes, and returns what the query reads after the
        last of them, (R,H,1,V)."""
        parts = tuple(map(self.readable, parts))
        by_key = [part is not None and part.dim() == 4 for part in (parts[3], parts[5])]
        y = self.like.new_empty(self.arguments.rows, self.heads, 1, self.value_dim)
        for write in range(self.mixer.writes):
            for view, part in zip(self.views, parts):
                view.show(part if part is None or part.shape[2] == 1 else part[:, :, write : write + 1])
            loop = self.arguments  # others after a write that made factors a matrix
            loop.y, (loop.decay_of_keys, loop.erase_of_keys) = y.data_ptr(), by_key
            self.run(loop)
        return y

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.kept = {name: part.index_select(0, order) for name, part in self.kept.items()}

    def state(self) -> FastWeightState:
        """The state after the last token."""
        return super().state()._replace(**self.kept)
