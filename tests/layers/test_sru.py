"""The scan of simple recurrent units against its equations, one step at a time in float64."""

from __future__ import annotations

import pytest
import torch
from support.compiled import compile_and_record
from support.definitions import NAMES, by_the_equations

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.feature_maps import wide
from fw_fairseq.mixers import Sru
from fw_fairseq.mixers.sru import SruState
from fw_fairseq.ops.scans import sru as ops
from fw_fairseq.ops.scans.sru import sru

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread", "in_pytorch")]


def draw(length=20, dtype=torch.float64):
    shapes = [(length, 3, 15), (length, 3, 5), (5,), (5,), (3, 5)]
    dtypes = [dtype] * 4 + [torch.promote_types(dtype, torch.float32)]  # the state is wide
    return [torch.randn(shape, dtype=dtype).mul_(2).requires_grad_() for shape, dtype in zip(shapes, dtypes)]


def results(outputs, leaves):
    generator = torch.Generator().manual_seed(1)
    adjoints = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, adjoints)]


@pytest.mark.parametrize("with_resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("block", [15, 100, 1000], ids=["steps", "blocks", "at once"])
def test_outputs_states_and_gradients_are_those_of_the_equations(monkeypatch, block, padded, with_resets):
    monkeypatch.setattr(ops, "BLOCK", block)
    leaves = draw()
    masks = [torch.rand(3, 20) < 0.3 if wanted else None for wanted in (padded, with_resets)]
    expected, actual = (results(form(*leaves, *masks, scale=1.3), leaves) for form in (by_the_equations, sru))
    for name, got, want in zip(("h", "c", *NAMES), actual, expected):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def test_parts_with_their_state_equal_the_whole():
    leaves = draw()
    expected = results(sru(*leaves), leaves)
    *steps, v_forget, v_reset, c = leaves
    parts = []
    for part in torch.arange(20).split([1, 12, 7]):
        h, c = sru(*(x[part] for x in steps), v_forget, v_reset, c)
        parts.append(h)
    torch.testing.assert_close(results((torch.cat(parts), c), leaves), expected)


@pytest.mark.parametrize("from_a_state", [False, True], ids=["", "state"])
def test_a_cell_behind_a_tanh(from_a_state):
    """With padding, and texts that begin at any token: gates read the cell of their own text before them."""
    mixer, x = Sru(5, sru_tanh=True).double(), torch.randn(20, 3, 5, dtype=torch.float64)
    padding, resets = (torch.rand(3, 20) < 0.3 for _ in range(2))
    cell = torch.randn(3, 5, dtype=torch.float64) if from_a_state else None
    h, state = mixer(x, SruState(cell) if from_a_state else None, padding, resets)
    start = torch.zeros(3, 5).double() if cell is None else cell
    expected = by_the_equations(mixer.in_proj(x), x, *mixer.gate_weight, start, padding, resets, mixer.scale, torch.tanh)
    torch.testing.assert_close((h, state.cell), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_keeps_a_wide_state(dtype):
    leaves = draw(dtype=dtype)
    (h, c), exact = sru(*leaves[:4]), sru(*(x.double() for x in leaves[:4]))
    assert (h.dtype, c.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(h.double(), exact[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(c.double(), exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masks"])
def test_compiled_by_torch_as_one_operator_with_its_gradients(masked, dtype):
    leaves, masks = draw(dtype=dtype), [torch.rand(3, 20) < 0.3 if masked else None for _ in range(2)]
    compiled, graphs = compile_and_record(sru)
    torch.testing.assert_close(results(compiled(*leaves, *masks), leaves), results(sru(*leaves, *masks), leaves))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves, *masks), sru(*leaves, *masks))
    assert graphs == [["fw_fairseq.sru_portable"]] * 2


def test_one_graph_serves_texts_of_any_length():
    leaves = draw()
    compiled, graphs = compile_and_record(sru)
    for x in leaves[:2]:
        torch._dynamo.mark_dynamic(x, 0)
    for shorter in (leaves, [x.detach()[:9].requires_grad_() for x in leaves[:2]] + leaves[2:]):
        torch.testing.assert_close(results(compiled(*shorter), shorter), results(sru(*shorter), shorter))
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    """Shapes, strides and gradients, also for inputs that lie otherwise in memory."""
    product, x, *others = draw(4, dtype)
    others = [wide(part.detach()).requires_grad_() for part in others]
    product, x = (part.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for part in (product, x))
    padded, keep = torch.rand(4, 3, 1) < 0.3, (torch.rand(4, 3, 1) < 0.7).to(others[2].dtype)
    for masks in ((None, None), (padded, keep)):
        torch.library.opcheck(torch.ops.fw_fairseq.sru_portable.default, (product, x, *others, *masks, 1.3, True))


@pytest.mark.parametrize("used", [0, 1], ids=["h", "c"])
def test_gradients_where_one_result_is_used(used):
    leaves = draw()
    reached = leaves if used == 0 else [*leaves[:1], leaves[2], leaves[4]]  # the cell reads neither x nor v_reset
    expected, actual = (results([form(*leaves)[used]], reached) for form in (by_the_equations, sru))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "index, shape, message",
    [
        (0, (20, 3, 5), r"product is \(20, 3, 5\) and x \(20, 3, 5\); they must be \(T,B,3D\) and \(T,B,D\)"),
        (1, (20, 3, 4), r"product is \(20, 3, 15\) and x \(20, 3, 4\)"),
        (4, (2, 5), r"state is \(2, 5\); it must be \(3, 5\)"),
    ],
)
def test_refused(index, shape, message):
    leaves = draw()
    leaves[index] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        sru(*leaves)


def test_weights_begin_with_the_variances_of_the_input_and_those_of_gates_halved():
    mixer = Sru(256, 1, FastWeightConfig(sru_highway_bias=-1.5))
    parts = mixer.in_proj.weight.detach().split(256)
    for part, variance in zip((*parts, mixer.gate_weight.detach()), (1 / 256, 0.5 / 256, 0.5 / 256, 0.5)):
        assert abs(part.var() / variance - 1) < 0.1
    assert [bias.unique().tolist() for bias in mixer.in_proj.bias.split(256)] == [[0], [0], [-1.5]]
