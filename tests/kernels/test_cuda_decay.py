"""The kernels for decay per channel on the emulator, against the definition in float64: outputs, final memory, every gradient."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, Recorder
from hostcuda.nvrtc import ARCHITECTURES, EVERY, compile_check, long_ones
from support.cuda_scan import PRECISION, TOLERANCE, by_definition, by_kernels, compare, draw, launches, to_run
from support.draws import assert_same

from fw_fairseq.feature_maps import AS_IS, RowMap
from fw_fairseq.ops.kernels import decay, decay_tiles, launch
from fw_fairseq.ops.kernels.family import Operands


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("dtype, policy, seed", [*((torch.bfloat16, *each) for each in SCHEDULES), (torch.float32, *SCHEDULES[-1])])
def test_any_schedule(one_thread, dtype, policy, seed):
    compare(decay, "decay", (2, 1, 70, 64, 64), dtype, EmulatorLaunch(policy, seed))


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize(
    "rule, shape, dtype, gates, policy, seed",
    [
        *(("decay", (1, 2, 600, 64, 64), torch.bfloat16, "uniform", *each) for each in SCHEDULES),
        ("gla", (2, 1, 530, 20, 100), torch.float32, "near one", *SCHEDULES[-1]),
        ("decay", (1, 1, 520, 32, 64), torch.float16, "small", *SCHEDULES[-1]),
        ("decay", (1, 1, 1040, 128, 40), torch.bfloat16, "resets", *SCHEDULES[-1]),
    ],
)
def test_few_sequences_in_parts(one_thread, rule, shape, dtype, gates, policy, seed):
    device = EmulatorLaunch(policy, seed)
    device.blocks = 16
    compare(decay, rule, shape, dtype, device, gates=gates)
    assert [name for _, name, _ in device.calls] == ["decay_walk", "decay_forward", "decay_walk", "decay_backward"]


@pytest.mark.parametrize(
    "sequences, tokens, processors, sides",
    [
        (64, 2048, 132, 2),
        (67, 2048, 132, 0),  # more than half of the processors have a block
        (1, 2048, 132, 3),
        (1, 1100, 132, 2),
        (1, 511, 132, 0),
    ],
)
def test_sides(sequences, tokens, processors, sides):
    found = launches(decay, "decay", (1, sequences, tokens, 16, 32), torch.bfloat16, processors=processors)
    walk = ["decay_walk"] if sides else []
    assert [launch.kernel for launch in found] == [*walk, "decay_forward", *walk, "decay_backward"]
    for launched in found[sides > 0 :: 2 if sides else 1]:
        assert launched.grid == (1, sequences, 1 << sides) and launched.defines.get("FW_SIDE_BITS", 0) == sides


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
        _, final, saved = decay.forward(launcher, Operands(*x.values(), "exact"))
        *_, dstart = decay.backward(launcher, Operands(*x.values(), "exact"), saved, dy, dmemory)
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
    for K, tile in table.items():
        assert K % (16 * tile.k_warps) == tile.V % 16 == 0
        assert first > K or least <= K * tile.V // (32 * tile.k_warps * tile.v_warps) <= 2 * least


@pytest.mark.parametrize("width, backward", [(64, False), (128, False), (64, True)])
def test_a_warp_has_half_as_much_of_a_memory_in_fp32(width, backward):
    """As in 16 bits, where operands take half as many registers."""

    def share(precision: str) -> int:
        given = (width, width, precision)
        none = (True, True, lambda chunks: 0, launch.SHARED)
        tile = decay_tiles.choose_backward(*given, *none)[0] if backward else decay_tiles.choose_forward(*given)
        return width * tile.V // (tile.k_warps * tile.v_warps)

    assert 2 * share("exact") == share("bf16")


@pytest.mark.cases_in_ci(4)
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


@pytest.mark.parametrize("tokens", [70, 550])
@pytest.mark.parametrize("absent, gates", [("z", "lone"), ("f", "near one")])
def test_gates_of_one_side(one_thread, absent, gates, tokens):
    """And a write strength, whose gradient is a sum over V; chunks of one round beside chunks of several; and in parts."""
    x = draw("decay", (1, 2, tokens, 64, 64), torch.bfloat16, gates)
    x[absent], x["w"] = None, torch.rand(1, 2, tokens)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    device = EmulatorLaunch()
    device.blocks = 16
    actual = by_kernels(decay, x, dy, dmemory, "bf16", device)
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["bf16"])


@pytest.mark.parametrize("f, z", [(0.018, 0.018), (0.057, 0.0057), (0.0175, 0.0175)])
def test_large_operands(one_thread, f, z):
    """Gates of one side and of both that nearly need more rounds than one, and such as do, with entries as large as fp16's: no
    infinity on the way."""
    x = draw("decay", (1, 1, 33, 16, 16))
    x["f"], x["z"] = torch.full_like(x["f"], f), torch.full_like(x["z"], z)
    x["k"], x["v"] = x["k"] * 1e3, x["v"] * 3e4
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    actual = by_kernels(decay, x, dy, dmemory, "exact", EmulatorLaunch())
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["exact"])


@pytest.mark.parametrize("width", [32, 64])
def test_gradients_of_small_gates(one_thread, width):
    """As accurate as those of other gates, though differences of sums would lose them: half a chunk to a warp, or all of it."""
    x, at = draw("decay", (1, 1, 48, width, width), gates="near one"), [0, 7, 8, 21, 34, 47]
    for name in "fz":
        x[name][:, :, at] = 10.0 ** -torch.linspace(2.1, 7, len(at))[:, None]
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    actual = by_kernels(decay, x, dy, dmemory, "exact", EmulatorLaunch())
    expected = by_definition(x, dy, dmemory)
    assert_same(actual, expected, TOLERANCE["exact"])
    for name in ("gradient of f", "gradient of z"):
        found, exact = actual[name][:, :, at], expected[name][:, :, at]
        assert ((found - exact).abs().amax(-1) < 1e-5 * exact.abs().amax(-1)).all()


@pytest.mark.parametrize(
    "f, z, scale",
    [(0.01, 0.1, 1.0), (0.1, 0.01, 1.0), (0.005, 0.005, 1e-9), (0.002, 0.0015, 1.0), (1e-4, 1e-4, 1.0), (1e-4, 1e-4, 1e-9)],
)
def test_gradients_where_every_gate_is_small(one_thread, f, z, scale):
    """In one round, in two and in six; and where the loss hardly changes."""
    x = draw("decay", (1, 1, 48, 32, 32))
    for name, gate in (("f", f), ("z", z)):
        x[name] = gate * (0.9 + 0.2 * torch.rand_like(x[name]))
    dy, dmemory = scale * torch.randn_like(x["v"]), scale * torch.randn_like(x["memory"])
    actual = by_kernels(decay, x, dy, dmemory, "exact", EmulatorLaunch())
    expected = by_definition(x, dy, dmemory)
    for name, found in actual.items():
        assert ((found - expected[name]).abs() <= 1e-4 * expected[name].abs().amax(-1, keepdim=True)).all(), name


@pytest.mark.parametrize(
    "width, dtype, policy, seed", [(64, torch.bfloat16, *each) for each in SCHEDULES] + [(32, torch.float32, "prio", 1)]
)
def test_every_way_of_a_chunk_in_one_sequence(one_thread, width, dtype, policy, seed):
    """Gates near 1, such as need a frame for each half of a chunk or several rounds, and gates of 0; they differ from
    channel to channel."""
    x = draw("decay", (1, 1, 134, width, width), dtype, gates="near one")
    for name in "fz":
        for chunk, gate in enumerate((0.004, 0.95, 1e-4, 0.004, 0.004, 0.0, 0.95, 0.004)):
            some = torch.rand_like(x[name][:, :, :16]) < (0.3 if gate == 0 else 0.9)
            of_chunk = x[name][:, :, 16 * chunk : 16 * chunk + 16]
            of_chunk[:] = torch.where(some[:, :, : of_chunk.shape[2]], gate, of_chunk)
        x[name][:, :, 48:56] = 1.0
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    actual = by_kernels(decay, x, dy, dmemory, PRECISION[dtype], EmulatorLaunch(policy, seed))
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE[PRECISION[dtype]])


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
    reason = decay.supported(to_run(q, q, q, q, q, None, None))
    assert reason is None if message is None else reason.startswith("backend='cuda' ") and message in reason


@pytest.mark.parametrize(
    "absent, key, needed",
    [("f", 512, None), ("fz", 512, None), ("z", 384, None), ("z", 385, 251328), ("", 385, 254400)],
)
def test_wide_keys_in_fp32_have_kernels_without_a_decay_of_keys(absent, key, needed):
    """Its sums, of 16 rows of keys, are what does not fit; those of a decay of values take 3072 bytes more."""
    q, v = torch.empty(1, 1, 2, key), torch.empty(1, 1, 2, 16)
    f, z = (None if name in absent else x for name, x in (("f", q), ("z", v)))
    with launch.use(Recorder((9, 0))):
        reason = decay.supported(to_run(q, q, v, f, z, None, None))
    assert reason is None if needed is None else reason.startswith(f"backend='cuda' needs {needed} bytes of shared memory")


# Values of several tiles: the width of the tile, the warps that share it along K and all of them, forward and backward; the tokens
# of a part. A gate of the value side, on a device with 227 KiB.
@pytest.mark.parametrize(
    "dtype, key, ahead, back, part",
    [
        (torch.bfloat16, 16, (64, 1, 4), (64, 1, 4), 64),
        (torch.bfloat16, 32, (64, 1, 4), (64, 1, 4), 64),
        (torch.bfloat16, 64, (128, 1, 8), (64, 1, 4), 64),
        (torch.bfloat16, 128, (128, 1, 8), (64, 2, 8), 64),
        (torch.bfloat16, 256, (64, 2, 10), (16, 4, 9), 32),
        (torch.bfloat16, 300, (32, 6, 13), (16, 12, 13), 16),
        (torch.bfloat16, 500, (32, 8, 17), (16, 16, 17), 16),
        (torch.float32, 32, (64, 1, 4), (64, 1, 4), 32),
        (torch.float32, 64, (64, 2, 8), (32, 2, 4), 32),
        (torch.float32, 128, (64, 2, 8), (16, 4, 5), 32),
        (torch.float32, 256, (64, 2, 10), (16, 4, 9), 16),
    ],
)
def test_layouts(dtype, key, ahead, back, part):
    x = draw("decay", (1, 1, 2, key, 200), dtype) | {"f": None}
    with launch.use(Recorder()) as recorder:
        by_kernels(decay, x, x["v"], x["memory"], PRECISION[dtype], recorder)
    for launched, (width, k_warps, warps) in zip(recorder.launches, (ahead, back), strict=True):
        defines = launched.defines
        assert (defines["FW_V"], defines["FW_K_WARPS"], defines["FW_V_WARPS"]) == (width, k_warps, width // 16)
        assert (launched.grid, launched.threads, defines["FW_WARPS"]) == ((-(-200 // width), 1, 1), 32 * warps, warps)
        assert defines["FW_PART"] == part


@pytest.mark.parametrize("tokens, borders", [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_a_memory_is_saved_before_each_part_but_the_first(tokens, borders):
    x = draw("decay", (2, 3, tokens, 32, 20), torch.bfloat16)
    with launch.use(Recorder()):
        assert decay.saved_like(Operands(*x.values(), "bf16")) == [((2, 3, borders, 32, 20), torch.float32)]


def test_rows_that_a_map_takes_are_all_in_shared_memory_in_the_backward():
    """Two chunks in turns in the forward, the four of a part in the backward."""
    x, row_map = draw("decay", (1, 1, 65, 16, 64), torch.bfloat16), RowMap("dpfp", 1, "sum")
    x["f"], x["memory"] = torch.rand(1, 1, 65, 32), torch.randn(1, 1, 32, 64)
    with launch.use(Recorder()) as recorder:
        _, _, saved = decay.forward(recorder, Operands(*x.values(), "bf16", row_map=row_map))
        decay.backward(recorder, Operands(*x.values(), "bf16", row_map), saved, x["v"], x["memory"])
    assert [(call.defines["FW_PART"], call.defines["FW_ROW_CHUNKS"]) for call in recorder.launches] == [(64, 2), (64, 4)]


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "dtype, start, shape, strides, paired",
    [
        (BF16, 2, (2, 3, 5, 4), (240, 80, 6), True),
        (BF16, 1, (2, 3, 5, 4), (240, 80, 6), False),
        (FP32, 1, (2, 3, 5, 4), (240, 80, 6), False),
        (FP32, 6, (2, 3, 5, 4), (240, 80, 6), True),
        (BF16, 0, (2, 3, 5, 3), (240, 80, 6), False),
        (BF16, 0, (2, 3, 5, 4), (241, 80, 6), False),
        (BF16, 0, (2, 3, 5, 4), (240, 81, 6), False),
        (BF16, 0, (2, 3, 5, 4), (240, 80, 5), False),
        (BF16, 1, (2, 3, 5), (241, 81, 1), True),  # one number for a token
    ],
)
def test_channels_that_can_be_moved_in_pairs(dtype, start, shape, strides, paired):
    strides = strides if len(shape) == 3 else (*strides, 1)
    assert decay.in_pairs(torch.empty(1000, dtype=dtype).as_strided(shape, strides, start)) is paired


@pytest.mark.parametrize("dtype, stride, paired", [(BF16, 2**30 - 2, True), (BF16, 2**30, False), (FP32, 2**29, False)])
def test_pairs_whose_way_from_row_to_row_has_32_bits(dtype, stride, paired):
    x = torch.empty_strided((1, 1, 2, 4), (4 * stride, 2 * stride, stride, 1), dtype=dtype, device="meta")
    assert decay.in_pairs(x) is paired


@pytest.mark.parametrize("row_map, paired", [(AS_IS, 0), (RowMap("dpfp", 2), 1)])
def test_rows_that_a_map_takes_need_no_pairs(row_map, paired):
    """Seven channels of q and k are no pairs, but the features are."""
    q, v, width = torch.empty(1, 1, 17, 7), torch.empty(1, 1, 17, 16), row_map.width(7)
    with launch.use(Recorder()) as recorder:
        given = (q, q, v, None, v, None, None, torch.empty(1, 1, width, 16))
        decay.forward(recorder, Operands(*given, "exact", row_map), keep=False)
    assert [call.defines["FW_PAIRED"] for call in recorder.launches] == [paired]


MAIN = [torch.bfloat16, torch.float32]
COMPILED = [(arch, 64, torch.bfloat16) for arch in ARCHITECTURES if arch != "75"] + [("90", 64, torch.float32)]
COMPILED += [("90", width, torch.bfloat16) for width in (32, 128)]
if ARCHITECTURES == EVERY:
    COMPILED += [("90", 32, torch.float32), ("90", 128, torch.float32), *(("80", 128, dtype) for dtype in MAIN)]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("arch, width, dtype", long_ones(COMPILED))
def test_compiles_without_spills(arch, width, dtype):
    capability = (int(arch[:-1]), int(arch[-1]))
    for launched in launches(decay, "decay", (1, 1, 17, width, width), dtype, capability):
        found = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        most = 0 if dtype == torch.bfloat16 else {64: 76}.get(width, 552)  # bytes; docs/kernels.md says where
        assert max(found["spill_stores"], found["spill_loads"], found["stack"]) <= most, (launched.kernel, found)
        assert launched.defines["FW_SHARED"] <= launch.SHARED_MORE.get(capability, launch.SHARED)
