"""A rule of a new shape is one entry: registered from outside, it has everything that the operation has for its own rules."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.draws import assert_same, draw_gates, draw_inputs
from support.extension import KEYED, Square, keyed_write

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers import FastWeight
from fw_fairseq.ops import FastWeightState, fast_weight
from fw_fairseq.ops.chunkwise.recall import recall
from fw_fairseq.ops.factored import Factors
from fw_fairseq.ops.kernels import launch
from fw_fairseq.ops.kernels.recurrence import FAMILIES
from fw_fairseq.ops.parallel.parts import run_parts
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (2, 2, 75, 6, 5)
TESTS = Path(__file__).parents[1]
DRIVEN = ["ops/test_fast_weight.py", "ops/test_rules.py", "ops/test_factored.py", "ops/test_recall.py", "ops/test_emptied.py",
          "ops/test_feature_maps.py", "ops/test_workers.py", "kernels/test_cuda_parts.py", "tools/test_explain.py"]  # fmt: skip


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(RULES, "keyed", KEYED)
    monkeypatch.setitem(FEATURE_MAPS, "square", Square)


def draw(dtype=torch.float64, shape=SHAPE):
    return draw_inputs(shape, dtype), draw_gates(KEYED, shape, dtype)


def by_loops(q, k, v, f, beta, memory=None, padding=None, resets=None):
    """The equation in float64, token by token: y, and the memory after the last one."""
    q, k, v, f, beta = (x.double() for x in (q, k, v, f, beta))
    outputs, memories = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            now = q.new_zeros(k.shape[3], v.shape[3]) if memory is None else memory[b, h].double()
            for t in range(q.shape[2]):
                if resets is not None and resets[b, t]:
                    now = torch.zeros_like(now)
                padded = padding is not None and padding[b, t]
                now = now if padded else keyed_write(now, k[b, h, t], v[b, h, t], f[b, h, t], beta[b, h, t])
                outputs.append(now.mT @ q[b, h, t] * (0.0 if padded else 1.0))
            memories.append(now)
    return torch.stack(outputs).unflatten(0, q.shape[:3]), torch.stack(memories).unflatten(0, q.shape[:2])


def with_gradients(leaves, y, memory):
    gradients = torch.autograd.grad(y.double().square().sum() + memory.double().sin().sum(), list(leaves.values()))
    return {"y": y.detach(), "memory": memory.detach()} | dict(zip(leaves, gradients))


@pytest.mark.parametrize("backend", ["recurrent", "chunkwise", "auto"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 5e-5)])
def test_against_the_equation(backend, dtype, tolerance):
    """From a state, with padding, with texts that begin within a chunk, and with gates of exactly 0 in some channels."""
    inputs, gates = draw(dtype)
    f = gates["f"].detach().clone()
    f[0, :, 45, 2] = f[1, :, 60] = 0
    gates["f"] = f.requires_grad_()
    memory = torch.randn(2, 2, 6, 5, dtype=dtype).requires_grad_()
    padding, resets = torch.zeros(2, 75, dtype=torch.bool), torch.zeros(2, 75, dtype=torch.bool)
    padding[1, [0, 33, 34, 74]] = resets[0, [10, 11]] = resets[1, 50] = True
    leaves = inputs | gates | {"memory before": memory}
    options = dict(padding_mask=padding, reset_mask=resets, backend=backend)
    y, state = fast_weight(**inputs, rule="keyed", gates=gates, state=FastWeightState(memory), **options)
    want = by_loops(*inputs.values(), **gates, memory=memory, padding=padding, resets=resets)
    assert_same(with_gradients(leaves, y, state.memory), with_gradients(leaves, *want), tolerance)


def test_parts_and_decoding():
    inputs, gates = draw(shape=(1, 2, 40, 6, 5))
    want, last = by_loops(*inputs.values(), **gates)
    coefficients = KEYED.coefficients(**gates)
    y, memory = run_parts(step_form, 3, *inputs.values(), coefficients, torch.zeros_like(last))
    torch.testing.assert_close((y, memory), (want, last))
    state, factored = None, []
    for t in range(40):
        now = {name: gate[:, :, t : t + 1] for name, gate in gates.items()}
        y, state = fast_weight(*(x[:, :, t : t + 1] for x in inputs.values()), "keyed", now, state, decoding=True)
        factored.append(isinstance(state.memory, Factors))
        torch.testing.assert_close(y, want[:, :, t : t + 1])
    assert factored == [True] * 2 + [False] * 38
    torch.testing.assert_close(state.memory, last)


def test_recall_reads_the_same_without_a_memory():
    inputs, gates = draw()
    q, k, v = inputs.values()
    want, _ = by_loops(*inputs.values(), **gates)
    y, weights = recall(q[:, :, -1:], k, v, KEYED.coefficients(**gates))
    torch.testing.assert_close(y, want[:, :, -1:])
    torch.testing.assert_close(weights @ v, y)


def test_explain_says_what_the_last_token_read():
    mixer = FastWeight(16, 2, FastWeightConfig(update_rule="keyed", feature_map="square", feature_norm="sum"))
    mixer.out_proj, x = torch.nn.Identity(), torch.randn(40, 1, 16)
    answer = torch.einsum("ht,htv->hv", mixer.explain(x)["read"], mixer.operands(x).v[0]).flatten()
    torch.testing.assert_close(answer, mixer(x)[0][-1, 0], rtol=1e-4, atol=1e-5)


def test_a_kernel_that_knows_its_coefficients_runs_it(emulate):
    """All tokens and their gradients, and one token: no family names the rule."""
    inputs, gates = draw(torch.float32, (1, 2, 35, 16, 16))
    want, last = by_loops(*inputs.values(), **gates)
    launcher = emulate()
    y, state = fast_weight(**inputs, rule="keyed", gates=gates, backend="cuda")
    found = with_gradients(inputs | gates, y, state.memory)
    assert_same(found, with_gradients(inputs | gates, want, last), 2e-5)
    assert [kernel for _, kernel, _ in launcher.calls] == ["channel_delta_forward", "channel_delta_backward"]
    with torch.no_grad():
        first = [x[:, :, :1] for x in inputs.values()]
        y, _ = fast_weight(*first, "keyed", {n: gate[:, :, :1] for n, gate in gates.items()}, backend="cuda")
    torch.testing.assert_close(y.double(), want[:, :, :1], rtol=1e-5, atol=1e-5)


def test_without_a_kernel_it_runs_in_pytorch_and_says_so_once(emulate, caplog, monkeypatch):
    """Learning, and one token without gradients, where a kernel may know the rule: never as another rule."""
    inputs, gates = draw(torch.float32)
    want, last = by_loops(*inputs.values(), **gates)
    emulate()
    monkeypatch.delitem(FAMILIES, "channel_delta")
    launch.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y, state = fast_weight(**inputs, rule="keyed", gates=gates)
    assert_same({"y": y, "memory": state.memory}, {"y": want, "memory": last}, 2e-5)
    assert len([r for r in caplog.records if "running the PyTorch form instead" in r.message]) == 1
    with pytest.raises(ValueError, match=r"^backend='cuda' "):
        fast_weight(**inputs, rule="keyed", gates=gates, backend="cuda")
    with torch.no_grad():
        first = [x[:, :, :1] for x in inputs.values()]
        y, _ = fast_weight(*first, "keyed", {n: gate[:, :, :1] for n, gate in gates.items()})
    torch.testing.assert_close(y.double(), want[:, :, :1], rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_everything_that_goes_through_the_registries():
    """The operation's own tests, in a process where the rule and the map were there before them."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", "keyed or square", *DRIVEN]
    environment = os.environ | {"PYTEST_PLUGINS": "support.extension", "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 58 and "failed" not in result.stdout
