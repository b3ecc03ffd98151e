"""Generation on a GPU as CUDA graphs: the host starts one graph for a token in place of some hundred kernels.

A graph does at every replay what it did when it was captured, at the same addresses. So tokens, position and order have buffers,
and the number of rows stays that of the first token: rows that beam search gives up repeat the first one. Each memory has two
buffers, which take turns, and there is a graph for either turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..mixers import FastWeight
from ..ops.dispatch import has_kernels
from .generation import Generation
from .kernel_memory import KernelMemory

EAGER = 2  # tokens that compile the kernels and make the buffers, before a graph can be captured


class CudaGraph:
    """A graph has the work that a function started on the GPU, and repeats it without the function."""

    def __init__(self, function: Callable[[], None]):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            function()

    def replay(self) -> None:
        """Starts it again."""
        self.graph.replay()


class CapturedGeneration(Generation):
    """The states of one generation, whose tokens replay graphs from the third on."""

    graph_type: Callable = CudaGraph

    def __init__(self, decoder, incremental_state: dict, encoder_out: dict | None = None):
        super().__init__(decoder, incremental_state, encoder_out)
        self.rows, self.count = 0, 0
        self.graphs: list[CudaGraph | None] = [None, None]

    @staticmethod
    def fits(decoder) -> bool:
        """Whether a GPU keeps all states in fixed places, and nothing asks the host in between. FW_FAIRSEQ_DECODING_GRAPH=0 says
        no."""
        layers = list(decoder.layers.children())
        mixers = [getattr(layer.self_attn, "mixer", None) for layer in layers]
        alone = all(layer.encoder_attn is None and layer.recurrence is None and not len(layer.more_attention) for layer in layers)
        return (
            os.environ.get("FW_FAIRSEQ_DECODING_GRAPH") != "0"
            and has_kernels(next(decoder.parameters()))
            and isinstance(decoder.embed_tokens, nn.Embedding)
            and alone
            and not decoder.reversible
            and all(type(mixer) is FastWeight and KernelMemory.fits(mixer) for mixer in mixers)
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
        self.tokens[:rows].copy_(tokens[:, -1])
        self.place.fill_(place)
        memories = [layer.stepper.buffers for layer in self.layers]
        turn = memories[0].turn
        if self.graphs[turn] is None:
            self.graphs[turn] = self.graph_type(self.advance)
        self.graphs[turn].replay()
        for memory in memories:
            memory.turn = 1 - turn
        return self.out[:rows].clone()

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
        super().reorder(torch.cat([order, order[:1].expand(len(self.tokens) - len(order))]))
