"""One attention that reads one token of each row at a time: a mixer, or softmax attention."""

from __future__ import annotations

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from ...generation.kv_cache import Past, attend
from ...generation.steppers import Stepper, step_mixer
from ...modules import MixerAttention
from ...modules.sparse.softmax import SparseAttention


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
        length = state["prev_key"].shape[2]
        return Past(state["prev_key"], state["prev_value"], length, [length], None if hidden is None else hidden.bool())

    def state(self):
        if self.last is None or isinstance(self.mixer, SparseAttention):
            return self.last
        keys, values, hidden = self.last.tokens()
        return {"prev_key": keys, "prev_value": values, "prev_key_padding_mask": hidden}


def make_stepper(attention: nn.Module, state) -> Stepper:
    """The stepper of a mixer's attention, or of softmax attention, that continues from this state; None: from the first token."""
    return step_mixer(attention.mixer, state) if isinstance(attention, MixerAttention) else SoftmaxStepper(attention, state)


def has_stepper(attention: nn.Module) -> bool:
    """Whether there is a stepper for an attention."""
    if isinstance(attention, MixerAttention):
        return not attention.mixer.norms_residual
    if isinstance(attention, SparseAttention):
        return True
    plain = isinstance(attention, MultiheadAttention) and attention.self_attention
    return plain and attention.bias_k is None and not attention.add_zero_attn and not attention.use_xformers
