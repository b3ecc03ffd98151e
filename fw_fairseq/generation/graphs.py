"""Generation on a GPU as CUDA graphs: the host starts one graph for a token in place of some hundred kernels.

A graph does at every replay what it did when it was captured, at the same addresses. So whatever a step reads and writes has a
buffer. Each memory has two buffers, which take turns, and there is a graph for either turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernel_memory import KernelMemory

EAGER = 2  # tokens that compile the kernels and make the buffers, before a graph can be captured
VARIABLE = "FW_FAIRSEQ_DECODING_GRAPH"


class CudaGraph:
    """A graph has the work that a function started on the GPU, and repeats it without the function. ``how``: options of
    ``torch.cuda.graph``."""

    def __init__(self, function: Callable[[], None], **how) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, **how):
            function()

    def replay(self) -> None:
        self.graph.replay()


class Graphs:
    """A step of generation from buffer to buffer: eager for the first tokens, then as graphs. The number of rows stays that of the
    first token; rows that beam search gives up repeat the first one.

    function: maps inputs, whose rows may get fewer, to an output. memories: of all layers, which then have one order. sources: what
    the layers read through an index, which then is one, too.
    """

    graph_type: Callable = CudaGraph

    def __init__(self, function: Callable[..., Tensor], memories: list[KernelMemory], sources: Sequence = ()) -> None:
        self.function, self.memories, self.sources = function, memories, sources
        self.captured: list[Any] = [None, None]
        self.count = 0  # tokens

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Copies the inputs into buffers and returns a copy of the output, (R,...), with as many rows as the first input."""
        self.count += 1
        if self.count == 1:
            self.inputs = [x.clone() for x in inputs]
        for buffer, x in zip(self.inputs, inputs):
            buffer[: len(x)].copy_(x)
        if self.count <= EAGER:
            self.output = self.function(*self.inputs)
        else:
            self.replay()
        return self.output[: len(inputs[0])].clone()

    def replay(self) -> None:
        if self.count == EAGER + 1:
            for memory in self.memories:
                memory.share(self.memories[0].order)
            for source in self.sources:
                source.order = self.sources[0].order
        turn = self.memories[0].turn
        graph = self.captured[turn] = self.captured[turn] or self.graph_type(self.advance)
        graph.replay()
        for memory in self.memories:
            memory.turn = 1 - turn

    def advance(self) -> None:
        """The work of one token. It ends with the rows in their new order."""
        self.output.copy_(self.function(*self.inputs))
        self.memories[0].order.copy_(self.memories[0].identity)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the states of row ``order[i]``; the rows that are left over repeat the first one."""
        order = torch.cat([order, order[:1].expand(len(self.inputs[0]) - len(order))])
        shared = self.count > EAGER  # all layers have the order of the first one
        for part in (*self.memories[: 1 if shared else None], *self.sources[: 1 if shared else None]):
            part.reorder(order)


def wanted() -> bool:
    """Whether the environment leaves graphs on: FW_FAIRSEQ_DECODING_GRAPH=0 switches them off."""
    return os.environ.get(VARIABLE) != "0"
