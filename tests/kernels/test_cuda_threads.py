"""How small kernels are cut into threads, and what is too wide or too much for a launch."""

from __future__ import annotations

import pytest
import torch
from hostcuda import Recorder
from support.cuda_scan import to_run

from fw_fairseq.feature_maps import AS_IS
from fw_fairseq.modules.sparse import kernel
from fw_fairseq.ops.kernels import decay, launch, parameters, step
from fw_fairseq.ops.kernels.family import Divided
from fw_fairseq.ops.kernels.launch import in_units, undivided
from fw_fairseq.ops.kernels.recurrence import FAMILIES
from fw_fairseq.ops.scans import pooling_kernel, sru_kernel
from fw_fairseq.rules import Coefficients

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "dtype, start, width, strides, whole",
    [
        (FP32, 4, 8, (480, 160, 8), True),
        (FP32, 0, 8, (484, 164, 12), True),
        (FP32, 2, 8, (480, 160, 8), False),
        (FP32, 0, 6, (480, 160, 8), False),
        (FP32, 0, 8, (482, 160, 8), False),
        (FP32, 0, 8, (480, 162, 8), False),
        (FP32, 0, 8, (480, 160, 10), False),
        (BF16, 0, 8, (480, 160, 8), True),
        (BF16, 0, 8, (480, 160, 12), False),
    ],
)
def test_rows_that_can_be_moved_16_bytes_at_a_time(dtype, start, width, strides, whole):
    """All of them start at 16 bytes, those of other tokens, heads and sequences too, and are whole units."""
    assert in_units(torch.empty(2000, dtype=dtype).as_strided((2, 3, 20, width), (*strides, 1), start)) is whole


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
    assert (launched.defines["FW_LANES"], launched.grid, launched.threads) == (lanes, (6 * blocks,), 256)


def test_the_last_tokens_have_lanes_where_reads_are_divided():
    """A warp for each of 2056 tokens is 257 whole blocks."""
    y, sums, recorder = torch.empty(1, 1, 1, 128).expand(1, 1, 2056, 128), torch.empty(1, 1, 8), Recorder()
    undivided(recorder, Divided(0.0, 1.0, sums, sums, y), torch.empty(1, 1, 2056), y)
    assert recorder.launches[0].grid == (257,)


STRUCTURES = [parameters.PARAMS, parameters.DIVIDED, decay.PARAMS, step.PARAMS, step.READ_PARAMS]
STRUCTURES += [pooling_kernel.PARAMS, sru_kernel.PARAMS, kernel.PARAMS]


@pytest.mark.parametrize("params", STRUCTURES)
def test_parameters_are_laid_out_as_a_structure_in_cuda(params):
    """Each begins at a multiple of its size, and the whole is a multiple of 8 bytes."""
    assert params.isalignedstruct and params.itemsize % 8 == 0
    for dtype, start in params.fields.values():
        assert start % (dtype.itemsize if dtype.names is None else 8) == 0


def test_rows_that_kernels_get_are_dense():
    x = torch.empty(2, 3, 4)
    assert launch.dense(x) is x and launch.dense(x[:, 1:, :2]).data_ptr() == x[:, 1:].data_ptr()
    for strided in (x.mT, x[..., ::2], torch.empty(2, 4, 1).expand(2, 4, 3)):
        assert launch.dense(strided).is_contiguous() and launch.dense(strided).shape == strided.shape


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
        reason = FAMILIES["decay"].supported(to_run(q, q, q, None, None, None, None))
    assert reason is None if fits else f"for up to 65535 sequences and heads, not {shape[0]} and {shape[1]}" in reason
