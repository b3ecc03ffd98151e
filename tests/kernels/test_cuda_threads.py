"""How blocks are cut: the widths of keys and values at which another layout begins, on devices with much shared memory and little.

docs/kernels.md says why. Another layout computes the same, but slower, so that tests of the results do not notice it.
"""

from __future__ import annotations

import pytest
import torch
from hostcuda import Launch, Recorder

from fw_fairseq.ops.kernels import launch, step
from fw_fairseq.ops.kernels.common import Divided, undivided
from fw_fairseq.ops.kernels.families import FAMILIES
from fw_fairseq.row_map import AS_IS
from fw_fairseq.rules import Coefficients

BF16, FP32 = torch.bfloat16, torch.float32
GATES = {
    "linear": {"f": "t"},
    "decay": {"f": "k", "z": "v"},
    "delta": {"f": "t", "e": "t", "w": "t"},
    "channel_delta": {"f": "k", "e": "k"},
}
MACROS = {
    "linear": ("FW_K", "FW_V", "FW_WARPS", "FW_CHUNK", "FW_MEMORIES", "FW_STAGES"),  # the last two in one kernel each
    "decay": ("FW_K", "FW_V", "FW_K_WARPS", "FW_V_WARPS", "FW_WARPS", "FW_PART"),
    "delta": ("FW_K", "FW_V", "FW_KSPLIT", "FW_SPAN", "FW_STAGES"),
    "channel_delta": ("FW_K", "FW_V", "FW_KSPLIT", "FW_SPAN"),
}
# The type, the compute capability, the widths of keys and values, the macros of the forward and of the backward.
LINEAR = [
    (BF16, (9, 0), 64, 20, (64, 32, 4, 64, 2), (64, 32, 4, 64, 2)),
    (BF16, (9, 0), 64, 33, (64, 64, 4, 64, 2), (64, 64, 4, 64, 2)),
    (BF16, (9, 0), 64, 64, (64, 64, 4, 64, 2), (64, 64, 4, 64, 2)),
    (BF16, (9, 0), 64, 65, (64, 128, 8, 64, 2), (64, 128, 8, 64, 1)),
    (BF16, (9, 0), 65, 128, (80, 128, 8, 64, 1), (80, 128, 8, 64, 1)),
    (BF16, (9, 0), 128, 128, (128, 128, 8, 64, 1), (128, 128, 8, 64, 1)),
    (BF16, (9, 0), 129, 128, (160, 64, 8, 64, 1), (160, 64, 8, 64, 1)),
    (BF16, (9, 0), 256, 128, (256, 64, 8, 64, 1), (256, 64, 8, 64, 1)),
    (BF16, (9, 0), 257, 128, (320, 32, 8, 64, 1), (320, 32, 8, 64, 1)),
    (BF16, (9, 0), 385, 128, (448, 32, 8, 32, 1), (448, 32, 8, 64, 1)),
    (BF16, (9, 0), 512, 128, (512, 32, 8, 32, 1), (512, 32, 8, 64, 1)),
    (FP32, (9, 0), 64, 20, (64, 32, 4, 32, 2), (64, 32, 4, 32, 2)),
    (FP32, (9, 0), 64, 33, (64, 64, 4, 32, 2), (64, 64, 4, 32, 1)),
    (FP32, (9, 0), 64, 64, (64, 64, 4, 32, 2), (64, 64, 4, 32, 1)),
    (FP32, (9, 0), 64, 65, (64, 128, 8, 32, 1), (64, 128, 8, 32, 1)),
    (FP32, (9, 0), 65, 128, (80, 128, 8, 32, 1), (80, 128, 8, 32, 1)),
    (FP32, (9, 0), 128, 128, (128, 128, 8, 32, 1), (128, 128, 8, 32, 1)),
    (FP32, (9, 0), 129, 128, (160, 64, 8, 32, 1), (160, 64, 8, 32, 1)),
    (FP32, (9, 0), 256, 128, (256, 64, 8, 16, 1), (256, 64, 8, 16, 1)),
    (FP32, (9, 0), 257, 128, (320, 32, 8, 32, 1), (320, 32, 8, 32, 1)),
    (FP32, (9, 0), 384, 128, (384, 32, 8, 16, 1), (384, 32, 8, 32, 1)),
    (FP32, (9, 0), 385, 128, (448, 32, 8, 16, 1), (448, 32, 8, 16, 1)),
    (FP32, (9, 0), 512, 128, (512, 32, 8, 16, 1), (512, 32, 8, 16, 1)),
    (BF16, (8, 9), 64, 64, (64, 64, 4, 64, 1), (64, 64, 4, 64, 1)),
    (BF16, (8, 9), 128, 128, (128, 128, 8, 16, 1), (128, 128, 8, 16, 1)),
    (BF16, (8, 9), 256, 128, (256, 64, 8, 16, 1), (256, 32, 4, 32, 1)),
    (FP32, (8, 9), 64, 64, (64, 64, 4, 32, 1), (64, 64, 4, 32, 1)),
    (FP32, (8, 9), 128, 128, (128, 64, 4, 16, 1), (128, 64, 4, 16, 1)),
    (FP32, (8, 9), 256, 128, (256, 16, 4, 16, 1), (256, 16, 4, 16, 1)),
    (BF16, (9, 0), 64, 8, (64, 16, 4, 64, 2), (64, 16, 4, 64, 2)),
    (BF16, (9, 0), 129, 16, (160, 16, 2, 32, 2), (160, 16, 2, 32, 2)),
    (BF16, (9, 0), 256, 16, (256, 16, 4, 64, 1), (256, 16, 4, 64, 1)),
]
DECAY = [
    (BF16, (9, 0), 64, 20, (64, 32, 1, 2, 3, 64), (64, 32, 1, 2, 3, 64)),
    (BF16, (9, 0), 64, 33, (64, 64, 1, 4, 4, 64), (64, 64, 1, 4, 4, 64)),
    (BF16, (9, 0), 64, 64, (64, 64, 1, 4, 4, 64), (64, 64, 1, 4, 4, 64)),
    (BF16, (9, 0), 64, 65, (64, 128, 1, 8, 8, 64), (64, 64, 1, 4, 4, 64)),
    (BF16, (9, 0), 65, 128, (128, 128, 1, 8, 8, 64), (128, 64, 2, 4, 8, 64)),
    (BF16, (9, 0), 128, 128, (128, 128, 1, 8, 8, 64), (128, 64, 2, 4, 8, 64)),
    (BF16, (9, 0), 129, 128, (256, 64, 2, 4, 10, 16), (256, 16, 4, 1, 9, 16)),
    (BF16, (9, 0), 256, 128, (256, 64, 2, 4, 10, 16), (256, 16, 4, 1, 9, 16)),
    (BF16, (9, 0), 257, 128, (384, 32, 6, 2, 13, 16), (384, 16, 12, 1, 13, 16)),
    (BF16, (9, 0), 385, 128, (512, 32, 8, 2, 17, 16), (512, 16, 16, 1, 17, 16)),
    (BF16, (9, 0), 512, 128, (512, 32, 8, 2, 17, 16), (512, 16, 16, 1, 17, 16)),
    (FP32, (9, 0), 64, 20, (64, 32, 2, 2, 4, 32), (64, 32, 2, 2, 4, 32)),
    (FP32, (9, 0), 64, 33, (64, 64, 2, 4, 8, 32), (64, 32, 2, 2, 4, 32)),
    (FP32, (9, 0), 64, 64, (64, 64, 2, 4, 8, 32), (64, 32, 2, 2, 4, 32)),
    (FP32, (9, 0), 64, 65, (64, 64, 2, 4, 8, 32), (64, 32, 2, 2, 4, 32)),
    (FP32, (9, 0), 65, 128, (128, 64, 2, 4, 8, 32), (128, 16, 4, 1, 5, 32)),
    (FP32, (9, 0), 128, 128, (128, 64, 2, 4, 8, 32), (128, 16, 4, 1, 5, 32)),
    (FP32, (9, 0), 129, 128, (256, 64, 2, 4, 10, 16), (256, 16, 4, 1, 9, 16)),
    (FP32, (9, 0), 256, 128, (256, 64, 2, 4, 10, 16), (256, 16, 4, 1, 9, 16)),
    (FP32, (9, 0), 257, 128, (384, 32, 6, 2, 13, 16), (384, 16, 12, 1, 13, 16)),
    (FP32, (9, 0), 384, 128, (384, 32, 6, 2, 13, 16), (384, 16, 12, 1, 13, 16)),
    (BF16, (8, 9), 64, 64, (64, 64, 1, 4, 4, 64), (64, 64, 1, 4, 4, 64)),
    (BF16, (8, 9), 128, 128, (128, 128, 1, 8, 8, 32), (128, 32, 4, 2, 8, 32)),
    (BF16, (8, 9), 256, 128, (256, 64, 2, 4, 10, 16), (256, 16, 4, 1, 9, 16)),
    (FP32, (8, 9), 64, 64, (64, 64, 2, 4, 8, 32), (64, 32, 2, 2, 4, 32)),
    (FP32, (8, 9), 128, 128, (128, 64, 2, 4, 8, 32), (128, 16, 4, 1, 5, 32)),
    (BF16, (9, 0), 16, 256, (16, 64, 1, 4, 4, 64), (16, 64, 1, 4, 4, 64)),
    (BF16, (9, 0), 32, 256, (32, 64, 1, 4, 4, 64), (32, 64, 1, 4, 4, 64)),
    (BF16, (9, 0), 64, 256, (64, 128, 1, 8, 8, 64), (64, 64, 1, 4, 4, 64)),
    (BF16, (9, 0), 128, 256, (128, 128, 1, 8, 8, 64), (128, 64, 2, 4, 8, 64)),
]
DELTA = [
    (BF16, (9, 0), 64, 20, (64, 32, 1, 64), (64, 32, 1, 32, 2)),
    (BF16, (9, 0), 64, 33, (64, 48, 1, 64), (64, 48, 1, 32, 2)),
    (BF16, (9, 0), 64, 64, (64, 64, 1, 64), (64, 64, 1, 32, 2)),
    (BF16, (9, 0), 64, 65, (64, 48, 1, 64), (64, 48, 1, 32, 2)),
    (BF16, (9, 0), 65, 128, (80, 64, 1, 32), (80, 64, 1, 32, 1)),
    (BF16, (9, 0), 128, 128, (128, 64, 1, 32), (128, 64, 1, 32, 1)),
    (BF16, (9, 0), 129, 128, (160, 32, 2, 32), (160, 32, 2, 16, 2)),
    (BF16, (9, 0), 256, 128, (256, 32, 2, 32), (256, 32, 2, 16, 2)),
    (BF16, (9, 0), 257, 128, (320, 16, 4, 16), (320, 16, 4, 16, 2)),
    (BF16, (9, 0), 385, 128, (448, 16, 4, 16), (448, 16, 4, 16, 1)),
    (BF16, (9, 0), 512, 128, (512, 16, 4, 16), (512, 16, 4, 16, 1)),
    (FP32, (9, 0), 64, 20, (64, 32, 1, 32), (64, 32, 1, 16, 2)),
    (FP32, (9, 0), 64, 33, (64, 48, 1, 32), (64, 48, 1, 16, 2)),
    (FP32, (9, 0), 64, 64, (64, 64, 1, 32), (64, 64, 1, 16, 2)),
    (FP32, (9, 0), 64, 65, (64, 48, 1, 32), (64, 48, 1, 16, 2)),
    (FP32, (9, 0), 65, 128, (96, 32, 2, 32), (96, 32, 2, 16, 2)),
    (FP32, (9, 0), 128, 128, (128, 32, 2, 32), (128, 32, 2, 16, 1)),
    (FP32, (9, 0), 129, 128, (192, 16, 4, 16), (192, 16, 4, 16, 2)),
    (FP32, (9, 0), 256, 128, (256, 16, 4, 16), (256, 16, 4, 16, 1)),
    (FP32, (9, 0), 257, 128, (320, 16, 4, 16), (320, 16, 4, 16, 1)),
    (FP32, (9, 0), 385, 128, (448, 16, 4, 16), (448, 16, 4, 16, 2)),
    (FP32, (9, 0), 512, 128, (512, 16, 4, 16), (512, 16, 4, 16, 1)),
    (BF16, (8, 9), 64, 64, (64, 64, 1, 64), (64, 64, 1, 32, 1)),
    (BF16, (8, 9), 128, 128, (128, 64, 1, 32), (128, 64, 1, 32, 1)),
    (BF16, (8, 9), 256, 128, (256, 32, 2, 32), (256, 32, 2, 16, 1)),
    (FP32, (8, 9), 64, 64, (64, 64, 1, 32), (64, 64, 1, 16, 1)),
    (FP32, (8, 9), 128, 128, (128, 32, 2, 32), (128, 32, 2, 16, 1)),
    (FP32, (8, 9), 256, 128, (256, 16, 4, 16), (256, 16, 4, 16, 1)),
    (BF16, (9, 0), 128, 65, (128, 48, 1, 32), (128, 48, 1, 32, 1)),
    (BF16, (9, 0), 256, 33, (256, 32, 2, 32), (256, 32, 2, 16, 2)),
    (BF16, (9, 0), 512, 17, (512, 16, 4, 16), (512, 16, 4, 16, 1)),
    (FP32, (9, 0), 128, 33, (128, 32, 2, 32), (128, 32, 2, 16, 1)),
    (FP32, (9, 0), 512, 17, (512, 16, 4, 16), (512, 16, 4, 16, 1)),
]
CHANNEL_DELTA = [
    (BF16, (9, 0), 64, 20, (64, 32, 1, 32), (64, 32, 1, 32)),
    (BF16, (9, 0), 64, 33, (64, 48, 1, 32), (64, 48, 1, 32)),
    (BF16, (9, 0), 64, 64, (64, 64, 1, 32), (64, 64, 1, 32)),
    (BF16, (9, 0), 64, 65, (64, 48, 1, 32), (64, 48, 1, 32)),
    (BF16, (9, 0), 65, 128, (80, 128, 1, 32), (80, 128, 1, 16)),
    (BF16, (9, 0), 128, 128, (128, 128, 1, 32), (128, 128, 1, 16)),
    (BF16, (9, 0), 129, 128, (160, 64, 2, 16), (160, 64, 2, 16)),
    (BF16, (9, 0), 256, 128, (256, 64, 2, 16), (256, 64, 2, 16)),
    (FP32, (9, 0), 64, 20, (64, 32, 1, 16), (64, 32, 1, 16)),
    (FP32, (9, 0), 64, 33, (64, 48, 1, 16), (64, 48, 1, 16)),
    (FP32, (9, 0), 64, 64, (64, 64, 1, 16), (64, 64, 1, 16)),
    (FP32, (9, 0), 64, 65, (64, 48, 1, 16), (64, 48, 1, 16)),
    (FP32, (9, 0), 65, 128, (96, 64, 2, 16), (96, 64, 2, 16)),
    (FP32, (9, 0), 128, 128, (128, 64, 2, 16), (128, 64, 2, 16)),
    (FP32, (9, 0), 129, 128, (192, 32, 4, 16), (192, 32, 4, 16)),
    (FP32, (9, 0), 256, 128, (256, 32, 4, 16), (256, 32, 4, 16)),
    (BF16, (8, 9), 64, 64, (64, 64, 1, 32), (64, 64, 1, 16)),
    (BF16, (8, 9), 128, 128, (128, 32, 1, 16), (128, 32, 1, 16)),
    (BF16, (8, 9), 256, 128, (256, 16, 2, 16), (256, 16, 2, 16)),
    (FP32, (8, 9), 64, 64, (64, 32, 1, 16), (64, 32, 1, 16)),
    (FP32, (8, 9), 128, 128, (128, 16, 2, 16), (128, 16, 2, 16)),
    (FP32, (8, 9), 256, 128, (256, 16, 4, 16), (256, 16, 4, 16)),
]
LAYOUTS = {"linear": LINEAR, "decay": DECAY, "delta": DELTA, "channel_delta": CHANNEL_DELTA}


def launches(name: str, dtype: torch.dtype, capability: tuple[int, int], key: int, value: int) -> list[Launch]:
    """The forward and the backward that a device would get."""
    family, precision = FAMILIES[name], "bf16" if dtype == BF16 else "exact"
    q, v, memory = torch.empty(1, 2, 17, key, dtype=dtype), torch.empty(1, 2, 17, value, dtype=dtype), torch.empty(1, 2, key, value)
    size = {"t": (), "k": (key,), "v": (value,)}
    gates = [torch.empty(1, 2, 17, *size[GATES[name][n]]) if n in GATES[name] else None for n in "fzew"]
    with launch.use(Recorder(capability)) as recorder:
        _, _, saved = family.forward(recorder, q, q, v, *gates, memory, precision)
        family.backward(recorder, q, q, v, *gates, memory, saved, v, memory, precision)
    return recorder.launches


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_every_width(name):
    for dtype, capability, key, value, *layouts in LAYOUTS[name]:
        for launched, layout in zip(launches(name, dtype, capability, key, value), layouts, strict=True):
            macros = launched.defines
            found = tuple(macros[macro] for macro in MACROS[name] if macro in macros)
            assert found == layout, (launched.kernel, dtype, capability, key, value)
            tiles = launched.grid[0] if name == "decay" else launched.grid[1]
            assert tiles == -(-value // macros["FW_V"])


# 16 bytes a lane, up to a warp for a token, 256 threads a block.
@pytest.mark.parametrize(
    "dtype, width, lanes, blocks",
    [
        (FP32, 4, 1, 1),
        (FP32, 20, 8, 2),
        (FP32, 128, 32, 5),
        (FP32, 132, 32, 5),
        (BF16, 128, 16, 3),
        (BF16, 20, 32, 5),
        (BF16, 3, 4, 1),
    ],
)
def test_lanes_of_a_token_where_reads_are_divided(dtype, width, lanes, blocks):
    y, sums, recorder = torch.empty(2, 3, 40, width, dtype=dtype), torch.empty(2, 3, 8), Recorder()
    undivided(recorder, Divided(0.0, 1.0, sums, sums, y), torch.empty(2, 3, 40), y)
    [launched] = recorder.launches
    assert (launched.defines["FW_LANES"], launched.grid, launched.threads) == (lanes, (6, blocks), 256)


@pytest.mark.parametrize("key, rows, warps", [(1, 8, 1), (128, 8, 16), (129, 16, 9), (256, 16, 16), (257, 32, 9), (512, 32, 16)])
def test_rows_of_a_warp_in_decoding(key, rows, warps):
    q, v = torch.empty(3, 2, key), torch.empty(3, 2, 33)
    with launch.use(Recorder()) as recorder:
        step.step(q, q, v, None, None, None, None, torch.empty(3, 2, key, 33))
        step.read(q, torch.empty(1, 2, key, 33), None, torch.zeros(3, dtype=torch.long), 0.0, AS_IS, v)
    for launched in recorder.launches:
        assert (launched.defines["FW_ROWS"], launched.grid, launched.threads) == (rows, (6, 2), 32 * warps)


def test_widest_keys_in_decoding():
    q, v = torch.empty(1, 1, 1, 513), torch.empty(1, 1, 1, 4)
    with launch.use(Recorder()):
        assert step.why_not(q, v, Coefficients()) == "the decoding kernel takes keys up to 512 wide, not 513"
        assert step.why_not(q[..., 1:], v, Coefficients()) is None


@pytest.mark.parametrize("shape, fits", [((65535, 65535), True), ((65536, 1), False), ((1, 65536), False)])
def test_sequences_and_heads_of_the_largest_grid(shape, fits):
    """The kernels without erase have them along dimensions of the grid that CUDA limits."""
    q = torch.empty(1, 1, 2, 16).expand(*shape, 2, 16)
    with launch.use(Recorder()):
        reason = FAMILIES["decay"].supported(q, q, q, None, None, None, None)
    assert reason is None if fits else f"for up to 65535 sequences and heads, not {shape[0]} and {shape[1]}" in reason
