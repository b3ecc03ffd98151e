"""The fused Adam is fairseq's: equations in float64, checkpoints both ways, 16-bit parameters."""

from __future__ import annotations

import copy
import math
from argparse import Namespace

import pytest
import torch
from fairseq import utils
from fairseq.optim.adam import Adam, FairseqAdam
from torch import nn

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches.speed import optimiser
from fw_fairseq.patches.speed.optimiser import FusedAdam, parts, take_all_norms_at_once

SHAPES = ((3, 5), (7,), (), (2, 3, 4))
ALONE = utils.clip_grad_norm_.__wrapped__


def config(**given) -> Namespace:
    defaults = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-3, "weight_decay": 0.1, "use_old_adam": False, "fp16_adam_stats": False}
    return Namespace(**{**defaults, "tpu": False, "lr": [0.05], **given})


def parameters(dtype) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def set_gradients(params, update: int) -> None:
    torch.manual_seed(update)
    for index, p in enumerate(params):  # the second one has a gradient in every other update only
        p.grad = torch.randn(p.shape, dtype=torch.float64).to(p.dtype) if index != 1 or update % 2 else None


def train(optimizer, params, updates) -> None:
    for update in updates:
        set_gradients(params, update)
        optimizer.set_lr(0.05 / (1 + update))
        optimizer.step()


def by_hand(params, updates, beta1=0.9, beta2=0.98, eps=1e-3, decay=0.1) -> list[torch.Tensor]:
    """The publication's equations, with the decay apart from the gradient and with fairseq's eps, in float64."""
    found = [p.detach().double().clone() for p in params]
    m, v, t = [torch.zeros_like(x) for x in found], [torch.zeros_like(x) for x in found], [0] * len(found)
    for update in updates:
        set_gradients(params, update)
        rate = 0.05 / (1 + update)
        for i, p in enumerate(params):
            if p.grad is not None:
                g, t[i] = p.grad.double(), t[i] + 1
                m[i], v[i] = beta1 * m[i] + (1 - beta1) * g, beta2 * v[i] + (1 - beta2) * g * g
                step = rate * math.sqrt(1 - beta2 ** t[i]) / (1 - beta1 ** t[i])
                found[i] = found[i] - rate * decay * found[i] - step * m[i] / (v[i].sqrt() + eps)
    return found


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 1e-5)])
def test_updates_are_those_of_the_equations(dtype, tolerance):
    """The kernel has powers of the betas in float32, also in float64."""
    params = parameters(dtype)
    expected = by_hand(params, range(6))
    optimizer = FairseqAdam(config(), params)
    assert type(optimizer.optimizer) is FusedAdam
    train(optimizer, params, range(6))
    for p, x in zip(params, expected):
        torch.testing.assert_close(p.detach().double(), x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.float16, 0), (torch.bfloat16, 0)]
)
@pytest.mark.parametrize("numbers", [2**24, 20])
def test_it_is_fairseqs_loop(dtype, tolerance, numbers, monkeypatch):
    """16-bit parameters, as with --memory-efficient-fp16, have averages in float32; all but a few are the same to the last bit."""
    monkeypatch.setattr(optimiser, "NUMBERS", numbers)
    own, loop = parameters(dtype), parameters(dtype)
    train(FairseqAdam(config(), own), own, range(6))
    train(FairseqAdam(config(use_old_adam=True), loop), loop, range(6))
    if tolerance:
        torch.testing.assert_close(own, loop, rtol=tolerance, atol=tolerance)
    else:
        same = torch.cat([(x == y).flatten() for x, y in zip(own, loop)])
        assert same.double().mean() > 0.9
        torch.testing.assert_close(own, loop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [True, False])
def test_checkpoints_go_both_ways(dtype, first):
    """A run goes on with the other one, and the states have the same names and types."""
    whole, params = parameters(dtype), parameters(dtype)
    train(FairseqAdam(config(use_old_adam=True), whole), whole, range(6))
    before, after = (FairseqAdam(config(use_old_adam=old), params) for old in (first, not first))
    train(before, params, range(3))
    state = copy.deepcopy(before.state_dict())
    assert all(type(entry["step"]) is int and {*entry} == {"step", "exp_avg", "exp_avg_sq"} for entry in state["state"].values())
    after.load_state_dict(state, {"lr": 0.01})
    train(after, params, range(3, 6))
    torch.testing.assert_close(params, whole, rtol=1e-6, atol=1e-6)


def test_flat_parameters_and_their_slices():
    """One flat parameter, as --fp16 has it, is updated as its parts; a parameter need not be contiguous, nor its gradient."""
    params = parameters(torch.float32)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in params]))
    turned = nn.Parameter(params[0].detach().clone().t())
    assert not turned.is_contiguous()
    set_gradients(params, 1)
    flat.grad, turned.grad = torch.cat([p.grad.flatten() for p in params]), params[0].grad.t()
    for x in (params, [flat], [turned]):
        FairseqAdam(config(), x).step()
    torch.testing.assert_close(flat.detach(), torch.cat([p.detach().flatten() for p in params]))
    torch.testing.assert_close(turned.detach().t(), params[0].detach())


def test_who_keeps_fairseqs_adam(monkeypatch):
    for given in ({"use_old_adam": True}, {"tpu": True}):
        assert type(FairseqAdam(config(**given), parameters(torch.float32)).optimizer) is Adam


def test_sparse_gradients_are_refused_as_before():
    p = nn.Parameter(torch.zeros(3, 2))
    p.grad = torch.sparse_coo_tensor([[0]], [[1.0, 1.0]], (3, 2))
    with pytest.raises(RuntimeError, match="sparse"):
        FairseqAdam(config(), [p]).step()


def test_parts_hold_all_parameters_once(monkeypatch):
    monkeypatch.setattr(optimiser, "NUMBERS", 10)
    given = [torch.zeros(n) for n in (4, 6, 1, 30, 2)]
    assert [[len(x) for x in part] for part in parts(given)] == [[4, 6], [1], [30], [2]]


@pytest.mark.parametrize("most", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("aggregate", [None, lambda norm: 2 * norm])
def test_norms_are_clipped_as_before(most, aggregate):
    own, loop = parameters(torch.float32), parameters(torch.float32)
    for params in (own, loop):
        set_gradients(params, 2)
    found, expected = take_all_norms_at_once(None, own, most, aggregate), ALONE(loop, most, aggregate)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([p.grad for p in own if p.grad is not None], [p.grad for p in loop if p.grad is not None])
    assert utils.clip_grad_norm_([], most) == 0
    assert utils.clip_grad_norm_(own[0], 0.0) == pytest.approx(float(own[0].grad.norm()))
