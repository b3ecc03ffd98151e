"""The kernels of additive pooling on the emulator, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, Recorder, guarded, sanitized_launch
from hostcuda.nvrtc import compile_check
from support.cuda_pooling import TOLERANCE, compare, draw, results
from support.definitions import by_definition
from support.draws import assert_same
from support.emulated import emulated

from fw_fairseq.ops.scans import pooling_kernel as cuda_pooling
from fw_fairseq.ops.scans.pooling import pool

WINDOWS = [0, 1, 3, 4, 5, 8, 11, 16, 17, 32, 37, 64]


@pytest.mark.cases_in_ci(4)
@pytest.mark.parametrize("with_resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("window", WINDOWS)
def test_means_and_gradients_are_those_of_the_definition(emulate, window, with_resets):
    launcher = emulate(bounds=True)
    compare(*draw(75, 3), window, reset=torch.rand(2, 75) < 0.07 if with_resets else None)
    several = window == 0 or window > 16
    kernels = ["pool_chunks", "pool_borders", "pool_tokens"] if several else ["pool_tokens"]
    assert [kernel for _, kernel, _ in launcher.calls] == 2 * kernels
    chunk = next((size for size in (4, 8) if 0 < window <= size), 16)
    assert {macros["FW_CHUNK"] for *_, macros in launcher.calls} == {chunk}


# B = 2, H = 3 and V = 40, a thread for each channel of each chunk: 16 tokens, or all of a window of up to 4 or 8. The thread blocks
# over chunks, over blocks of chunks (the borders) and over chunks again.
@pytest.mark.parametrize(
    "window, total, grids",
    [
        (0, 16, [2]),
        (0, 17, [4, 2, 4]),
        (0, 112, [14, 2, 14]),
        (1, 100, [188]),
        (4, 100, [47]),
        (8, 100, [25]),
        (16, 100, [14]),
        (17, 100, [23, 12, 23]),
        (20, 100, [19, 10, 19]),
    ],
)
def test_threads(window, total, grids):
    a, x = draw(total, 40, heads=3)
    with emulated(Recorder()) as recorder:
        results(lambda a, x: pool(a, x, window, backend="cuda")[0], a, x)
    assert [(launched.grid, launched.threads) for launched in recorder.launches] == 2 * [((grid,), 128) for grid in grids]
    for backward, launched in enumerate(recorder.launches[:: len(grids)]):
        flags = [launched.defines[f"FW_{name}"] for name in ("WINDOW", "CHUNKS", "TEXTS", "BACKWARD")]
        assert flags == [window > 0, len(grids) > 1, False, backward]


def test_a_state_of_all_of_the_past_is_not_rounded(emulate):
    """Means of a window, which no state has, are of the values' type."""
    emulate()
    (a, x), reset = draw(30, 4, torch.bfloat16), torch.zeros(2, 30, dtype=torch.bool)
    _, state = pool(a, x, reset_mask=reset, backend="cuda")
    torch.testing.assert_close(state.values.double(), by_definition(a.double(), x.double())[:, :, -1:], rtol=1e-5, atol=1e-5)
    assert cuda_pooling.pool_cuda_form(a, x, 6, reset.long())[1].dtype == torch.bfloat16


@pytest.mark.parametrize("window, policy, seed", [*((20, *each) for each in SCHEDULES), (0, *SCHEDULES[-1])])
def test_any_schedule(emulate, window, policy, seed):
    emulate(policy, seed)
    compare(*draw(50, 33), window, torch.rand(2, 50) < 0.2, torch.rand(2, 50) < 0.1)


@pytest.mark.parametrize("window", [0, 6, 18])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_parts_with_their_state_equal_the_whole(emulate, dtype, window):
    """Values, the final state and gradients through the states, in every type, padding and resets in it."""
    emulate()
    a, x = draw(60, 8, dtype)
    padding, reset = torch.rand(2, 60) < 0.2, torch.rand(2, 60) < 0.05

    def in_parts(a, x):
        state, parts = None, []
        for part in torch.arange(60).split([7, 1, 2, 50]):
            args = (a[:, :, part], x[:, :, part], window, state, padding[:, part], reset[:, part])
            y, state = pool(*args, backend="cuda")
            parts.append(y)
        assert {s.dtype for s in state if s is not None} == {torch.float32}
        return torch.cat(parts, 2)

    expected = results(lambda a, x: by_definition(a, x, window, padding, reset), a.double(), x.double())
    assert_same(results(in_parts, a, x), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [0, 24])
def test_large_scores(emulate, window):
    """Far beyond what exp can hold, and then tokens that would vanish in a difference of cumulative sums."""
    emulate()
    a, x = draw(200, 4)
    a[..., :50] += 300
    a[..., 120:130] -= 300
    compare(a, x, window)


def test_the_state_has_gradients(emulate):
    emulate()
    leaves = [part.requires_grad_() for part in draw(40, 4)]

    def gradients(backend):
        _, state = pool(*leaves, backend=backend)
        return dict(zip("ax", torch.autograd.grad((state.scores.sin() + state.values.sum(-1)).sum(), leaves)))

    assert_same(gradients("cuda"), gradients("torch"), 2e-5)


@pytest.mark.parametrize("window", [0, 5, 20])
def test_nothing_past_the_end(emulate, window):
    emulate()
    compare(*(guarded(part) for part in draw(41, 5)), window)


def test_opcheck(emulate):
    emulate()
    a, x = (part.requires_grad_() for part in draw(20, 4))
    torch.library.opcheck(torch.ops.fw_fairseq.pool.default, (a, x, torch.zeros(2, 20, dtype=torch.long), 5))


def sanitized() -> None:
    with emulated(sanitized_launch()):
        for window in (0, 18):
            compare(*draw(40, 3, batch=1), window, reset=torch.rand(1, 40) < 0.1)


@pytest.mark.parametrize("arch", ["75", "90"])
def test_compiles_without_spills(arch):
    """The two that keep most in registers."""
    for dtype, texts in ((torch.float32, True), (torch.bfloat16, False)):
        macros = cuda_pooling.defines(dtype, torch.float32, 1024, True, texts, True)
        for kernel, used in compile_check("pooling.cu", macros, arch).items():
            assert used["spill_stores"] == used["spill_loads"] == used["stack"] == 0, (kernel, used)


def test_refused(emulate):
    emulate()
    a, x = draw(3, 2)
    with pytest.raises(ValueError, match=r"has kernels for torch.float32, torch.bfloat16, torch.float16, not for torch.float64"):
        pool(a.double(), x.double(), backend="cuda")
    with pytest.raises(ValueError, match="backend is 'fast'; allowed: auto, torch, cuda"):
        pool(a, x, backend="fast")
