"""The way to the kernels without torch's dispatcher, and who is not passed by."""

from __future__ import annotations

import pytest
import torch
from support.draws import draw_gates, draw_inputs
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fw_fairseq import autograd
from fw_fairseq.feature_maps import AS_IS
from fw_fairseq.ops import fast_weight
from fw_fairseq.rules import RULES

SHAPE = (1, 2, 21, 16, 16)
NOT_DIVIDED = (None, 0.0, 0.0)


class Names(TorchDispatchMode):
    """Writes down the operators of this project that are called."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fw_fairseq":
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def scan_inputs() -> tuple:
    x = draw_inputs(SHAPE, torch.float32)
    beta = draw_gates(RULES["delta"], SHAPE, torch.float32)["beta"]
    memory = torch.randn(*SHAPE[:2], *SHAPE[3:], requires_grad=True)
    return x["q"], x["k"], x["v"], None, None, beta, beta, memory, *NOT_DIVIDED, "delta", "exact", True, True, *AS_IS


def with_gradients(function, inputs) -> list[torch.Tensor]:
    y, memory, _, saved = function(*inputs)
    leaves = [x for x in inputs[:8] if x is not None]
    return [y, memory, *saved, *torch.autograd.grad((y, memory), leaves, (torch.ones_like(y), torch.full_like(memory, 0.5)))]


def test_a_call_is_that_of_the_operator(emulate):
    emulate()
    inputs = scan_inputs()
    ours = with_gradients(lambda *given: autograd.call("scan", *given), inputs)
    theirs = with_gradients(torch.ops.fw_fairseq.scan, inputs)
    assert len(ours) == len(theirs) == 3 + 6
    for one, other in zip(ours, theirs):
        assert torch.equal(one, other)


def test_who_looks_at_calls_sees_the_operators(emulate):
    emulate()
    x, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES["delta"], SHAPE, torch.float32)
    with Names() as mode:
        y, _ = fast_weight(**x, rule="delta", gates=gates, backend="cuda")
        y.sum().backward()
    assert mode.found == ["fw_fairseq::scan", "fw_fairseq::scan_backward"]


class Marked(torch.Tensor):
    """A class of tensors, as a compiler's is."""


def test_seen():
    x = torch.zeros(2)
    assert not autograd.is_seen([x, torch.nn.Parameter(x)])
    assert autograd.is_seen([x, x.as_subclass(Marked)])
    with Names():
        assert autograd.is_seen([x])
    with forward_ad.dual_level():
        assert autograd.is_seen([x])
    assert torch.func.vmap(lambda row: row + autograd.is_seen([row]))(torch.zeros(3)).tolist() == [1, 1, 1]
    assert not autograd.is_seen([x])


def test_a_second_gradient_is_refused(emulate):
    emulate()
    x, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES["delta"], SHAPE, torch.float32)
    y, _ = fast_weight(**x, rule="delta", gates=gates, backend="cuda")
    (dq,) = torch.autograd.grad(y.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="a gradient of a gradient was asked for"):
        dq.sum().backward()


def test_an_operator_without_a_gradient_is_refused_where_one_is_asked_for(emulate):
    emulate()
    inputs = scan_inputs()
    with torch.no_grad():
        y, memory, _, saved = autograd.call("scan", *inputs)
    with pytest.raises(RuntimeError, match="fw_fairseq::scan_backward has no gradient, and one of its inputs requires one"):
        autograd.call("scan_backward", *inputs[:8], saved, None, y, memory, None, *NOT_DIVIDED[1:], "delta", "exact", *AS_IS)
