"""Generation on a GPU as CUDA graphs.

Tokens, position and order have buffers, and the number of rows stays that of the first token. Rows that beam search gives up repeat
the first one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...generation.graphs import EAGER, Graphs, wanted
from ...generation.kernel_memory import KernelMemory
from ...mixers import FastWeight
from ...ops.dispatch import has_kernels
from .generation import Generation
from .kernel_source import KernelSource
from .parts import CrossStep


class CapturedGeneration(Generation):
    """The states of one generation, whose tokens replay graphs from the third on."""

    def __init__(self, decoder, incremental_state: dict, encoder_out: dict | None = None):
        super().__init__(decoder, incremental_state, encoder_out)
        self.count = 0
        self.graphs: Graphs | None = None

    @staticmethod
    def fits(decoder) -> bool:
        """Whether a GPU keeps all states in fixed places, nothing asks the host in between, and graphs are wanted."""
        return (
            wanted()
            and not decoder.fast_weight_config.no_decoding_graph
            and has_kernels(next(decoder.parameters()))
            and isinstance(decoder.embed_tokens, nn.Embedding)
            and not decoder.reversible
            and all(map(stays_in_place, decoder.layers.children()))
        )

    def features(self, tokens: Tensor) -> Tensor:
        """Maps the rows' tokens so far, (R,T), to the features at the last one, (R,1,C). All before it have been read."""
        rows, place = len(tokens), self.decoder.padding_idx + tokens.shape[1]
        if not self.count:
            self.tokens, self.place = tokens[:, -1].clone(), torch.empty(1, dtype=torch.long, device=tokens.device)
        self.rows, self.count = rows, self.count + 1
        if self.count <= EAGER or (self.table is not None and place >= len(self.table)):
            self.out = super().features(torch.cat([tokens, tokens[:1].expand(len(self.tokens) - rows, -1)]))
            return self.out[:rows]
        if self.graphs is None:
            self.graphs = Graphs(self.advance, [layer.stepper.buffers for layer in self.layers])
            for source in self.sources():
                source.order = self.sources()[0].order
        self.tokens[:rows].copy_(tokens[:, -1])
        self.place.fill_(place)
        self.graphs()
        return self.out[:rows].clone()

    def sources(self) -> list[KernelSource]:
        """Returns the readers of the source, one for each layer that has cross attention."""
        return [part.reader for part in self.parts() if isinstance(part, CrossStep)]

    def read(self, tokens: Tensor, position: Tensor | None) -> Tensor:
        """Maps tokens (R) and the embedding of their position to features (R,C)."""
        y = super().read(tokens, position)
        if self.graphs is not None:
            self.graphs.settle()
        return y

    def advance(self) -> None:
        """The work of one token, from buffer to buffer."""
        position = None if self.table is None else self.table.index_select(0, self.place)
        self.out.copy_(self.read(self.tokens, position).unsqueeze(1))

    def states(self) -> list:
        """The states of the layers after the last token."""
        rows = torch.arange(self.rows, device=self.tokens.device)
        return [state.index_select(rows) for state in super().states()]

    def reorder(self, order: Tensor) -> None:
        """Gives row i the states of row ``order[i]``; the rows that are left over repeat the first one."""
        self.rows = len(order)
        order = torch.cat([order, order[:1].expand(len(self.tokens) - len(order))])
        if self.graphs is None:
            return super().reorder(order)
        for one in (self.graphs, *self.sources()[:1]):  # all layers have their orders
            one.reorder(order)
        return None


def stays_in_place(layer: nn.Module) -> bool:
    """Whether everything that a layer keeps has a fixed place on the GPU."""
    mixer = getattr(layer.self_attn, "mixer", None)
    cross = layer.encoder_attn
    alone = layer.recurrence is None and not len(layer.more_attention) and (cross is None or KernelSource.fits(cross))
    return alone and type(mixer) is FastWeight and KernelMemory.fits(mixer)
