"""The kernels for decay per channel on the emulator, against the definition in float64: outputs, final memory, every gradient."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch
from hostcuda.nvrtc import ARCHITECTURES, EVERY, compile_check
from support.cuda_scan import TOLERANCE, by_definition, by_kernels, compare, draw, launches
from support.draws import assert_same

from fw_fairseq.ops.kernels import common, decay, decay_tiles, launch


@pytest.mark.parametrize("policy, seed", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_schedule(one_thread, dtype, policy, seed):
    compare(decay, "decay", (2, 1, 70, 64, 64), dtype, EmulatorLaunch(policy, seed))


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 70])
def test_any_length(one_thread, tokens):
    compare(decay, "decay", (1, 2, tokens, 32, 32))


def test_long_sums_in_fp32(one_thread):
    """Where the tensor cores cut off their sums, as they do on a device: what 8192 tokens write into the memory, and what they add
    to its gradient, is as accurate as fp32."""
    x = {name: t if t is None else t.abs() for name, t in draw("decay", (1, 1, 8192, 16, 16)).items()}
    x["f"], x["z"] = torch.ones_like(x["f"]), torch.ones_like(x["z"])
    dy, dmemory = torch.randn_like(x["v"]).abs(), torch.randn_like(x["memory"]).abs()
    with launch.use(EmulatorLaunch(truncates=True)) as launcher:
        _, final, saved = decay.forward(launcher, *x.values(), "exact")
        *_, dstart = decay.backward(launcher, *x.values(), saved, dy, dmemory, "exact")
    for found, start, left, right in ((final, x["memory"], x["k"], x["v"]), (dstart, dmemory, x["q"], dy)):
        expected = start.double() + left.double().mT @ right.double()
        assert ((found - expected).abs() / expected).max() < 3e-6


def test_keys_are_padded_to_the_next_width_that_has_tiles():
    widths = (16, 32, 64, 128, 256, 384, 512)
    assert tuple(decay_tiles.FORWARD) == tuple(decay_tiles.BACKWARD) == widths
    for K in range(1, 513):
        assert decay_tiles.padded(K) == min(width for width in widths if width >= K)


@pytest.mark.parametrize("table, first, least", [(decay_tiles.FORWARD, 64, 32), (decay_tiles.BACKWARD, 32, 16)])
def test_a_thread_holds_enough_of_a_memory_and_not_too_much(table, first, least):
    for K, (V, k_warps, v_warps) in table.items():
        assert K % (16 * k_warps) == V % (16 * v_warps) == 0
        assert first > K or least <= K * V // (32 * k_warps * v_warps) <= 2 * least


@pytest.mark.parametrize("width, backward", [(64, False), (128, False), (64, True)])
def test_a_warp_has_half_as_much_of_a_memory_in_fp32(width, backward):
    """As in 16 bits, where operands take half as many registers."""

    def share(precision: str) -> int:
        given = (width, width, precision)
        none = (True, True, lambda chunks: 0, common.SHARED)
        tile = decay_tiles.choose_backward(*given, *none)[0] if backward else decay_tiles.choose_forward(*given)
        return width * tile.V // (tile.k_warps * tile.v_warps)

    assert 2 * share("exact") == share("bf16")


# Widths of one tile and of several, padded ones, keys shared by several warps, every type.
@pytest.mark.parametrize(
    "K, V, dtype",
    [
        (16, 16, torch.float16),
        (21, 36, torch.bfloat16),
        (64, 128, torch.bfloat16),
        (256, 32, torch.bfloat16),
        (512, 16, torch.bfloat16),
    ],
)
def test_widths_and_dtypes(one_thread, K, V, dtype):
    compare(decay, "decay", (1, 2, 37, K, V), dtype)


@pytest.mark.parametrize("capability, tile", [((9, 0), 64), ((8, 9), 32)])
def test_wider_tiles_where_shared_memory_holds_them(one_thread, capability, tile):
    device = EmulatorLaunch("prio", 1)
    device.capability = lambda _: capability
    compare(decay, "decay", (1, 1, 70, 128, 64), torch.bfloat16, device, gates="lone")
    assert device.calls[1][2]["FW_V"] == tile


@pytest.mark.parametrize("absent, gates", [("z", "lone"), ("f", "near one")])
def test_gates_of_one_side(one_thread, absent, gates):
    """And a write strength, whose gradient is a sum over V; chunks of one round beside chunks of several."""
    x = draw("decay", (1, 2, 70, 64, 64), torch.bfloat16, gates)
    x[absent], x["w"] = None, torch.rand(1, 2, 70)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    actual = by_kernels(decay, x, dy, dmemory, "bf16", EmulatorLaunch())
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["bf16"])


def test_large_operands(one_thread):
    """Gates that nearly need the chunks' rounds, with entries as large as fp16's: no infinity on the way."""
    x = draw("decay", (1, 1, 33, 16, 16))
    x["f"], x["z"] = torch.full_like(x["f"], 0.0101), torch.full_like(x["z"], 0.0101)
    x["k"], x["v"] = x["k"] * 1e3, x["v"] * 3e4
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    actual = by_kernels(decay, x, dy, dmemory, "exact", EmulatorLaunch())
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["exact"])


@pytest.mark.parametrize(
    "capability, key, dtype, message",
    [
        ((9, 0), 513, torch.bfloat16, "for keys up to 512 wide, not 513"),
        ((7, 5), 64, torch.float16, "for compute capability 8.0 and higher only"),
        ((8, 0), 64, torch.float16, None),
        ((8, 9), 512, torch.float32, "this device has 101376"),
        ((9, 0), 512, torch.bfloat16, None),
        ((9, 0), 384, torch.float32, None),
        ((9, 0), 512, torch.float32, "this device has 232448"),
        ((8, 9), 128, torch.float32, None),
    ],
)
def test_what_has_no_kernel(emulate, monkeypatch, capability, key, dtype, message):
    monkeypatch.setattr(emulate(), "capability", lambda device: capability)
    q = torch.empty(1, 1, 2, key, dtype=dtype)
    reason = decay.supported(q, q, q, q, q, None, None)
    assert reason is None if message is None else reason.startswith("backend='cuda' ") and message in reason


MAIN = [torch.bfloat16, torch.float32]
COMPILED = [(arch, 64, dtype) for arch in ARCHITECTURES if arch != "75" for dtype in MAIN]
COMPILED += [("90", width, torch.bfloat16) for width in (32, 128)]
if ARCHITECTURES == EVERY:
    COMPILED += [("90", 32, torch.float32), ("90", 128, torch.float32), *(("80", 128, dtype) for dtype in MAIN)]


@pytest.mark.parametrize("arch, width, dtype", COMPILED)
def test_compiles_without_spills(arch, width, dtype):
    capability = (int(arch[:-1]), int(arch[-1]))
    for launched in launches(decay, "decay", (1, 1, 17, width, width), dtype, capability):
        found = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        most = 0 if dtype == torch.bfloat16 else {64: 8}.get(width, 552)  # bytes; docs/kernels.md says where
        assert max(found["spill_stores"], found["spill_loads"], found["stack"]) <= most, (launched.kernel, found)
        assert launched.defines["FW_SHARED"] <= common.SHARED_MORE.get(capability, common.SHARED)
