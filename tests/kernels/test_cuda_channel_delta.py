"""The kernels for decay per channel with erase on the emulator, against the definition in float64: outputs, memory, gradients."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, Launch, Recorder, guarded, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, EVERY, compile_check, long_ones
from support.cuda_scan import PRECISION, TOLERANCE, by_definition, by_kernels, to_run
from support.draws import assert_same, draw_gates, draw_projections
from support.emulated import emulated
from torch.nn.functional import normalize

from fw_fairseq.feature_maps import AS_IS, RowMap
from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.kernels import channel_delta, launch, recurrence
from fw_fairseq.ops.kernels.family import Operands
from fw_fairseq.rules import RULES

GATES = {
    "near": lambda *size: torch.rand(*size) * 0.4 + 0.6,
    "uniform": torch.rand,
    "small": lambda *size: torch.rand(*size) * 9e-3 + 1e-3,
    "tiny": lambda *size: torch.full(size, 1e-6),
    "near one": lambda *size: 1 - torch.rand(*size) * 1e-3,
    "some": lambda *size: torch.where(torch.rand(*size) < 0.1, tiny(size), 1 - torch.rand(*size) * 1e-3),
    "resets": lambda *size: torch.where(torch.rand(*size[:3], 1) < 0.05, 0.0, torch.rand(*size) * 0.4 + 0.6),
}


def tiny(size):
    return torch.tensor([0.0, 1e-38, 1e-30, 1e-6])[torch.randint(4, size)]


def draw(shape, dtype=torch.float32, gates="near", present="tw") -> dict[str, torch.Tensor | None]:
    """q, k, v as views of (T,B,C) projections. t: e per token; c: per channel; w: a write strength."""
    B, H, T, K, V = shape
    q, k, v = draw_projections(B, H, T, K, K, V)
    e = torch.rand(B, H, T) if "t" in present else normalize(torch.randn(B, H, T, K), dim=-1) * torch.rand(B, H, T, 1)
    x = dict(zip("qkv", (x.to(dtype) for x in (q, normalize(k, dim=-1), v))))
    w = torch.rand(B, H, T) if "w" in present else None
    return x | {"f": GATES[gates](B, H, T, K), "z": None, "e": e, "w": w, "memory": torch.randn(B, H, K, V)}


def compare(shape, dtype=torch.float32, launcher=None, precision=None, **options):
    x = draw(shape, dtype, **options)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    precision = precision or PRECISION[dtype]
    with launch.use(launcher or EmulatorLaunch()) as launcher:
        actual = by_kernels(channel_delta, x, dy, dmemory, precision, launcher)
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE[precision])


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("dtype, policy, seed", [*((torch.float32, *each) for each in SCHEDULES), (torch.bfloat16, *SCHEDULES[-1])])
def test_any_schedule(one_thread, dtype, policy, seed):
    for gates in ("near", "some"):
        compare((1, 1, 40, 64, 64), dtype, EmulatorLaunch(policy, seed), gates=gates)


@pytest.mark.parametrize(
    "dtype, present, gates",
    [*((torch.float32, "tw", name) for name in GATES), *((torch.bfloat16, "c", name) for name in [*GATES][::3])],
)
def test_any_gate(one_thread, dtype, present, gates):
    """Of 0, near 0 and near 1, over many chunks: those whose products fp32 holds, and those whose products it does not."""
    compare((1, 1, 100, 32, 32), dtype, gates=gates, present=present)


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize(
    "shape, dtype, present, gates, policy, seed",
    [
        *(((1, 2, 600, 64, 64), torch.bfloat16, "tw", "some", *each) for each in SCHEDULES),
        ((1, 1, 530, 64, 40), torch.bfloat16, "c", "resets", *SCHEDULES[-1]),
        ((1, 1, 520, 20, 24), torch.float32, "tw", "near", *SCHEDULES[-1]),
        ((1, 1, 520, 128, 128), torch.float16, "c", "some", *SCHEDULES[-1]),
    ],
)
def test_few_sequences_in_parts(one_thread, shape, dtype, present, gates, policy, seed):
    device = EmulatorLaunch(policy, seed)
    device.blocks = 16
    compare(shape, dtype, device, "tf32" if dtype == torch.float16 else None, gates=gates, present=present)
    assert [name for _, name, _ in device.calls] == [f"channel_delta_{name}" for name in ("forward", "adjoint", "backward")]
    assert device.calls[-1][2]["FW_SIDES"]


@pytest.mark.parametrize(
    "tokens, dtype", [*((count, torch.float32) for count in (1, 16, 17)), *((count, torch.bfloat16) for count in (5, 17, 33))]
)
def test_any_length(one_thread, dtype, tokens):
    compare((2, 2, tokens, 64, 64), dtype)


# Widths of one tile and of several, keys shared by 2 and 4 warps, rows that start anywhere, every type.
@pytest.mark.parametrize(
    "key, value, dtype, present, gates",
    [
        (16, 16, torch.float16, "tw", "near"),
        (21, 18, torch.float32, "c", "uniform"),
        (20, 20, torch.bfloat16, "c", "near"),
        (128, 136, torch.bfloat16, "tw", "near"),
        (120, 50, torch.float32, "cw", "near"),
        (96, 96, torch.bfloat16, "tw", "near"),
        (256, 16, torch.float32, "tw", "some"),
        (20, 72, torch.float32, "c", "some"),
    ],
)
def test_widths(one_thread, key, value, dtype, present, gates):
    compare((1, 1, 35, key, value), dtype, present=present, gates=gates)


@pytest.mark.parametrize("dtype, key", [(torch.bfloat16, 64)])
def test_a_device_with_less_shared_memory(one_thread, dtype, key):
    """Parts are shorter there, or tiles of V narrower."""
    device = EmulatorLaunch("prio", 1)
    device.capability = lambda _: (8, 9)
    compare((1, 1, 40, key, 64), dtype, device, present="c")
    forward, backward = (call[2] for call in device.calls)
    assert (backward["FW_PART"], backward["FW_V"]) == ((16, 64) if dtype == torch.bfloat16 else (16, 32))
    assert max(forward["FW_SHARED"], backward["FW_SHARED"]) <= launch.SHARED


def test_fp32_in_tf32(one_thread):
    compare((1, 2, 35, 32, 32), precision="tf32", gates="uniform")
    compare((1, 2, 35, 32, 32), precision="tf32")


def test_large_operands(one_thread):
    """Gates that are nearly too small for one product of a chunk's pairs, with entries as large as fp16's."""
    x = draw((1, 1, 33, 32, 32))
    x["f"], x["e"] = torch.full_like(x["f"], 0.033), x["e"] * 1e-4
    x["k"], x["v"] = x["k"] * 1e2, x["v"] * 3e4
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    with launch.use(EmulatorLaunch()) as launcher:
        actual = by_kernels(channel_delta, x, dy, dmemory, "exact", launcher)
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["exact"])


@pytest.mark.parametrize(
    "rule, dtype", [("kda", torch.bfloat16), ("gdn2", torch.float32), ("rwkv7", torch.float32), ("rwkv7", torch.bfloat16)]
)
def test_public_op(emulate, rule, dtype):
    """Through fast_weight: padding, resets, a feature map, a state; and that the kernels ran. 16 bits stay 16 bits."""
    launcher = emulate()
    shape = (2, 1, 37, 32, 32)
    x = draw(shape, dtype)
    gates = draw_gates(RULES[rule], shape, torch.float32)
    leaves = {n: x[n].detach() for n in "qkv"} | {
        n: (normalize(g, dim=-1) if n == "kappa" else g).detach() for n, g in gates.items()
    }
    masks = {"padding_mask": torch.rand(2, 37) < 0.2, "reset_mask": torch.rand(2, 37) < 0.1}
    masks["reset_mask"][:, 20] = True

    def results(backend, **leaves):
        leaves = {n: t.requires_grad_() for n, t in leaves.items()}
        q, k, v = (leaves[n] for n in "qkv")
        call = {"backend": backend, "feature_map": RowMap(norm="l2"), **masks}
        y, state = fast_weight(q, k, v, rule, {n: leaves[n] for n in gates}, **call)
        generator = torch.Generator().manual_seed(1)
        adjoints = [torch.randn(t.shape, generator=generator).to(t) for t in (y, state.memory)]
        grads = torch.autograd.grad((y, state.memory), list(leaves.values()), adjoints)
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(leaves, grads))

    exact = results("recurrent", **{n: t.double() for n, t in leaves.items()})
    assert_same(results("cuda", **leaves), exact, 5e-2 if dtype == torch.bfloat16 else 2e-5)
    assert [call[1] for call in launcher.calls] == ["channel_delta_forward", "channel_delta_backward"]
    assert {call[2]["FW_IN"] for call in launcher.calls} == {launch.TYPES[dtype]}


@pytest.mark.parametrize("rule, kernel", [("kda", "step"), ("gdn2", "step"), ("rwkv7", "channel_delta_forward")])
def test_decoding(emulate, rule, kernel):
    """One launch for each token, the state handed on. A token of RWKV 7 is two steps of the recurrence, which one launch takes."""
    shape, launcher, state, outputs = (2, 2, 3, 8, 6), emulate(), None, []
    x, gates = draw(shape), {n: g.detach() for n, g in draw_gates(RULES[rule], shape, torch.float32).items()}
    expected, end = fast_weight(x["q"], x["k"], x["v"], rule, gates, backend="recurrent")
    for t in range(3):
        now = slice(t, t + 1)
        token = {n: g[:, :, now] for n, g in gates.items()}
        y, state = fast_weight(*(x[n][:, :, now] for n in "qkv"), rule, token, state, backend="cuda")
        outputs.append(y)
    assert [call[1] for call in launcher.calls] == [kernel] * 3
    torch.testing.assert_close(torch.cat(outputs, 2), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.memory, end.memory, rtol=1e-4, atol=1e-4)


def test_few_long_sequences_run_in_parts(emulate, monkeypatch):
    launcher = emulate()
    monkeypatch.setattr(launcher, "blocks", 3)
    monkeypatch.setattr(recurrence, "LEAST", 0)
    monkeypatch.setattr(recurrence, "SHORTEST", 32)
    shape = (1, 1, 230, 16, 16)
    x, gates = draw(shape), {n: g.detach() for n, g in draw_gates(RULES["gdn2"], shape, torch.float32).items()}
    y, state = fast_weight(x["q"], x["k"], x["v"], "gdn2", gates, backend="cuda")
    want, end = fast_weight(x["q"], x["k"], x["v"], "gdn2", gates, backend="chunkwise")
    assert [call[1] for call in launcher.calls] == ["channel_delta_forward"] * 3  # from empty memories, the identity, the true ones
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.memory, end.memory, rtol=1e-4, atol=1e-4)


def test_without_gradients_nothing_is_kept(one_thread):
    x = draw((1, 1, 35, 64, 64)).values()
    y, final, saved = channel_delta.forward(EmulatorLaunch(), Operands(*x, "exact"), keep=False)
    want_y, want_final, _ = channel_delta.forward(EmulatorLaunch(), Operands(*x, "exact"), keep=True)
    assert saved == () and torch.equal(y, want_y) and torch.equal(final, want_final)


@pytest.mark.parametrize("gates", ["near", "some"])
def test_nothing_outside_the_tensors(one_thread, monkeypatch, gates):
    """Every tensor, outputs too, ends at an unmapped page."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded(empty_like(x).contiguous()))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **options: guarded(new_empty(x, *size, **options)))
    for dtype, width, present in ((torch.float32, 64, "tw"), (torch.bfloat16, 20, "c")):
        drawn = draw((1, 2, 19, width, width), dtype, gates, present)
        x = {name: None if t is None else guarded(t.contiguous()) for name, t in drawn.items()}
        dy, dmemory = guarded(torch.randn_like(x["v"])), guarded(torch.randn_like(x["memory"]))
        actual = by_kernels(channel_delta, x, dy, dmemory, PRECISION[dtype], EmulatorLaunch())
        assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE[PRECISION[dtype]])


def test_nothing_past_a_row_that_all_tokens_share(one_thread):
    """Values in two tiles, of which the second is not full: the row ends at an unmapped page, and no other one follows it. What is
    brought into the cache ahead counts too."""
    x = draw((1, 1, 20, 16, 80))
    x["v"] = guarded(x["v"][:, :, :1]).expand(1, 1, 20, 80)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    with launch.use(EmulatorLaunch()) as launcher:
        actual = by_kernels(channel_delta, x, dy, dmemory, "exact", launcher)
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["exact"])
    assert [(call[2]["FW_V"], call[2]["FW_PART"]) for call in launcher.calls] == [(48, 16)] * 2


def test_symbolic_shapes(emulate):
    emulate()
    *x, memory = draw((1, 2, 17, 32, 32)).values()
    given = *x, memory.requires_grad_(), None, 0.0, 0.0, "channel_delta", "exact", True, True, *AS_IS
    torch.library.opcheck(torch.ops.fw_fairseq.scan.default, given)


def sanitized() -> None:
    """Parts with gates of 0 beside others; and few sequences."""
    launch.SHORTEST_PART = 32
    for tokens, processors in ((40, 1), (130, 8)):
        with emulated(sanitized_launch()) as launcher:
            launcher.blocks = processors
            x = draw((1, 1, tokens, 64, 64), torch.bfloat16)
            x["f"][:, :, 3, :9] = 0.0
            by_kernels(channel_delta, x, torch.randn_like(x["v"]), torch.randn_like(x["memory"]), "bf16", launcher)
            assert len(launcher.calls) == (3 if processors > 1 else 2)


@pytest.mark.parametrize(
    "capability, key, dtype, message",
    [
        ((9, 0), 257, torch.bfloat16, "for keys up to 256 wide, not 257"),
        ((7, 5), 64, torch.float16, "for compute capability 8.0 and higher only"),
        ((8, 9), 64, torch.bfloat16, None),
        ((8, 9), 256, torch.float32, "this device has 101376"),
        ((8, 0), 256, torch.bfloat16, None),
        ((9, 0), 256, torch.float32, None),
    ],
)
def test_what_has_no_kernel(emulate, monkeypatch, capability, key, dtype, message):
    monkeypatch.setattr(emulate(), "capability", lambda device: capability)
    q = torch.empty(1, 1, 2, key, dtype=dtype)
    reason = channel_delta.supported(to_run(q, q, q, q, None, q, None))
    assert reason is None if message is None else reason.startswith("backend='cuda' ") and message in reason


def launches(key: int, dtype: torch.dtype, present: str, capability: tuple[int, int], value: int | None = None) -> list[Launch]:
    """What would be launched on a device for a forward and a backward."""
    x = draw((1, 1, 2, key, value or key), dtype, present=present)
    with launch.use(Recorder(capability)) as recorder:
        by_kernels(channel_delta, x, x["v"], x["memory"], PRECISION[dtype], recorder)
    return recorder.launches


# The narrowest and the widest key of each layout, values one column wider than a tile: the tiles, their width, the warps that share
# 16 of its columns, the tokens in shared memory in the forward, the tokens between two saved memories.
@pytest.mark.parametrize(
    "dtype, key, value, layout",
    [
        (torch.bfloat16, 64, 129, (3, 48, 1, 64, 32)),
        (torch.bfloat16, 65, 129, (2, 80, 1, 64, 16)),
        (torch.bfloat16, 128, 129, (2, 80, 1, 64, 16)),
        (torch.bfloat16, 129, 65, (2, 48, 2, 16, 16)),
        (torch.bfloat16, 256, 65, (2, 48, 2, 16, 16)),
        (torch.float32, 64, 129, (3, 48, 1, 16, 16)),
        (torch.float32, 65, 129, (3, 48, 2, 16, 16)),
        (torch.float32, 128, 129, (3, 48, 2, 16, 16)),
        (torch.float32, 129, 33, (2, 32, 4, 16, 16)),
        (torch.float32, 256, 33, (2, 32, 4, 16, 16)),
    ],
)
def test_layouts(dtype, key, value, layout):
    """On a device with 227 KiB."""
    tiles, width, ksplit, span, part = layout
    for launched in launches(key, dtype, "tw", (9, 0), value):
        defines = launched.defines
        assert (defines["FW_K"], defines["FW_V"], defines["FW_KSPLIT"]) == (launch.round_up(key, 16 * ksplit), width, ksplit)
        assert (defines["FW_PART"], launched.grid, launched.threads) == (part, (1, tiles), 2 * width * ksplit)
        assert defines["FW_SPAN"] == (span if launched.kernel == "channel_delta_forward" else part)


def test_rows_of_gates_that_start_anywhere():
    """Those that an erase reads with are moved like the decay's: 16 bytes at a time only where all of either can be."""
    x = draw((1, 1, 17, 16, 16), present="c")
    apart = torch.empty(1, 1, 17, 17)[..., :16]
    for changes, aligned in (({}, 1), ({"f": apart}, 0), ({"e": apart}, 0), ({"e": apart[..., 0]}, 1)):
        given = x | {"q": x["v"], "k": x["v"]} | changes
        with launch.use(Recorder()) as recorder:
            by_kernels(channel_delta, given, x["v"], x["memory"], "exact", recorder)
        assert [launched.defines["FW_ALIGNED"] for launched in recorder.launches] == [aligned] * 2


COMPILED = [(arch, 64, torch.bfloat16, "tw") for arch in ARCHITECTURES if arch != "75"]
if ARCHITECTURES == EVERY:
    COMPILED += [("90", 64, torch.bfloat16, "c"), ("90", 64, torch.float32, "tw"), ("90", 128, torch.bfloat16, "tw")]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("arch, width, dtype, present", long_ones(COMPILED))
def test_compiles_without_spills(arch, width, dtype, present):
    """Two blocks fit a multiprocessor at 64 columns."""
    capability = (int(arch[:-1]), int(arch[-1]))
    for launched in launches(width, dtype, present, capability):
        found = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        assert found["spill_stores"] == found["spill_loads"] == found["stack"] == 0, (launched.kernel, found)
        held, shared = launch.SHARED_MORE.get(capability, launch.SHARED), launched.defines["FW_SHARED"]
        assert shared <= held
        if arch == "90" and width <= 64:
            assert shared <= held // 2 and found["registers"] * launched.threads <= 32768, (launched.kernel, found)
