"""Attention normalisation in the kernels without erase on the emulator, against its definition in float64 token by token."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, Recorder, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, compile_check
from support.cuda_scan import PRECISION, TOLERANCE, draw
from support.draws import assert_same

from fw_fairseq.feature_maps import AS_IS
from fw_fairseq.ops import FastWeightState, dispatch, fast_weight
from fw_fairseq.ops.checks import check_arguments
from fw_fairseq.ops.dispatch import choose_kernel
from fw_fairseq.ops.kernels import launch, linear
from fw_fairseq.ops.kernels import step as cuda_step
from fw_fairseq.ops.kernels.family import Divided, Operands
from fw_fairseq.ops.kernels.launch import undivided
from fw_fairseq.rules import Coefficients

EPS, LEAST = 1e-3, 1e-2
BF16, FP32 = torch.bfloat16, torch.float32


def draw_divided(rule: str, shape, dtype, gates: str = "uniform") -> dict[str, torch.Tensor | None]:
    """Features that are not negative, of which some queries read nothing, and sums of keys."""
    x = draw(rule, shape, dtype, gates)
    x["q"], x["k"] = (t.abs() for t in (x["q"], x["k"]))
    x["q"][:, :, 2::7] = 0
    return x | {"sums": torch.rand(*shape[:2], shape[3])}


def by_kernels(x: dict, dy, dmemory, dsums, precision: str, launcher) -> dict[str, torch.Tensor]:
    sums, operands = x["sums"], [t for name, t in x.items() if name != "sums"]
    final, before = torch.empty_like(sums), torch.empty_like(sums)
    with launch.use(launcher if hasattr(launcher, "capability") else launch.current()):
        y, memory, saved = linear.forward(launcher, Operands(*operands, precision, divided=Divided(EPS, LEAST, sums, final)))
        kept = linear.saved_like(Operands(*operands, precision, divided=Divided(EPS, LEAST, sums)))
        assert [(tuple(t.shape), t.dtype) for t in saved] == [(tuple(shape), dtype) for shape, dtype in kept]
        given = Divided(EPS, LEAST, before, dsums, y)
        grads = linear.backward(launcher, Operands(*operands, precision, divided=given), saved, dy, dmemory)
    grads = {f"gradient of {name}": grad for name, grad in zip(x, grads) if grad is not None}
    return {"y": y, "final memory": memory, "final sums": final} | grads | {"gradient of sums": before}


def by_definition(x: dict, dy, dmemory, dsums) -> dict[str, torch.Tensor]:
    leaves = {name: t.double().requires_grad_() for name, t in x.items() if t is not None}
    memory, n, reads = leaves["memory"], leaves["sums"], []
    for t in range(x["q"].shape[2]):
        q, k, v = (leaves[name][:, :, t] for name in "qkv")
        f, w = (leaves[name][:, :, t, None] if name in leaves else 1.0 for name in "fw")
        memory = (f * memory.mT).mT if isinstance(f, float) else f[..., None] * memory
        memory, n = memory + (w * k)[..., None] * v[:, :, None], f * n + w * k
        read, divisor = (q[:, :, None] @ memory).squeeze(2), (n * q).sum(-1, keepdim=True)
        reads.append(read / torch.where(divisor == 0, LEAST, divisor + EPS))
    y = torch.stack(reads, 2)
    grads = torch.autograd.grad((y, memory, n), list(leaves.values()), (dy.double(), dmemory.double(), dsums.double()))
    results = {"y": y, "final memory": memory, "final sums": n}
    return {name: t.detach() for name, t in results.items()} | {f"gradient of {name}": g for name, g in zip(leaves, grads)}


def test_a_long_sequence_fits_the_grid():
    """It needs 65,536 blocks, one more than a grid has in y."""
    dy, recorder = torch.empty(1, 1, 524_281, 33), Recorder()
    undivided(recorder, Divided(EPS, LEAST, None, None, dy), dy[..., 0], dy)
    assert [launch.grid for launch in recorder.launches] == [(65_536,)]


def compare(rule: str, shape, dtype, launcher=None, gates: str = "uniform") -> None:
    x = draw_divided(rule, shape, dtype, gates)
    gradients = [torch.randn_like(x[name]) for name in ("v", "memory", "sums")]
    precision = PRECISION[dtype]
    actual = by_kernels(x, *gradients, precision, launcher or EmulatorLaunch())
    assert_same(actual, by_definition(x, *gradients), TOLERANCE[precision])


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("policy, seed", SCHEDULES)
def test_any_schedule(one_thread, policy, seed):
    compare("gated", (2, 1, 150, 64, 64), BF16, EmulatorLaunch(policy, seed))


@pytest.mark.cases_in_ci(3)
# Widths of one tile and of several, padded ones, keys shared by several warps, few and many tokens, gates of 0, gates that keep
# what is chunks away.
@pytest.mark.parametrize(
    "rule, tokens, K, V, dtype, gates",
    [
        ("sum", 1, 16, 16, FP32, "uniform"),
        ("sum", 70, 64, 64, BF16, "uniform"),
        ("gated", 150, 64, 64, FP32, "resets"),
        ("gated", 150, 64, 64, FP32, "near one"),
        ("gated", 37, 20, 36, BF16, "resets"),
        ("gated", 37, 128, 72, BF16, "both extremes"),
        ("gated", 37, 300, 140, FP32, "uniform"),
    ],
)
def test_widths_and_dtypes(one_thread, rule, tokens, K, V, dtype, gates):
    compare(rule, (1, 2, tokens, K, V), dtype, gates=gates)


@pytest.mark.parametrize("rule, shape, dtype", [("sum", (1, 2, 520, 32, 40), FP32), ("gated", (1, 1, 600, 64, 144), BF16)])
def test_few_sequences_in_parts(one_thread, rule, shape, dtype):
    """The second has several tiles of V, of which one has the sums."""
    device = EmulatorLaunch("prio", 2)
    device.blocks = 16
    compare(rule, shape, dtype, device)
    assert [name for _, name, _ in device.calls] == ["linear_forward", "divided_backward", "linear_adjoint", "linear_backward"]


def sanitized() -> None:
    launch.SHORTEST_PART = 64
    for processors in (1, 8):
        device = sanitized_launch()
        device.blocks = processors
        compare("gated", (1, 1, 70 * processors, 20, 36), BF16, device)
        assert ("linear_adjoint" in [name for _, name, _ in device.calls]) == (processors > 1)


def test_16_bits_stay_16_bits(emulate):
    """No column is added to the values, and nothing becomes fp32, over many tokens and over one."""
    launcher, (q, k, v) = emulate(), (torch.rand(2, 2, 40, width).bfloat16() for width in (16, 16, 64))
    state = FastWeightState(torch.randn(2, 2, 16, 64), torch.rand(2, 2, 16))
    call = dict(q=q, k=k, v=v, rule="gated", gates={"g": torch.rand(2, 2, 40)}, attention_norm=True)
    y, after = fast_weight(**call, state=state)
    exact = {name: x.double() if torch.is_tensor(x) else x for name, x in call.items()}
    exact |= {"gates": {"g": call["gates"]["g"].double()}, "state": state._map(torch.Tensor.double), "backend": "recurrent"}
    want, want_after = fast_weight(**exact)
    assert y.dtype == BF16
    assert_same({"y": y, "n": after.normaliser}, {"y": want, "n": want_after.normaliser}, 2e-2)
    given = {"q": call["q"], "k": call["k"], "v": call["v"], "g": call["gates"]["g"]}
    for t in range(3):
        q, k, v, g = (x[:, :, t : t + 1] for x in given.values())
        y, state = fast_weight(q, k, v, "gated", {"g": g}, state, attention_norm=True)
        torch.testing.assert_close(y.double(), want[:, :, t : t + 1], rtol=0, atol=1e-2)
    assert [(name, made["FW_SUMS"]) for _, name, made in launcher.calls] == [("linear_forward", 1), *[("step", 1)] * 3]
    assert {made["FW_IN"] for *_, made in launcher.calls} == {"__nv_bfloat16"} and launcher.calls[0][2]["FW_V"] == 64


def scaled_reads(q, k, v, f, w, key_log_scale) -> torch.Tensor:
    """sum_s a_s (k_s . q_t) v_s / sum_s a_s (k_s . q_t), a_s = w_s exp(key_log_scale_s) f_{s+1} ... f_t; 0 where that is 0 / 0."""
    reads = []
    for t in range(q.shape[2]):
        left = f[:, :, 1 : t + 1].flip(2).cumprod(2).flip(2)
        left = torch.cat([left, torch.ones_like(f[:, :, :1])], 2)
        written = w[:, :, : t + 1] * key_log_scale[:, :, : t + 1].exp()
        pairs = (k[:, :, : t + 1] @ q[:, :, t, :, None]).squeeze(-1) * left * written
        total = pairs.sum(-1, keepdim=True)
        reads.append((pairs[..., None] * v[:, :, : t + 1]).sum(2) / torch.where(total == 0, 1.0, total))
    return torch.stack(reads, 2)


def test_keys_with_a_scale_of_their_own(emulate):
    """The kernels divide these reads, too, over many tokens and over one, with scales that fp32 cannot hold as factors."""
    launcher, shape = emulate(), (2, 2, 40)
    q, k, v = (torch.rand(*shape, width).requires_grad_() for width in (16, 16, 24))
    g, scale = (torch.rand(shape) * 0.3 + 0.7).requires_grad_(), (30 * torch.randn(shape)).requires_grad_()
    with torch.no_grad():
        q[:, :, 2::7] = 0
    leaves = [q, k, v, g, scale]
    y, state = fast_weight(q, k, v, "gated", {"g": g}, attention_norm=True, key_log_scale=scale)
    dy = torch.randn_like(y)
    dy[:, :, 2::7] = 0  # a query that reads nothing has no gradient of its own
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = scaled_reads(*exact[:4], 1 - exact[3], exact[4])
    names = [f"gradient of {name}" for name in ("q", "k", "v", "g", "key_log_scale")]
    results = {"y": y.detach()} | dict(zip(names, torch.autograd.grad(y, leaves, dy)))
    assert scale.abs().max() > 60 and (want[:, :, 2::7] == 0).all()
    assert_same(results, {"y": want.detach()} | dict(zip(names, torch.autograd.grad(want, exact, dy.double()))), 2e-5)
    with torch.no_grad():
        cut = [x[:, :, :39] for x in leaves]
        _, state = fast_weight(*cut[:3], "gated", {"g": cut[3]}, attention_norm=True, key_log_scale=cut[4])
        last = [x[:, :, 39:] for x in leaves]
        y, _ = fast_weight(*last[:3], "gated", {"g": last[3]}, state, attention_norm=True, key_log_scale=last[4])
    assert_same({"y": y}, {"y": want[:, :, 39:].detach()}, 1e-5)
    ran = [name for _, name, _ in launcher.calls]
    assert ran == ["linear_forward", "divided_backward", "linear_backward", "linear_forward", "step"]
    assert all(made["FW_SUMS"] for _, name, made in launcher.calls if name != "divided_backward")


@pytest.mark.parametrize("width", [24, 30])
@pytest.mark.parametrize("inside", [True, False])
def test_reads_in_fp16(emulate, monkeypatch, width, inside):
    """Multiplied in tf32. With a column for the sums, too, rows of the values can be moved 16 bytes at a time."""
    launcher = emulate()
    if not inside:
        monkeypatch.setattr(dispatch, "in_many_parts", lambda q: True)
    q, k, v = (torch.rand(2, 2, 40, n).half().requires_grad_() for n in (16, 16, width))
    y, state = fast_weight(q, k, v, "sum", attention_norm=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    always, never = torch.ones(2, 2, 40).double(), torch.zeros(2, 2, 40).double()
    want, dy = scaled_reads(*exact, always, always, never), torch.randn_like(y)
    names = ("gradient of q", "gradient of k", "gradient of v")
    results = {"y": y.detach()} | dict(zip(names, torch.autograd.grad(y, (q, k, v), dy)))
    assert_same(results, {"y": want.detach()} | dict(zip(names, torch.autograd.grad(want, exact, dy.double()))), 4e-3)
    assert state.memory.shape == (2, 2, 16, width) and state.normaliser.shape == (2, 2, 16)
    assert_same({"sums": state.normaliser}, {"sums": k.detach().double().sum(2)}, 1e-5)
    made = [made for _, name, made in launcher.calls if name.startswith("linear")]
    expected = {"FW_SUMS": inside, "FW_PRECISION": launch.PRECISIONS["tf32"], "FW_ALIGNED": width == 24 or not inside}
    assert [{name: x[name] for name in expected} for x in made] == [expected] * 2


@pytest.mark.parametrize("policy, seed", SCHEDULES)
def test_one_token_in_any_schedule(emulate, policy, seed):
    """Several tiles of V and several warps of keys, rows in another order, a query that reads nothing."""
    emulate(policy, seed, bounds=True)
    q, k, v = (torch.rand(3, 2, width) for width in (40, 40, 70))
    q[0, 1] = 0
    f, w, order = torch.rand(3, 2), torch.rand(3, 2), torch.tensor([1, 0, 1])
    memory, sums, final = torch.randn(2, 2, 40, 70), torch.rand(2, 2, 40), torch.empty(3, 2, 40)
    divided = Divided(EPS, LEAST, sums, final)
    y, after = cuda_step.step(q, k, v, f, None, None, w, memory, order=order, divided=divided)
    x = {"q": q, "k": k, "v": v, "f": f, "w": w}
    x = {name: t.unsqueeze(2) for name, t in x.items()} | {"memory": memory[order], "sums": sums[order]}
    want = by_definition(x, torch.zeros(3, 2, 1, 70), torch.zeros_like(after), torch.zeros_like(final))
    want = {"y": want["y"].squeeze(2), "memory": want["final memory"], "sums": want["final sums"]}
    assert_same({"y": y, "memory": after, "sums": final}, want, 1e-5)


@pytest.mark.parametrize(
    "processors, dtype, shapes, taken",
    [
        (15, BF16, {"f": (1, 2, 4096)}, True),
        (16, BF16, {"f": (1, 2, 4096)}, False),  # 16 parts
        (15, torch.float16, {"f": (1, 2, 4096)}, False),
        (15, BF16, {"f": (1, 2, 4096), "z": (1, 2, 4096, 16)}, False),
        (15, BF16, {"f": (1, 2, 4096, 16)}, False),
        (15, BF16, {"e": (1, 2, 4096)}, False),
        (15, BF16, {"f": (1, 2, 4096, 16), "e": (1, 2, 4096)}, False),
    ],
)
def test_what_the_kernels_divide(processors, dtype, shapes, taken):
    """Few parts, not in fp16, and sums that follow the writes."""
    q, device = torch.empty(1, 2, 4096, 16, dtype=dtype), Recorder()
    device.processors = lambda _: processors
    with launch.use(device):
        gates = [None if name not in shapes else torch.empty(shapes[name]) for name in "fzew"]
        state, divided = (
            FastWeightState(torch.empty(1, 2, 16, 16), torch.empty(1, 2, 16)),
            Divided(EPS, LEAST, torch.empty(1, 2, 16)),
        )
        inputs = check_arguments(
            q, q, q, "sum", {}, state, "auto", True, EPS, None, None, None, None, False, None, "read_and_erase", None, True
        )._replace(coefficients=Coefficients(*gates))
        assert (choose_kernel(inputs, divided).reason is None) is taken


def test_opcheck(emulate):
    emulate()
    x = {name: None if t is None else t.requires_grad_() for name, t in draw_divided("gated", (1, 1, 17, 16, 16), FP32).items()}
    torch.library.opcheck(torch.ops.fw_fairseq.scan.default, (*x.values(), EPS, LEAST, "linear", "exact", True, True, *AS_IS))
    token = [t if t is None else t[:, :, 0].detach() for t in list(x.values())[:7]]
    states = [x[name].detach() for name in ("memory", "sums")]
    torch.library.opcheck(torch.ops.fw_fairseq.step.default, (*token, *states, EPS, LEAST, *AS_IS))


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("arch, width, dtype", [*((arch, 64, BF16) for arch in ARCHITECTURES[1:]), ("90", 64, FP32)])
def test_compiles_without_spills(arch, width, dtype):
    """Two blocks fit a multiprocessor."""
    x, recorder = draw_divided("gated", (1, 1, 17, width, width), dtype), Recorder((int(arch[:-1]), int(arch[-1])))
    by_kernels(x, x["v"], x["memory"], x["sums"], PRECISION[dtype], recorder)
    for launched in recorder.launches:
        found = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        assert found["spill_stores"] == found["spill_loads"] == found["stack"] == 0, (launched, found)
        if arch == "90" and launched.kernel != "divided_backward":
            assert 2 * launched.shared <= 227 * 1024 and found["registers"] * launched.threads <= 32768, (launched, found)
