"""The published recurrences beside this project's own: every form against loops over their equations in float64."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from support.definitions import READS, WRITES
from support.draws import PLAIN, assert_same, draw_gates, draw_inputs, run_with_gradients
from support.imports import import_file
from torch.nn import functional as F

from fw_fairseq.ops import FastWeightState, fast_weight
from fw_fairseq.ops import multistep as steps
from fw_fairseq.ops.chunkwise.frames import ChannelGates, NearGates
from fw_fairseq.ops.chunkwise.scan import plan
from fw_fairseq.ops.parallel import parts as parallel
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule

pytestmark = pytest.mark.quick

OWN = [name for name in RULES if name not in PLAIN]
SHAPE = (2, 2, 70, 6, 5)  # two chunks and a part
WRITES_OF_A_TOKEN = 3


def draw(rule, dtype=torch.float64, shape=SHAPE):
    """Inputs and gates, of which some are exactly 0 and 1; several writes for each query where the rule has them."""
    n = WRITES_OF_A_TOKEN if RULES[rule].several else 1
    long = (*shape[:2], n * shape[2], *shape[3:])
    inputs, gates = draw_inputs(long, dtype), draw_gates(RULES[rule], long, dtype)
    inputs["q"] = inputs["q"].detach()[:, :, ::n].clone().requires_grad_()
    for name, gate in gates.items():
        gate = gate.detach().clone()
        gate[:, :, 12], gate[0, :, 40] = 1, 0
        gate[1, 0, 50] = (torch.rand(gate[1, 0, 50].shape) < 0.5).to(dtype)
        if name == "kappa":
            gate = F.normalize(gate + 0.1, dim=-1)
        if RULES[rule].gates[name].erases:  # negative eigenvalues
            gate = 2 * gate
        gates[name] = gate.requires_grad_()
    return inputs, gates


def masks(shape=SHAPE):
    padding, resets = (torch.zeros(shape[0], shape[2], dtype=torch.bool) for _ in range(2))
    padding[1, [0, 33, 34, 69]] = resets[0, [10, 11]] = resets[1, 50] = True
    return {"padding_mask": padding, "reset_mask": resets}


def loops(rule, q, k, v, gates, memory, padding_mask, reset_mask):
    """The equation token by token in float64: y, and the memory after the last token."""
    q, k, v, memory = (x.double() for x in (q, k, v, memory))
    n, outputs, finals = k.shape[2] // q.shape[2], [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            W = memory[b, h]
            for t in range(q.shape[2]):
                W = torch.zeros_like(W) if reset_mask[b, t] else W
                if padding_mask[b, t]:
                    outputs.append(torch.zeros_like(v[b, h, 0]))
                    continue
                for s in range(n * t, n * t + n):
                    now, before = {name: x[b, h, s].double() for name, x in gates.items()}, W
                    W = WRITES[rule](W, k[b, h, s], v[b, h, s], **now)
                read = READS[rule](before, W, q[b, h, t], k[b, h, s], v[b, h, s], **now) if rule in READS else q[b, h, t] @ W
                outputs.append(read)
            finals.append(W)
    return torch.stack(outputs).unflatten(0, q.shape[:3]), FastWeightState(torch.stack(finals).unflatten(0, q.shape[:2]))


def compare(rule, inputs, gates, memory, leaves, tolerance):
    """Steps and chunks against the loops: outputs, final memory and all gradients."""
    want = run_with_gradients(leaves, lambda: loops(rule, *inputs.values(), gates, memory, **masks()))
    call = dict(rule=rule, gates=gates, state=FastWeightState(memory), **masks())
    for backend in ("recurrent", "chunkwise"):
        found = run_with_gradients(leaves, functools.partial(fast_weight, **inputs, **call, backend=backend))
        assert_same(found, want, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("rule", OWN)
def test_every_form_against_the_equation(rule, dtype, tolerance):
    """From a state, with padding, texts that begin within a chunk, gates of exactly 0 and 1, and gradients."""
    inputs, gates = draw(rule, dtype)
    memory = torch.randn(2, 2, 6, 5, dtype=dtype).requires_grad_()
    leaves = inputs | gates | {"memory": memory}
    compare(rule, inputs, gates, memory, leaves, tolerance)


@pytest.mark.parametrize("rule", ["rwkv6", "rwkv7", "delta_product"])
def test_keys_of_one_number(rule):
    inputs, gates = draw(rule, shape=(2, 2, 70, 1, 5))
    memory = torch.randn(2, 2, 1, 5, dtype=torch.float64).requires_grad_()
    compare(rule, inputs, gates, memory, inputs | gates | {"memory": memory}, 1e-11)


@pytest.mark.parametrize("rule", OWN)
def test_any_cut_and_one_token_at_a_time(rule):
    """Also as decoding does it, whose first states are factors where a token is one step."""
    (q, k, v), gates = (list(x.values()) if i == 0 else x for i, x in enumerate(draw(rule)))
    n, given = k.shape[2] // q.shape[2], masks()
    empty = torch.zeros(2, 2, 6, 5, dtype=torch.float64)
    want, last = loops(rule, q, k, v, gates, empty, **given)
    for pieces in ([33, 1, 2, 34], [1] * 70):
        outputs, state, start = [], None, 0
        for length in pieces:
            now, writes = slice(start, start + length), slice(n * start, n * (start + length))
            y, state = fast_weight(
                q[:, :, now], k[:, :, writes], v[:, :, writes], rule, {name: x[:, :, writes] for name, x in gates.items()}, state,
                decoding=len(pieces) > 4, **{name: x[:, now] for name, x in given.items()},
            )  # fmt: skip
            outputs.append(y)
            start += length
        torch.testing.assert_close((torch.cat(outputs, 2), state.memory), (want, last.memory), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", OWN)
def test_parts_side_by_side(rule, monkeypatch):
    """As several workers, or groups of blocks of a kernel launch, compute them."""
    inputs, gates = draw(rule)
    empty = torch.zeros(2, 2, 6, 5, dtype=torch.float64)
    want, last = loops(rule, *inputs.values(), gates, empty, **masks())

    def in_parts(given):
        return parallel.run_parts(step_form, 3, given.q, given.k, given.v, given.coefficients, given.state.memory)

    monkeypatch.setattr(steps, "run", in_parts)
    monkeypatch.setattr("fw_fairseq.ops.operation.run", in_parts)
    y, state = fast_weight(**inputs, rule=rule, gates=gates, **masks())
    torch.testing.assert_close((y, state.memory), (want, last.memory), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("present", ["", "f"])
def test_an_erase_that_reads_with_another_key(present, monkeypatch):
    """Erase strengths per feature without decay, and with one gate per token, of which some are 0."""
    given = {name: Gate(None if name == "f" else "K") for name in [*present, "b"]}
    rule = Rule(equation="", source="", gates=given, coefficients=lambda b, f=None: Coefficients(f=f, e=b))
    monkeypatch.setitem(RULES, "apart", rule)
    monkeypatch.setitem(WRITES, "apart", lambda W, k, v, b, f=1.0: f * W - torch.outer(k, (b * k) @ (f * W)) + torch.outer(k, v))
    inputs, gates = draw("apart")
    memory = torch.randn(2, 2, 6, 5, dtype=torch.float64).requires_grad_()
    compare("apart", inputs, gates, memory, inputs | gates | {"memory": memory}, 1e-10)


@pytest.mark.parametrize("more", ["", "w"])
def test_one_gate_for_each_token_beside_gates_of_values(more, monkeypatch):
    given = {"f": Gate(), "z": Gate("V"), **{name: Gate() for name in more}}
    rule = Rule(equation="", source="", gates=given, coefficients=lambda f, z, w=None: Coefficients(f=f, z=z, w=w))
    monkeypatch.setitem(RULES, "both", rule)
    monkeypatch.setitem(WRITES, "both", lambda W, k, v, f, z, w=1.0: f * W * z + w * torch.outer(k, v))
    inputs, gates = draw("both")
    memory = torch.randn(2, 2, 6, 5, dtype=torch.float64).requires_grad_()
    compare("both", inputs, gates, memory, inputs | gates | {"memory": memory}, 1e-10)


@pytest.mark.parametrize("erases", ["", "e"])
def test_a_removal_before_the_write(erases, monkeypatch):
    """By keys of its own, and with or without an erase by the key of the write."""
    given = {"f": Gate("K"), "a": Gate("K"), "p": Gate("K"), **{name: Gate() for name in erases}}
    rule = Rule(
        equation="", source="", gates=given, coefficients=lambda f, a, p, e=None: Coefficients(f=f, e=e),
        removal=lambda f, a, p, e=None: (a, p),
    )  # fmt: skip

    def write(W, k, v, f, a, p, e=0.0):
        W = f[:, None] * W
        W = W - torch.outer(a, p @ W)
        return W - e * torch.outer(k, k @ W) + torch.outer(k, v)

    monkeypatch.setitem(RULES, "removing", rule)
    monkeypatch.setitem(WRITES, "removing", write)
    inputs, gates = draw("removing")
    gates |= {name: (gates[name] / 3).detach().requires_grad_() for name in "ap"}  # so that the memory stays small
    memory = torch.randn(2, 2, 6, 5, dtype=torch.float64).requires_grad_()
    compare("removing", inputs, gates, memory, inputs | gates | {"memory": memory}, 1e-10)


def test_a_read_before_the_write_beside_gates_of_values(monkeypatch):
    """The token's own value is read with the strength of its write."""
    rule = Rule(
        equation="", source="", gates={"z": Gate("V"), "w": Gate(), "u": Gate("K")},
        coefficients=lambda z, w, u: Coefficients(z=z, w=w), bonus=lambda z, w, u: u,
    )  # fmt: skip
    monkeypatch.setitem(RULES, "before", rule)
    monkeypatch.setitem(WRITES, "before", lambda W, k, v, z, w, u: W * z + w * torch.outer(k, v))
    monkeypatch.setitem(READS, "before", lambda before, W, q, k, v, z, w, u: q @ (before + torch.outer(u * k, w * v)))
    inputs, gates = draw("before")
    memory = torch.randn(2, 2, 6, 5, dtype=torch.float64).requires_grad_()
    compare("before", inputs, gates, memory, inputs | gates | {"memory": memory}, 1e-10)


@pytest.mark.parametrize("rule", ["gla", "kda", "gdn2"])
@pytest.mark.parametrize("least, most, way", [(1 / 16, 0.6, NearGates), (0.9, 1, NearGates), (1 / 16, 0.1, ChannelGates)])
def test_gates_whose_products_fit_into_fp32(rule, least, most, way):
    """Those run in fp32; a chunk whose products are smaller does not, however large its gates are."""
    inputs, gates = draw(rule, torch.float32)
    gates["f"] = (least + (most - least) * torch.rand(gates["f"].shape)).requires_grad_()
    erases = None if rule == "gla" else inputs["k"]
    cuts = plan((inputs["q"], None, None, gates["f"], None, erases, None), torch.float32)
    assert [kind for _, kind in cuts] == [way, way, NearGates], "the last chunk is short"
    memory = torch.randn(2, 2, 6, 5).requires_grad_()
    compare(rule, inputs, gates, memory, inputs | gates | {"memory": memory}, 2e-5)


def test_half_precision_stays_near():
    for rule in OWN:
        inputs, gates = draw(rule)
        lower = {name: x.detach().bfloat16() for name, x in inputs.items()}
        rounded = {name: x.double() for name, x in lower.items()}
        want, _ = fast_weight(**rounded, rule=rule, gates=gates)
        y, state = fast_weight(**lower, rule=rule, gates={name: x.float() for name, x in gates.items()})
        assert y.dtype == torch.bfloat16 and state.memory.dtype == torch.float32
        assert (y.double() - want).norm() < 1e-2 * want.norm(), rule


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((1, 2, 3, 4), (1, 2, 4, 4), (1, 2, 4, 5)), r"k has shape \(1, 2, 4, 4\) but q .*; k must be \(B,H,n T,K\) for q of"),
        (((1, 2, 3, 4), (1, 2, 6, 4), (1, 2, 3, 5)), r"v has shape \(1, 2, 3, 5\) but k \(1, 2, 6, 4\); B, H and T must agree"),
    ],
)
def test_writes_that_do_not_fit_the_queries(shapes, message):
    q, k, v = map(torch.randn, shapes)
    with pytest.raises(ValueError, match=message):
        fast_weight(q, k, v, "delta_product", {"beta": torch.rand(k.shape[:3])})
    with pytest.raises(ValueError, match=r"k has shape .*; both must be \(B,H,T,K\)"):
        fast_weight(q, torch.randn(1, 2, 6, 4), v, "delta", {"beta": torch.rand(1, 2, 3)})


PEERS = {  # rule: module and function of fla-core, and the names under which it takes the gates, as logarithms or as they are
    "gla": ("gla.naive", "naive_recurrent_gla", {"f": "gk"}),
    "rwkv6": ("rwkv6.recurrent_naive", "naive_recurrent_rwkv6", {"f": "w"}),
    "kda": ("kda.naive", "naive_recurrent_kda", {"f": "g", "beta": "beta"}),
    "gdn2": ("gdn2.naive", "naive_recurrent_gdn2", {"f": "g", "b": "b", "w": "w"}),
    "delta_product": ("gated_delta_product.naive", "naive_recurrent_gated_delta_product", {"beta": "beta"}),
    "retnet": ("retention.naive", "naive_retention", {}),
    "rwkv7": ("generalized_delta_rule.dplr.naive", "dplr_recurrence", {}),
}


def reference_of(module: str, function: str):
    """A function of fla-core, from its file: the package itself imports Triton, and does not load without it."""
    package = importlib.util.find_spec("fla")
    if package is None or importlib.util.find_spec("einops") is None:
        pytest.skip("flash-linear-attention and einops are not installed")
    path = Path(package.submodule_search_locations[0], "ops", *module.split(".")).with_suffix(".py")
    return getattr(import_file(path, f"reference_{module.replace('.', '_')}"), function)


@pytest.mark.parametrize("rule", PEERS)
def test_against_the_authors_of_flash_linear_attention(rule):
    """Their PyTorch references, in fp32, where the package is installed."""
    module, function, names = PEERS[rule]
    reference = reference_of(module, function)
    B, H, T, K, V = shape = (2, 3, 24, 8, 8)
    n = 2 if RULES[rule].several else 1
    long = (B, H, n * T, K, V)
    inputs, gates = draw_inputs(long, torch.float32), draw_gates(RULES[rule], long, torch.float32)
    inputs = {name: x.detach() for name, x in inputs.items()}
    inputs["q"] = inputs["q"][:, :, ::n] * K**0.5  # their scale
    gates = {name: x.detach() for name, x in gates.items()}
    first_heads = rule in ("retnet", "rwkv6", "rwkv7")  # (B,H,T,.), the others (B,T,H,.)
    order = (lambda x: x) if first_heads else (lambda x: x.transpose(1, 2))
    theirs = {ours: order(gates[ours]) for ours in names}
    theirs = {names[name]: x.log() if RULES[rule].gates[name].axis == "K" and name == "f" else x for name, x in theirs.items()}
    if rule == "retnet":
        gates["g"] = (1 - 2.0 ** (-5 - torch.arange(H)))[None, :, None].expand(B, H, T)
    if rule == "rwkv6":
        u = torch.randn(H, K)
        gates["u"], theirs["u"] = u[None, :, None].expand(B, H, T, K), u
    if rule == "rwkv7":
        gates["kappa"] = F.normalize(gates["kappa"], dim=-1)
        written = RULES[rule].key(inputs["k"], **gates)
        decay = RULES[rule].coefficients(**gates).f.log()
        y, _ = reference(inputs["q"], written, inputs["v"], -gates["kappa"], gates["c"] * gates["kappa"], decay)
    else:
        extra = {"g": None, "scale": K**-0.5, "num_householder": n} if rule == "delta_product" else {}
        y = reference(*(order(x) for x in inputs.values()), **theirs, **extra)
        y = order(y if rule == "retnet" else y[0])
    ours, _ = fast_weight(inputs["q"] * K**-0.5, inputs["k"], inputs["v"], rule, gates)
    assert ours.shape == (*shape[:3], V)
    torch.testing.assert_close(ours, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["recurrent", "chunkwise", "cuda"])
def test_comba_where_decay_leaves_nothing(backend, emulate):
    """It removes what was there before decay, however much that is beside what is left."""
    inputs, gates = draw("comba", torch.float32, (2, 2, 70, 16, 16))
    gates["s"] = torch.rand(2, 2, 70).mul(3).index_fill(2, torch.tensor([5, 6, 33, 40]), 100.0).requires_grad_()
    none = {name: torch.zeros(2, 70, dtype=torch.bool) for name in ("padding_mask", "reset_mask")}
    leaves = inputs | {name: gates[name] for name in ("beta", "b", "d")}
    want = run_with_gradients(leaves, lambda: loops("comba", *inputs.values(), gates, torch.zeros(2, 2, 16, 16), **none))
    emulate()
    found = run_with_gradients(leaves, lambda: fast_weight(**inputs, rule="comba", gates=gates, backend=backend))
    assert_same(found, want, 2e-5)
    [slope] = torch.autograd.grad(fast_weight(**inputs, rule="comba", gates=gates, backend=backend)[0].square().sum(), gates["s"])
    assert slope.isfinite().all() and not slope[:, :, 33].any()
