"""Training on a GPU with the layers as CUDA graphs: the host starts one graph forward and one backward in place of some hundred
kernels.

A graph does at every replay what it did when it was captured, at the same addresses. So what layers read is copied into buffers,
parameters stay where they are, and their gradients leave as copies. Graphs of all shapes share the memory for activations, which
holds those of one forward pass: its backward comes before the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from fairseq import utils
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..autograd import once_differentiable
from ..config import FastWeightConfig, refuse_beside
from ..errors import Mistake
from ..feature_maps import RandomFeatures
from ..generation.graphs import CudaGraph
from ..ops.kernels.launch import has_kernels
from .sparse import Stack
from .streams import LayerStates

logger = logging.getLogger(__name__)
SHAPES = 16  # of batches that get graphs; others run as they are
# options with which every pass would be another one, or not run on the GPU alone
APART = ("encoder_layerdrop", "decoder_layerdrop", "checkpoint_activations", "offload_activations", "quant_noise_pq", "reversible")
WARM_UP = 2  # passes that compile kernels and fill the caches of libraries, before a graph can be captured


class Passes:
    """The forward and backward pass of ``function`` for inputs of these shapes, as two graphs.

    function: maps inputs, and the parameters by name, to outputs.
    """

    graph_type: Callable = CudaGraph

    def __init__(self, function: Callable, inputs: Sequence[Tensor], parameters: dict[str, Tensor], **how) -> None:
        self.function, self.parameters = function, parameters
        self.inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        random = utils.get_rng_state()
        self.warm_up()
        self.forward, self.backward = self.graph_type(self.run, **how), self.graph_type(self.go_back, **how)
        utils.set_rng_state(random)

    def warm_up(self) -> None:
        """Runs both passes on a stream of their own, as graphs are captured on one."""
        side = torch.cuda.Stream() if self.inputs[0].is_cuda else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.run()
                self.given = [torch.zeros_like(y) for y in self.outputs if y.requires_grad]
                self.go_back()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    def run(self) -> None:
        """The forward pass. Autograd knows the parameters by aliases that are made here: it would go back to the parameters
        themselves on the stream where they were first used, which is not captured."""
        aliases = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
        with torch.enable_grad():
            self.outputs = self.function(self.inputs, aliases)
        self.wanted = [x for x in self.inputs if x.requires_grad] + [*aliases.values()]

    def go_back(self) -> None:
        """The backward pass. The gradients of parameters, which outlive it, lie in one tensor for each type."""
        ends = [y for y in self.outputs if y.requires_grad]
        found = torch.autograd.grad(ends, self.wanted, self.given, allow_unused=True)
        count = len(found) - len(self.parameters)
        self.gradients, own = found[:count], found[count:]
        self.known = {dtype: [i for i, x in enumerate(own) if x is not None and x.dtype == dtype] for dtype in dtypes(own)}
        self.joined = {dtype: torch.cat([own[i].flatten() for i in places]) for dtype, places in self.known.items()}

    def start(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs the forward pass and returns its outputs."""
        for buffer, x in zip(self.inputs, inputs):
            buffer.detach().copy_(x)
        self.forward.replay()
        return self.outputs

    def finish(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward pass from the gradients of the outputs that have one; returns those of inputs and parameters."""
        for buffer, x in zip(self.given, given):
            buffer.zero_() if x is None else buffer.copy_(x)
        self.backward.replay()
        found = iter(self.gradients)
        inputs = [next(found) if x.requires_grad else None for x in self.inputs]
        parameters, own = [*self.parameters.values()], [None] * len(self.parameters)
        for dtype, places in self.known.items():
            parts = self.joined[dtype].clone().split([parameters[i].numel() for i in places])
            for i, part in zip(places, parts):
                own[i] = part.view_as(parameters[i])
        return inputs + own


def dtypes(tensors: Sequence[Tensor | None]) -> list[torch.dtype]:
    """The types of these, each once."""
    return [*dict.fromkeys(x.dtype for x in tensors if x is not None)]


class Replay(torch.autograd.Function):
    """Replays the graphs of ``Passes``, which ``captured`` has, on inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, captured: Captured, *tensors: Tensor) -> tuple[Tensor, ...]:
        captured.turn += 1
        ctx.passes, ctx.captured, ctx.turn = passes, captured, captured.turn
        outputs = passes.start(tensors[: len(passes.inputs)])
        found = tuple(y.detach() for y in outputs)
        ctx.mark_non_differentiable(*(y for y, own in zip(found, outputs) if not own.requires_grad))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple:
        if ctx.turn != ctx.captured.turn:
            raise Mistake(
                "--graph-training keeps the activations of one forward pass, and this loss has two before a backward; leave it out"
            )
        ends = [dy for dy, y in zip(given, ctx.passes.outputs) if y.requires_grad]
        return None, None, *ctx.passes.finish(ends)


class Layers(nn.Module):
    """A stack without the hooks that its callers put around it."""

    def __init__(self, stack: CapturedStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, *args, **kwargs) -> Any:
        return Stack.run(self.stack, *args, **kwargs)


class Captured:
    """The graphs of one stack, by what it is called with."""

    def __init__(self, stack: CapturedStack) -> None:
        self.modules = [module for layer in stack.children() for module in layer.modules()]
        self.parameters: dict[str, Tensor] = {f"stack.{name}": p for name, p in stack.named_parameters() if p.requires_grad}
        self.places = self.addresses()
        self.turn = 0  # forward passes so far
        self.passes: dict[Any, tuple[Passes, list]] = {}
        self.how: dict[str, Any] = {}
        if next(iter(self.parameters.values())).is_cuda:  # other threads, such as the one that loads batches, may allocate
            self.how = {"pool": torch.cuda.graph_pool_handle(), "capture_error_mode": "thread_local"}

    def addresses(self) -> list[int]:
        """Where the parameters are."""
        return [p.data_ptr() for p in self.parameters.values()]

    def observed(self) -> bool:
        """Whether somebody wants to know what happens within the layers."""
        return any(module._forward_hooks or getattr(module, "watched", False) for module in self.modules)


CAPTURED: WeakKeyDictionary[nn.Module, Captured] = WeakKeyDictionary()  # so that copies and pickles of a model have none


class CapturedStack(Stack):
    """Layers that train as CUDA graphs on a GPU, captured for each shape of a batch when it first comes. They run as they are where
    their statistics are wanted, in evaluation, and on a CPU."""

    def run(self, x: Tensor, *args, **kwargs) -> Any:
        if not (self.training and torch.is_grad_enabled() and (x.is_cuda or has_kernels(x))):
            return super().run(x, *args, **kwargs)
        captured = CAPTURED.get(self)
        if captured is None or captured.places != captured.addresses():
            captured = CAPTURED[self] = Captured(self)
        states: LayerStates | None = kwargs.get("states")
        if states is not None and states.group is not None:
            raise Mistake("--graph-training does not work with streams that workers share; leave one of them out")
        if torch.is_autocast_enabled(x.device.type):
            raise Mistake("--graph-training does not work with --amp; give --fp16 or --bf16, or leave it out")
        call = (x, *args), kwargs | {"states": None if states is None else (states.before, states.resets)}
        given, form = pytree.tree_flatten(call)
        found = None if captured.observed() else self.passes(captured, given, form)
        if found is None:
            return super().run(x, *args, **kwargs)
        passes, returned = found
        outputs = Replay.apply(passes, captured, *filter(is_input, given), *captured.parameters.values())
        y, after = pytree.tree_unflatten(filled(returned[0], outputs), returned[1])
        if states is not None:
            states.after.update(after)
        return y

    def passes(self, captured: Captured, given: list, form: Any) -> tuple[Passes, list] | None:
        """The graphs for calls with arguments like these, and the template and form of what a call returns; None where such calls
        run as they are."""
        if not all(isinstance(value, KNOWN) for value in given):  # such as states from a checkpoint
            return None
        key = str(form), *map(described, given)
        if key not in captured.passes and len(captured.passes) < SHAPES:
            captured.passes[key] = self.capture(captured, given, form)
        return captured.passes.get(key)

    def capture(self, captured: Captured, given: list, form: Any) -> tuple[Passes, list]:
        template = without_inputs(given)
        returned: list[Any] = []

        def function(inputs: list[Tensor], parameters: dict[str, Tensor]) -> list[Tensor]:
            args, kwargs = pytree.tree_unflatten(filled(template, inputs), form)
            before, states = kwargs.pop("states"), None
            if before is not None:
                states = kwargs["states"] = LayerStates()
                states.before, states.resets = before
            y = functional_call(Layers(self), parameters, args, kwargs)
            after = {} if states is None else {layer: state.detach() for layer, state in states.after.items()}
            outputs, returned_form = pytree.tree_flatten((y, after))
            returned[:] = without_inputs(outputs), returned_form
            return [*filter(is_input, outputs)]

        logger.info(f"the layers become CUDA graphs for {given[0].shape[1]} rows of {given[0].shape[0]} tokens")
        try:
            passes = Passes(function, [*filter(is_input, given)], captured.parameters, **captured.how)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Mistake(f"--graph-training cannot capture these layers ({error}); train without it") from error
        return passes, returned


HERE = object()  # the place of an input in a template
KNOWN = (Tensor, bool, int, float, str, type(None))


def is_input(value: Any) -> bool:
    """Whether it is a tensor with numbers that may change: a subclass of tensors stands for a mask that does not."""
    return type(value) in (Tensor, nn.Parameter)


def described(value: Any) -> Any:
    """What graphs depend on."""
    if not isinstance(value, Tensor):
        return value
    return type(value), value.shape, value.dtype, value.device, value.requires_grad


def without_inputs(values: list) -> list:
    """The values as a template."""
    return [HERE if is_input(value) else value for value in values]


def filled(template: list, inputs: Iterable[Tensor]) -> list:
    """The template with inputs in their places."""
    rest = iter(inputs)
    return [next(rest) if value is HERE else value for value in template]


def stack_of(layers: nn.Module, config: FastWeightConfig, drop: float, args: Any, in_front: bool = False) -> nn.Module:
    """The layers of an encoder or a decoder as one."""
    if config.graph_training:
        refuse_beside("--graph-training", args, *APART)
        if any(isinstance(module, RandomFeatures) for module in layers.modules()):
            raise Mistake("--graph-training keeps what is drawn in the first pass; choose a --feature-map without random features")
    kind = CapturedStack if config.graph_training else Stack
    return kind([*layers.children()], drop, config.reversible, in_front)
