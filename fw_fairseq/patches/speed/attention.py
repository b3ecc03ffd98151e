"""Attention

Causal attention is told that it is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from torch import Tensor
from torch.nn import functional as F

from ..replacing import replaces

ASK = (Tensor.dim, Tensor.size, torch.is_floating_point)  # what torch's attention asks of a mask, beside its attributes
KEEP = (Tensor.detach, Tensor.unsqueeze)  # what activation checkpointing and torch's attention make of it


class CausalMask(Tensor):
    """fairseq's causal mask (T,T), of which there are no numbers. torch's attention with it is causal; whatever else reads it gets
    the numbers, which ``numbers`` makes."""

    numbers: Callable[[], Tensor]

    @classmethod
    def made_by(cls, numbers: Callable[[Tensor], Tensor], like: Tensor) -> CausalMask:
        """Returns the mask for x (T,B,C). ``numbers`` makes that of fairseq for a tensor of this length, type and device."""
        length = like.shape[0]
        shape = like.new_empty(()).expand(length, length)
        return shape.as_subclass(cls).with_numbers(partial(numbers, shape))

    def with_numbers(self, numbers: Callable[[], Tensor]) -> CausalMask:
        """Returns itself."""
        self.numbers = numbers
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return causal_attention(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in ASK or getattr(func, "__name__", "") in ("__get__", "__set__"):
                return func(*args, **kwargs)
            if func in KEEP:
                return func(*args, **kwargs).as_subclass(cls).with_numbers(args[0].numbers)
        return func(*map(with_its_numbers, args), **{name: with_its_numbers(value) for name, value in kwargs.items()})


def with_its_numbers(value: Any) -> Any:
    """Returns the numbers of a causal mask, also of one within a tuple; anything else as it is."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(with_its_numbers, value))
    if not isinstance(value, CausalMask):
        return value
    return value.numbers().expand(value.shape)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **more
) -> Tensor:
    """torch's attention without the mask that it would compute."""
    return F.scaled_dot_product_attention(query, key, value, None, dropout_p, True, **more)


@replaces(TransformerDecoderBase, "buffered_future_mask")
def say_that_a_mask_is_causal(original: Callable, decoder: TransformerDecoderBase, tensor: Tensor) -> Tensor:
    """fairseq gives torch's attention the causal mask as T x T numbers, so it never takes FlashAttention. Now it says that
    attention is causal; with padding, and where weights are wanted, it gives the numbers as before."""
    return CausalMask.made_by(partial(original, decoder), tensor)
