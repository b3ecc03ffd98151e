"""A sequence on several workers gives what one worker gives: outputs, states and every gradient."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.commands import preloaded
from support.draws import CASES, FITTING, assert_same, draw_gates, draw_inputs, draw_state, run_with_gradients
from torch import distributed

from fw_fairseq.ops import FastWeightState, RowMap, fast_weight
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule

ENDS = [0, 21, 57, 70]  # where the parts of three workers begin and end
SHAPE = (2, 2, ENDS[-1], 4, 3)
ACROSS = [(rule, norm, options) for rule, norm in CASES if rule in FITTING for options in ("", "state", "state padding reset")]
ACROSS += [(rule, True, "scale state reset") for rule, entry in RULES.items() if entry.normaliser == "write"]
ACROSS += [("delta", True, "state padding reset read")]  # --attention-norm-of
LOWER = [("delta", True, "state", torch.bfloat16), ("gated_delta", False, "state", torch.float32)]


def name(case) -> str:
    return " ".join(map(str, case))


def draw(rule, attention_norm, options, dtype=torch.float64):
    """The leaves, what else the call takes, and adjoints of y and the final state, those of each worker's copy."""
    torch.manual_seed(0)
    inputs, gates = draw_inputs(SHAPE, dtype, positive=attention_norm), draw_gates(RULES[rule], SHAPE, dtype)
    masks, state, scale = {}, None, None
    if "padding" in options:
        masks["padding_mask"] = torch.zeros(2, SHAPE[2], dtype=torch.bool)
        masks["padding_mask"][:, 57:] = masks["padding_mask"][1, 15:24] = True  # all of what the last worker has
    if "reset" in options:
        masks["reset_mask"] = torch.zeros(2, SHAPE[2], dtype=torch.bool)
        masks["reset_mask"][0, [5, 40]] = True
    if "scale" in options:
        scale = (torch.randn(SHAPE[:3], dtype=torch.float64)).to(dtype)
    if "state" in options:
        state = draw_state(RULES[rule], SHAPE, dtype, attention_norm)
        state = state._replace(log_scale=None if scale is None else torch.zeros(SHAPE[:2], dtype=state.memory.dtype))
    dy = torch.randn(*SHAPE[:3], SHAPE[4], dtype=torch.float64)
    dstate = [torch.randn(3, *SHAPE[:2], *rest, dtype=torch.float64) for rest in (SHAPE[3:], SHAPE[3:4])]
    return inputs, gates, state, scale, masks, dy, dstate


def cut(x, span, time=2):
    return x.narrow(time, span.start, span.stop - span.start)


def run(case, span, dstate_of, group=None):
    rule, attention_norm, options, *_ = case
    inputs, gates, state, scale, masks, dy, dstate = draw(*case)
    y, final = fast_weight(
        *(cut(x, span) for x in inputs.values()), rule, {n: cut(x, span) for n, x in gates.items()}, state,
        attention_norm=attention_norm, attention_norm_of="read" if "read" in options else "read_and_erase",
        key_log_scale=None if scale is None else cut(scale, span),
        **{n: cut(x, span, 1) for n, x in masks.items()}, group=group,
    )  # fmt: skip
    pairs = [(y, cut(dy, span)), (final.memory, dstate_of(dstate[0]))]
    pairs += [] if final.normaliser is None else [(final.normaliser, dstate_of(dstate[1]))]
    outputs, adjoints = zip(*((x, a.to(x.dtype)) for x, a in pairs if x.requires_grad))
    leaves = inputs | gates | {f"initial {n}": x for n, x in (state or FastWeightState(None))._asdict().items() if x is not None}
    leaves.pop("initial log_scale", None)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), adjoints, allow_unused=True)
    results = {"y": y} | {f"final {n}": x for n, x in final._asdict().items() if x is not None}
    results |= {f"gradient of {n}": g for n, g in zip(leaves, gradients) if g is not None}
    return {n: x.detach() for n, x in results.items()}


@contextlib.contextmanager
def worker_of(rank: int, size: int, folder):
    """In a group of ``size`` processes of this machine."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def worker(rank: int, folder) -> None:
    with worker_of(rank, 3, folder) as group:
        span = slice(*ENDS[rank : rank + 2])
        cases = {name(case): run(case, span, lambda x: x[rank], group) for case in [*ACROSS, *LOWER]}
        torch.save(cases, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What each of three workers got, by case."""
    folder = tmp_path_factory.mktemp("workers")
    processes = [preloaded().Process(target=worker, args=(rank, folder)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


def together(parts: list[dict]) -> dict:
    """Of what is over time, each worker's part in its place; states are the same everywhere; the rest adds up."""
    joined = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if key == "y":
            joined[key] = torch.cat(values, 2)
        elif key.startswith("final"):
            assert all(torch.equal(values[0], value) for value in values)
            joined[key] = values[0]
        else:
            joined[key] = sum(values)
    return joined


@pytest.mark.parametrize("case", [*ACROSS, *LOWER], ids=name)
def test_three_workers_equal_one(one_thread, parts, case):
    """Parts of unequal length, a state before and after, padding and new texts in the middle."""
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 2e-5}[case[3]] if len(case) == 4 else 1e-6 if "reset" in case[2] else 1e-10
    want = run(case, slice(0, SHAPE[2]), lambda x: x.sum(0))
    assert_same(together([part[name(case)] for part in parts]), want, tolerance)


def test_gates_of_values_beside_an_erase(one_thread, monkeypatch, tmp_path):
    """The erase changes what is left of the memory that a worker starts from, here the only one."""
    given = {"z": Gate("V"), "beta": Gate()}
    rule = Rule(equation="", source="", gates=given, coefficients=lambda z, beta: Coefficients(z=z, e=beta, w=beta))
    monkeypatch.setitem(RULES, "both", rule)
    inputs, gates, state = draw_inputs(SHAPE), draw_gates(rule, SHAPE), draw_state(rule, SHAPE)

    def results(**options):
        leaves = inputs | gates | {"memory": state.memory}
        return run_with_gradients(leaves, lambda: fast_weight(**inputs, rule="both", gates=gates, state=state, **options))

    with worker_of(0, 1, tmp_path) as group:
        found = results(group=group)
    assert_same(found, results(backend="recurrent"), 1e-10)


def test_mistakes(tmp_path):
    q = torch.rand(1, 1, 4, 2)
    with worker_of(0, 1, tmp_path) as group, pytest.raises(ValueError, match="rule 'fwm' has steps of its own"):
        fast_weight(q, q, q, "fwm", {"beta": q[..., 0]}, group=group)


def test_by_kernels(emulate, tmp_path):
    """They, on the emulator, take the columns that the transfer adds, and feature maps before them."""
    shape = (1, 1, 40, 16, 8)
    inputs, gates = draw_inputs(shape, torch.float32), draw_gates(RULES["delta"], shape, torch.float32)

    def results(**options):
        y, state = fast_weight(*inputs.values(), "delta", gates, feature_map=RowMap("elu", norm="sum"), **options)
        leaves = inputs | gates
        gradients = torch.autograd.grad(y.square().sum() + state.memory.square().sum(), list(leaves.values()))
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(leaves, gradients))

    want = results(backend="chunkwise")
    emulate()
    with worker_of(0, 1, tmp_path) as group:
        assert_same(results(backend="cuda", group=group), want, 2e-5)
