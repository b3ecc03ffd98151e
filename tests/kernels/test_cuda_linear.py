"""The kernels with one gate per token and without erase on the emulator, against the definition in float64: outputs, final memory,
every gradient. And the operation with each of the families without erase."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, Recorder
from hostcuda.nvrtc import ARCHITECTURES, compile_check
from support.cuda_scan import GATES, PRECISION, by_family, compare, draw, launches, to_run
from support.draws import assert_same

from fw_fairseq.feature_maps import RowMap
from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.kernels import launch, linear
from fw_fairseq.ops.kernels.family import Divided, Operands
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients

MAIN = [torch.bfloat16, torch.float32]


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("dtype, policy, seed", [*((torch.bfloat16, *each) for each in SCHEDULES), (torch.float32, *SCHEDULES[-1])])
def test_any_schedule(one_thread, dtype, policy, seed):
    compare(linear, "gated", (2, 1, 150, 64, 64), dtype, EmulatorLaunch(policy, seed))


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 100])
@pytest.mark.parametrize("rule", ["sum", "gated"])
def test_any_length(one_thread, rule, tokens):
    compare(linear, rule, (1, 2, tokens, 32, 32))


@pytest.mark.cases_in_ci(3)
# Widths of one tile and of several, padded ones, rows that start anywhere, keys shared by several warps, every type.
@pytest.mark.parametrize(
    "rule, K, V, dtype",
    [
        ("gated", 16, 16, torch.float16),
        ("sum", 20, 35, torch.float32),
        ("gated", 21, 36, torch.bfloat16),
        ("gated", 128, 128, torch.bfloat16),
        ("gated", 300, 140, torch.float32),
    ],
)
def test_widths_and_dtypes(one_thread, rule, K, V, dtype):
    compare(linear, rule, (1, 2, 37, K, V), dtype)


def test_a_device_with_less_shared_memory(one_thread):
    """One chunk at a time is in shared memory there."""
    device = EmulatorLaunch("prio", 1)
    device.capability = lambda _: (8, 9)
    compare(linear, "gated", (1, 1, 150, 64, 64), torch.bfloat16, device)
    assert device.calls[0][2]["FW_MEMORIES"] == device.calls[1][2]["FW_STAGES"] == 1


def test_a_gate_that_is_not_a_number_is_seen_from_its_token_on(one_thread):
    x = draw("gated", (1, 1, 33, 32, 32))
    with launch.use(EmulatorLaunch()) as launcher:
        before, *_ = linear.forward(launcher, Operands(*x.values(), "exact"), keep=False)
        x["f"][:, :, 5] = float("nan")
        y, *_ = linear.forward(launcher, Operands(*x.values(), "exact"), keep=False)
    assert y[:, :, :5].equal(before[:, :, :5]) and y[:, :, 5:].isnan().all()


@pytest.mark.cases_in_ci(3)
@pytest.mark.parametrize(
    "rule, shape, dtype, policy, seed",
    [
        *(("gated", (1, 2, 600, 64, 64), torch.bfloat16, *each) for each in SCHEDULES),
        ("sum", (2, 1, 513, 48, 100), torch.float32, *SCHEDULES[-1]),
        ("gated", (1, 2, 1024, 32, 64), torch.float16, *SCHEDULES[-1]),
    ],
)
def test_few_sequences(one_thread, rule, shape, dtype, policy, seed):
    """Narrower tiles of the forward, and parts of the backward."""
    device = EmulatorLaunch(policy, seed)
    device.blocks = 8
    compare(linear, rule, shape, dtype, device)
    assert [name for _, name, _ in device.calls] == ["linear_forward", "linear_adjoint", "linear_backward"]
    ahead, adjoint, back = (macros["FW_V"] for *_, macros in device.calls)
    assert ahead == adjoint == back // 2 and device.calls[-1][2]["FW_SIDES"]


@pytest.mark.parametrize(
    "sequences, value, tokens, processors, parts",
    [
        (64, 64, 2048, 132, 4),
        (67, 64, 2048, 132, 1),  # more than half of the processors have a block
        (1, 64, 2048, 132, 8),  # of 256 tokens
        (1, 64, 511, 132, 1),
        (8, 256, 2048, 132, 8),  # two tiles of V each
        (20, 64, 1000, 132, 3),
    ],
)
def test_parts_of_the_backward(sequences, value, tokens, processors, parts):
    *_, back = launches(linear, "sum", (1, sequences, tokens, 16, value), torch.bfloat16, processors=processors)
    assert back.grid[2:] == ((parts,) if parts > 1 else ()) and back.defines["FW_SIDES"] == (parts > 1)


@pytest.mark.parametrize(
    "sequences, key, value, processors, ahead",
    [
        (64, 64, 64, 132, (64, 2)),  # two tiles of 32 columns each
        (67, 64, 64, 132, (67, 1)),  # two would be more than the device has processors
        (32, 128, 128, 132, (32, 4)),
        (1, 128, 128, 132, (1, 4)),  # none is narrower than 32
        (1, 16, 64, 132, (1, 1)),  # half a tile would have two warps
        (1, 16, 128, 132, (1, 2)),
        (1, 64, 33, 132, (1, 2)),
    ],
)
def test_as_many_tiles_as_the_device_has_processors(sequences, key, value, processors, ahead):
    found, back = launches(linear, "gated", (1, sequences, 17, key, value), torch.bfloat16, processors=processors)
    usual, same = launches(linear, "gated", (1, sequences, 17, key, value), torch.bfloat16)
    assert found.grid == ahead and back._replace(params=b"") == same._replace(params=b"")
    assert found.defines["FW_PART"] == usual.defines["FW_PART"] and found.threads >= min(128, usual.threads)


@pytest.mark.parametrize("value", [64, 100, 128])
def test_two_blocks_fit_where_a_block_takes_room_twice(value):
    """On an A100, whose multiprocessors have 164 KiB, 1 KiB of which each block costs beside its own."""
    for launched in launches(linear, "gated", (1, 1, 2, 20, value), torch.bfloat16, (8, 0)):
        twice = launched.defines.get("FW_MEMORIES", launched.defines.get("FW_STAGES"))
        assert twice in (1, 2) and (twice == 1 or 2 * (launched.defines["FW_SHARED"] + 1024) <= 164 * 1024)


def test_long_sums_in_fp32(one_thread):
    """Where the tensor cores cut off their sums, as they do on a device: the memory of 8192 tokens is as accurate as fp32."""
    x = {name: t if t is None else t.abs() for name, t in draw("sum", (1, 1, 8192, 16, 16)).items()}
    with launch.use(EmulatorLaunch(truncates=True)) as launcher:
        _, final, _ = linear.forward(launcher, Operands(*x.values(), "exact"), keep=False)
    expected = x["memory"].double() + x["k"].double().mT @ x["v"].double()
    assert ((final - expected).abs() / expected).max() < 3e-6


@pytest.mark.parametrize("rule, attention_norm", [("sum", True), ("gated", False), ("decay", False)])
def test_public_op(emulate, rule, attention_norm):
    """Through fast_weight: padding, resets, a state, attention normalisation; and that the kernels ran."""
    launcher = emulate()
    batch, tokens = 2, 37
    x = draw("sum", (batch, 1, tokens, 32, 32))
    leaves = {n: x[n].abs() + 0.1 if attention_norm else x[n] for n in "qkv"}
    gates = {n: GATES["uniform"](batch, 1, tokens, *(() if g.axis is None else (32,))) for n, g in RULES[rule].gates.items()}
    leaves = {n: t.detach().requires_grad_() for n, t in (leaves | gates).items()}
    masks = {"padding_mask": torch.rand(batch, tokens) < 0.2, "reset_mask": torch.rand(batch, tokens) < 0.1}

    def results(backend):
        called = {n: leaves[n] for n in gates}
        y, state = fast_weight(*(leaves[n] for n in "qkv"), rule, called, backend=backend, attention_norm=attention_norm, **masks)
        torch.manual_seed(1)
        grads = torch.autograd.grad((y, state.memory), list(leaves.values()), (torch.randn_like(y), torch.randn_like(state.memory)))
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(leaves, grads))

    assert_same(results("cuda"), results("recurrent"), 2e-5)
    family = "decay" if rule == "decay" else "linear"
    between = ["divided_backward"] if attention_norm else []
    assert [call[1] for call in launcher.calls] == [f"{family}_forward", *between, f"{family}_backward"]


def test_a_decay_per_token_beside_one_per_channel(emulate):
    """No family takes both: the kernels get their product."""
    launcher, x = emulate(), draw("decay", (1, 1, 37, 16, 16))
    x["f"] = torch.rand(1, 1, 37)
    leaves = {n: t.requires_grad_() for n, t in x.items() if t is not None}
    coefficients = Coefficients(leaves["f"], leaves["z"])

    def results(form):
        y, memory = form(leaves["q"], leaves["k"], leaves["v"], coefficients, leaves["memory"])
        grads = torch.autograd.grad(y.square().sum() + memory.sum(), list(leaves.values()))
        return {"y": y.detach(), "memory": memory.detach()} | dict(zip(leaves, grads))

    assert_same(results(by_family), results(step_form), 2e-5)
    assert [call[1] for call in launcher.calls] == ["decay_forward", "decay_backward"]


@pytest.mark.parametrize(
    "capability, key, dtype, message",
    [
        ((9, 0), 513, torch.bfloat16, "for keys up to 512 wide, not 513"),
        ((7, 5), 64, torch.float16, "for compute capability 8.0 and higher only"),
        ((8, 0), 64, torch.float16, None),
        ((8, 9), 512, torch.float32, "this device has 101376"),
        ((8, 9), 512, torch.bfloat16, None),
        ((9, 0), 512, torch.float32, None),
    ],
)
def test_what_has_no_kernel(emulate, monkeypatch, capability, key, dtype, message):
    monkeypatch.setattr(emulate(), "capability", lambda device: capability)
    q = torch.empty(1, 1, 2, key, dtype=dtype)
    reason = linear.supported(to_run(q, q, q, q[..., 0], None, None, None))
    assert reason is None if message is None else reason.startswith("backend='cuda' ") and message in reason


def test_attention_normalisation_takes_more_shared_memory():
    """The sum of the keys, which nothing else needs."""
    q, v = torch.empty(1, 1, 2, 272), torch.empty(1, 1, 2, 64)
    given = to_run(q, q, v, None, None, None, None, row_map=RowMap("elu", 1, "sum"))
    with launch.use(Recorder((8, 0))):
        assert linear.supported(given) is None
        assert linear.supported(given._replace(divided=Divided(0.0, 1.0, q))).endswith("keys 272 wide; this device has 166912")


@pytest.mark.parametrize("dtype, chunks", [(torch.bfloat16, 3), (torch.float32, 5)])
def test_what_is_saved_for_the_backward(dtype, chunks):
    """The memory before each of its chunks, padded, in the type of the products; and what divides reads."""
    shape = (2, 3, 150, 20, 35)
    assert {-(-150 // call.defines["FW_PART"]) for call in launches(linear, "gated", shape, dtype)[:1]} == {chunks}
    given = Operands(*draw("gated", shape, dtype).values(), PRECISION[dtype])
    with launch.use(Recorder()):
        saved = [((2, 3, chunks, 48, 32), dtype)]
        assert linear.saved_like(given) == saved
        assert linear.saved_like(given._replace(divided=Divided(0.0, 1.0, given.q))) == [
            *saved,
            ((2, 3, chunks, 32), dtype),
            ((2, 3, 150), torch.float32),
        ]


# Narrow values, keys that one, two and four warps hold 16 columns of, one tile of V and several, devices with little shared memory:
# the tiles, their width, the warps, the tokens at a time forward and backward.
@pytest.mark.parametrize(
    "capability, dtype, key, value, layout",
    [
        ((9, 0), torch.bfloat16, 64, 8, (1, 16, 4, 64, 64)),
        ((9, 0), torch.bfloat16, 64, 65, (1, 128, 8, 64, 64)),
        ((9, 0), torch.bfloat16, 128, 129, (2, 128, 8, 64, 64)),
        ((9, 0), torch.bfloat16, 129, 64, (1, 64, 8, 64, 64)),
        ((9, 0), torch.bfloat16, 256, 64, (1, 64, 8, 64, 64)),
        ((9, 0), torch.bfloat16, 257, 64, (2, 32, 8, 64, 64)),
        ((9, 0), torch.bfloat16, 512, 128, (4, 32, 8, 32, 64)),
        ((8, 0), torch.bfloat16, 500, 128, (4, 32, 8, 16, 32)),
        ((8, 9), torch.bfloat16, 192, 128, (2, 64, 8, 32, 32)),
        ((9, 0), torch.float32, 64, 65, (1, 128, 8, 32, 32)),
        ((9, 0), torch.float32, 512, 128, (4, 32, 8, 16, 16)),
        ((8, 9), torch.float32, 192, 128, (4, 32, 4, 16, 16)),
    ],
)
def test_layouts(capability, dtype, key, value, layout):
    tiles, width, warps, ahead, back = layout
    for launched, chunk in zip(launches(linear, "sum", (1, 1, 2, key, value), dtype, capability), (ahead, back), strict=True):
        defines = launched.defines
        found = launched.grid, defines["FW_V"], defines["FW_WARPS"], launched.threads, defines["FW_CHUNK"]
        assert found == ((1, tiles), width, warps, 32 * warps, chunk)
        assert defines.get("FW_PART", back) == back and defines.get("FW_PARTIAL", tiles > 1) == (tiles > 1)


PLACES = [(arch, 64) for arch in ARCHITECTURES if arch != "75"] + [("90", 32), ("90", 128)]
COMPILED = [(arch, width, torch.bfloat16) for arch, width in PLACES] + [("90", 64, torch.float32)]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("arch, width, dtype", COMPILED)
def test_compiles_without_spills(arch, width, dtype):
    """Two blocks fit a multiprocessor up to 64 columns; up to 128 no gradient is written in shares where memory allows."""
    capability = (int(arch[:-1]), int(arch[-1]))
    for launched in launches(linear, "gated", (1, 1, 17, width, width), dtype, capability):
        found = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        assert found["spill_stores"] == found["spill_loads"] == found["stack"] == 0, (launched.kernel, found)
        held = launch.SHARED_MORE.get(capability, launch.SHARED)
        assert launched.defines["FW_SHARED"] <= held
        if arch == "90":
            assert not launched.defines.get("FW_PARTIAL")
            assert width > 64 or (launched.defines["FW_SHARED"] <= held // 2 and found["registers"] * launched.threads <= 32768)


@pytest.mark.parametrize("rule", ["sum", "gated"])
def test_odd_lengths_take_the_same_kernels(rule):
    """Gates per token are moved one by one: their rows need not be even."""
    odd, even = (launches(linear, rule, (1, 1, tokens, 64, 64), torch.bfloat16) for tokens in (511, 512))
    assert [call.defines for call in odd] == [call.defines for call in even]
