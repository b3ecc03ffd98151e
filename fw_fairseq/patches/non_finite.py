"""Values that are not finite

A run that ends in NaN says where it came from, by a pass over the model that fairseq repeats, and no result is NaN.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar

import fairseq.trainer
import torch
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import Mistake
from ..feature_maps import FeatureMap
from ..files import CRASH
from ..modules import MixerAttention
from .replacing import changes, replaces

WHILE_TRAINING: ContextVar[bool] = ContextVar("WHILE_TRAINING", default=False)
FINITE = "all parameters are finite"


class NotFinite(Mistake, FloatingPointError):
    """A loss, a gradient or a score is NaN or infinite."""

    exit_code = 3


@changes("fairseq.trainer.NanDetector")
def find_the_first_non_finite_tensor() -> None:
    """After a NaN, fairseq repeats the pass and logs every tensor of the model. Now the repeated pass finds the first tensor that
    is not finite."""
    fairseq.trainer.NanDetector = FirstNonFinite


@replaces(Trainer, "train_step")
def say_where_a_nan_came_from(original, trainer, *args, **kwargs):
    """fairseq ends a run whose loss or gradient is NaN or infinite with a traceback. Now one sentence names the layer, the gate or
    projection, the update, and the file with the parameters."""
    try:
        return original(trainer, *args, **kwargs)
    except NotFinite:
        raise  # of a repeated step within this one
    except FloatingPointError as error:
        where = getattr(error, "first_non_finite", "the repeated pass did not show where")
        crash = f"{trainer.cfg.checkpoint.save_dir}/{CRASH}"
        raise NotFinite(f"{error}; {where}, at update {trainer.get_num_updates() + 1}; {crash} has the parameters") from None


@replaces(SequenceScorer, "generate")
def refuse_scores_that_are_nan(original, scorer, models, sample, **kwargs):
    """`fairseq-eval-lm` and `--score-reference` report NaN as a result, with exit code 0. Now one sentence names the first
    parameter that is not finite, and the exit code is 3."""
    found = original(scorer, models, sample, **kwargs)
    if any(bool(hypothesis["positional_scores"].isnan().any()) for hypotheses in found for hypothesis in hypotheses):
        raise NotFinite(f"the model's scores are NaN; {why_not_finite(*models)}")
    return found


@replaces(SequenceGenerator, "generate")
def refuse_to_write_from_nan(original, generator, models, sample, **kwargs):
    """If a model's scores are NaN, no hypothesis ends, and `fairseq-generate` and `fairseq-interactive` stop with an
    AssertionError. Now one sentence names the first parameter that is not finite, and the exit code is 3. A `--min-len` that is
    longer than a text may become is refused in one sentence, too."""
    try:
        return original(generator, models, sample, **kwargs)
    except AssertionError as error:
        if str(error).startswith("min_len"):
            limits = "--max-len-a, --max-len-b and the model's positions"
            raise Mistake(f"--min-len is {generator.min_len}, which is more than {limits} allow") from error
        why = why_not_finite(*models)
        if why == FINITE:
            raise
        raise NotFinite(f"the model's scores are NaN; {why}") from error


@replaces(Trainer, "valid_step")
def validate_while_training(original, trainer, *args, **kwargs):
    """A run goes on where the loss of a validation is NaN, and saves its checkpoint. Now this is told apart from
    `fairseq-validate`."""
    token = WHILE_TRAINING.set(True)
    try:
        return original(trainer, *args, **kwargs)
    finally:
        WHILE_TRAINING.reset(token)


@replaces(FairseqTask, "valid_step")
def refuse_losses_that_are_nan(original, task, sample, model, criterion, **kwargs):
    """`fairseq-validate` reports NaN as a result, with exit code 0. Now one sentence names the first parameter that is not finite,
    and the exit code is 3."""
    found = original(task, sample, model, criterion, **kwargs)
    if not WHILE_TRAINING.get() and bool(torch.as_tensor(found[0]).isnan().any()):
        raise NotFinite(f"the loss is NaN; {why_not_finite(model)}")
    return found


def why_not_finite(*models: nn.Module) -> str:
    """Returns which parameter is the first that is not finite, in words."""
    weights = ((name, x) for model in models for name, x in model.named_parameters())
    weight = next((name for name, x in weights if not x.isfinite().all()), None)
    return FINITE if weight is None else f"the parameter {weight} is not finite"


class FirstNonFinite:
    """Watches a model within a ``with`` block, in the place of fairseq's NanDetector. ``sentence`` then says what was found, and
    the error that is being handled, if there is one, has it as ``first_non_finite``. This class raises nothing itself, because
    that error is the one to show."""

    def __init__(self, model: nn.Module):
        self.names = {module: name for name, module in model.named_modules()}
        self.mixers = {part: owner for owner in self.names if isinstance(owner, MixerAttention) for part in owner.mixer.modules()}
        self.ran: list[nn.Module] = []
        self.found = self.sentence = ""
        leaves = [module for module in self.names if next(module.parameters(recurse=False), None) is not None]
        self.hooks = [module.register_forward_hook(self.after_forward, with_kwargs=True) for module in leaves]
        maps = {id(x): module for module in leaves if isinstance(module, FeatureMap) for x in module.parameters()}
        self.uses = ParameterUses(maps, self.look_at)  # a map's linear part is called without the map's forward, so no hook sees it

    def __enter__(self) -> FirstNonFinite:
        self.uses.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.uses.__exit__(*error)
        for hook in self.hooks:
            hook.remove()
        with contextlib.suppress(Exception):
            self.found = self.found or self.first_gradient()
        self.sentence = f"the first is {self.found}" if self.found else "the repeated pass did not show where"
        if isinstance(handled := sys.exc_info()[1], FloatingPointError):
            handled.first_non_finite = self.sentence

    def after_forward(self, module: nn.Module, inputs: tuple, options: dict, output: object) -> None:
        output = output[0] if isinstance(output, tuple) and output else output  # of a mixer, which also returns its state
        self.look_at(module, (*inputs, *options.values()), output)

    def look_at(self, module: nn.Module, inputs: Iterable, output: object) -> None:
        self.ran.append(module)
        if not self.found:
            with contextlib.suppress(Exception):  # modules of other projects may have any inputs and outputs
                self.found = self.first_tensor(module, next((x for x in inputs if isinstance(x, Tensor)), None), output)

    def first_tensor(self, module: nn.Module, x: Tensor | None, output: object) -> str:
        if bad(x):
            owner = self.mixers.get(module)
            if owner is None:
                return f"what comes into {self.names[module]}"
            weight = bad_weight(owner.mixer)
            of = f"; {weight} of that layer is not finite" if weight else ""
            return f"what the memory of layer {owner.layer} gives to {self.names[module]}{of}"
        if bad(output):
            weight = bad_weight(module)
            of = f", whose {weight} is not finite" if weight else ""
            return f"the output of {self.place(module, output.movedim(-1, 0))}{of}"
        return ""

    def first_gradient(self) -> str:
        """The gradient that is nearest to the loss."""
        gradients = ((module, bad_gradient(module)) for module in reversed(self.ran))
        module, gradient = next(((module, gradient) for module, gradient in gradients if gradient is not None), (None, None))
        return "" if module is None else f"the gradient of {self.place(module, gradient)}"

    def place(self, module: nn.Module, rows: Tensor) -> str:
        """Returns the module's name and, where it makes all projections of a mixer, the projection whose ``rows`` are not
        finite."""
        name, owner = self.names[module], self.mixers.get(module)
        projections = {} if owner is None else owner.mixer.projections()
        parts = next((parts for key, parts in projections.items() if owner.mixer.get_submodule(key) is module), None)
        if parts is None:
            return name
        part = next(part for part, own in parts.items() if bad(rows[own]))
        return f"{part} of layer {owner.layer} ({name})"


class ParameterUses(TorchFunctionMode):
    """Calls ``report(module, inputs, output)`` after each function that took one of the modules' parameters; ``modules``: by the id
    of their parameters."""

    def __init__(self, modules: dict[int, nn.Module], report: Callable[[nn.Module, Iterable, object], None]):
        super().__init__()
        self.modules, self.report = modules, report

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        module = next((self.modules[id(x)] for x in args if id(x) in self.modules), None)
        if module is not None and isinstance(output, Tensor) and output.is_floating_point():
            self.report(module, [x for x in args if id(x) not in self.modules], output)
        return output


def bad(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not bool(torch.isfinite(x).all())


def bad_weight(module: nn.Module) -> str | None:
    return next((name for name, x in module.named_parameters(recurse=False) if bad(x)), None)


def bad_gradient(module: nn.Module) -> Tensor | None:
    return next((x.grad for x in module.parameters(recurse=False) if bad(x.grad)), None)
