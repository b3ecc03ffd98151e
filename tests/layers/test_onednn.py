"""The product by oneDNN is that of PyTorch, with its gradients, and PyTorch's where there is no oneDNN."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fw_fairseq.mixers.parts import onednn as module
from fw_fairseq.mixers.parts.onednn import OneDnn, linear

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


def results(form, x, weight, bias):
    leaves = [part for part in (x, weight, bias) if part is not None]
    y = form(x, weight, bias)
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))]


@pytest.mark.parametrize("shape", [(32, 7), (4, 8, 7), (40, 1, 7)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_as_pytorch(shape, with_bias):
    x = torch.randn(*shape[::-1]).permute(*reversed(range(len(shape)))).requires_grad_()  # any strides
    weight, bias = torch.randn(6, 7, requires_grad=True), torch.randn(6, requires_grad=True) if with_bias else None
    assert module.suits(x, weight)
    torch.testing.assert_close(results(linear, x, weight, bias), results(F.linear, x, weight, bias))


@pytest.mark.parametrize("bias", [torch.randn(12)[::2], torch.ones(1).expand(6)], ids=["every second", "expanded"])
def test_a_bias_with_strides(bias):
    x, weight = torch.randn(40, 7), torch.randn(6, 7)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("learns", ["x", "weight", "bias"])
def test_a_gradient_of_one_operand_alone(learns):
    leaves = {"x": torch.randn(32, 7), "weight": torch.randn(6, 7), "bias": torch.randn(6)}
    leaves[learns].requires_grad_()
    dy = torch.randn(32, 6)
    found, want = (torch.autograd.grad(form(**part), leaves[learns], dy) for form, part in
                   ((linear, leaves), (lambda x, weight, bias: F.linear(x, weight, bias), leaves)))  # fmt: skip
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("why", ["float64", "autocast", "few rows", "without oneDNN", "missing"])
def test_pytorch_itself(monkeypatch, why):
    monkeypatch.setattr(OneDnn, "apply", None)
    if why == "missing":
        monkeypatch.setattr(module, "product", lambda: None)
    dtype = torch.float64 if why == "float64" else torch.float32
    x, weight = torch.randn(31 if why == "few rows" else 32, 7, dtype=dtype), torch.randn(6, 7, dtype=dtype)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: why != "without oneDNN")
    with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
