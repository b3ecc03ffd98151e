"""Feature maps inside the kernels, on the emulator: outputs, memories and the gradients of q and k as they were before the map."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from hostcuda import EmulatorLaunch, Recorder, guarded, sanitized_launch
from hostcuda.hostemu import KERNELS
from hostcuda.nvrtc import compile_check
from support.draws import assert_same, draw_projections
from support.emulated import emulated

from fw_fairseq import feature_maps
from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers.fast_weight import FastWeight
from fw_fairseq.ops import RowMap, fast_weight, native
from fw_fairseq.ops.kernels import decay, delta, launch, linear
from fw_fairseq.ops.kernels import step as cuda_step
from fw_fairseq.ops.kernels.family import Operands
from fw_fairseq.ops.recurrent import step as one_step
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients

FAMILIES = {"linear": linear, "decay": decay, "delta": delta}
TOLERANCE = {"exact": 2e-5, "fp16": 2e-3, "bf16": 2e-2}
PRECISION = {torch.float32: "exact", torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMES = ("q", "k", "v", "f", "z", "e", "w", "memory")


def draw(row_map: RowMap, shape, dtype, present: str) -> dict[str, torch.Tensor | None]:
    """shape (B,H,T,D,V); present: the coefficients, F for one decay gate per channel. Some coordinates are 0, and rows of
    dpfp and of the identity where a norm divides by nothing there."""
    B, H, T, d, V = shape
    key = row_map.width(d)
    size = {"f": (), "F": (key,), "z": (V,), "e": (), "w": ()}
    x = {name: projection.to(dtype) for name, projection in zip("qkv", draw_projections(B, H, T, d, d, V))}
    x |= {name.lower(): torch.rand(B, H, T, *size[name]) * 0.9 + 0.05 for name in present}
    x |= {"memory": torch.randn(B, H, key, V)}
    x["q"][:, :, ::6, 1::5] = x["k"][:, :, 2::6, ::5] = 0  # where maps have a kink
    if (row_map.name, row_map.norm) in (("dpfp", "sum"), ("identity", "l2"), ("identity", "l2_eps")):
        x["q"][:, :, 3:4] = x["k"][:, :, 5:6] = 0
    return {name: x.get(name) for name in NAMES}


def compare(family: str, row_map: RowMap, shape, dtype, present: str, launch) -> None:
    kernels, precision = FAMILIES[family], PRECISION[dtype]
    x = {name: None if t is None else guarded(t) for name, t in draw(row_map, shape, dtype, present).items()}
    dy, dmemory = guarded(torch.randn_like(x["v"])), guarded(torch.randn_like(x["memory"]))
    y, final, saved = kernels.forward(launch, Operands(*x.values(), precision, row_map=row_map))
    kept = kernels.saved_like(Operands(*x.values(), precision, row_map))
    assert [(tuple(t.shape), t.dtype) for t in saved] == [(tuple(shape), dtype) for shape, dtype in kept]
    grads = kernels.backward(launch, Operands(*x.values(), precision, row_map), saved, dy, dmemory)
    actual = {"y": y, "final memory": final} | {f"gradient of {n}": g for n, g in zip(x, grads) if g is not None}

    leaves = {name: None if t is None else t.double().requires_grad_() for name, t in x.items()}
    features = (row_map(leaves["q"]), row_map(leaves["k"]))
    y, final = step_form(*features, leaves["v"], Coefficients(*(leaves[n] for n in "fzew")), leaves["memory"])
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    grads = torch.autograd.grad((y, final), list(present.values()), (dy.double(), dmemory.double()))
    expected = {"y": y.detach(), "final memory": final.detach()} | {f"gradient of {n}": g for n, g in zip(present, grads)}
    assert_same(actual, expected, TOLERANCE[precision])


# Each map and norm, rows that start at 16 bytes or anywhere, several tiles of V, every type.
@pytest.mark.cases_in_ci(6)
@pytest.mark.parametrize(
    "family, row_map, d, value, dtype, present",
    [
        ("decay", RowMap("dpfp", 2, "sum"), 24, 40, torch.bfloat16, "Fzw"),
        ("linear", RowMap("identity", 1, "l2"), 20, 20, torch.float32, "f"),
        ("linear", RowMap("relu", 1, "l2"), 17, 16, torch.float16, ""),
        ("delta", RowMap("identity", 1, "l2_eps"), 20, 20, torch.float32, "fe"),
        ("linear", RowMap("dpfp", 2, "l2_eps"), 16, 16, torch.float32, "f"),
        ("delta", RowMap("dpfp", 3, "sum"), 24, 40, torch.bfloat16, "few"),
        ("delta", RowMap("dpfp", 4, "l2"), 7, 16, torch.float32, "few"),
        ("delta", RowMap("elu", 1, "sum"), 16, 16, torch.float16, "ew"),
        ("decay", RowMap("elu", 1, "none"), 16, 16, torch.float16, "F"),
        ("decay", RowMap("relu", 1, "sum"), 22, 16, torch.float32, "F"),
        ("linear", RowMap("dpfp", 1, "none"), 16, 16, torch.float32, "fw"),
        ("delta", RowMap("identity", 1, "l2"), 64, 40, torch.bfloat16, "e"),
    ],
)
def test_equals_the_map_and_the_steps(one_thread, family, row_map, d, value, dtype, present):
    compare(family, row_map, (1, 2, 70, d, value), dtype, present, EmulatorLaunch("prio", 1))


@pytest.mark.parametrize(
    "family, dtype, present",
    [
        ("linear", torch.bfloat16, "fw"),
        ("delta", torch.bfloat16, "few"),
        ("delta", torch.float16, "fe"),
        ("decay", torch.bfloat16, "Fzw"),
    ],
)
def test_few_sequences_in_parts(one_thread, family, dtype, present):
    """What is left of each part is found from the rows, too."""
    device = EmulatorLaunch("prio", 2)
    device.blocks = 8
    compare(family, RowMap("dpfp", 1, "sum"), (1, 1, 530, 10, 64), dtype, present, device)
    kernels = ["walk", "forward", "walk", "backward"] if family == "decay" else ["forward", "adjoint", "backward"]
    assert [name for _, name, _ in device.calls] == [f"{family}_{kernel}" for kernel in kernels]


def sanitized() -> None:
    with emulated(sanitized_launch()) as launch:
        for family, present in (("linear", "f"), ("delta", "fe")):
            compare(family, RowMap("dpfp", 1, "sum"), (1, 1, 37, 10, 16), torch.bfloat16, present, launch)


@pytest.mark.parametrize("rule, norm, attention_norm", [("gated", "none", True), ("delta", "sum", False)])
def test_public_op(emulate, rule, norm, attention_norm):
    """Padding, where features of 0 are not 0, resets and attention normalisation."""
    launcher, row_map, batch, tokens = emulate(), RowMap("elu", 1, norm), 2, 37
    x = draw(row_map, (batch, 1, tokens, 16, 15), torch.float32, "")
    leaves = {n: x[n].detach().requires_grad_() for n in "qkv"}
    gates = {n: torch.rand(batch, 1, tokens).requires_grad_() for n in RULES[rule].gates}
    leaves |= gates
    masks = {"padding_mask": torch.rand(batch, tokens) < 0.2, "reset_mask": torch.rand(batch, tokens) < 0.1}

    def results(backend):
        call = dict(gates=gates, backend=backend, attention_norm=attention_norm, feature_map=row_map, **masks)
        y, state = fast_weight(*(leaves[n] for n in "qkv"), rule, **call)
        torch.manual_seed(1)
        grads = torch.autograd.grad((y, state.memory), list(leaves.values()), (torch.randn_like(y), torch.randn_like(state.memory)))
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(leaves, grads))

    assert_same(results("cuda"), results("recurrent"), 2e-5)
    assert [call[2].get("FW_MAP") for call in launcher.calls if call[1] != "divided_backward"] == [2, 2]


@pytest.fixture
def added(monkeypatch):
    """A map and a norm that no kernel has, added from outside."""
    monkeypatch.setitem(feature_maps.ROW_MAPS, "square", feature_maps.Numbered(None, lambda x, nu: x.square()))
    monkeypatch.setitem(
        feature_maps.NORMS,
        "largest",
        feature_maps.Numbered(None, lambda features: features / features.abs().amax(-1, keepdim=True).clamp(min=1e-6)),
    )
    launch.log_once.cache_clear()


ADDED = [(RowMap("square"), "feature map 'square'"), (RowMap("elu", 1, "largest"), "norm 'largest'")]


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("row_map, lacking", ADDED)
def test_what_the_kernels_lack_runs_before_them(emulate, added, caplog, row_map, lacking, tokens):
    """ "auto" gives the numbers of PyTorch and one line in the log; "cuda" refuses with the same reason."""
    launcher, call = emulate(), dict(rule="gated", gates={"g": torch.rand(2, 1, tokens)}, feature_map=row_map)
    q, k, v = (torch.randn(2, 1, tokens, 8) for _ in range(3))
    want, end = fast_weight(q, k, v, **call, backend="recurrent")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y, state = fast_weight(q, k, v, **call)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.memory, end.memory, rtol=1e-4, atol=1e-5)
    assert len(launcher.calls) == 2 and not any("FW_MAP" in macros for _, _, macros in launcher.calls)
    [record] = caplog.records
    assert record.message.startswith(f"backend='cuda' has no {lacking} in its kernels, which have: ")
    assert record.message.endswith("; the map runs in PyTorch, before the kernels")
    with pytest.raises(ValueError, match=f"^backend='cuda' has no {lacking} in its kernels, which have: "):
        fast_weight(q, k, v, **call, backend="cuda")


@pytest.mark.parametrize("row_map, lacking", ADDED)
def test_what_the_kernels_lack_is_never_launched(emulate, added, row_map, lacking):
    """Not by the kernels' own functions either, whoever calls them."""
    launcher, x = emulate(), draw(row_map, (1, 1, 17, 8, 8), torch.float32, "few")
    with pytest.raises(ValueError, match=lacking):
        delta.forward(launcher, Operands(*x.values(), "exact", row_map=row_map))
    with pytest.raises(ValueError, match=lacking):
        linear.forward(launcher, Operands(*(x | {"e": None}).values(), "exact", row_map=row_map))
    with pytest.raises(ValueError, match=lacking):
        cuda_step.step(
            **{name: None if t is None else t[:, :, 0] for name, t in x.items() if name != "memory"},
            memory=x["memory"],
            row_map=row_map,
        )
    assert not launcher.calls


def test_the_numbers_of_maps_and_norms_are_those_of_the_sources():
    """In the macros of row_map.cuh, 0 for features as they are, and in the enumerations of decode.cpp."""
    maps = {name.upper(): entry.number for name, entry in feature_maps.ROW_MAPS.items()}
    norms = {name.upper(): entry.number for name, entry in feature_maps.NORMS.items()}
    macros = dict(re.findall(r"#define FW_([A-Z0-9_]+) (\d)", (KERNELS / "row_map.cuh").read_text().split("static_assert")[0]))
    assert {name: int(n) for name, n in macros.items()} == {"MAP": 0} | maps | {n: x for n, x in norms.items() if n != "NONE"}
    enums = re.findall(r"enum (Map|Norm) \{ (\w+(?: = 1)?), ([^}]*) \};", (native.FOLDER / "decode.cpp").read_text())
    for (kind, first, rest), expected in zip(enums, (maps, norms)):
        start = 1 if first.endswith("= 1") else 0
        names = [first.split()[0], *rest.split(", ")]
        assert {name: start + i for i, name in enumerate(names)} == expected, kind
    assert [kind for kind, *_ in enums] == ["Map", "Norm"]


@pytest.mark.parametrize(
    "macros, reason", [({"FW_MAP": 5, "FW_NORM": 0}, "FW_MAP is no map"), ({"FW_MAP": 1, "FW_NORM": 4}, "FW_NORM is no norm")]
)
def test_unknown_numbers_do_not_compile(macros, reason):
    x = torch.empty(1, 1)
    macros = cuda_step.defines(torch.float32, None, None, None, x, 8) | {"FW_D": 8, "FW_NU": 1} | macros
    with pytest.raises(RuntimeError, match=reason):
        compile_check("step.cu", macros, "80")


@pytest.mark.parametrize(
    "row_map", [RowMap("dpfp", 3, "sum"), RowMap("elu", 1, "l2"), RowMap("relu"), RowMap("identity", 1, "l2_eps")]
)
def test_decoding_kernel(emulate, row_map):
    emulate("prio", 1, bounds=True)
    x = {name: None if t is None else t.squeeze(2) for name, t in draw(row_map, (2, 2, 1, 10, 40), torch.float32, "few").items()}
    y, memory = cuda_step.step(**x, row_map=row_map)
    x |= {"q": row_map(x["q"]), "k": row_map(x["k"])}
    want_y, want_memory = one_step(x.pop("memory"), **x)
    torch.testing.assert_close(y, want_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(memory, want_memory, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, macro", [("dpfp", 4), ("relu", 3), ("favor", None)])
def test_layer(emulate, name, macro):
    """What has parameters stays outside; random features do altogether."""
    mixer = FastWeight(16, 2, FastWeightConfig(update_rule="delta", feature_map=name, feature_norm="sum")).eval()
    x = torch.randn(1, 3, 16)
    with torch.no_grad():
        mixer.feature_map.redraw(keep=True)
        want, _ = mixer(x)
        launcher = emulate()
        y, _ = mixer(x)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    assert [(call[1], call[2].get("FW_MAP")) for call in launcher.calls] == [("step", macro)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_layer_can_be_moved_16_bytes_at_a_time(emulate, dtype):
    """Whatever the number of heads; a layer without kernels gives the same numbers and gradients."""
    mixer = FastWeight(40, 5, FastWeightConfig(update_rule="gated", feature_map="elu")).to(dtype)
    x = torch.randn(18, 2, 40, dtype=dtype)

    def results():
        y, state = mixer(x)
        grads = torch.autograd.grad(y.square().sum() + state.memory.sum(), list(mixer.parameters()))
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(dict(mixer.named_parameters()), grads))

    want, launcher = results(), emulate()
    assert_same(results(), want, 1e-4 if dtype == torch.float32 else 5e-2)
    assert [call[2]["FW_ALIGNED"] for call in launcher.calls] == [1, 1] and mixer.in_proj.out_features % 8


def test_rows_that_start_anywhere_are_told_once(emulate, caplog):
    emulate()
    launch.log_once.cache_clear()
    q, k, v = (torch.randn(1, 1, 17, 13) for _ in range(3))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            fast_weight(q, k, v, "sum", backend="cuda")
    [record] = caplog.records
    assert record.message.startswith("rows of q, k or v do not start at multiples of 16 bytes; ")


def launches(family: str, row_map: RowMap, d: int, value: int, dtype: torch.dtype, present: str):
    """(file, kernel, macros) of a forward and a backward."""
    recorder, kernels = Recorder(), FAMILIES[family]
    x = draw(row_map, (1, 1, 17, d, value), dtype, present)
    _, _, saved = kernels.forward(recorder, Operands(*x.values(), PRECISION[dtype], row_map=row_map))
    kernels.backward(recorder, Operands(*x.values(), PRECISION[dtype], row_map), saved, x["v"], x["memory"])
    return [launched[:3] for launched in recorder.launches]


@pytest.mark.parametrize("family, present, needed", [("linear", "f", 88192), ("delta", "few", 72880)])
def test_shared_memory_of_a_documented_map(family, present, needed):
    """The least that the backward takes, as docs/kernels.md has it for D = 64, nu = 3 and V = 64 in bf16."""
    row_map = RowMap("dpfp", 3, "sum")
    x = draw(row_map, (1, 1, 17, 64, 64), torch.bfloat16, present)
    given = Operands(*x.values(), "bf16", row_map)
    kernel = linear.LinearKernel.of(given) if family == "linear" else delta.DeltaKernel.of(given)
    least = kernel.backward_bytes(kernel.back, 1) if family == "linear" else kernel.backward_bytes(1)
    assert least == needed <= kernel.held == 99 * 1024


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize(
    "arch, family, nu, d, present",
    [
        ("80", "linear", 1, 64, "f"),
        ("90", "decay", 1, 32, "Fz"),
        ("120", "delta", 3, 64, "few"),
    ],
)
def test_compiles_without_spills(arch, family, nu, d, present):
    for source, kernel, defines in launches(family, RowMap("dpfp", nu, "sum"), d, 64, torch.bfloat16, present):
        found = compile_check(source, defines, arch)[kernel]
        most = 400 if kernel == "decay_backward" else 0  # bytes
        assert max(found["spill_stores"], found["spill_loads"], found["stack"]) <= most, (kernel, found)
        assert defines["FW_SHARED"] <= launch.SHARED
