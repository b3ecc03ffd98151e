"""How heads get into an attention of transformers, and their states to them.

Every decoder of transformers calls its attention function by a name in its configuration, with the queries, keys and values that
its own projections, norms and positions have made. A converted attention has another name there, NAME, under which this module
registers ``read``. That one function is all that an architecture needs; the modules of the library stay where they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

from ..errors import Mistake
from ..feature_maps import wide
from .heads import LocalHeads, MemoryHeads, Read
from .steps import HeadsStep

NAME = "fw_fairseq"
CACHES = ("cache", "past_key_values", "layer_past")  # what versions and architectures call the cache of an attention
CHANGES_SCORES = ("softcap", "s_aux", "position_bias")  # which softmax over a window would have to know


@dataclass
class Pass:
    """What the converted layers of one pass need besides their input.

    ``before`` and ``after``: the states by layer, before the first and after the last token. ``distances``: None, or a list in
    which each converted layer leaves how far its heads are from softmax, whose output it then returns.
    """

    padding_mask: Tensor | None = None  # (B,T), True at padding
    reset_mask: Tensor | None = None  # (B,T), True at the first token of a new text
    before: dict[Any, Any] = field(default_factory=dict)
    after: dict[Any, Any] = field(default_factory=dict)
    group: Any = None  # see ``Mixer.forward``
    decoding: bool = False
    distances: list[Tensor] | None = None


class StateLayer(DynamicLayer):
    """The place of a converted layer in transformers' cache: its state, and how many tokens were read."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = None  # the state, or after a generated token what changes it in place
        self.length = 0

    @property
    def state(self) -> Any:
        return self.held.state() if isinstance(self.held, HeadsStep) else self.held

    @state.setter
    def state(self, value: Any) -> None:
        self.held = value

    def __getstate__(self) -> dict:
        return self.__dict__ | {"held": self.state}  # a copy has a state of its own

    def step(self, heads: Any, given: Read) -> Tensor | None:
        """What the heads read at one token by their compiled step, where they have one; None otherwise."""
        if not isinstance(self.held, HeadsStep):
            if not HeadsStep.can_hold(heads, self.held):
                return None
            self.held = HeadsStep(heads, self.held)
        return self.held(given)

    def get_seq_length(self, *args) -> int:
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # positions, in transformers before 5.4
        return self.length + new, 0

    def reset(self) -> None:
        self.held, self.length = None, 0

    def crop(self, *args) -> None:
        raise Mistake("a state cannot take tokens back, so this model cannot assist another one's generation")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if isinstance(self.held, HeadsStep):
            self.held.reorder(beam_idx.long())
        elif self.held is not None:
            self.held = self.held.index_select(beam_idx.long())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if (state := self.state) is not None:
            rows = next(len(x) for x in state if isinstance(x, Tensor))
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))


def state_layer(cache: Any, layer: int) -> StateLayer:
    """The place of a converted layer in the cache, made where it is not there yet."""
    while len(cache.layers) <= layer:
        cache.layers.append(DynamicLayer())
    if not isinstance(cache.layers[layer], StateLayer):
        cache.layers[layer] = StateLayer()
    return cache.layers[layer]


def read(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float | None = None,
    dropout: float = 0.0, layer_input: Tensor | None = None, memories: Pass | None = None, state_cache: Any = None, **others,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function of converted layers: q (B,H,T,D), k and v (B,G,T,D) to (B,T,H,V)."""
    heads: Any = module.heads
    if layer_input is None or memories is None:
        raise Mistake(
            f"{type(module).__name__} does not hand its arguments on to its attention function; docs/pretrained.md says more"
        )
    if isinstance(heads, LocalHeads) or getattr(heads, "local", None) is not None:
        for name in CHANGES_SCORES:
            if others.get(name) is not None:
                raise Mistake(f"{type(module).__name__} changes the scores of softmax by {name}; leave windows out")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, given, y = module.layer_idx, Read(layer_input, query * scaling, key, value), None
    place = None if state_cache is None else state_layer(state_cache, layer)
    if place is not None and not heads.training and is_step(given, memories):
        y = place.step(heads, given)
    if y is None:
        state = memories.before.get(layer) if place is None else place.state
        if isinstance(state, tuple) and not hasattr(state, "_fields"):  # read from a checkpoint
            state = heads.state_type(*state).to(query.device)
        heads.redraw(keep=bool(memories.before))
        y, state = heads(
            given, state, memories.padding_mask, memories.reset_mask, dropout=dropout,
            decoding=memories.decoding or (place is not None and not torch.is_grad_enabled()), group=memories.group,
        )  # fmt: skip
        if place is not None:
            place.state = state
        else:
            memories.after[layer] = state
    if place is not None:
        place.length += query.shape[2]
    y = y.transpose(1, 2).to(query.dtype)
    if memories.distances is None:
        return y, None
    with torch.no_grad():
        wanted, _ = FUNCTIONS[module.softmax](module, query, key, value, attention_mask, dropout=0.0, scaling=scaling)
    memories.distances.append(distance(y, wanted, memories.padding_mask))
    return wanted, None


def is_step(given: Read, memories: Pass) -> bool:
    """Whether these are one token of each sequence, with nothing around them."""
    plain = memories.padding_mask is None and memories.reset_mask is None and memories.distances is None
    return plain and given.q.shape[2] == 1 and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def distance(y: Tensor, wanted: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The squared distance of y (B,T,H,V) in units of the mean square of what is wanted, over what is no padding."""
    y, wanted = wide(y), wide(wanted)
    if padding_mask is not None:
        y, wanted = y[~padding_mask], wanted[~padding_mask]
    return (y - wanted).square().sum() / wanted.square().sum().clamp(min=1e-12 * max(1, wanted.numel()))


def before_attention(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A hook of converted attention: its function gets the layer's input and the cache, and the library does not keep keys there.
    Without rotary positions, queries and keys are turned by nothing."""
    given = dict(kwargs)
    given["layer_input"] = args[0] if args else kwargs["hidden_states"]
    for name in CACHES:
        if given.get(name) is not None:
            given["state_cache"] = given[name]
            given[name] = None
    if module.drops_rotary and given.get("position_embeddings") is not None:
        cos, sin = given["position_embeddings"]
        given["position_embeddings"] = torch.ones_like(cos), torch.zeros_like(sin)
    return args, given


def before_model(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A hook of the whole model: its converted layers get what is padding, and where texts begin that are packed into a row."""
    if kwargs.get("memories") is not None:
        return args, kwargs
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    tokens: Any = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    padding = resets = None
    if mask is not None and mask.dim() == 2:
        padding = mask[:, -tokens.shape[1] :].eq(0)
        padding = padding if padding.any() else None
    cached = any(kwargs.get(name) is not None for name in CACHES)
    if positions is not None and mask is None and not cached and positions.shape[-1] > 1:
        begins = positions.expand(len(tokens), -1).eq(0)
        resets = torch.cat([begins.new_zeros(len(begins), 1), begins[:, 1:]], 1)
        resets = resets if resets.any() else None
    return args, kwargs | {"memories": Pass(padding, resets)}


def install(attention: Any, heads: LocalHeads | MemoryHeads, drops_rotary: bool) -> None:
    """Makes the heads a part of the attention."""
    attention.heads, attention.drops_rotary, attention.softmax = heads, drops_rotary, attention.config._attn_implementation
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = NAME
    attention.register_forward_pre_hook(before_attention, with_kwargs=True)


FUNCTIONS: Any = AttentionInterface()
FUNCTIONS.register(NAME, read)
