"""Puts heads of this project into a decoder of transformers, whatever its architecture."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..errors import Mistake
from .attention import before_model, install
from .heads import HEADS, Sizes, make_heads

SOFTMAX, PROBE = "softmax", "fw_fairseq_probe"
PAGE = "docs/pretrained.md says what an architecture needs"


def attentions(model: nn.Module) -> list[Any]:
    """The attention of each layer, bottom first: what has a layer's number, and says whether it is causal."""
    found: list[Any] = [
        part for part in model.modules() if isinstance(getattr(part, "layer_idx", None), int) and hasattr(part, "is_causal")
    ]
    found.sort(key=lambda part: part.layer_idx)
    if not found or [part.layer_idx for part in found] != [*range(len(found))]:
        raise Mistake(f"{type(model).__name__} does not have one attention in each layer where this project finds it; {PAGE}")
    return found


def adapt(
    model: nn.Module, mixers: Sequence[str], options: Any, window: int = 0, drops_rotary: bool = False,
    sizes: dict[int, Sizes] | None = None,
) -> dict[int, Sizes]:  # fmt: skip
    """Replaces softmax by heads of their own in the layers whose mixer is not softmax. Returns the sizes of all layers.

    mixers: the name of each layer's; options: a ``MixerOptions`` or an object or dictionary with such values. window: how many
    tokens softmax reads beside fast weights; 0: none. drops_rotary: queries and keys of converted layers have no rotary positions.
    sizes: what an earlier call returned.
    """
    layers = attentions(model)
    if len(mixers) != len(layers):
        raise Mistake(f"{len(mixers)} mixers are named, and {type(model).__name__} has {len(layers)} layers; name one for each")
    if unknown := sorted({*mixers} - {*HEADS, SOFTMAX}):
        raise Mistake(f"{unknown[0]} cannot take the place of a pretrained attention; use: {', '.join((*HEADS, SOFTMAX))}")
    if {*mixers} == {SOFTMAX}:
        return {}
    sizes = sizes or probe(model, layers)
    for number, (name, attention) in enumerate(zip(mixers, layers)):
        if name == SOFTMAX:
            continue
        heads = make_heads(name, sizes[number], options, window, number, len(layers))
        like = next(attention.parameters())
        install(attention, heads.to(device=like.device, dtype=like.dtype), drops_rotary)
    model.register_forward_pre_hook(before_model, with_kwargs=True)
    return sizes


@torch.no_grad()
def probe(model: Any, layers: list[Any]) -> dict[int, Sizes]:
    """The sizes of each attention, found by one token that passes all of them."""
    found: dict[int, Sizes] = {}
    widths: dict[int, int] = {}

    def measure(module: Any, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
        found[module.layer_idx] = Sizes(widths[module.layer_idx], query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        return value.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None

    def see(module: Any, args: tuple, kwargs: dict) -> None:
        widths[module.layer_idx] = (args[0] if args else kwargs["hidden_states"]).shape[-1]

    AttentionInterface.register(PROBE, measure)
    configs, training = [layer.config for layer in layers], model.training
    hooks = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]
    try:
        for layer in layers:
            layer.config = copy.copy(layer.config)
            layer.config._attn_implementation = PROBE
        model.eval()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device), use_cache=False)
    finally:
        model.train(training)
        for layer, config in zip(layers, configs):
            layer.config = config
        for hook in hooks:
            hook.remove()
    if len(found) != len(layers):
        raise Mistake(f"{type(model).__name__} does not call transformers' attention function in every layer; {PAGE}")
    return found


def all_heads(model: nn.Module) -> dict[int, Any]:
    """The heads of the converted layers by the layers' numbers."""
    return {part.layer_idx: part.heads for part in attentions(model) if hasattr(part, "heads")}
