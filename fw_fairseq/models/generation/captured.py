"""Generation on a GPU as CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...generation.graphs import Graphs, wanted
from ...generation.kernel_memory import KernelMemory
from ...mixers import FastWeight
from ...ops.kernels.launch import has_kernels
from .cross import KernelSource
from .generation import Generation


class CapturedGeneration(Generation):
    """The states of one generation, whose tokens replay graphs from the third on."""

    def __init__(self, decoder: Any, incremental_state: dict, encoder_out: dict | None = None) -> None:
        super().__init__(decoder, incremental_state, encoder_out)
        steppers = [part.stepper for part in self.parts() if hasattr(part, "stepper")]
        memories = [x for x in steppers if isinstance(x, KernelMemory)]
        sources = [x for x in steppers if isinstance(x, KernelSource)]
        self.graphs = Graphs(super().read, memories, sources)

    @staticmethod
    def fits(decoder: Any) -> bool:
        """Whether a GPU keeps all states in fixed places, nothing asks the host in between, and graphs are wanted."""
        return (
            wanted()
            and not decoder.fast_weight_config.no_decoding_graph
            and has_kernels(next(decoder.parameters()))
            and isinstance(decoder.embed_tokens, nn.Embedding)
            and not decoder.reversible
            and all(map(stays_in_place, decoder.layers.children()))
        )

    def read(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        return self.graphs(tokens) if position is None else self.graphs(tokens, position)

    def owned_states(self) -> list[tuple[Any, Any]]:
        rows = torch.arange(self.held or 0, device=self.graphs.output.device)
        return [(owner, state.index_select(rows)) for owner, state in super().owned_states()]

    def reorder(self, order: Tensor) -> None:
        self.held = len(order)
        self.graphs.reorder(order)


def stays_in_place(layer: nn.Module) -> bool:
    """Whether everything that a layer keeps has a fixed place on the GPU."""
    mixer = getattr(layer.self_attn, "mixer", None)
    cross = layer.encoder_attn
    alone = (
        layer.recurrence is None
        and layer.channel_mixing is None
        and not len(layer.more_attention)
        and (cross is None or KernelSource.can_read(cross))
    )
    return alone and type(mixer) is FastWeight and KernelMemory.can_hold(mixer)
