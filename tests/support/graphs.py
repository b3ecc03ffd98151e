"""CUDA graphs on the emulator: a graph is a call that is repeated."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fw_fairseq.generation.graphs import Graphs
from fw_fairseq.ops.kernels import launch

PLACES = {"step": ("memory", "memory_out"), "read_memory": ("memory", "y")}  # what stays where it is, by kernel


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.data_ptr() not in given and not func.is_view:
            self.size = max(self.size, out.numel())
        return out


class Repeated:
    """Stands for a graph: what it repeats starts the same kernels at the same addresses."""

    made: list[Repeated] = []  # noqa: RUF012

    def __init__(self, function):
        self.function, self.seen, self.largest = function, [], 0
        self.made.append(self)

    def replay(self) -> None:
        calls, before = launch.current().pointers, len(launch.current().pointers)
        with Largest() as made:
            self.function()
        self.largest = max(self.largest, made.size)
        self.seen.append(calls[before:])


def emulate_graphs(launcher, monkeypatch):
    """The emulator, which writes down where each decoding kernel has its buffers, and repeats calls as graphs."""
    launcher.pointers, start = [], type(launcher).__call__

    def write_down(self, source, name, defines, grid, block, params, *rest):
        if name in PLACES:
            self.pointers.append((*(int(params[field]["p"]) for field in PLACES[name]), int(params["order"])))
        return start(self, source, name, defines, grid, block, params, *rest)

    monkeypatch.setattr(type(launcher), "__call__", write_down)
    monkeypatch.setattr(Graphs, "graph_type", Repeated)
    Repeated.made.clear()
    return launcher


@torch.no_grad()
def generate(model, tokens, prompt: int) -> tuple[list[torch.Tensor], dict]:
    """Logits of hypotheses that change places twice; then one of them ends."""
    state, rows, found = {}, torch.arange(len(tokens), device=tokens.device), []
    for t in range(prompt, tokens.shape[1]):
        found.append(model(tokens[rows, : t + 1], incremental_state=state)[0][:, -1])
        if t in (4, 6, 8):
            order = torch.tensor([1, 1, 0] if t < 8 else [0, 2], device=tokens.device)
            rows = rows[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
    return found, state
