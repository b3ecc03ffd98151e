"""Generation token by token: the layers read one token of each sequence, and change their states in place.

On a GPU the layers' work is a CUDA graph from the third token on, where all of them have fast weights. Embedding and output stay
outside of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..generation.base import SoftmaxStepper, function_of
from ..generation.graphs import Graphs, wanted
from ..generation.kernel_memory import KernelMemory
from ..generation.layer import AttentionStep, FeedForwardStep, LayerStep
from ..generation.steppers import share, step_mixer
from ..mixers import Mixer
from ..mixers.base import has_hooks


def layer_step(layer: Any, state: Any) -> LayerStep:
    """The step of a layer that continues from this state of its mixer."""
    mixer, norms = layer.self_attn, [layer.self_attn_layer_norm, layer.final_layer_norm]
    inside = norms if layer.before else [None, None]
    stepper = step_mixer(mixer, state) if isinstance(mixer, Mixer) else SoftmaxStepper(mixer, state)
    parts: list[AttentionStep | FeedForwardStep] = [AttentionStep(layer, stepper, inside[0])]
    if layer.fc1 is not None:
        parts.append(FeedForwardStep(layer.fc1, layer.activation, layer.fc2, inside[1]))
    return LayerStep(parts, None if layer.before else norms[: len(parts)])


class Steps:
    """The states of all layers of a model for B sequences, from the ``states`` after a prompt on."""

    def __init__(self, model: Any, states: dict[int, Any], graph: bool) -> None:
        self.model = model
        self.layers = [layer_step(layer, states[i]) for i, layer in enumerate(model.layers)]
        self.steppers = [layer.stepper for layer in self.layers]
        self.norm = function_of(nn.Identity() if model.layer_norm is None else model.layer_norm)
        share(self.steppers)
        in_graph = graph and wanted() and all(isinstance(stepper, KernelMemory) for stepper in self.steppers)
        self.graphs = Graphs(self.through, self.steppers) if in_graph else None

    @staticmethod
    def can_read(model: Any, kind: Any) -> bool:
        """Whether all layers are plain ones of ``kind`` in one place, and nobody watches them."""
        known = all(type(layer) is kind and not (layer.self_attn.norms_residual or layer.self_attn.alone) for layer in model.layers)
        return known and len({x.device for x in model.parameters()}) == 1 and not has_hooks(model)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps the embeddings of a token, (B,C), to the input of the output layer, (B,C)."""
        return self.through(x) if self.graphs is None else self.graphs(x)

    def through(self, x: Tensor) -> Tensor:
        """Calls the layers and the last norm."""
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def reorder(self, order: Tensor) -> None:
        """Gives sequence i the states of sequence ``order[i]``; there are as many as before."""
        for part in self.steppers if self.graphs is None else [self.graphs]:
            part.reorder(order)

    def states(self) -> dict[int, object]:
        """The states of the layers after the last token."""
        return {i: stepper.state() for i, stepper in enumerate(self.steppers)}
