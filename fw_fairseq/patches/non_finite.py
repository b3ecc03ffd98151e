"""Where a NaN or an infinity first appeared: a pass over the model that fairseq repeats after the loss or a gradient was one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..feature_maps import FeatureMap
from ..modules import MixerAttention


class FirstNonFinite:
    """In the place of fairseq's NanDetector, which logs every tensor. ``sentence``: what was found."""

    sentence = "where, a second pass did not show"

    def __init__(self, model: nn.Module):
        self.names = {module: name for name, module in model.named_modules()}
        self.mixers = {part: owner for owner in self.names if isinstance(owner, MixerAttention) for part in owner.mixer.modules()}
        self.ran: list[nn.Module] = []
        self.found = ""
        leaves = [module for module in self.names if next(module.parameters(recurse=False), None) is not None]
        self.hooks = [module.register_forward_hook(self.after_forward) for module in leaves]
        self.maps = [module for module in leaves if isinstance(module, FeatureMap)]
        for phi in self.maps:  # their learned part is called by itself, which no hook sees
            phi.linear = partial(self.linear, phi, phi.linear)

    def __enter__(self) -> FirstNonFinite:
        return self

    def __exit__(self, *error) -> None:
        for hook in self.hooks:
            hook.remove()
        for phi in self.maps:
            del phi.linear
        if not self.found:
            gradients = ((module, non_finite_gradient(module)) for module in reversed(self.ran))
            module, gradient = next(((module, gradient) for module, gradient in gradients if gradient is not None), (None, None))
            if module is not None:
                self.found = f"the gradient of {self.place(module, gradient)}"
        FirstNonFinite.sentence = f"the first is {self.found}" if self.found else FirstNonFinite.sentence

    def linear(self, phi: FeatureMap, original, x: Tensor) -> Tensor:
        y = original(x)
        self.after_forward(phi, (x,), y)
        return y

    def after_forward(self, module: nn.Module, inputs, output) -> None:
        self.ran.append(module)
        output = output[0] if isinstance(output, tuple) else output  # a mixer's, without its state
        if self.found or not isinstance(output, Tensor):
            return
        if bad(inputs[0]):
            owner = self.mixers.get(module)
            what = "what comes into" if owner is None else f"what the memory of layer {owner.layer} gives to"
            weight = None if owner is None else bad_weight(owner.mixer)
            self.found = f"{what} {self.names[module]}" + (f"; {weight} of that layer is not finite" if weight else "")
        elif bad(output):
            weight = bad_weight(module)
            of = f", whose {weight} is not finite" if weight else ""
            self.found = f"the output of {self.place(module, output.flatten(0, -2).t())}{of}"

    def place(self, module: nn.Module, rows: Tensor) -> str:
        """The module, and which part of it if ``rows``, one for each of its outputs, are those of a mixer's joint projection."""
        name, owner = self.names[module], self.mixers.get(module)
        sizes = getattr(owner.mixer, "sizes", None) if owner is not None else None
        if owner is None or sizes is None or module is not owner.mixer.in_proj:
            return name
        parts = zip(sizes, rows.split(list(sizes.values())))
        part = next(part for part, values in parts if bad(values))
        return f"{'gate ' if part in owner.mixer.rule.gates else ''}{part} of layer {owner.layer} ({name})"


def bad(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not bool(torch.isfinite(x).all())


def bad_weight(module: nn.Module) -> str | None:
    return next((name for name, x in module.named_parameters(recurse=False) if bad(x)), None)


def non_finite_gradient(module: nn.Module) -> Tensor | None:
    return next((x.grad for x in module.parameters(recurse=False) if bad(x.grad)), None)
