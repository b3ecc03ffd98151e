"""Functions as ``torch.compile`` runs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo import lookup_backend


def compile_and_record(function: Callable, **options) -> tuple[Callable, list[list[str]]]:
    """Returns the compiled function, and a list that gets the names of this project's operators for each graph that is made."""
    graphs = []

    def record(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "fw_fairseq" in str(node.target)])
        return lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=record, **options), graphs
