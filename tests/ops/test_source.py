"""Linear attention to a whole source in the kernels on the emulator, against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from support.draws import assert_same

from fw_fairseq.feature_maps import RowMap
from fw_fairseq.ops.dispatch import attend_to_source
from fw_fairseq.ops.kernels.launch import PRECISIONS

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
EPS = 1e-6


def features(x: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    if row_map.name == "elu":
        phi = torch.where(x > 0, x + 1, x.exp())
    else:
        both = torch.cat([x.relu(), (-x).relu()], -1)
        phi = torch.cat([both * both.roll(n, -1) for n in range(1, row_map.nu + 1)], -1)
    return phi / phi.sum(-1, keepdim=True) if row_map.norm == "sum" else phi


def by_definition(q, k, v, padding, row_map) -> torch.Tensor:
    phi_q, phi_k = features(q, row_map), features(k, row_map)
    kept = torch.ones(k.shape[0], k.shape[2]).double() if padding is None else (~padding).double()
    weights = phi_q @ phi_k.mT * kept[:, None, None]
    return weights @ v / (weights.sum(-1, keepdim=True) + EPS)


@pytest.mark.parametrize(
    "dtype, row_map, padded, tokens, sources",
    [
        (torch.float32, RowMap("elu", 1, "none"), True, 7, 37),
        (torch.float32, RowMap("dpfp", 2, "sum"), False, 70, 20),
        (torch.bfloat16, RowMap("dpfp", 2, "none"), True, 20, 20),
        (torch.float16, RowMap("elu", 1, "sum"), True, 1, 9),
    ],
)
def test_against_the_definition(emulate, dtype, row_map, padded, tokens, sources):
    """Outputs and gradients; what is at padding does not matter."""
    launcher = emulate()
    padding = torch.arange(sources) >= torch.tensor([[sources], [sources - 4]]) if padded else None
    x = [torch.randn(2, 3, n, width).to(dtype) for n, width in ((tokens, 6), (sources, 6), (sources, 8))]
    if padded:
        x[1][1, :, -4:], x[2][1, :, -4:] = torch.nan, torch.inf
    leaves = [t.clone().requires_grad_() for t in x]
    exact = [(t if padding is None or n == 0 else t.masked_fill(padding[:, None, :, None], 0)).double() for n, t in enumerate(x)]
    exact = [t.requires_grad_() for t in exact]
    y = attend_to_source(*leaves, padding, row_map, EPS, EPS)
    want = by_definition(*exact, padding, row_map)
    dy = torch.randn_like(want)
    names = "gradient of q", "gradient of k", "gradient of v"
    found = dict(zip(names, torch.autograd.grad(y, leaves, dy.to(dtype))))
    expected = dict(zip(names, torch.autograd.grad(want, exact, dy.to(dtype).double())))
    assert y.dtype == dtype
    assert_same({"y": y.detach()} | found, {"y": want.detach()} | expected, TOLERANCE[dtype])
    assert [name for _, name, _ in launcher.calls] == ["linear_forward", "divided_backward", "linear_backward"]
    precision = {torch.float32: "exact", torch.bfloat16: "bf16", torch.float16: "tf32"}[dtype]
    assert launcher.calls[0][2]["FW_PRECISION"] == PRECISIONS[precision] and launcher.calls[0][2]["FW_MAP"]


def test_where_no_kernel_can():
    x = torch.randn(1, 2, 5, 6)
    assert attend_to_source(x, x, x, None, RowMap("elu", 1, "sum"), EPS, EPS) is None
