"""Sparse layers against their equations, written as loops in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.definitions import by_the_equations
from torch.nn import functional as F

from fw_fairseq import Mistake
from fw_fairseq.mixers import FastWeight, Sru
from fw_fairseq.mixers.sru import SruState
from fw_fairseq.modules import MixerAttention
from fw_fairseq.modules.sparse import Multiplicative, RecurrentUnits, SparseFeedForward, feed_forward, fused, gathered, make_sparse
from fw_fairseq.modules.sparse.fused import FusedFeedForward, FusedProjections
from fw_fairseq.modules.sparse.projections import Convolutions, RecentState, SparseSource, with_recent
from fw_fairseq.ops import native

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


def sparse_source(mixer):
    """Makes the projections of a mixer sparse, and returns what they read."""
    attention = MixerAttention(mixer, 0)
    make_sparse(attention, 4)
    return attention.source.part


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("outputs", [12, 10])
def test_a_multiplicative_layer(outputs):
    """Each module multiplies the input by its own gains, and all share one matrix. The last one may be cut."""
    layer, x = Multiplicative(8, outputs, 4).double(), draw(3, 2, 8)
    layer.bias.data.normal_()
    y = layer(x)
    width = 3
    for t in range(3):
        for b in range(2):
            for module in range(4):
                for o in range(width):
                    if (place := module * width + o) < outputs:
                        total = sum(x[t, b, i] * layer.gains[module, i] * layer.weight[o, i] for i in range(8))
                        assert_close(y[t, b, place], total + layer.bias[place])


def feed_forward_by_loops(layer: SparseFeedForward, x, choose) -> torch.Tensor:
    """choose(logits of a block) -> the mask of its units."""
    inner = [sum(layer.controller_in[j, i] * x[i] for i in range(len(x))) for j in range(len(layer.controller_in))]
    logits = [sum(row[j] * inner[j] for j in range(len(inner))) + b for row, b in zip(layer.controller_out, layer.controller_bias)]
    y = layer.bias.clone()
    for block in range(0, len(logits), layer.block):
        mask = choose(torch.stack(logits[block : block + layer.block]))
        for unit in range(layer.block):
            hidden = sum(layer.weight_in[block + unit, i] * x[i] for i in range(len(x))) * mask[unit]
            y = y + max(hidden, hidden * 0) * layer.weight_out[block + unit]
    return y


def largest(logits):
    return F.one_hot(logits.argmax(), len(logits)).double()


@pytest.mark.parametrize("way", ["all units", "chosen units", "chosen units, PyTorch"])
@torch.no_grad()
def test_a_sparse_feed_forward_layer_uses_one_unit_of_each_block(way, monkeypatch):
    torch.manual_seed(0)
    layer, x = SparseFeedForward(6, 24, 8, rank=2).double().eval(), draw(2, 1, 6)
    for bias in (layer.controller_bias, layer.bias):
        bias.normal_()
    monkeypatch.setattr(feed_forward, "few_rows", lambda *sizes: way != "all units")
    if way.endswith("PyTorch"):
        monkeypatch.setattr(native, "library", lambda: None)
    y = layer(x)
    for t in range(2):
        assert_close(y[t, 0], feed_forward_by_loops(layer, x[t, 0], largest))


@pytest.mark.parametrize("tokens, block, few", [(1, 2, True), (2, 8, True), (3, 8, False)])
@torch.no_grad()
def test_few_tokens_read_the_chosen_rows_only(tokens, block, few):
    """All other rows may be anything. One token, or as many as choose at most a quarter of the rows, are few."""
    torch.manual_seed(0)
    layer, x = SparseFeedForward(6, 24, block).double().eval(), draw(tokens, 6)
    expected, mask = layer(x), layer.mask(x).sum(0)
    layer.weight_in[mask == 0], layer.weight_out[mask == 0] = torch.nan, torch.nan
    assert (mask > 0).sum() <= tokens * 24 // block
    assert torch.equal(layer(x), expected) is few


@torch.no_grad()
def test_operands_of_the_loops(monkeypatch):
    """Contiguous tensors in memory, all of one type that the loops have, without gradients."""
    monkeypatch.setattr(native, "library", object)
    x = torch.ones(2, 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert gathered.takes(x.to(dtype), x[0].to(dtype))
    for other in (x.mT, x.double(), x.to("meta")):
        assert not gathered.takes(x, other) and not gathered.takes(other, x)
    assert not gathered.takes(x.half(), x.half())
    with torch.enable_grad():
        assert not gathered.takes(x, x)
    for place, name, value in ((torch.compiler, "is_compiling", True), (native, "library", None)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda value=value: value)
            assert not gathered.takes(x, x)


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@torch.no_grad()
def test_which_products_are_loops(monkeypatch):
    """Those of one token with gains, of up to 32 rows, and of chosen units. Threads share a loop by the weights that it reads."""
    loop, called, read = native.loop, [], []
    monkeypatch.setattr(native, "loop", lambda name, dtype: called.append(name) or loop(name, dtype))
    monkeypatch.setattr(gathered, "threads", lambda numbers: read.append(numbers) or 1)
    gains, weight, bias = draw(2, 6), draw(3, 6), draw(6)
    for tokens in (1, 2):
        x = draw(tokens, 1, 6)
        expected = torch.einsum("tbi,mi,oi->tbmo", x, gains, weight).flatten(2) + bias
        assert_close(gathered.gained(x, gains, weight, bias), expected)
    assert (called, read) == (["few"], [3 * 6])
    for rows in (33, 32):
        x = draw(1, rows, 6)
        assert_close(gathered.rows_product(x, weight), torch.einsum("bsi,oi->bso", x, weight).flatten(1))
        assert len(called) == (2 if rows == 32 else 1)
    chosen, hidden = gathered.chosen_units(draw(5, 6), draw(2, 6), draw(12, 2), draw(12), draw(12, 6), 4)
    gathered.sum_of_units(hidden, chosen, draw(12, 6), bias)
    assert called[2:] == ["choose", "sum"] and read[2:] == [2 * 6 + 12 * 2, 5 * 3 * 6]


@pytest.mark.parametrize("loops, few", [(gathered, 2**17), (native, 2**18)])
def test_threads_share_what_is_not_small(loops, few, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert (loops.threads(few), loops.threads(few + 1)) == (1, 5)


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@torch.no_grad()
def test_which_layers_have_a_loop_for_all_their_parts():
    norm, units = torch.nn.LayerNorm(8), RecurrentUnits(8, 4)
    for activation, fits in ((F.relu, True), (torch.relu, True), (F.gelu, False)):
        layer = SparseFeedForward(8, 16, 4, activation=activation)
        assert FusedFeedForward.fits(layer, norm, units) is FusedFeedForward.fits(layer, None, None) is fits
    layer = SparseFeedForward(8, 16, 4)
    assert not FusedFeedForward.fits(layer, torch.nn.Identity(), None) and not FusedFeedForward.fits(
        torch.nn.Linear(8, 8), norm, None
    )
    assert not FusedFeedForward.fits(layer, norm.double(), None), "two types of numbers"
    dense, heads, other = Multiplicative(8, 8, 2), Convolutions(8, 2, {"q": 8}), torch.nn.Linear(8, 8)
    assert FusedProjections.fits(dense, heads)
    assert not any(FusedProjections.fits(*pair) for pair in ((dense, other), (other, heads), (other, other)))
    assert not FusedProjections.fits(dense, heads.double()), "two types of numbers"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, width, units, block, rank, threads",
    [(1, 150, 96, 16, 5, 1), (3, 64, 40, 8, 70, 1), (2, 7, 12, 3, 33, 1), (1, 70, 76, 4, 9, 3), (5, 70, 76, 4, 9, 2)],
)
@torch.no_grad()
def test_the_compiled_loops_equal_pytorch(dtype, rows, width, units, block, rank, threads, monkeypatch):
    """Also with more blocks than are read at the same time, and shared by threads."""
    if native.library() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(gathered, "threads", lambda numbers: threads)
    inputs = [draw(rows, width), draw(rank, width), draw(units, rank), draw(units), draw(units, width)]
    inputs, out = [x.to(dtype) for x in inputs], draw(units, width).to(dtype)

    def both():
        chosen, hidden = gathered.chosen_units(*inputs, block)
        return chosen, hidden, gathered.sum_of_units(hidden.relu(), chosen, out, inputs[0][0].contiguous())

    found = both()
    monkeypatch.setattr(native, "library", lambda: None)
    inputs, out = [x.double() for x in inputs], out.double()
    expected = both()
    assert torch.equal(found[0], expected[0])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for one, other in zip(found[1:], expected[1:]):
        assert (one.double() - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_compiled_products_of_few_rows_equal_pytorch(dtype, monkeypatch):
    if native.library() is None:
        pytest.skip("no compiler")
    operands = draw(1, 150), draw(4, 150), draw(20, 150), draw(78)  # 4 modules of 20 outputs, the last two left out
    rows = draw(2, 3, 5, 70), draw(6, 70)

    def both(dtype):
        one, *others = (x.to(dtype) for x in (*operands, *rows))
        return gathered.gained(one, *others[:3]), gathered.rows_product(*others[3:])

    found = both(dtype)
    monkeypatch.setattr(native, "library", lambda: None)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for one, other in zip(found, both(torch.float64)):
        assert one.shape == other.shape and one.dtype == dtype
        assert (one.double() - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("hard", [True, False])
def test_training_draws_a_unit_and_passes_the_gradient_through(hard, monkeypatch):
    """The mask is one unit or the softmax; in both cases its gradient is that of the softmax."""
    layer, x = SparseFeedForward(4, 6, 3).double().train(), draw(5, 4)
    layer.controller_bias.data.normal_()
    monkeypatch.setattr(torch, "rand", lambda *shape: torch.tensor(0.29 if hard else 0.31))
    soft = torch.stack([part.softmax(-1) for part in layer.logits(x).unbind(-2)], -2)
    torch.manual_seed(3)
    noise = -torch.empty_like(soft).exponential_().log()
    torch.manual_seed(3)
    mask = layer.mask(x)
    drawn = F.one_hot((soft.log() + 0.1 * noise).argmax(-1), 3).double()
    assert_close(mask, (drawn if hard else soft).flatten(-2))
    direction = draw(5, 6)
    found = torch.autograd.grad((mask * direction).sum(), layer.controller_bias)[0]
    assert_close(found, torch.autograd.grad((soft.flatten(-2) * direction).sum(), layer.controller_bias)[0])


def test_three_of_ten_batches_are_hard():
    torch.manual_seed(0)
    layer, x = SparseFeedForward(4, 6, 3).train(), torch.randn(2, 4)
    hard = sum(bool(((layer.mask(x) - 0.5).abs() - 0.5).abs().max() < 1e-6) for _ in range(1000))
    assert 250 < hard < 350


def test_the_noise_is_gumbels_with_a_tenth():
    """The logit 0.1 above another is drawn with the odds exp(1)."""
    torch.manual_seed(0)
    layer = SparseFeedForward(4, 2, 2).train()
    layer.controller_bias.data = torch.tensor([0.1, 0.0])
    scores = torch.zeros(1, 4)
    drawn = torch.stack([layer.mask(scores)[0] for _ in range(3000)])
    drawn = drawn[((drawn - 0.5).abs() - 0.5).abs().amax(1) < 1e-6]
    assert drawn[:, 0].mean().item() == pytest.approx(1 / (1 + math.exp(-1)), abs=0.05)


def assert_glorots(weight: torch.Tensor) -> None:
    """Uniform up to the ends of Glorot's range for so many rows and columns."""
    end = math.sqrt(6 / sum(weight.shape))
    assert 0.95 * end < weight.abs().max() <= end and 0.9 < weight.std() * math.sqrt(3) / end < 1.1


@torch.no_grad()
def test_what_sparse_layers_start_from():
    """Matrices of Glorot's distribution, gains with a deviation of 1/2, and biases at 0 or, with the units, near 0."""
    dense, layer, units = Multiplicative(64, 96, 4), SparseFeedForward(64, 256, 8), RecurrentUnits(64, 32)
    dense.bias.fill_(1)
    dense.reset_parameters()
    assert dense.gains.std().item() == pytest.approx(0.5, rel=0.2)
    for bias in (layer.controller_bias, layer.bias):
        assert bias.std().item() == pytest.approx(1e-6, rel=0.4)
    assert layer.controller_in.shape == (256 // 8, 64), "a logit of each block"
    linears = units.down, units.gates, units.up
    assert not any(bias.any() for bias in (dense.bias, *(linear.bias for linear in linears)))
    matrices = dense.weight, layer.controller_in, layer.controller_out, layer.weight_in, layer.weight_out
    for weight in (*matrices, *(linear.weight for linear in linears)):
        assert_glorots(weight)


@torch.no_grad()
def test_what_convolutions_start_from():
    """Glorot's distribution, for all numbers that an output reads; narrow parts and biases are those of a dense projection."""
    dense, parts = torch.nn.Linear(64, 3 * 64 + 5), {"q": 64, "k": 64, "v": 64, "gate s": 5}
    heads = Convolutions(64, 4, parts, dense)
    for name, read in (("q", 9), ("k", 9), ("v", 3)):  # modules of 16 numbers
        assert heads.weights[name].flatten(1).shape == (16, 16 * read)
        assert_glorots(heads.weights[name].flatten(1))
    assert heads.weights["gate s"].equal(dense.weight[-5:]) and heads.bias.equal(dense.bias)
    assert not Convolutions(64, 4, {"q": 64}).bias.any()
    assert Convolutions(64, 4, {"q": 64}, torch.nn.Linear(64, 64, bias=False)).bias is None


def convolution_by_loops(weight, p, t: int, module: int, count: int) -> torch.Tensor:
    """weight (O, modules read, 3 tokens, C/S); p (T,C)."""
    outputs, sides, taps, channels = weight.shape
    y = torch.zeros(outputs, dtype=torch.float64)
    for side in range(sides):
        for tap in range(taps):
            other = module + side - sides // 2
            if t - tap >= 0 and 0 <= other < count:
                y += weight[:, side, tap] @ p[t - tap, other * channels : (other + 1) * channels]
    return y


def test_queries_keys_and_values_are_causal_convolutions():
    """Queries and keys read three tokens and three modules, values three tokens of their own module."""
    source, heads = SparseSource(12, 4).double(), Convolutions(12, 4, {"q": 8, "k": 12, "v": 12, "gate s": 3}).double()
    heads.bias.data.normal_()
    x = draw(6, 1, 12)
    p, y = source.dense(x)[:, 0], heads(source(x)[0])[:, 0]
    for t in range(6):
        parts = [
            torch.cat([convolution_by_loops(heads.weights[name], p, t, module, 4) for module in range(4)])
            for name in ("q", "k", "v")
        ]
        assert_close(y[t], torch.cat([*parts, heads.weights["gate s"] @ p[t]]) + heads.bias)
    assert [weight.shape[1] for weight in heads.weights.values() if weight.dim() == 4] == [3, 3, 1]
    assert_close(heads.rows(source(x)[0], "k", "v")[:, 0], y[:, 8:32])


def test_gates_keep_their_biases_where_inputs_have_none():
    mixer, x = Sru(12, sru_input_bias=False), draw(6, 1, 12)
    mixer.gate_bias.data.normal_()
    source = sparse_source(mixer).double()
    mixer.double()
    read = source(x)[0]
    product = mixer.in_proj(read) + torch.cat([torch.zeros(12), mixer.gate_bias.data.flatten()])
    expected = by_the_equations(product, x, *mixer.gate_weight, torch.zeros(1, 12), scale=mixer.scale)
    h, state = mixer(x, source=read)
    assert_close((h, state.cell), expected)


def test_kernels_read_what_convolutions_make(emulate):
    """Its rows, 4 (3 + 3 + 3 + 2) numbers, are no multiple of 16 bytes."""
    mixer, x = FastWeight(12, 4, update_rule="gated_delta", feature_map="identity", feature_norm="l2"), torch.randn(9, 2, 12)
    source = sparse_source(mixer)(x)[0]
    assert mixer.in_proj.out_features == 44
    expected = mixer(x, source=source)[0]
    launcher = emulate()
    found = mixer(x, source=source)[0]
    assert launcher.calls
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_state_size_of_a_layer_that_reads_convolutions():
    mixer = FastWeight(12, 4, update_rule="sum")
    sparse_source(mixer)
    assert mixer.state_size() == 4 * 3 * 3


def recent_by_loops(p, padding, resets) -> tuple[torch.Tensor, torch.Tensor]:
    """What every token reads, and the last two tokens' vectors."""
    total, batch, width = p.shape
    read, last = torch.zeros(total, batch, 3 * width).double(), torch.zeros(batch, 2, width).double()
    for b in range(batch):
        one, two = torch.zeros(2, width).double()
        for t in range(total):
            if resets[b, t]:
                one, two = torch.zeros(2, width).double()
            read[t, b] = torch.cat([p[t, b], one, two])
            if not padding[b, t]:
                one, two = p[t, b], one
        last[b, 0], last[b, 1] = one, two
    return read, last


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_tokens_before_each_token(padded, reset):
    """Padding is no token, and a text begins with nothing before it, also in a long segment."""
    torch.manual_seed(2)
    p, padding, resets = draw(40, 4, 3), torch.rand(4, 40) < 0.4, torch.rand(4, 40) < 0.3
    padding, resets = padding & padded, resets & reset & ~padding
    expected, last = recent_by_loops(p, padding, resets)
    read, state = with_recent(p, None, padding if padded else None, resets if reset else None)
    real = ~padding.t()
    assert_close(read[real], expected[real])
    assert_close(state.vectors, last)
    state, parts = None, []
    for piece in (slice(0, 1), slice(1, 4), slice(4, 40)):
        masks = padding[:, piece] if padded else None, resets[:, piece] if reset else None
        read, state = with_recent(p[piece], state, *masks)
        parts.append(read)
    assert_close(torch.cat(parts)[real], expected[real])
    assert_close(state.vectors, last)
    assert isinstance(state.index_select(torch.tensor([1, 0])), RecentState)


def test_recurrent_units():
    units, x = RecurrentUnits(6, 4).double(), draw(5, 2, 6)
    for linear in (units.down, units.gates, units.up):
        linear.bias.data.normal_()
    units.norm.weight.data.normal_()
    y, state = units(x)
    cell, cells = torch.zeros(2, 4).double(), torch.zeros(2, 4).double()
    for t in range(5):
        mean, variance = x[t].mean(-1, keepdim=True), x[t].var(-1, unbiased=False, keepdim=True)
        inner = ((x[t] - mean) / (variance + 1e-5).sqrt() * units.norm.weight) @ units.down.weight.T + units.down.bias
        u, forget, highway = (inner @ units.gates.weight.T + units.gates.bias).chunk(3, -1)
        f, r = 1 / (1 + (-forget).exp()), 1 / (1 + (-highway).exp())
        cell = f * cell + (1 - f) * u
        h = r * cell + (1 - r) * math.sqrt(3) * inner
        expected = h @ units.up.weight.T + units.up.bias
        assert_close(y[t], expected)
        with torch.no_grad():
            assert_close(units.step(x[t], cells), expected.detach())
    assert isinstance(state, SruState)
    assert_close(state.cell, cell)
    assert_close(cells, cell.detach())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SparseFeedForward(8, 30, 7), "--ffn-sparsity is 7; it must be at least 2 and divide 30"),
        (lambda: SparseFeedForward(8, 32, 4, activation=torch.cos), "activation must be 0 at 0; choose another --activation-fn"),
        (lambda: SparseSource(10, 4), "--qkv-sparsity is 4; it must divide the width of the layers, 10"),
        (lambda: Convolutions(12, 4, {"q": 6}), "--qkv-sparsity is 4; it must divide 6, the width of q of all heads"),
    ],
)
def test_sizes_that_do_not_fit(make, message):
    with pytest.raises(Mistake, match=message):
        make()


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 3, 5)])
@torch.no_grad()
def test_products_of_no_rows(shape):
    assert gathered.rows_product(torch.ones(shape), torch.ones(6, 5)).shape == (*shape[:-2], 18)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}
SHAPES = [(13, 1, 1), (13, 3, 2), (150, 1, 3), (150, 4, 2)]  # width, rows, threads


def assert_near(found, expected, dtype):
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("width, rows, threads", SHAPES)
@torch.no_grad()
def test_a_feed_forward_part_in_one_call(width, rows, threads, normed, dtype, monkeypatch):
    """Norm, chosen units and recurrent units of any width, by threads that wait for each other, and the cell for the next token."""
    monkeypatch.setattr(fused, "threads", lambda numbers: threads)
    norm, layer, units = torch.nn.LayerNorm(width), SparseFeedForward(width, 96, 16, rank=5), RecurrentUnits(width, 3)
    parts = torch.nn.ModuleList([norm, layer, units]).eval()
    for p in parts.parameters():
        p += 0.1 * torch.randn_like(p)
    part = FusedFeedForward(parts.to(dtype)[1], norm if normed else None, units)
    cell = torch.zeros(rows, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    norm, layer, units = copy.deepcopy(parts).double()
    expected_cell = cell.double().clone()
    for _ in range(3):
        x = draw(rows, width).to(dtype)
        read = norm(x.double()) if normed else x.double()
        hidden = (read @ layer.weight_in.T).relu() * layer.mask(read)
        expected = hidden @ layer.weight_out + layer.bias + units.step(x.double(), expected_cell)
        assert_near(part(x, cell), expected, dtype)
        assert_near(cell, expected_cell, cell.dtype) if dtype != torch.bfloat16 else None


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width, rows, threads", [(20, 1, 1), (20, 3, 2), (72, 2, 3)])
@torch.no_grad()
def test_the_projections_of_a_layer_in_one_call(width, rows, threads, bias, dtype, monkeypatch):
    """Four tokens, one after another; with biases and without."""
    monkeypatch.setattr(fused, "threads", lambda numbers: threads)
    sizes = {"q": width, "k": 2 * width, "v": width, "gate s": 5}
    dense = Multiplicative(width, width, 4)
    heads = Convolutions(width, 4, sizes, torch.nn.Linear(width, sum(sizes.values()), bias=bias))
    for p in (*dense.parameters(), *heads.parameters()):
        p += 0.1 * torch.randn_like(p)
    part, before = FusedProjections(dense.to(dtype), heads.to(dtype)), torch.zeros(rows, 2 * width, dtype=dtype)
    x, weights = draw(4, rows, width).to(dtype), {name: weight.double() for name, weight in heads.weights.items()}
    gains, weight = dense.gains.double(), dense.weight.double()
    p = torch.einsum("tri,mi,oi->trmo", x.double(), gains, weight).flatten(2) + dense.bias.double()
    for t in range(4):
        found = part(x[t], before)
        for row in range(rows):
            names = ("q", "k", "v")
            each = [convolution_by_loops(weights[name], p[:, row], t, module, 4) for name in names for module in range(4)]
            expected = torch.cat([*each, weights["gate s"] @ p[t, row]]) + (heads.bias.double() if bias else 0)
            assert_near(found[row], expected, dtype)
        assert_near(before[:, :width], p[t], dtype)


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@torch.no_grad()
def test_the_first_of_equal_units_is_chosen():
    """As argmax does, also where there are fewer blocks than are read at the same time, and where all logits are below 0."""
    for rows, units, block in ((1, 12, 4), (3, 12, 4), (2, 40, 4)):
        x, bias = draw(rows, 6), torch.full((units,), -1.0).double()
        chosen, _ = gathered.chosen_units(x, torch.zeros(2, 6).double(), draw(units, 2), bias, draw(units, 6), block)
        assert chosen.equal(torch.arange(0, units, block).expand(rows, -1))


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@torch.no_grad()
def test_hidden_values_below_0_count():
    """After an activation that has some."""
    hidden, weight, bias, chosen = draw(3, 11), draw(44, 9), draw(9), torch.arange(11) * 4 + torch.randint(4, (3, 11))
    hidden[:, ::3] = 0
    assert_close(gathered.sum_of_units(hidden, chosen, weight, bias), torch.einsum("rb,rbc->rc", hidden, weight[chosen]) + bias)


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@torch.no_grad()
def test_16_bits_are_rounded_to_the_nearest():
    """Products of two numbers, which fp32 holds; halves go to the even one."""
    ones = torch.arange(128, 256).to(torch.bfloat16) / 128  # all mantissas
    found = gathered.rows_product(ones[:32, None], ones[:, None])
    assert found.view(32, 128).equal((ones[:32, None].double() * ones.double()).bfloat16())
    found = gathered.rows_product(ones[96:, None], -ones[:, None])
    assert found.view(32, 128).equal((ones[96:, None].double() * -ones.double()).bfloat16())


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@torch.no_grad()
def test_nothing_is_written_behind_an_output_that_is_cut():
    x, gains, weight, bias, y = draw(15), draw(4, 15), draw(20, 15), draw(78), torch.full((80,), 7.0).double()
    pointers = [part.data_ptr() for part in (x, gains, weight, bias, y)]
    native.loop("few", torch.float64)(*pointers, native.integers(4, 15, 20, 78, 1))
    assert_close(y[:78], torch.einsum("i,mi,oi->mo", x, gains, weight).flatten()[:78] + bias)
    assert y[78:].eq(7).all()
