"""The kernel of sparse feed-forward layers on the emulator, against the definition in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hostcuda import SCHEDULES, Recorder, guarded, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, compile_check
from support.cuda_gathered import TOLERANCE, compare, draw
from support.emulated import emulated
from torch import nn

from fw_fairseq.modules.sparse import SparseFeedForward, kernel
from fw_fairseq.ops.kernels import launch
from fw_fairseq.ops.kernels.compiler import WITHOUT_ASKING


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows, width, units, block, rank",
    [(1, 64, 64, 16, 8), (3, 72, 40, 8, 16), (2, 7, 12, 3, 33), (1, 136, 6, 2, 9), (2, 66, 12, 3, 4)],
)
def test_widths_and_dtypes(emulate, rows, width, units, block, rank, dtype):
    """With loads of 16 bytes and one by one, and with fewer units than warps; one launch."""
    launcher = emulate(bounds=True)
    compare(draw(rows, width, units, block, rank, dtype))
    assert len(launcher.calls) == 1


@pytest.mark.parametrize("policy, seed", SCHEDULES)
def test_any_schedule(emulate, policy, seed):
    emulate(policy, seed)
    compare(draw(2, 40, 32, 8, 12))


def test_equal_logits_take_the_first_unit(emulate):
    emulate()
    operands = draw(1, 16, 64, 32, 4)
    operands[2].zero_(), operands[3].zero_()
    operands[3][[5, 9, 40, 63]] = 1.0
    compare(operands)


def test_launches_follow_each_other(emulate):
    """Each one finds the counters at 0."""
    emulate()
    operands = draw(2, 16, 32, 8, 4)
    for _ in range(3):
        compare(operands)
    assert not any(made.any() for made in kernel.COUNTERS.values())


def test_only_the_chosen_rows_are_read(emulate):
    """All other rows may be anything, and so may rows of W_2 whose hidden value is 0."""
    emulate()
    x, inner, outer, c, w1, w2, _, block = operands = draw(1, 16, 64, 8, 4)
    expected = kernel.feed_forward(*operands)
    logits = (outer @ (inner @ x[0]) + c).view(-1, block)
    chosen = logits.argmax(1) + torch.arange(0, 64, block)
    rest = torch.ones(64, dtype=torch.bool)
    rest[chosen] = False
    w1[rest], w2[rest] = torch.nan, torch.nan
    idle = chosen[w1[chosen] @ x[0] < 0]
    assert len(idle) > 0
    w2[idle] = torch.nan
    assert torch.equal(kernel.feed_forward(*operands), expected)


def test_nothing_past_the_end(emulate):
    emulate()
    *operands, block = draw(3, 24, 40, 8, 12)
    compare([*map(guarded, operands), block])


def sanitized() -> None:
    with emulated(sanitized_launch()):
        compare(draw(2, 40, 32, 8, 12))


@torch.no_grad()
@pytest.mark.parametrize("activation, kernels", [(torch.relu, 1), (torch.tanh, 0)])
def test_layers_use_it(emulate, activation, kernels):
    """For few tokens, with ReLU; and they equal the form with all units."""
    torch.manual_seed(0)
    layer, x = SparseFeedForward(16, 64, 16, activation=activation).eval(), torch.randn(2, 1, 16)
    nn.init.normal_(layer.controller_bias)
    expected = layer.activation(x @ layer.weight_in.T) * layer.mask(x) @ layer.weight_out + layer.bias
    launcher = emulate()
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert [call[1] for call in launcher.calls] == ["feed_forward"] * kernels
    assert layer(torch.randn(5, 16)).shape == (5, 16) and len(launcher.calls) == kernels  # many tokens


def test_what_it_does_not_take(emulate):
    emulate()
    *operands, block = draw(1, 16, 32, 8, 4)
    assert kernel.why_not(*operands, block=block) is None
    assert "of one type" in kernel.why_not(*operands[:-1], operands[-1].bfloat16(), block=block)
    assert "takes a rank up to" in kernel.why_not(*operands[:1], torch.empty(20000, 16), *operands[2:], block=block)


@pytest.mark.parametrize("ranks, blocks, taken", [(11520, 5760, True), (11521, 1, False), (1, 5761, False)])
def test_sizes_that_shared_memory_holds(emulate, ranks, blocks, taken):
    """45 KiB, with four bytes for each of the rank or eight for each block, whichever is more."""
    emulate()
    x, one, outer = torch.empty(1, 1), torch.empty(ranks, 1), torch.empty(1, 1).expand(2 * blocks, ranks)
    reason = kernel.why_not(x, one, outer, x, x, x, x, block=2)
    assert reason is None if taken else reason.endswith("takes a rank up to 11520 and up to 5760 blocks of units")


# The numbers of a load and of a lane's columns; thread blocks: those of 8 rows of A, of blocks of units and of 32 lanes' columns.
@pytest.mark.parametrize(
    "sizes, dtype, vector, columns, items, shared",
    [
        ((2, 136, 32, 8, 8), torch.float32, 4, 1, 1 + 4 + 5, 32),
        ((2, 136, 32, 8, 8), torch.bfloat16, 8, 2, 1 + 4 + 3, 32),
        ((2, 66, 32, 8, 8), torch.bfloat16, 1, 1, 1 + 4 + 3, 32),
        ((1, 64, 32, 2, 9), torch.float16, 1, 1, 2 + 16 + 2, 128),
    ],
)
def test_threads(sizes, dtype, vector, columns, items, shared):
    with launch.use(Recorder()) as recorder:
        kernel.feed_forward(*draw(*sizes, dtype))
    [launched] = recorder.launches
    assert (launched.defines["FW_VECTOR"], launched.defines["FW_COLUMNS"]) == (vector, columns)
    assert (launched.grid, launched.threads, launched.shared) == ((sizes[0] * items,), 256, shared)


@pytest.mark.parametrize("moved", [[], [0], [6], range(7)], ids=["none", "the first", "the last", "all"])
def test_operands_at_any_place_in_memory(emulate, moved):
    """All start at multiples of 16 bytes, or numbers are loaded one by one."""
    launcher = emulate(bounds=True)
    *operands, block = draw(2, 16, 32, 8, 4)
    for i in moved:
        operands[i] = torch.cat([operands[i].new_zeros(1), operands[i].flatten()])[1:].view(operands[i].shape)
    compare([*operands, block])
    assert [macros["FW_VECTOR"] for _, _, macros in launcher.calls] == [1 if moved else 4]


def test_opcheck(emulate):
    emulate()
    torch.library.opcheck(torch.ops.fw_fairseq.sparse_feed_forward.default, tuple(draw(2, 16, 32, 8, 4)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch):
    for dtype, aligned in [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)]:
        macros = kernel.defines(dtype, aligned, 1024, 96)
        found = compile_check("gathered.cu", macros, arch)["feed_forward"]
        assert found["spill_stores"] == found["spill_loads"] == 0 and found["registers"] <= 64, (macros, found)
        assert found["shared"] + kernel.HELD <= WITHOUT_ASKING, (macros, found)


def test_counters_of_the_default_stream_are_made_once_for_each_number(monkeypatch):
    """Another stream may be recorded, and then replayed beside others; what it uses is its own."""
    stream, device = SimpleNamespace(cuda_stream=0), torch.device("cuda", 3)
    monkeypatch.setattr(kernel, "COUNTERS", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: ([0] * count, dtype, device))
    first = kernel.counters(device, 4)
    assert first == ([0] * 4, torch.int32, device) and kernel.counters(device, 4) is first
    assert kernel.counters(device, 2) == ([0] * 2, torch.int32, device)
    here = kernel.counters(torch.device("cpu"), 4)
    assert kernel.counters(torch.device("cpu"), 4) is here and here != first
    stream.cuda_stream = 5
    side = kernel.counters(device, 4)
    assert side == first and side is not first and kernel.counters(device, 4) is not side
    stream.cuda_stream = 0
    assert kernel.counters(device, 4) is first
