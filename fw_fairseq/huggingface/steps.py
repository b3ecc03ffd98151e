"""Generation token by token: the layers read one token of each sequence, and change their states in place.

On a GPU the layers' work is a CUDA graph from the third token on, where all of them have fast weights. Embedding and output stay
outside of it.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..generation.graphs import EAGER, Graphs, wanted
from ..generation.kernel_memory import KernelMemory
from ..generation.modules import plain
from ..generation.steppers import share, step_mixer
from ..mixers.base import has_hooks


class PlainLayerStep:
    """One layer that reads one token of each sequence at a time."""

    def __init__(self, layer: nn.Module, state):
        self.stepper, self.before = step_mixer(layer.self_attn, state), layer.before
        self.mixer_norm = plain(layer.self_attn_layer_norm)
        self.feeds = layer.fc1 is not None
        if self.feeds:
            self.fc1, self.fc2, self.norm = plain(layer.fc1), plain(layer.fc2), plain(layer.final_layer_norm)
        self.activation = layer.activation

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (B,C) to the layer's output (B,C)."""
        x = x + self.stepper(self.mixer_norm(x)) if self.before else self.mixer_norm(x + self.stepper(x))
        if not self.feeds:
            return x
        y = self.fc2(self.activation(self.fc1(self.norm(x) if self.before else x)))
        return x + y if self.before else self.norm(x + y)


class Steps:
    """The states of all layers of a model for B sequences, from the ``states`` after a prompt on."""

    def __init__(self, model: nn.Module, states: dict[int, object], graph: bool):
        self.model = model
        self.layers = [PlainLayerStep(layer, states[i]) for i, layer in enumerate(model.layers)]
        self.norm = (lambda x: x) if model.layer_norm is None else plain(model.layer_norm)
        steppers = [layer.stepper for layer in self.layers]
        share(steppers)
        self.in_graph = graph and wanted() and all(getattr(each, "kind", None) is KernelMemory for each in steppers)
        self.count, self.graphs = 0, None

    @staticmethod
    def fit(model: nn.Module, kind: type) -> bool:
        """Whether all layers are plain ones of ``kind`` in one place, and nobody watches them."""
        known = all(type(layer) is kind and not getattr(layer.self_attn, "norms_residual", False) for layer in model.layers)
        return known and len({x.device for x in model.parameters()}) == 1 and not has_hooks(model)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps the embeddings of a token, (B,C), to the input of the output layer, (B,C)."""
        self.count += 1
        if not self.in_graph:
            return self.through(x)
        if self.count <= EAGER:
            self.x, self.y = x.clone(), self.through(x)
            return self.y
        if self.graphs is None:
            self.graphs = Graphs(self.advance, [layer.stepper.buffers for layer in self.layers])
        self.x.copy_(x)
        self.graphs()
        return self.y.clone()

    def through(self, x: Tensor) -> Tensor:
        """Calls the layers and the last norm."""
        for layer in self.layers:
            x = layer(x)
        if self.graphs is not None:
            self.graphs.settle()
        return self.norm(x)

    def advance(self) -> None:
        """The work of one token, from buffer to buffer."""
        self.y.copy_(self.through(self.x))

    def reorder(self, order: Tensor) -> None:
        """Gives sequence i the states of sequence ``order[i]``; there are as many as before."""
        for part in [layer.stepper for layer in self.layers] if self.graphs is None else [self.graphs]:
            part.reorder(order)

    def states(self) -> dict[int, object]:
        """The states of the layers after the last token."""
        return {i: layer.stepper.state() for i, layer in enumerate(self.layers)}
