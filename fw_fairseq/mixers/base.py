"""The protocol of every token mixer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import Mistake
from ..feature_maps import FEATURE_MAPS
from .options import DECLARED, MixerOptions, check_values

VALUES = "values"  # of layer 0, in what layers share: (B,H,n T,V)


def check_heads(embed_dim: int, num_heads: int, part: str | None = None) -> None:
    """Refuses a width that heads cannot share. With ``part``, "encoder" or "decoder", it has the names of the command line."""
    if num_heads < 1 or embed_dim % num_heads:
        options = f"--{part}-embed-dim", f"--{part}-attention-heads"
        width, heads = ("embed_dim", "the number of heads") if part is None else options
        raise Mistake(f"{width} is {embed_dim}; it must be a multiple of {heads}, {num_heads}")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(T,B,H*X) -> (B,H,T,X), a view."""
    return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def join_heads(x: Tensor) -> Tensor:
    """(B,H,T,X) -> (T,B,H*X)"""
    return x.permute(2, 0, 1, 3).flatten(2)


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer's weight and bias say all that it computes: there is no adapter around it, and no hook changes them."""
    return isinstance(layer, nn.Linear) and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    """Whether someone wants to be told when a part of the module runs, or has put a function in its place."""
    return any(part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook") for part in module.modules())


def rows(**counts: int) -> dict[str, slice]:
    """Consecutive rows of one projection, by name."""
    start, found = 0, {}
    for name, count in counts.items():
        found[name], start = slice(start, start + count), start + count
    return found


class Mixer(nn.Module):
    """``forward(x[0:T])`` equals ``forward(x[0:s])`` followed by ``forward(x[s:T], state)`` for every s, up to rounding.

    The same state serves decoding token by token, a prompt that is read in one pass, and the next segment of a stream. Its type is
    ``state_type``, a NamedTuple of tensors that begin with B, decorated by ``ops.state.tensor_state``. Its size does not depend on
    the number of tokens. A new mixer overrides ``forward`` and sets ``state_type``; it overrides the other methods where it can do
    more than they do here.

    ``settings`` names those of ``MixerOptions`` that a mixer takes, which ``read_settings`` returns. Models give all options as one
    object, ``config``; ``Leap(128, heads=4, pooling_dropout=0.1)`` gives settings by name, and the others have their defaults.

    ``options`` names the options of the command line that the mixer reads: its settings, where it does not say otherwise. A model
    that is to be trained refuses every other option that was given, because it would have no effect.
    """

    state_type: type
    takes_shared = False  # whether layers of one pass share something: see ``forward``
    takes_source = False  # whether ``source`` may replace x as the input of ``in_proj``
    takes_keep_state = False  # whether ``forward`` saves work where no state is kept
    norms_residual = False  # whether the residual connection around it takes its input after the norm, not before it
    alone = False  # whether a layer is the mixer alone, without residual connection, norm and dropout around it
    settings: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **keywords) -> None:
        super().__init_subclass__(**keywords)
        if "settings" in vars(cls) and "options" not in vars(cls):
            cls.options = cls.settings

    def __init__(self, embed_dim: int, heads: int = 1, *, divided: bool = True) -> None:
        """divided: whether each head has its share of the width."""
        super().__init__()
        if divided or heads < 1:
            check_heads(embed_dim, heads)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, heads, embed_dim // heads

    @classmethod
    def read_settings(cls, config: object, given: dict[str, Any]) -> MixerOptions:
        """The options of ``config``, a MixerOptions, another object with such attributes, or None, and in their place those given
        by name. Those of ``config`` were checked before; those given by name are checked here."""
        options = MixerOptions.of(config)
        if not given:
            return options
        for name in given:
            if name not in cls.settings:
                raise Mistake(f"{cls.__name__} has no setting {name}; it has: {', '.join(cls.settings) or 'none'}")
        check_values([DECLARED[name] for name in given], given, str)
        options = replace(options, **given)
        for name, value in given.items():
            maps = [phi for phi, kind in FEATURE_MAPS.items() if name in kind.options]
            if maps and str(options.feature_map) not in maps and value != DECLARED[name].default:
                raise Mistake(f"{name} has no effect with feature_map {str(options.feature_map)!r}; it is for: {', '.join(maps)}")
        return options

    @classmethod
    def of_layer(cls, embed_dim: int, num_heads: int, config: MixerOptions, layer: int, layers: int) -> Mixer:
        """The mixer of layer number ``layer`` of ``layers``."""
        kind: Any = cls  # the others take settings, too
        return kind(embed_dim, num_heads, config)

    def __call__(self, x: Tensor, state: Any = None, *args, **kwargs) -> Any:
        """``forward``, for an input and a state that this mixer can have."""
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != self.embed_dim or not x.is_floating_point():
            is_ = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise Mistake(f"x is {is_}; it must be a tensor of floating-point numbers (T,B,C) with C = {self.embed_dim}")
        if state is not None and not isinstance(state, self.state_type):
            kind = self.state_type.__name__
            raise Mistake(f"state is a {type(state).__name__}; it must be None or the {kind} that an earlier call returned")
        return super().__call__(x, state, *args, **kwargs)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        decoding: bool = False,
        group: Any = None,
        source: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
        keep_state: bool = True,
    ) -> tuple[Tensor, Any]:
        """Maps x (T,B,C), T at least 1, to y (T,B,C) and the state after the last token.

        Args:
            state: the state that an earlier call returned; None before the first token.
            padding_mask: (B,T), True at padding, which leaves the state as it is.
            reset_mask: (B,T), True at the first token of a new text, before which the state is emptied.
            decoding: the tokens come one at a time, so that the state may take whatever form is smaller.
            group: a ``torch.distributed`` group whose workers hold consecutive parts of the tokens. It is None unless
                ``why_not_across_workers`` returns None.
            source: (T,B,C'), what ``in_proj`` reads in place of x. It is None unless ``takes_source``.
            shared: a dictionary of the pass, empty before layer 0, where layers leave what later ones read. It is None unless
                ``takes_shared``.
            keep_state: False where no call continues from this one, so that the state may be None. It is True unless
                ``takes_keep_state``.

        A mixer that makes no use of the last five takes ``**unused`` in their place. T = 0 raises ValueError.
        """
        raise NotImplementedError

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Maps x (T,1,C) to the weights (heads,T) that the tokens have in the output at the last one, by kind; docs/explain.md."""
        raise Mistake(f"fw-explain cannot say what a layer of {type(self).__name__} takes from which token")

    def by_head(self, part: Tensor) -> Tensor:
        """(T,B,H*X) -> (B,H,T,X), a view."""
        return split_heads(part, self.num_heads)

    def join(self, heads: Tensor) -> Tensor:
        """(B,H,T,X) -> (T,B,H*X)"""
        return join_heads(heads)

    @torch.no_grad()
    def state_size(self) -> int:
        """The number of numbers in the state of one sequence."""
        x = next(self.parameters()).new_zeros(1, 1, self.embed_dim)
        read: int = self.in_proj.in_features if self.takes_source else self.embed_dim  # type: ignore[union-attr, assignment]
        source: dict[str, Any] = {} if read == self.embed_dim else {"source": x.new_zeros(1, 1, read)}
        if self.takes_shared:
            source["shared"] = {VALUES: x.new_zeros(1, self.num_heads, 1, self.head_dim)}
        _, state = self(x, **source)
        return sum(x.numel() for x in state if x is not None and x.is_floating_point())

    def projections(self) -> dict[str, dict[str, slice]]:
        """Maps the name of each linear layer that makes several things at once to the rows of its weight and bias that make each
        of them, in their order. Messages about a layer name those parts; fw-convert and fine-tuning find gates there."""
        return {}

    def pretrained(self) -> dict[str, slice]:
        """Maps each parameter's name to the rows that fw-convert copies from softmax attention, scaled or not."""
        return {}

    def redraw(self, keep: bool = False) -> None:
        """Draws new random features before a training forward; with ``keep``, takes those that an earlier state was made with."""

    def why_not_across_workers(self) -> str | None:
        """The reason why the mixer cannot continue from the state of the worker before it in ``group``, or None if it can."""
        return f"the memory of {type(self).__name__} does not pass from worker to worker; use --mixer fast_weight"

    def watch(self, keeps_state_norm: bool) -> None:
        """Is called before a training forward whose ``statistics`` are wanted. Those after it are not watched."""

    def statistics(self) -> dict[str, Tensor | None]:
        """Detached scalars of the forward after ``watch``, to be logged by name. None: the layer did not run, as with LayerDrop."""
        return {}
