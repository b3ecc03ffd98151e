"""One attention that reads one token of each row at a time: a mixer, or softmax attention."""

from __future__ import annotations

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from ..mixers import Additive, FastWeight, Leap, Mixer, Sru
from ..modules import MixerAttention
from ..modules.past import Past, attend
from ..modules.sparse.softmax import SparseAttention
from .cell import Cell
from .compiled_memory import CompiledMemory
from .kernel_memory import KernelMemory
from .memory import Memory
from .pools import Pools


class Stepper:
    """Calls the mixer, which returns a new state for each token.

    ``takes_projected``: whether ``of_projected`` may get what the input projection makes of a token.
    """

    takes_projected = False

    def __init__(self, mixer: Mixer, state):
        self.mixer, self.last = mixer, state

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Maps x (R,C) to y (R,C). ``source``: what the input projection reads in place of x."""
        given = {} if source is None else {"source": source.unsqueeze(0)}
        y, self.last = self.mixer(x.unsqueeze(0), self.last, decoding=True, **given)
        return y.squeeze(0)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the state of row ``order[i]``."""
        if self.last is not None:
            self.last = self.last.index_select(order)

    def state(self):
        """The state after the last token."""
        return self.last


class InPlaceStepper(Stepper):
    """Keeps the state in buffers and changes them there.

    kind: the class of the buffers, ``kind(mixer, state, x)``, with ``step``, ``reorder`` and ``state`` as this class has them.
        ``kind.takes(mixer, state, rows)`` says whether they can hold the state yet: until then the mixer is called.
    """

    def __init__(self, mixer: Mixer, state, kind: type):
        super().__init__(mixer, state)
        self.kind, self.buffers = kind, None
        self.takes_projected = kind in (CompiledMemory, Memory)

    def ready(self, rows: int) -> bool:
        """Whether the buffers hold the state, or can hold it from now on."""
        return self.buffers is not None or self.kind.takes(self.mixer, self.last, rows)

    def of_projected(self, parts: Tensor) -> Tensor:
        """Maps what the input projection makes of a token, (R,P), to y (R,C)."""
        if self.buffers is None:
            self.buffers, self.last = self.kind(self.mixer, self.last, parts), None
        return self.buffers.of_projected(parts)

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        if self.buffers is None:
            if not self.kind.takes(self.mixer, self.last, len(x)):
                return super().__call__(x, source)
            self.buffers, self.last = self.kind(self.mixer, self.last, x), None
        return self.buffers.step(x if source is None else source)

    def reorder(self, order: Tensor) -> None:
        super().reorder(order) if self.buffers is None else self.buffers.reorder(order)

    def state(self):
        return super().state() if self.buffers is None else self.buffers.state()


class SoftmaxStepper(Stepper):
    """Softmax attention whose keys and values stay where they are: a token adds its own."""

    def __init__(self, attention: MultiheadAttention | SparseAttention, state):
        super().__init__(attention, self.past(state))
        self.takes_projected = isinstance(attention, SparseAttention)

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        attention = self.mixer
        if source is not None:
            return self.of_projected(attention.in_proj(source))
        return attention.out_proj(self.read(attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)))

    def ready(self, rows: int) -> bool:
        """Always: there are no other buffers."""
        return True

    def of_projected(self, parts: Tensor) -> Tensor:
        """Maps q, k and v side by side, (R,3C), to y (R,C)."""
        return self.read(*parts.chunk(3, -1))

    def read(self, *parts: Tensor) -> Tensor:
        """Adds k and v to the past, and reads it with q."""
        q, k, v = (part.reshape(len(part), self.mixer.num_heads, 1, -1) for part in parts)
        self.last = (Past.empty(k, 64) if self.last is None else self.last).add(k, v, None)
        return attend(q, *self.last.tokens(), False).view(len(q), -1)

    def past(self, state) -> Past | None:
        """The state as ``Past``; fairseq's attention has a dictionary."""
        if not isinstance(state, dict):
            return state
        hidden = state.get("prev_key_padding_mask")
        return Past(state["prev_key"], state["prev_value"], state["prev_key"].shape[2], None if hidden is None else hidden.bool())

    def state(self):
        if self.last is None or isinstance(self.mixer, SparseAttention):
            return self.last
        keys, values, hidden = self.last.tokens()
        return {"prev_key": keys, "prev_value": values, "prev_key_padding_mask": hidden}


BUFFERS = {
    FastWeight: (KernelMemory, CompiledMemory, Memory),
    Additive: (Pools,),
    Leap: (Pools,),
    Sru: (Cell,),
}  # the best of each mixer first


def make_stepper(attention: nn.Module, state) -> Stepper:
    """The stepper of a mixer's attention, or of softmax attention, that continues from this state; None: from the first token."""
    if not isinstance(attention, MixerAttention):
        return SoftmaxStepper(attention, state)
    mixer = attention.mixer
    for kind in BUFFERS.get(type(mixer), ()):
        if kind.fits(mixer):
            return InPlaceStepper(mixer, state, kind)
    return Stepper(mixer, state)


def has_stepper(attention: nn.Module) -> bool:
    """Whether there is a stepper for an attention."""
    if isinstance(attention, MixerAttention):
        return not attention.mixer.norms_residual
    if isinstance(attention, SparseAttention):
        return True
    plain = isinstance(attention, MultiheadAttention) and attention.self_attention
    return plain and attention.bias_k is None and not attention.add_zero_attn and not attention.use_xformers
