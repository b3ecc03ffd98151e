"""The checks of a function with flash-linear-attention's arguments. Every one returns the error that it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reference import GATES, GROUPED, STATE, draw, part_of, recurrence

Inputs = dict[str, Tensor]
FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Examined(NamedTuple):
    """A function and the rule that it claims to compute."""

    function: Callable[..., Any]
    rule: str
    device: str = "cpu"

    def run(self, x: Inputs, dtype: torch.dtype = FP32, **options: Any) -> tuple[Tensor, Tensor]:
        """Its outputs and last state for inputs in this dtype; states are never less than fp32."""
        given = {name: y.to(self.device, FP32 if dtype == BF16 and name == STATE else dtype) for name, y in x.items()}
        return self.call(given, **options)

    def call(self, given: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
        """The function's own result."""
        q, k, v, *others = given.values()
        named = dict(zip([*given][3:], others))
        if self.rule == "linear_attn":
            options["normalize"] = False
        return self.function(q, k, v, **named, output_final_state=True, **options)

    def want(self, x: Inputs, dtype: torch.dtype = FP32, **options: Any) -> tuple[Tensor, Tensor]:
        """The equations' result for what ``run`` gives the function."""
        return recurrence(
            self.rule, {name: y.to(FP32 if dtype == BF16 and name == STATE else dtype).double() for name, y in x.items()}, **options
        )

    def with_gradients(self, x: Inputs, reference: bool, **options: Any) -> list[Tensor]:
        """Outputs, the last state and the gradients of all inputs, in fp32, or by the equations."""
        dtype, device = (FP64, "cpu") if reference else (FP32, self.device)
        leaves = {name: y.to(FP32).to(device, dtype).requires_grad_() for name, y in x.items()}
        found = recurrence(self.rule, leaves, **options) if reference else self.call(leaves, **options)
        weights = [torch.linspace(-1, 1, y.numel(), dtype=FP64).view(y.shape).to(y) for y in found]
        sum((y * w).sum() for y, w in zip(found, weights)).backward()  # type: ignore[union-attr]
        return [*found, *(torch.full_like(y, torch.nan) if y.grad is None else y.grad for y in leaves.values())]


def error(found: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    """The largest difference of any two tensors, as a part of the largest number of the second; inf where something is no number,
    or of another shape."""
    worst = 0.0
    for x, y in zip(found, want, strict=True):
        if x is None or x.shape != y.shape:
            return torch.inf
        x, y = x.detach().double().cpu(), y.detach().double()
        if y.numel():
            worst = max(worst, float(((x - y).abs().amax() / y.abs().amax().clamp(min=1e-3)).nan_to_num(nan=torch.inf)))
    return worst


def values(f: Examined, dtype: torch.dtype) -> float:
    """Outputs and last state, in this dtype."""
    x = draw(f.rule, 150)
    found = f.run(x, dtype)
    return error(found, f.want(x, dtype)) if found[0].dtype == dtype else torch.inf


def gradients(f: Examined) -> float:
    """Gradients of everything that the function is given, beside outputs and state."""
    x = draw(f.rule, 130)
    return error(f.with_gradients(x, False), f.with_gradients(x, True))


def scale(f: Examined) -> float:
    """Another than the default."""
    x = draw(f.rule, 40)
    return error(f.run(x, scale=0.3), f.want(x, scale=0.3))


def empty_memory(f: Examined) -> float:
    """Without a first state."""
    x = draw(f.rule, 70)
    want = f.want({**x, STATE: torch.zeros_like(x[STATE])})
    return error(f.run({name: y for name, y in x.items() if name != STATE}), want)


def in_parts(f: Examined, ends: Sequence[int]) -> float:
    """A text in several calls, which end at these tokens."""
    x = draw(f.rule, ends[-1])
    ys, state = [], x[STATE]
    for first, last in zip([0, *ends], ends):
        y, state = f.run({**part_of(x, slice(first, last)), STATE: state})
        ys.append(y)
    return error([torch.cat(ys, 1), state], f.want(x))


def padding(f: Examined) -> float:
    """Tokens of zeros, which neither decay nor write, before a text and after it."""
    x = draw(f.rule, 60)
    padded = {
        name: y if name == STATE else torch.cat([torch.zeros_like(y[:, :9]), y, torch.zeros_like(y[:, :30])], 1)
        for name, y in x.items()
    }
    y, state = f.run(padded)
    return error([y[:, 9:69], state], f.want(x))


def packing(f: Examined) -> float:
    """Several texts in one row."""
    limits = [0, 5, 5, 70, 71, 150]
    x = draw(f.rule, 150, rows=1, texts=5)
    options = {"cu_seqlens": torch.tensor(limits, device=f.device)}
    return error(f.with_gradients(x, False, **options), f.with_gradients(x, True, limits=limits))


def grouped_heads(f: Examined) -> float:
    """Heads of values that share one of keys."""
    x = draw(f.rule, 70, groups=3)
    return error(f.with_gradients(x, False), f.with_gradients(x, True))


def gates(f: Examined, decay: float, strength: float) -> float:
    """A third of the tokens have these gates."""
    x = draw(f.rule, 130)
    for name, value in (("g", decay), ("beta", strength)):
        if name in x:
            x[name][:, ::3] = value
    return error(f.with_gradients(x, False), f.with_gradients(x, True))


def strides(f: Examined) -> float:
    """Inputs that are views, which nothing may change."""
    x = draw(f.rule, 70)
    views = {name: y.to(f.device, FP32).transpose(1, 2).contiguous().transpose(1, 2) for name, y in x.items()}
    before = {name: y.clone() for name, y in views.items()}
    found = f.call(views)
    return error([*found, *views.values()], [*f.want(x), *(y.cpu() for y in before.values())])


def repeated(f: Examined) -> float:
    """The same bits twice, in outputs and gradients."""
    x = draw(f.rule, 200)
    first, second = (f.with_gradients(x, False) for _ in range(2))
    return 0.0 if all(torch.equal(a, b) for a, b in zip(first, second)) else error(first, [y.cpu() for y in second]) or torch.inf


def long(f: Examined) -> float:
    """Many tokens that are remembered."""
    x = draw(f.rule, 4096, rows=1)
    if "g" in x:
        x["g"] = x["g"] / 500  # so that a token is remembered for thousands
    return error(f.run(x), f.want(x))


class Check(NamedTuple):
    """A check: what it is about, the error that it allows, and how it finds one. ``needs``: what a rule must have: "gates",
    "groups" of heads, or "rest", tokens that change nothing."""

    about: str
    bound: float
    find: Callable[[Examined], float]
    needs: str = ""

    def applies(self, rule: str) -> bool:
        """Whether the rule has what this checks."""
        has = {"gates": bool(GATES[rule]), "groups": rule in GROUPED, "rest": rule != "retention"}
        return has.get(self.needs, True)


CHECKS: dict[str, Check] = {
    "fp32": Check("150 tokens from a state: outputs and last state", 1e-5, lambda f: values(f, FP32)),
    "float64": Check("the same in float64", 1e-9, lambda f: values(f, FP64)),
    "bf16": Check("the same in bf16, with the state in fp32", 2e-2, lambda f: values(f, BF16)),
    "gradients": Check("of all inputs and of the first state", 2e-5, gradients),
    "empty memory": Check("without a first state", 1e-5, empty_memory),
    "scale": Check("another than K^-0.5", 1e-5, scale),
    "splits": Check("three calls that pass the state on are one", 1e-5, lambda f: in_parts(f, (1, 64, 150))),
    "tokens": Check("so are twelve calls of one token", 1e-5, lambda f: in_parts(f, range(1, 13))),
    "padding": Check("tokens of zeros before and after a text", 1e-5, padding, "rest"),
    "packing": Check("five texts in one row, one of them empty, with gradients", 2e-5, packing),
    "grouped heads": Check("one head of keys for three of values, with gradients", 2e-5, grouped_heads, "groups"),
    "gates of 0": Check("decays of exp(-200) and strengths of 0, with gradients", 2e-5, lambda f: gates(f, -200.0, 0.0), "gates"),
    "gates of 1": Check("no decay and strengths of 1, with gradients", 2e-5, lambda f: gates(f, 0.0, 1.0), "gates"),
    "views": Check("inputs that are not contiguous, and stay as they are", 1e-5, strides),
    "repeated": Check("the same bits twice, with gradients", 0.0, repeated),
    "long": Check("4,096 tokens with a long memory", 2e-5, long),
}
