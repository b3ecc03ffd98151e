"""fairseq's decoder layer as a step of generation: which steps its parts have, and the states that they start from."""

from __future__ import annotations

from typing import Any

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from ...config import EXTRAS
from ...generation.base import SoftmaxStepper, Stepper
from ...generation.kv_cache import Past
from ...generation.layer import AttentionStep, FeedForwardStep, LayerStep
from ...generation.steppers import step_mixer
from ...mixers.base import has_hooks
from ...modules import FastWeightDecoderLayer, LinearAttention, MixerAttention
from ...modules.stateful import Incremental
from .channel_mixing import ChannelMixingStep
from .cross import KernelSource, SourceReader
from .sparse import SparseAttentionStep, SparseFeedForwardStep, SparseSoftmaxStepper, has_sparse_feed_forward, is_sparse_softmax


class FairseqSoftmaxStepper(SoftmaxStepper):
    """fairseq's softmax attention, whose state is a dictionary."""

    def __init__(self, attention: MultiheadAttention, state: dict | None) -> None:
        super().__init__(attention, None)
        if state is not None:
            hidden, length = state.get("prev_key_padding_mask"), state["prev_key"].shape[2]
            self.last = Past(state["prev_key"], state["prev_value"], length, [length], None if hidden is None else hidden.bool())

    def state(self) -> dict[str, Tensor | None] | None:
        if self.last is None:
            return None
        keys, values, hidden = self.last.tokens()
        return {"prev_key": keys, "prev_value": values, "prev_key_padding_mask": hidden}


def make_stepper(attention: nn.Module, state: Any) -> Stepper:
    """The stepper of a mixer's attention, or of softmax attention, that continues from this state; None: from the first token."""
    if isinstance(attention, MixerAttention):
        return step_mixer(attention.mixer, state)
    return (SparseSoftmaxStepper if is_sparse_softmax(attention) else FairseqSoftmaxStepper)(attention, state)


def has_stepper(attention: nn.Module) -> bool:
    """Whether there is a stepper for an attention."""
    if isinstance(attention, MixerAttention):
        return not (attention.mixer.norms_residual or attention.mixer.alone)
    if is_sparse_softmax(attention):
        return True
    reads_itself = isinstance(attention, MultiheadAttention) and attention.self_attention
    return reads_itself and attention.bias_k is None and not attention.add_zero_attn and not attention.use_xformers


def has_step(layer: nn.Module) -> bool:
    """Whether all self-attention of the layer has steppers, and it has no other part than those that are known here."""
    return (
        isinstance(layer, FastWeightDecoderLayer)
        and all(map(has_stepper, [layer.self_attn, *layer.more_attention]))
        and isinstance(layer.encoder_attn, (LinearAttention, type(None)))
        and all(getattr(layer, part) is None for part in EXTRAS.values())
        and not has_hooks(layer)
    )


def taken(part: Any, incremental_state: dict) -> Any:
    """Takes the state of an attention, or of another part, out of fairseq's incremental state."""
    name = part.state_name if isinstance(part, Incremental) else "attn_state"
    return incremental_state.pop(part._get_full_incremental_state_key(name), None)


def layer_step(layer: FastWeightDecoderLayer, incremental_state: dict, encoder_out: dict | None) -> LayerStep:
    """The step of a layer that continues from the states in fairseq's incremental state."""
    attentions, norms = [layer.self_attn, *layer.more_attention], [layer.self_attn_layer_norm, *layer.more_norms]
    source = None if layer.encoder_attn is None else encoder_out
    norms += [layer.final_layer_norm] if source is None else [layer.encoder_attn_layer_norm, layer.final_layer_norm]
    inside = norms if layer.normalize_before else [None] * len(norms)
    parts: list[AttentionStep | FeedForwardStep | ChannelMixingStep] = [
        attention_step(attention, norm, incremental_state) for attention, norm in zip(attentions, inside)
    ]
    if source is not None:
        reader = source_reader(layer.encoder_attn, incremental_state, source)
        parts.append(AttentionStep(layer.encoder_attn, reader, inside[-2]))
    if layer.channel_mixing is not None:
        mixing = layer.channel_mixing
        parts.append(ChannelMixingStep(mixing, inside[-1], taken(mixing, incremental_state)))
    elif not has_sparse_feed_forward(layer):
        parts.append(FeedForwardStep(layer.fc1, layer.activation_fn, layer.fc2, inside[-1]))
    else:
        units = None if layer.recurrence is None else taken(layer.recurrence, incremental_state)
        parts.append(SparseFeedForwardStep(layer, inside[-1], units))
    return LayerStep(parts, None if layer.normalize_before else norms)


def attention_step(attention: nn.Module, norm: nn.Module | None, incremental_state: dict) -> AttentionStep:
    """The step of self-attention, which reads the tokens or what sparse queries, keys and values make of them."""
    stepper, source = make_stepper(attention, taken(attention, incremental_state)), getattr(attention, "source", None)
    if source is None:
        return AttentionStep(attention, stepper, norm)
    return SparseAttentionStep(attention, stepper, norm, taken(source, incremental_state))


def source_reader(attention: LinearAttention, incremental_state: dict, encoder_out: dict) -> KernelSource | SourceReader:
    """What reads the source of each row."""
    if KernelSource.can_read(attention):
        return KernelSource(attention, taken(attention, incremental_state), encoder_out)
    return SourceReader(attention, incremental_state, encoder_out)
