"""The kernels for rules with erase on the emulator, against the definition in float64: outputs, final memory, every gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, Launch, Recorder, guarded, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, compile_check, long_ones
from support.cuda_scan import to_run
from support.draws import assert_same, draw_projections
from support.emulated import emulated

from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.kernels import delta, launch
from fw_fairseq.ops.kernels import launch as launching
from fw_fairseq.ops.kernels.family import Operands
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import Coefficients

# Of the largest entry, from inputs as rounded. Exact: fp32 sums in another order. bf16: operands of 8 bits, an inverse of 11. One
# draw in a hundred of 37 tokens is above that in bf16, up to 4e-2, by rounding alone: the gradients of e and f are differences of
# two reads, whose largest entry is small by chance. The draws of these tests are fixed.
TOLERANCE = {"exact": 1e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}
PRECISION = {torch.float32: "exact", torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMES = ("q", "k", "v", "f", "e", "w", "memory")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def draw(shape, dtype=torch.float32, present="few", resets=True, strong=False) -> dict[str, torch.Tensor | None]:
    """Unit keys; q, k, v as views of (T,B,C) projections. ``strong``: e = w = 1 and keys that hardly differ."""
    B, H, T, K, V = shape
    q, k, v = draw_projections(B, H, T, K, K, V)
    k = torch.nn.functional.normalize(k * 0.05 + 1 if strong else k, dim=-1)
    gates = {name: torch.rand(B, H, T) for name in "few"}
    if strong:
        gates["e"] = gates["w"] = torch.full((B, H, T), 0.999)
        gates["f"] = gates["f"] * 0.02 + 0.98
    if resets:
        gates["f"] = gates["f"].masked_fill(torch.rand(B, H, T) < 0.1, 0.0)
        gates["e"][:, :, 2::7] = 0.0
    gates = {name: gate if name in present else None for name, gate in gates.items()}
    return dict(zip("qkv", (x.to(dtype) for x in (q, k, v)))) | gates | {"memory": torch.randn(B, H, K, V)}


def by_kernels(x: dict, dy, dmemory, precision: str, launch) -> dict[str, torch.Tensor]:
    with launching.use(launch):
        return by_kernels_in_use(x, dy, dmemory, precision, launch)


def by_kernels_in_use(x: dict, dy, dmemory, precision: str, launch) -> dict[str, torch.Tensor]:
    operands = [x["q"], x["k"], x["v"], x["f"], None, x["e"], x["w"], x["memory"]]
    y, final, saved = delta.forward(launch, Operands(*operands, precision))
    assert y.dtype == x["v"].dtype and y.stride() == torch.empty_like(x["v"]).stride()
    kept = delta.saved_like(Operands(*operands, precision))
    assert [(tuple(t.shape), t.dtype) for t in saved] == [(tuple(shape), dtype) for shape, dtype in kept]
    grads = delta.backward(launch, Operands(*operands, precision), saved, dy, dmemory)
    results = {"y": y, "final memory": final}
    for operand, grad in zip(operands, grads):
        assert (grad is None) == (operand is None)
        assert grad is None or (grad.dtype, grad.stride()) == (operand.dtype, torch.empty_like(operand).stride())
    return results | {f"gradient of {n}": g for n, g in zip("qkvfzew", grads) if g is not None} | {"gradient of memory": grads[7]}


def by_definition(x: dict, dy, dmemory) -> dict[str, torch.Tensor]:
    leaves = {name: None if x[name] is None else x[name].double().requires_grad_() for name in NAMES}
    coefficients = Coefficients(leaves["f"], None, leaves["e"], leaves["w"])
    y, final = step_form(leaves["q"], leaves["k"], leaves["v"], coefficients, leaves["memory"])
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    grads = torch.autograd.grad((y, final), list(present.values()), (dy.double(), dmemory.double()))
    return {"y": y.detach(), "final memory": final.detach()} | {f"gradient of {n}": g for n, g in zip(present, grads)}


def compare(shape, dtype=torch.float32, launch=None, precision=None, **options):
    x = draw(shape, dtype, **options)
    dy, dmemory = torch.randn(shape[0], shape[1], shape[2], shape[4]).to(dtype), torch.randn_like(x["memory"])
    precision = precision or PRECISION[dtype]
    assert_same(
        by_kernels(x, dy, dmemory, precision, launch or EmulatorLaunch()), by_definition(x, dy, dmemory), TOLERANCE[precision]
    )


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("dtype, policy, seed", [*((torch.bfloat16, *each) for each in SCHEDULES), (torch.float32, *SCHEDULES[-1])])
def test_any_schedule(one_thread, dtype, policy, seed):
    compare((2, 1, 70, 64, 64), dtype, EmulatorLaunch(policy, seed))


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize(
    "dtype, policy, seed", [*((BF16, *each) for each in SCHEDULES), *((kind, *SCHEDULES[-1]) for kind in (FP32, FP16))]
)
def test_few_sequences_in_parts(one_thread, dtype, policy, seed):
    device = EmulatorLaunch(policy, seed)
    device.blocks = 8
    compare((1, 2, 600, 64, 64) if dtype == BF16 else (1, 1, 520, 32, 40), dtype, device)
    assert [name for _, name, _ in device.calls] == ["delta_forward", "delta_adjoint", "delta_backward"]
    assert device.calls[-1][2]["FW_SIDES"] and all(device.calls[n][2]["FW_AHEAD"] for n in (0, 1))


@pytest.mark.parametrize(
    "key, dtype, blocks, capability, tiles",
    [
        (128, BF16, 1, (9, 0), (128, 128)),
        (128, FP16, 1, (9, 0), (128, 128)),
        (32, BF16, 1, (9, 0), (128, 64)),  # a memory that the one has saved for the other
        (128, BF16, 8, (9, 0), (64, 64)),  # few sequences
        (128, BF16, 1, (8, 9), (64, 64)),
    ],
)
def test_tiles_of_each_pass(one_thread, key, dtype, blocks, capability, tiles):
    device = EmulatorLaunch("prio", 1)
    device.blocks, device.capability = blocks, lambda _: capability
    compare((1, 1, 100, key, 128), dtype, device)
    assert tuple(made["FW_V"] for _, _, made in device.calls) == tiles


def test_a_device_with_less_shared_memory(one_thread):
    """One part at a time is in shared memory there, and one chunk at a time takes its gradients."""
    device = EmulatorLaunch("prio", 1)
    device.capability = lambda _: (8, 9)
    compare((1, 1, 70, 64, 64), torch.bfloat16, device)
    assert device.calls[1][2]["FW_STAGES"] == 1


@pytest.mark.parametrize("tokens, dtype", [(1, FP32), (5, BF16), (16, FP32), (17, FP32), (17, BF16), (33, BF16)])
def test_any_length(one_thread, dtype, tokens):
    compare((1, 2, tokens, 64, 64), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_repeated_keys_at_full_strength(one_thread, dtype):
    """The worst case of the erase: what is left of the inverse's digits decides."""
    compare((1, 1, 70, 64, 64), dtype, strong=True, resets=False)


# Widths of one tile and of several, keys shared by 2 and 4 warps, rows that start anywhere, every type.
@pytest.mark.parametrize(
    "key, value, dtype, present",
    [
        (16, 16, torch.float16, "few"),
        (20, 20, torch.bfloat16, "ew"),
        (32, 32, torch.float32, "e"),
        (128, 72, torch.bfloat16, "few"),
        (120, 50, torch.float32, "few"),
        (256, 16, torch.bfloat16, "few"),
        (48, 48, torch.bfloat16, "few"),  # units of 16 bytes that are no whole rows for a warp
        (512, 16, torch.float32, "ew"),
    ],
)
def test_widths(one_thread, key, value, dtype, present):
    compare((1, 1, 35, key, value), dtype, present=present)


def test_fp32_in_tf32(one_thread):
    compare((1, 2, 35, 32, 32), precision="tf32")


@pytest.mark.parametrize("rule, attention_norm", [("delta", False), ("gated_delta", False), ("delta", True)])
def test_public_op(emulate, rule, attention_norm):
    """Through fast_weight: padding, resets, a state, attention normalisation; and that the kernels ran."""
    launcher = emulate()
    batch, tokens = 2, 37
    x = draw((batch, 1, tokens, 64, 64), resets=False)
    q, k, v = (t.abs() + 0.1 if attention_norm else t for t in (x["q"], x["k"], x["v"]))
    leaves = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v, "beta": x["e"], "g": x["f"] * 0.5 + 0.5}
    leaves = {n: t.detach().requires_grad_() for n, t in leaves.items() if n != "g" or rule == "gated_delta"}
    masks = {"padding_mask": torch.rand(batch, tokens) < 0.2, "reset_mask": torch.rand(batch, tokens) < 0.1}

    def results(backend):
        gates = {n: leaves[n] for n in ("beta", "g") if n in leaves}
        y, state = fast_weight(*(leaves[n] for n in "qkv"), rule, gates, backend=backend, attention_norm=attention_norm, **masks)
        torch.manual_seed(1)
        grads = torch.autograd.grad((y, state.memory), list(leaves.values()), (torch.randn_like(y), torch.randn_like(state.memory)))
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(leaves, grads))

    assert_same(results("cuda"), results("recurrent"), 2e-5)
    passes = [name for name, *_ in launcher.calls]
    sums = 2 * attention_norm  # keys, and keys before a token
    assert passes == ["linear.cu"] * sums + ["delta.cu", "delta_backward.cu"] + ["linear_backward.cu"] * sums
    assert all(made["FW_ALIGNED"] for name, _, made in launcher.calls if name.startswith("linear"))


def test_attention_normalisation_keeps_bf16(emulate):
    """The kernels take bf16 rows, those that sum the keys fp32. Rounded before they are divided, the two parts of the gradient of q
    cancel less exactly."""
    launcher = emulate()
    x = draw((1, 2, 70, 64, 64), torch.bfloat16, resets=False)
    leaves = {n: (x[n].abs() + 0.1).bfloat16() for n in "qkv"} | {"beta": x["e"]}
    leaves["k"] = leaves["k"] / leaves["k"].norm(dim=-1, keepdim=True)

    def results(backend, dtype=None):
        own = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in leaves.items()}
        y, state = fast_weight(own["q"], own["k"], own["v"], "delta", {"beta": own["beta"]}, backend=backend, attention_norm=True)
        grads = torch.autograd.grad(y.double().square().sum() + state.memory.double().sum(), list(own.values()))
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(own, grads))

    got, want = results("cuda"), results("recurrent", torch.float64)
    assert_same(results("chunkwise"), want, 1e-2)  # without kernels reads are divided in fp32
    assert_same({"q": got.pop("q")}, {"q": want.pop("q")}, 5e-2)
    assert_same(got, want, 2e-2)
    kinds = {name: made["FW_IN"] for _, name, made in launcher.calls}
    kind = {"delta": "__nv_bfloat16", "linear": "float"}
    assert kinds == {f"{family}_{way}": kind[family] for family in kind for way in ("forward", "backward")}


@pytest.mark.parametrize("norm_of, runs", [("read", 1), ("read_and_erase", 2)])
def test_sums_of_keys_over_one_token(emulate, norm_of, runs):
    """Decoding: each sum that is divided by is one more step, and a key that nothing was written under erases nothing."""
    launcher, (q, k, v) = emulate(), torch.rand(3, 2, 2, 3, 16)
    k[:, :, 1, :8], k[:, :, 0, 8:] = 0, 0  # the second key is the first one that is written to its features
    call = dict(rule="delta", attention_norm=True, attention_norm_of=norm_of)
    beta, state, reads = torch.rand(2, 2, 3), None, []
    for t in range(3):
        token = [x[:, :, t : t + 1] for x in (q, k, v, beta)]
        y, state = fast_weight(*token[:3], gates={"beta": token[3]}, state=state, **call)
        reads.append(y)
    exact = [x.double() for x in (q, k, v, beta)]
    memory, n, want = torch.zeros(2, 2, 16, 16).double(), torch.zeros(2, 2, 16).double(), []
    for t in range(3):
        q, k, v, beta = (x[:, :, t] for x in exact)
        recalled = (n * k).sum(-1, keepdim=True)
        divisor = recalled + 1e-6 if norm_of == "read_and_erase" else torch.ones_like(recalled)
        erased = (k[:, :, None] @ memory).squeeze(2) / divisor if t > 0 else torch.zeros_like(v)
        memory = memory + beta[..., None, None] * k[..., None] * (v - erased)[:, :, None]
        n = n + k
        want.append((q[:, :, None] @ memory).squeeze(2) / ((n * q).sum(-1, keepdim=True) + 1e-6))
    assert_same({"y": torch.cat(reads, 2)}, {"y": torch.stack(want, 2)}, 1e-5)
    assert [name for _, name, _ in launcher.calls] == ["step"] * (runs + 1) * 3


def test_without_gradients_nothing_is_kept(one_thread):
    x = draw((1, 1, 35, 64, 64))
    operands = [x["q"], x["k"], x["v"], x["f"], None, x["e"], x["w"], x["memory"]]
    y, final, saved = delta.forward(EmulatorLaunch(), Operands(*operands, "exact"), keep=False)
    want_y, want_final, _ = delta.forward(EmulatorLaunch(), Operands(*operands, "exact"), keep=True)
    assert saved == () and torch.equal(y, want_y) and torch.equal(final, want_final)


def test_nothing_past_the_end(one_thread, monkeypatch):
    """Every tensor, outputs too, ends at an unmapped page."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded(empty_like(x).contiguous()))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **options: guarded(new_empty(x, *size, **options)))
    for dtype, width, present in ((torch.float32, 64, "few"), (torch.bfloat16, 20, "ew")):
        drawn = draw((1, 2, 19, width, width), dtype, present)
        x = {name: None if t is None else guarded(t.contiguous()) for name, t in drawn.items()}
        dy, dmemory = guarded(torch.randn_like(x["v"])), guarded(torch.randn_like(x["memory"]))
        got = by_kernels(x, dy, dmemory, PRECISION[dtype], EmulatorLaunch())
        assert_same(got, by_definition(x, dy, dmemory), TOLERANCE[PRECISION[dtype]])


def sanitized(key: int, value: int) -> None:
    launching.SHORTEST_PART = 32
    for processors in (1, 8):
        with emulated(sanitized_launch()) as launch:
            launch.blocks = processors
            compare((1, 1, 37 if processors == 1 else 70, key, value), torch.bfloat16, launch)
        assert ("delta_adjoint" in [name for _, name, _ in launch.calls]) == (processors > 1)


@pytest.mark.parametrize("key, message", [(513, "for keys up to 512 wide, not 513"), (512, None)])
def test_what_has_no_kernel(key, message):
    q, v = torch.ones(1, 1, 2, key), torch.ones(1, 1, 2, 16)
    with launching.use(Recorder()):
        reason = delta.supported(to_run(q, q, v, None, None, v[..., 0], None))
    assert reason is None if message is None else reason.startswith("backend='cuda' has ") and message in reason


@pytest.fixture
def asked_anew():
    """What the device has, now and in the tests after."""
    launching.look_up_held.cache_clear()
    yield
    launching.look_up_held.cache_clear()


@pytest.mark.parametrize(
    "capability, key, dtype, message",
    [
        ((7, 5), 64, torch.float16, "for compute capability 8.0 and higher only"),
        ((8, 0), 64, torch.float16, None),
        ((8, 9), 512, torch.float32, "torch.float32 keys 512 wide; this device has 101376"),
        ((8, 9), 512, torch.bfloat16, None),
    ],
)
def test_device_that_is_too_small(monkeypatch, asked_anew, capability, key, dtype, message):
    properties = SimpleNamespace(multi_processor_count=1)  # torch 2.6 does not tell the shared memory
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    q = SimpleNamespace(shape=(1, 1, 2, key), dtype=dtype, device=torch.device("cuda"))
    reason = delta.supported(to_run(q, q, q, None, None, None, None))
    assert reason is None if message is None else reason.startswith("backend='cuda' ") and message in reason


def launches(key: int, value: int, dtype: torch.dtype, precision: str, capability: tuple[int, int]) -> list[Launch]:
    """What would be launched on a device for a forward and a backward."""
    x, recorder = draw((1, 1, 2, key, value), dtype), Recorder(capability)
    by_kernels(x, x["v"], x["memory"], precision, recorder)
    return recorder.launches


# The narrowest and the widest key of each layout, values one column wider than a tile or two. Of the forward and of the backward
# tiles and their width; the warps that share 16 columns, the tokens in shared memory in the forward, those between saved memories.
@pytest.mark.parametrize(
    "dtype, key, value, ahead, back, layout",
    [
        (torch.bfloat16, 64, 65, (1, 96), (2, 48), (1, 64, 32)),
        (torch.bfloat16, 65, 65, (1, 96), (1, 96), (1, 64, 32)),
        (torch.bfloat16, 65, 129, (3, 48), (3, 48), (1, 64, 32)),
        (torch.bfloat16, 128, 129, (3, 48), (3, 48), (1, 64, 32)),
        (torch.bfloat16, 129, 33, (2, 32), (2, 32), (2, 32, 16)),
        (torch.bfloat16, 256, 33, (2, 32), (2, 32), (2, 32, 16)),
        (torch.bfloat16, 257, 33, (3, 16), (3, 16), (4, 16, 16)),
        (torch.bfloat16, 512, 33, (3, 16), (3, 16), (4, 16, 16)),
        (torch.float32, 64, 129, (3, 48), (3, 48), (1, 32, 16)),
        (torch.float32, 65, 129, (5, 32), (5, 32), (2, 32, 16)),
        (torch.float32, 128, 129, (5, 32), (5, 32), (2, 32, 16)),
        (torch.float32, 129, 33, (3, 16), (3, 16), (4, 16, 16)),
        (torch.float32, 512, 33, (3, 16), (3, 16), (4, 16, 16)),
    ],
)
def test_layouts(dtype, key, value, ahead, back, layout):
    """On a device with 227 KiB."""
    ksplit, span, part = layout
    forward, backward = launches(key, value, dtype, PRECISION[dtype], (9, 0))
    for launched, (tiles, width), tokens in ((forward, ahead, span), (backward, back, part)):
        defines = launched.defines
        assert (defines["FW_K"], defines["FW_V"], defines["FW_KSPLIT"]) == (launch.round_up(key, 16 * ksplit), width, ksplit)
        assert (defines["FW_PART"], launched.grid, launched.threads) == (part, (1, tiles), 2 * width * ksplit)
        assert defines["FW_SPAN"] == tokens


@pytest.mark.parametrize("capability, stages", [((8, 9), 1), ((9, 0), 2)])
def test_a_second_part_does_not_take_the_place_of_a_second_block(capability, stages):
    """Two parts of 16 columns would leave room for two blocks in 100 KiB, but for the 1 KiB of each block that is CUDA's."""
    q, e, memory = torch.empty(1, 1, 33, 64).bfloat16(), torch.empty(1, 1, 33), torch.empty(1, 1, 64, 16)
    recorder = Recorder(capability)
    with launching.use(recorder):
        given = (q, q, q[..., :16], None, None, e, None, memory)
        delta.backward(recorder, Operands(*given, "bf16"), (memory,), q[..., :16], memory)
    assert [launched.defines["FW_STAGES"] for launched in recorder.launches] == [stages]


@pytest.mark.parametrize("tokens, parts", [(1, 1), (32, 1), (33, 2), (64, 2)])
def test_a_memory_is_saved_before_each_part(tokens, parts):
    x = draw((2, 3, tokens, 64, 20), torch.bfloat16)
    with launching.use(Recorder()):
        given = (x["q"], x["k"], x["v"], x["f"], None, x["e"], x["w"], x["memory"])
        assert delta.saved_like(Operands(*given, "bf16")) == [((6 * parts, 32, 64), torch.bfloat16)]


MAIN = [(torch.bfloat16, "bf16"), (torch.float32, "exact")]
COMPILED = [(arch, 64, *MAIN[0]) for arch in ARCHITECTURES if arch != "75"] + [("90", 64, *MAIN[1]), ("80", 128, *MAIN[1])]
COMPILED += [("90", width, *MAIN[0]) for width in (32, 128)]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("arch, width, dtype, precision", long_ones(COMPILED))
def test_compiles_without_spills(arch, width, dtype, precision):
    """Two blocks fit a multiprocessor up to 64 columns."""
    capability = (int(arch[:-1]), int(arch[-1]))
    for launched in launches(width, width, dtype, precision, capability):
        defines, found = launched.defines, compile_check(launched.source, launched.defines, arch)[launched.kernel]
        assert found["spill_stores"] == found["spill_loads"] == found["stack"] == 0, (launched.kernel, found)
        held = launch.SHARED_MORE.get(capability, launch.SHARED)
        assert defines["FW_SHARED"] <= held
        if arch == "90" and width <= 64:
            assert defines["FW_SHARED"] <= held // 2 and found["registers"] * launched.threads <= 32768, (launched.kernel, found)
            assert defines.get("FW_STAGES", 2) == 2
