"""Both kernel families without erase on the emulator: the properties that they share."""

from __future__ import annotations

import pytest
import torch
from hostcuda import EmulatorLaunch, guarded, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, compile_check
from support.cuda_scan import GATES, TOLERANCE, by_definition, by_kernels, compare, draw, launches
from support.draws import assert_same
from support.emulated import emulated

from fw_fairseq.feature_maps import AS_IS
from fw_fairseq.ops.kernels import channel_delta, decay, delta, launch, linear
from fw_fairseq.ops.kernels.family import Operands

each_family = pytest.mark.parametrize("family, rule", [(linear, "gated"), (decay, "decay")], ids=["linear", "decay"])


@each_family
@pytest.mark.parametrize("gates", GATES)
def test_any_gate(one_thread, family, rule, gates):
    """Of 0, near 0 and near 1: the gradients of the gates too, over many chunks."""
    compare(family, rule, (1, 1, 200, 32, 32), gates=gates)


@each_family
@pytest.mark.parametrize("gates", ["uniform", "lone", "both extremes"])
def test_any_gate_bf16(one_thread, family, rule, gates):
    compare(family, rule, (1, 1, 200, 64, 64), torch.bfloat16, gates=gates)


@each_family
def test_tf32(one_thread, family, rule):
    compare(family, rule, (1, 1, 37, 32, 32), precision="tf32")


@pytest.mark.cases_in_ci(1)
@each_family
def test_nothing_outside_the_tensors(one_thread, family, rule):
    x = {name: None if t is None else guarded(t) for name, t in draw(rule, (1, 1, 19, 20, 18)).items()}
    dy, dmemory = guarded(torch.randn_like(x["v"])), guarded(torch.randn_like(x["memory"]))
    actual = by_kernels(family, x, dy, dmemory, "exact", EmulatorLaunch(bounds=True))
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["exact"])


@each_family
def test_without_gradients_nothing_is_kept(one_thread, family, rule):
    x = draw(rule, (1, 1, 70, 32, 32)).values()
    y, final, saved = family.forward(EmulatorLaunch(), Operands(*x, "exact"), keep=False)
    want_y, want_final, _ = family.forward(EmulatorLaunch(), Operands(*x, "exact"), keep=True)
    assert saved == () and torch.equal(y, want_y) and torch.equal(final, want_final)


@pytest.mark.parametrize("rule", ["gated", "decay"])
def test_symbolic_shapes(emulate, rule):
    emulate()
    q, k, v, f, z, e, w, memory = draw(rule, (1, 2, 17, 32, 32)).values()
    family = "decay" if rule == "decay" else "linear"
    torch.library.opcheck(
        torch.ops.fw_fairseq.scan.default,
        (q, k, v, f, z, e, w, memory.requires_grad_(), None, 0.0, 0.0, family, "exact", True, True, *AS_IS),
    )


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("rule", ["gated", "gated_delta", "decay", "kda"])
@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
def test_kernels_of_parts_compile_without_spills(arch, rule):
    family = {"gated": linear, "gated_delta": delta, "decay": decay, "kda": channel_delta}[rule]
    passes = launches(family, rule, (1, 1, 512, 64, 64), torch.bfloat16, (int(arch[:-1]), int(arch[-1])), processors=8)
    for walk in [launched for launched in passes if launched.kernel.endswith(("adjoint", "walk"))]:
        found = compile_check(walk.source, walk.defines, arch)[walk.kernel]
        assert found["spill_stores"] == found["spill_loads"] == found["stack"] == 0, found


def sanitized() -> None:
    launch.SHORTEST_PART = 32
    cases = ((linear, "gated", 70, 32, 1), (decay, "decay", 33, 64, 1), (decay, "decay", 130, 20, 8))
    for family, rule, tokens, width, processors in cases:
        with emulated(sanitized_launch()) as launcher:
            launcher.blocks = processors
            x = draw(rule, (1, 1, tokens, width, width), torch.bfloat16)
            x["f"][:, :, 3] = 0.0  # one chunk of several rounds, others of one
            by_kernels(family, x, torch.randn_like(x["v"]), torch.randn_like(x["memory"]), "bf16", launcher)
            assert len(launcher.calls) == (4 if processors > 1 else 2)
