"""On a device: what emulation cannot show. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch
from support import cuda_pooling, cuda_sru
from support.draws import assert_same, draw_gates, draw_inputs
from support.kernel_rules import CHANNEL_RULES, KERNEL_RULES

from fw_fairseq.ops import FastWeightState, RowMap, fast_weight
from fw_fairseq.ops.kernels import step as cuda_step
from fw_fairseq.ops.kernels.compiler import CupyLaunch
from fw_fairseq.ops.recurrent import step as one_step
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.fixture(autouse=True)
def device():
    if reason := CupyLaunch().why_not(torch.device("cuda")):
        pytest.skip(reason)
    return torch.device("cuda")


def on_device(tensors, dtype=None):
    return {name: x.detach().to("cuda", dtype or x.dtype).requires_grad_() for name, x in tensors.items()}


def within(gates, rule):
    """In fp32, and of length 1 where the rule wants that: over 150 tokens longer ones fill the memory beyond its range."""
    unit = {name for name, gate in RULES[rule].gates.items() if gate.form == "unit"}
    return {n: (torch.nn.functional.normalize(x, dim=-1) if n in unit else x).detach().float() for n, x in gates.items()}


MAPS = [RowMap("dpfp", 1, "sum"), RowMap("dpfp", 3, "sum"), RowMap("elu", 1, "sum"), RowMap("relu", 1, "l2")]
CASES = [(rule, width, RowMap()) for rule in (*KERNEL_RULES, *CHANNEL_RULES) for width in (16, 48, 64, 96, 100, 128)]
CASES += [(rule, 64, row_map) for rule in ("gated", "delta") for row_map in MAPS]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rule, width, row_map", CASES)
def test_kernels_equal_steps(rule, dtype, width, row_map):
    """Outputs, states and gradients, against float64 steps on the same device; also with maps inside the kernels."""
    shape, key = (2, 2, 150, width, width), row_map.width(width)
    leaves = on_device(draw_inputs(shape, dtype)) | on_device(within(draw_gates(RULES[rule], (*shape[:3], key, width)), rule))
    leaves["memory"] = torch.randn(*shape[:2], key, width, device="cuda").requires_grad_()

    def results(leaves, backend):
        gates = {name: leaves[name] for name in RULES[rule].gates}
        call = dict(rule=rule, gates=gates, state=FastWeightState(leaves["memory"]), backend=backend, feature_map=row_map)
        y, state = fast_weight(leaves["q"], leaves["k"], leaves["v"], **call)
        generator = torch.Generator().manual_seed(1)
        adjoints = [torch.randn(x.shape, generator=generator).to(x) for x in (y, state.memory)]
        gradients = torch.autograd.grad((y, state.memory), list(leaves.values()), adjoints)
        return {"y": y.detach(), "memory": state.memory.detach()} | {f"d{n}": g for n, g in zip(leaves, gradients)}

    assert_same(results(leaves, "cuda"), results(on_device(leaves, torch.float64), "recurrent"), TOLERANCE[dtype])


@pytest.mark.parametrize("rule", ["sum", "delta", "decay"])
def test_long_sums_in_fp32(rule):
    """The memory of 8192 tokens is as accurate as fp32, though tensor cores cut off their sums."""
    shape = (1, 2, 8192, 64, 64)
    leaves = {name: x.detach().abs().to("cuda") for name, x in draw_inputs(shape, torch.float32).items()}
    leaves["k"] = torch.nn.functional.normalize(leaves["k"], dim=-1)
    gates = {name: x.detach().to("cuda") for name, x in draw_gates(RULES[rule], shape, torch.float32).items()}
    if rule == "decay":  # keeps everything
        gates = {name: torch.ones_like(x) for name, x in gates.items()}
    _, state = fast_weight(**leaves, rule=rule, gates=gates, backend="cuda")
    exact = {name: x.double() for name, x in leaves.items()}
    _, expected = fast_weight(**exact, rule=rule, gates={n: g.double() for n, g in gates.items()}, backend="chunkwise")
    assert (state.memory - expected.memory).abs().max() < 5e-6 * expected.memory.abs().max()


def draw_step(dtype=torch.float32):
    x = {name: torch.randn(3, 2, 64, device="cuda").to(dtype) for name in "qkv"}
    gates = {name: torch.rand(3, 2, device="cuda") for name in "few"}
    return x | {"f": gates["f"], "z": None, "e": gates["e"], "w": gates["w"], "memory": torch.randn(3, 2, 64, 64, device="cuda")}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decoding_kernel(dtype):
    inputs = draw_step(dtype)
    y, memory = cuda_step.step(**inputs)
    exact = {name: None if x is None else x.double() for name, x in inputs.items()}
    want_y, want_memory = one_step(exact.pop("memory"), **exact)
    torch.testing.assert_close(memory.double(), want_memory, rtol=1e-5, atol=1e-5)
    assert (y.double() - want_y).abs().max() <= TOLERANCE[dtype] * want_y.abs().max()


def test_decoding_in_a_cuda_graph():
    """Captured once, replayed with other inputs in the same place; the memory is updated in place."""
    inputs = draw_step()
    memory, y = inputs["memory"].clone(), torch.empty(3, 2, 64, device="cuda")
    cuda_step.step(**inputs, y=y, memory_out=torch.empty_like(memory))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_step.step(**inputs | {"memory": memory}, y=y, memory_out=memory)
    expected = inputs["memory"]
    for _ in range(3):
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        graph.replay()
        want_y, expected = cuda_step.step(**inputs | {"memory": expected})
        torch.testing.assert_close(y, want_y)
    torch.testing.assert_close(memory, expected)


@pytest.mark.parametrize("rule, attention_norm", [("gated", True), ("delta", False)])
def test_generation_in_cuda_graphs(monkeypatch, rule, attention_norm):
    """A language model whose tokens are graphs has the logits of one without, while hypotheses change places."""
    pytest.importorskip("fairseq")
    from support.graphs import generate
    from support.language_models import build, draw

    from fw_fairseq.models.generation import GENERATION, Generation
    from fw_fairseq.models.generation.captured import CapturedGeneration

    model = (
        build(update_rule=rule, attention_norm=attention_norm, **{"feature_map": "elu"} if attention_norm else {}).float().cuda()
    )
    tokens, found = draw(3, 13).cuda(), {}
    for graph, kind in (("0", Generation), ("1", CapturedGeneration)):
        monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", graph)
        found[kind], state = generate(model, tokens, 3)
        assert type(state[GENERATION]) is kind
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_current_stream_is_used():
    """A step behind a long computation on the same stream sees what that computed."""
    inputs, stream = draw_step(), torch.cuda.Stream()
    want, _ = cuda_step.step(**inputs | {"q": 2 * inputs["q"]})
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        got, _ = cuda_step.step(**inputs | {"q": 2 * inputs["q"]})
    stream.synchronize()
    torch.testing.assert_close(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_of_the_tensors_is_used():
    inputs = draw_step()
    want, _ = cuda_step.step(**inputs)
    got, _ = cuda_step.step(**{name: None if x is None else x.to("cuda:1") for name, x in inputs.items()})
    torch.testing.assert_close(got.cpu(), want.cpu())


def to_device(tensors):
    return [x.to("cuda") for x in tensors]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masks"])
def test_sru_kernels(dtype, masked):
    """Against the equations in float64, as on the emulator, at several sizes. v_f and v_r are small: with large ones a rounding of
    the state grows a thousandfold in a hundred steps, in every implementation."""
    torch.manual_seed(0)
    for length, batch, width in ((1, 1, 1), (133, 3, 100), (40, 2, 256)):
        product, x, v_forget, v_reset, state = cuda_sru.draw(length, batch, width, dtype)
        cuda_sru.compare(to_device([product, x, v_forget / 4, v_reset / 4, state]), masked, masked)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [0, 4, 100])
def test_pooling_kernels(dtype, window):
    for length, width in ((1, 1), (130, 64)):
        a, x = to_device(cuda_pooling.draw(length, width, dtype))
        cuda_pooling.compare(a, x, window)
        cuda_pooling.compare(a, x, window, *(torch.rand(2, length, device="cuda") < 0.1 for _ in range(2)))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sparse_feed_forward_kernel(dtype):
    """Thread blocks that run side by side wait for each other, also where the grid is larger than the device."""
    pytest.importorskip("fairseq")  # which sparse layers are of
    from support import cuda_gathered

    for sizes in ((1, 64, 64, 16, 8), (3, 71, 44, 4, 9), (16, 512, 4096, 64, 64)):
        for _ in range(3):
            cuda_gathered.compare(cuda_gathered.draw(*sizes, dtype, "cuda"))
