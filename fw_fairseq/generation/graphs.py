"""Generation on a GPU as CUDA graphs: the host starts one graph for a token in place of some hundred kernels.

A graph does at every replay what it did when it was captured, at the same addresses. So whatever a step reads and writes has a
buffer. Each memory has two buffers, which take turns, and there is a graph for either turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from .kernel_memory import KernelMemory

EAGER = 2  # tokens that compile the kernels and make the buffers, before a graph can be captured
VARIABLE = "FW_FAIRSEQ_DECODING_GRAPH"


class CudaGraph:
    """A graph has the work that a function started on the GPU, and repeats it without the function."""

    def __init__(self, function: Callable[[], None]):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            function()

    def replay(self) -> None:
        """Starts it again."""
        self.graph.replay()


class Graphs:
    """A step from buffer to buffer, which runs as it is captured and then as a graph. The memories of all layers have one order,
    and the step ends with ``settle``."""

    graph_type: Callable = CudaGraph

    def __init__(self, step: Callable[[], None], memories: list[KernelMemory]):
        self.step, self.memories = step, memories
        self.captured: list[CudaGraph | None] = [None, None]
        self.order, self.identity = memories[0].order, memories[0].identity
        for memory in memories:
            memory.share(self.order)

    def __call__(self) -> None:
        """Replays the step of the memories' turn."""
        turn = self.memories[0].turn
        if self.captured[turn] is None:
            self.captured[turn] = self.graph_type(self.step)
        self.captured[turn].replay()
        for memory in self.memories:
            memory.turn = 1 - turn

    def settle(self) -> None:
        """Says that the memories have been read in their new order."""
        self.order.copy_(self.identity)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the memories of row ``order[i]``."""
        self.order.copy_(self.order.index_select(0, order))


def wanted() -> bool:
    """Whether the environment leaves graphs on: FW_FAIRSEQ_DECODING_GRAPH=0 switches them off."""
    return os.environ.get(VARIABLE) != "0"
