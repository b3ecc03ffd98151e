"""Softmax-weighted means of the past against their definition, a loop over the tokens in float64."""

from __future__ import annotations

import pytest
import torch
from support.definitions import by_definition

from fw_fairseq.ops.scans import aggregates, pooling
from fw_fairseq.ops.scans.pooling import pool

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread", "in_pytorch")]
WINDOWS = [0, 1, 2, 5, 32, 33, 40, 64, 1000]


def draw(length: int, scale: float = 3.0):
    a, x = torch.randn(3, 2, length, dtype=torch.float64) * scale, torch.randn(3, 2, length, 4, dtype=torch.float64)
    return a.requires_grad_(), x.requires_grad_()


def masks(length: int, padded: bool, with_resets: bool):
    padding = torch.rand(3, length) < 0.3 if padded else None
    if padded:
        padding[1, 0], padding[2, -length // 2 :] = True, True
    return padding, torch.rand(3, length) < 0.05 if with_resets else None


def gradients(y, a, x):
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(y, (a, x), torch.randn(y.shape, generator=generator, dtype=y.dtype))


@pytest.mark.parametrize("padded, with_resets", [(False, False), (True, True)], ids=["", "padding and resets"])
@pytest.mark.parametrize("window", WINDOWS)
def test_means_are_those_of_the_definition(window, padded, with_resets):
    a, x = draw(150)
    padding, reset = masks(150, padded, with_resets)
    expected = by_definition(a, x, window, padding, reset)
    y, _ = pool(a, x, window, None, padding, reset)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, a, x), gradients(expected, a, x))


@pytest.mark.parametrize("padded", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("window", WINDOWS)
def test_parts_with_their_state_equal_the_whole(window, padded):
    a, x = draw(150)
    padding, reset = masks(150, padded, True)
    expected, last = pool(a, x, window, None, padding, reset)
    state, parts, sizes = None, [], set()
    for t, part in zip((0, 1, 2, 4, 40, 41, 149), torch.arange(150).split([1, 1, 2, 36, 1, 108, 1])):
        assert part[0] == t
        masked = [None if mask is None else mask[:, part] for mask in (padding, reset)]
        y, state = pool(a[:, :, part], x[:, :, part], window, state, *masked)
        parts.append(y)
        sizes.add(sum(s.numel() for s in state if s is not None))
    torch.testing.assert_close(torch.cat(parts, 2), expected)
    assert len(sizes) == 1
    if window:
        state, last = (pooling.PoolState(*pooling.aggregates(end)) for end in (state, last))
    seen = last.scores > pooling.NOTHING / 2
    torch.testing.assert_close(state.scores[seen], last.scores[seen])
    torch.testing.assert_close(state.values[seen], last.values[seen])
    torch.testing.assert_close(gradients(torch.cat(parts, 2), a, x), gradients(expected, a, x))


@pytest.mark.parametrize("padded", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("window", WINDOWS)
def test_without_the_state_the_means_are_the_same(window, padded):
    a, x = draw(150)
    padding, reset = masks(150, padded, True)
    _, before = pool(*draw(70), window)
    for state in (None, before):
        expected, _ = pool(a, x, window, state, padding, reset)
        y, state = pool(a, x, window, state, padding, reset, keep_state=False)
        assert state is None and torch.equal(y, expected)


@pytest.mark.parametrize("window", [0, 4, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_long_texts_with_large_scores_in_half_precision(window, dtype):
    """Scores far beyond what exp can hold, then long after them tokens that would vanish in a difference of cumulative sums."""
    length = 65536
    a = torch.randn(1, 1, length)
    a[..., :100] += 300
    x = torch.randn(1, 1, length, 2).to(dtype).requires_grad_()
    a.requires_grad_()
    y, _ = pool(a, x, window)
    y[..., -1, :].float().sum().backward()
    first = 0 if not window else length - window
    expected = (a[..., first:].double().softmax(-1)[..., None] * x[..., first:, :].double()).sum(2)
    torch.testing.assert_close(y[..., -1, :].double(), expected, rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-4)
    assert a.grad.isfinite().all() and x.grad.isfinite().all() and x.grad.abs().sum() > 0.5


@pytest.mark.parametrize("window", [3, 700])
def test_memory_of_a_window_does_not_grow_with_it(window):
    """Elements that the backward keeps, for each token: a quadratic form would keep one for each of the window."""
    kept = []
    a, x = torch.randn(1, 1, 4096, requires_grad=True), torch.randn(1, 1, 4096, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.numel()) or saved, lambda saved: saved):
        pool(a, x, window)
    assert sum(kept) / 4096 < 30


@pytest.mark.parametrize("window", [0, 600])
@torch.no_grad()
def test_single_tokens_under_autocast(window):
    """A mean of many tokens moves less with each token than bf16 can hold."""
    a, x, state, steps = torch.zeros(1, 1, 1000), torch.rand(1, 1, 1000, 4).cumsum(2) / 1000, None, []
    with torch.autocast("cpu", torch.bfloat16):
        for t in range(1000):
            y, state = pool(a[:, :, t : t + 1], x[:, :, t : t + 1], window, state)
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 2), by_definition(a, x, window, None, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shapes, window, state, message",
    [
        (((1, 2, 3), (1, 2, 3, 5)), 4, 8, r"tokens,V\) = \(1, 2, 8, 5\); with .* window 4 it must be \(1, 2, 3, 5\)"),
        (((2, 2, 3), (2, 2, 3, 5)), 4, 3, r"tokens,V\) = \(1, 2, 3, 5\); with .* it must be \(2, 2, 3, 5\)"),
        (((1, 2, 3), (1, 2, 3, 1)), 0, 1, r"tokens,V\) = \(1, 2, 1, 5\); with .* it must be \(1, 2, 1, 1\)"),
    ],
)
def test_refused(shapes, window, state, message):
    state = state and pooling.PoolState(torch.zeros(1, 2, state), torch.zeros(1, 2, state, 5))
    with pytest.raises(ValueError, match=message):
        pool(torch.zeros(shapes[0]), torch.zeros(shapes[1]), window, state)


@pytest.mark.parametrize("with_resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("window", [4, 5, 8, 9, 12, 30, 65, 90])
def test_windows_of_windows(monkeypatch, window, with_resets):
    """With chunks so small that the chunks between are many, and have windows, and chunks between, themselves."""
    monkeypatch.setattr(aggregates, "CHUNK", 4)
    monkeypatch.setattr(aggregates, "DENSE", 4)
    a, x = draw(101)
    _, reset = masks(101, False, with_resets)
    expected, (y, _) = by_definition(a, x, window, None, reset), pool(a, x, window, None, None, reset)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, a, x), gradients(expected, a, x))
