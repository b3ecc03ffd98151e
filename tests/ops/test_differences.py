"""The sentences of docs/differences.md on the operation: the equation that is meant holds, and that of the other code does not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fw_fairseq.feature_maps import FEATURE_MAPS, draw_projection
from fw_fairseq.ops import fast_weight

pytestmark = pytest.mark.quick

T, K, V = 12, 5, 4


@pytest.fixture
def inputs():
    q, k = torch.rand(2, T, K, dtype=torch.float64) + 0.1
    return q, k, torch.randn(T, V, dtype=torch.float64), torch.rand(T, dtype=torch.float64) * 0.8 + 0.1


def run(rule, q, k, v, beta, **options):
    y, _ = fast_weight(q[None, None], k[None, None], v[None, None], rule, {"beta": beta[None, None]}, **options)
    return y[0, 0]


def far(a, b) -> bool:
    return bool((a - b).norm() > 0.05 * b.norm())


def fast_weight_memory(q, k, v, beta, first_is_scaled: bool):
    W, outputs = torch.zeros(V, K, dtype=torch.float64), []
    for t in range(T):
        W = W + beta[t] * torch.outer(v[t] - W @ k[t], k[t])
        if t > 0 or first_is_scaled:
            W = W / max(1.0, W.norm().item())
        outputs.append(F.layer_norm(W @ q[t], (V,)))
    return torch.stack(outputs)


def test_fwm_scales_every_write(inputs):
    q, k, v, beta = inputs
    v = v * 9  # so that the first write is longer than 1
    got = run("fwm", q, k, v, beta)
    torch.testing.assert_close(got, fast_weight_memory(q, k, v, beta, True))
    other = fast_weight_memory(q, k, v, beta, False)
    torch.testing.assert_close(got[0], other[0], rtol=1e-3, atol=1e-3)  # LayerNorm hides the scale
    assert (got - other)[1:5].abs().max() > 0.01 and (got - other)[-1].abs().max() < 1e-3


def test_the_constant_in_divisors():
    """After one token the output is v n / (n + eps) with n = k q."""
    q = torch.full((1, 1, 1, 1), 1e-3, dtype=torch.float64)
    v = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    y, _ = fast_weight(q, q, v, "sum", attention_norm=True)
    assert y.item() == pytest.approx(1e-6 / (1e-6 + 1e-6))
    y, _ = fast_weight(q * 1e-12, q * 1e-12, v, "sum", attention_norm=True, key_log_scale=torch.zeros_like(q[..., 0]))
    assert y.item() == pytest.approx(1e-30 / (1e-30 + 1e-30))
    assert FEATURE_MAPS["favor"](4).eps == 1e-30 and FEATURE_MAPS["elu"](4).eps == 1e-6


def test_a_key_that_nothing_was_written_under_writes_fully():
    """The second key is orthogonal to the first; the authors' divisor, k / (z.k + eps) with z.k = 0 as a factor, would write 0."""
    k = torch.eye(2, dtype=torch.float64)[None, None].requires_grad_()
    v, beta = torch.randn(1, 1, 2, V, dtype=torch.float64), torch.full((1, 1, 2), 0.5, dtype=torch.float64)
    y, state = fast_weight(k, k, v, "delta", {"beta": beta}, attention_norm=True)
    torch.testing.assert_close(state.memory, 0.5 * v)
    torch.testing.assert_close(y, 0.5 * v, rtol=1e-5, atol=0)
    adjoint = torch.randn(2, V, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((state.memory * adjoint).sum(), k)
    torch.testing.assert_close(gradient[0, 0, 1], 0.5 * adjoint @ v[0, 0, 1])  # of the write alone: it erases nothing


def test_favor_adds_nothing_to_its_exponentials():
    phi, x = FEATURE_MAPS["favor"](8, features=4).double(), torch.randn(20, 8, dtype=torch.float64) * 2
    exact = (
        torch.exp(torch.cat([x @ phi.projection.mT, -x @ phi.projection.mT], -1) - x.square().sum(-1, keepdim=True) / 2) / 8**0.5
    )
    torch.testing.assert_close(phi(x), exact, rtol=1e-6, atol=0)
    assert exact.min() < 1e-6


@pytest.mark.parametrize("rows, width", [(4, 16), (32, 16)])
def test_random_directions_are_orthogonal_in_blocks_of_the_width(rows, width):
    for block in draw_projection(rows, width).double().split(width):
        products = block @ block.mT
        assert (products - products.diag().diag()).abs().max() < 1e-4 * products.diag().max()


def test_delta_reads_after_the_write_and_erases_by_its_gate(inputs):
    """Eq. 6 of Mao 2022; the kernel of its code reads the memory before the write, and its key is g k, which erases with g^2."""
    q, k, v, beta = inputs
    k = k / k.norm(dim=-1, keepdim=True)

    def loop(published: bool):
        S, outputs = torch.zeros(V, K, dtype=torch.float64), []
        for t in range(T):
            if published:
                S = S + beta[t] * torch.outer(v[t] - S @ k[t], k[t])
                outputs.append(S @ q[t])
            else:
                outputs.append(S @ q[t])
                key = beta[t] * k[t]
                S = S + torch.outer(v[t] - S @ key, key)
        return torch.stack(outputs)

    got = run("delta", q, k, v, beta)
    torch.testing.assert_close(got, loop(True))
    assert far(got, loop(False))
