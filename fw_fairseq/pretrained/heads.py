"""What takes the place of softmax between the projections of a pretrained attention: it gets the queries, keys and values of the
heads, with everything that the architecture does to them, and returns what the heads read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..feature_maps import LearnedRelu, wide
from ..mixers import FastWeight
from ..mixers.options import MixerOptions
from ..mixers.parts.features import drawn_bias, initial_bias
from ..ops import fast_weight
from ..rules.gates import Place
from .window import HeadsState, Window

SUM_SCALE = 1 / 512  # Mao 2022, footnote 4
SHARE = 2.0  # the logit of the window's share at the start, 0.88


class Sizes(NamedTuple):
    """The sizes of one attention: the width of its input, its heads, those of keys and values, and the widths of both."""

    width: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int


class Read(NamedTuple):
    """What heads read from: the attention's input (B,T,C), its queries (B,H,T,D), scaled, and keys and values (B,G,T,D)."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class LocalHeads(nn.Module):
    """Softmax attention to the last ``window`` tokens, itself among them. It has no parameters."""

    state_type = HeadsState

    def __init__(self, sizes: Sizes, window: int) -> None:
        super().__init__()
        self.repeats, self.window = sizes.heads // sizes.groups, window
        self.widths = [sizes.groups * sizes.key_dim, sizes.groups * sizes.value_dim]
        self.groups, self.heads, self.head_dim = sizes.groups, sizes.heads, sizes.value_dim

    def forward(
        self,
        read: Read,
        state: HeadsState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        dropout: float = 0.0,
        **unused,
    ) -> tuple[Tensor, HeadsState]:
        """Maps what the heads read from to what they read, (B,H,T,V), and the state after the last token."""
        made = torch.cat([part.transpose(1, 2).flatten(2) for part in (read.k, read.v)], -1)
        window = Window(made, state, self.window, padding_mask, reset_mask)
        y = self.through(window, read.q, dropout)
        recent, filled = window.last()
        return y, HeadsState(recent=recent, filled=filled)

    def through(self, window: Window, q: Tensor, dropout: float = 0.0) -> Tensor:
        """Softmax attention over the window."""
        k, v = self.keys_and_values(window.kept)
        return window.attend(q * q.shape[-1] ** 0.5, k.to(q), v, dropout)  # whose function divides again

    def keys_and_values(self, kept: Tensor) -> list[Tensor]:
        """Maps what is kept, (B,S,X), to keys and values of all heads, (B,H,S,D)."""
        parts = kept[..., : sum(self.widths)].split(self.widths, -1)
        return [part.unflatten(-1, (self.groups, -1)).transpose(1, 2).repeat_interleave(self.repeats, 1) for part in parts]

    def state_size(self) -> int:
        """The number of numbers in the state of one sequence."""
        return self.window * sum(self.widths)

    def watch(self, keeps_state_norm: bool) -> None:
        """Heads without a memory have no statistics."""

    def statistics(self) -> dict[str, Tensor | None]:
        return {}

    def redraw(self, keep: bool = False) -> None:
        """There is nothing random."""


class MemoryHeads(FastWeight):
    """Fast weights. ``in_proj`` makes the gates alone, and each query head has a memory, which shared keys and values are written
    into by gates of its own.

    With a ``window``, softmax reads the last tokens, itself among them, and the memory those before: each head takes a share of
    both that ``in_proj`` makes of the token, all of it from the window as long as nothing has left it.
    """

    settings: ClassVar[tuple[str, ...]] = (  # type: ignore[assignment]
        "update_rule", "feature_map", "feature_norm", "attention_norm", "attention_norm_of", "dpfp_nu", "favor_features",
        "favor_prescale", "write_strength_init", "negative_eigenvalues", "output_norm", "fast_weight_backend",
    )  # fmt: skip

    def __init__(self, sizes: Sizes, config: Any, window: int = 0, *, layer: int = 0, layers: int = 1) -> None:
        self.width, self.window, self.groups = sizes.width, window, sizes.groups
        config = replace(MixerOptions.of(config), feature_dim=sizes.key_dim)
        super().__init__(sizes.heads * sizes.value_dim, sizes.heads, config, layer=layer, layers=layers)
        self.out_proj = nn.Identity()  # type: ignore[assignment]
        self.local = LocalHeads(sizes, window) if window else None
        self.state_type: Any = HeadsState if window else FastWeight.state_type

    def rows_of_attention(self) -> dict[str, int]:
        return {"q": 0, "k": 0, "v": 0}

    def make_in_proj(self, bias: bool) -> nn.Linear:
        if self.window:
            self.sizes["share"] = self.num_heads
        made = nn.Linear(self.width, self.rows) if self.rows else nn.Identity()
        self.value_scale: Any = nn.Parameter(torch.ones(self.num_heads, 1, self.head_dim)) if self.scales_values else None
        return made  # type: ignore[return-value]

    @property
    def scales_values(self) -> bool:
        """Whether a memory would sum up too much with values as they are (Mao 2022, sec. 3)."""
        plain = not self.rule.gates and not self.attention_norm and self.feature_norm == "none"
        return plain or self.decaying_gate is not None

    @property
    def decaying_gate(self) -> str | None:
        """The gate of the decay of each channel of values."""
        named = [name for name, gate in self.rule.gates.items() if gate.axis == "V"]
        return named[0] if named and self.rule.sample.z is not None else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As fw-convert starts a layer: gates do not depend on the token, and start where their rule says for a converted model;
        learned features start as the identity."""
        if isinstance(self.feature_map, LearnedRelu):
            self.feature_map.bias.zero_()
            self.feature_map.weight.copy_(torch.eye(self.feature_map.head_dim).expand_as(self.feature_map.weight))
        if self.value_scale is not None:
            self.value_scale.fill_(SUM_SCALE)
        if not isinstance(self.in_proj, nn.Linear):
            return
        rows = self.sizes.values()
        for name, weight, bias in zip(self.sizes, self.in_proj.weight.split([*rows]), self.in_proj.bias.split([*rows])):
            if name in self.makers and len(weight):
                nn.init.xavier_uniform_(weight, gain=2**-0.5)
                bias.zero_()
            else:
                weight.zero_()
                bias.copy_(self.start_of(name, len(bias)))
            if name == self.decaying_gate:
                self.value_scale.copy_((1 - bias.sigmoid()).view_as(self.value_scale))

    def start_of(self, name: str, count: int) -> Tensor:
        """The biases of a gate, or of the window's share, in a converted layer."""
        if name == "share":
            return torch.full((count,), SHARE)
        gate = self.rule.gates.get(name)
        if gate is None or not count:
            return torch.zeros(count)
        start = "uniform" if gate.bias is None and gate.converted is None else gate.converted
        if start is None or (self.write_strength_init and gate.writes):
            return initial_bias(gate, Place(count, self.num_heads), self.write_strength_init)
        return drawn_bias(start, max(self.width, count))[:count]

    def __call__(self, *args, **kwargs) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)  # its input is no tensor

    def forward(  # type: ignore[override]
        self,
        read: Read,
        state: Any = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        decoding: bool = False,
        group: Any = None,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Any]:
        """Maps what the heads read from to what they read, (B,H,T,V), and the state after the last token."""
        if self.local is None:
            k, v = (part.repeat_interleave(self.num_heads // self.groups, 1) for part in (read.k, read.v))
            rows = self.in_proj(read.x)
            return self.recur(read.q, k, v, rows, state, padding_mask, reset_mask, decoding=decoding, group=group)
        made = torch.cat([*(part.transpose(1, 2).flatten(2) for part in (read.k, read.v)), self.in_proj(read.x)], -1)
        window = Window(made, state, self.window, padding_mask, reset_mask)
        y = self.local.through(window, read.q, dropout)
        kept, none = window.leaving()
        k, v = self.local.keys_and_values(kept)
        rows = kept[..., sum(self.local.widths) :]
        before = None if state is None else state.of_memory()
        y_memory, after = self.recur(read.q, k.to(read.q), v.to(read.q), rows, before, none, reset_mask, decoding=False)
        share = wide(made[..., -self.num_heads :]).sigmoid().masked_fill(none[..., None], 1).mT.unsqueeze(-1).to(y.dtype)
        recent, filled = window.last()
        return torch.lerp(y_memory.to(y.dtype), y, share), HeadsState(
            after.memory, after.normaliser, after.log_scale, recent, filled
        )

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, state: Any, padding_mask: Tensor | None, reset_mask: Tensor | None,
        **options,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Writes keys and values (B,H,T,D) by the gates that the rows (B,T,X) make, and reads with the queries."""
        q, _ = self.features(q)
        k, key_log_scale = self.features(k)
        if self.rule.keyless:
            k = torch.ones_like(q)
        rows = rows.transpose(0, 1)
        gates = self.all_gates(rows, k, self.gate_rows(rows))
        v = v if self.value_scale is None else v * self.value_scale.to(v.dtype)
        y, state = fast_weight(
            q, k, v.to(q.dtype), self.rule_name, gates, state, self.backend, self.attention_norm, self.feature_map.eps,
            padding_mask=padding_mask, key_log_scale=key_log_scale, reset_mask=reset_mask, feature_map=self.row_map,
            attention_norm_of=self.attention_norm_of, **options,
        )  # fmt: skip
        self.note_statistics(gates, state, padding_mask)
        y = y if self.norm is None else self.norm(y)
        return y.to(v.dtype), state

    def gate_rows(self, rows: Tensor) -> list[Tensor]:
        """What ``in_proj`` makes, (T,B,X), by gate. Without gates it is what it reads."""
        return list(rows[..., : self.rows].split([*self.sizes.values()][3:], -1))

    @property
    def rows(self) -> int:
        """The number of rows of ``in_proj``."""
        return sum(self.sizes.values())

    def projections(self) -> dict[str, dict[str, slice]]:
        return super().projections() if self.rows else {}

    def pretrained(self) -> dict[str, slice]:
        return {}

    def state_size(self) -> int:
        keys = self.num_heads * self.feature_map.out_dim
        size = keys * (self.head_dim + self.attention_norm)
        return size if self.local is None else size + self.local.state_size() + self.window * self.rows


HEADS = ("fast_weight", "local_attention")


def make_heads(name: str, sizes: Sizes, config: Any, window: int, layer: int, layers: int) -> Any:
    """The heads that ``name`` stands for in a pattern of mixers."""
    if name == "local_attention":
        return LocalHeads(sizes, MixerOptions.of(config).local_window)
    return MemoryHeads(sizes, config, window, layer=layer, layers=layers)
