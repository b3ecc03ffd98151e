"""Every kind of mistake is one ValueError of one line that names the argument."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch

from fw_fairseq.ops import FastWeightState, RowMap, fast_weight, operation
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.quick

B, H, T, K, V = 2, 3, 4, 5, 6
Q, KEYS, VALUES, BETA = torch.rand(B, H, T, K), torch.rand(B, H, T, K), torch.rand(B, H, T, V), torch.rand(B, H, T)
STATE = FastWeightState(torch.zeros(B, H, K, V))
CALL = dict(q=Q, k=KEYS, v=VALUES, rule="delta", gates={"beta": BETA})
PACKED = dict(q=Q[:1], k=KEYS[:1], v=VALUES[:1], gates={"beta": BETA[:1]})
SUM = dict(rule="sum", gates=None)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rule="dleta"), r"rule is 'dleta'; allowed: sum, gated, delta"),
        (dict(backend="triton"), r"backend is 'triton'; allowed: auto, recurrent, chunkwise, cuda"),
        (dict(q=[1.0]), r"q is a list; it must be a tensor of 4 dimensions"),
        (dict(q=Q[0]), r"q has shape \(3, 4, 5\); it must be a tensor of 4 dimensions, \(B,H,T,K\)"),
        (dict(v=VALUES[0]), r"v has shape .*\(B,H,T,V\)"),
        (dict(q=Q.long()), r"q has dtype torch.int64; allowed: torch.float32"),
        (dict(k=KEYS.double()), r"k is torch.float64 on cpu but q is torch.float32"),
        (dict(v=VALUES.to("meta")), r"v is torch.float32 on meta but q is torch.float32 on cpu"),
        (dict(k=KEYS[..., :3]), r"k has shape \(2, 3, 4, 3\) but q \(2, 3, 4, 5\)"),
        (dict(v=VALUES[:, :, :2]), r"v has shape \(2, 3, 2, 6\) but q .*B, H and T must agree"),
        (dict(q=Q[:, :, :0], k=KEYS[:, :, :0], v=VALUES[:, :, :0]), r"q has shape \(2, 3, 0, 5\); T must be at least 1"),
        (
            dict(rule="delta_product", k=KEYS[:, :, :0], v=VALUES[:, :, :0], gates={"beta": BETA[..., :0]}),
            r"k has shape \(2, 3, 0, 5\); T must be at least 1",
        ),
        (dict(feature_map=RowMap("dpfp", 10)), r"feature_map has nu 10; it must be from 1 to 2 \* D - 1 = 9"),
        (dict(feature_map=RowMap(norm="sum")), r"feature_map has norm 'sum' with name 'identity'.*; use norm 'l2'"),
        (dict(feature_map=RowMap("dpfp"), state=STATE), r"state.memory has shape \(2, 3, 5, 6\); .*\(2, 3, 10, 6\)"),
        (dict(gates=None), r"gates has none; rule 'delta' takes exactly: beta"),
        (dict(gates={"beta": BETA, "g": BETA}), r"gates has beta, g; rule 'delta' takes exactly: beta"),
        (dict(gates={"beta": BETA[:1]}), r"gates\['beta'\] has shape \(1, 3, 4\); it must be .*\(B,H,T\) = \(2, 3, 4\)"),
        (dict(gates={"beta": 0.5}), r"gates\['beta'\] is a float; it must be a tensor of shape"),
        (dict(gates={"beta": BETA.half()}), r"gates\['beta'\] is torch.float16 .*allowed: torch.float32"),
        (dict(state=torch.zeros(B, H, K, V)), r"state is a Tensor; it must be None or the state"),
        (dict(state=FastWeightState(torch.zeros(B, H, V, K))), r"state.memory has shape \(2, 3, 6, 5\); .*\(2, 3, 5, 6\)"),
        (dict(state=FastWeightState(STATE.memory.double())), r"state.memory is torch.float64 on cpu; it must be torch.float32"),
        (dict(state=STATE, attention_norm=True), r"state.normaliser has shape None; .*\(2, 3, 5\)"),
        (dict(state=STATE._replace(normaliser=torch.zeros(B, H, K))), r"state.normaliser has shape \(2, 3, 5\); .*None"),
        (dict(padding_mask=torch.zeros(B, T)), r"padding_mask is torch.float32 \(2, 4\); it must be a bool tensor"),
        (dict(padding_mask=torch.zeros(T, B, dtype=torch.bool)), r"padding_mask is .*\(4, 2\).*\(B,T\) = \(2, 4\)"),
        (dict(cu_seqlens=torch.tensor([0, 4])), r"cu_seqlens divides one row, and B is 2; B must be 1 and group None"),
        (dict(cu_seqlens=[0, 4]), r"cu_seqlens is list; it must be an int32 or int64 tensor of N \+ 1 numbers"),
        (dict(cu_seqlens=torch.tensor([0.0, 4.0])), r"cu_seqlens is torch.float32 \(2,\); it must be an int32 or int64 tensor"),
        *(
            (dict(PACKED, cu_seqlens=torch.tensor(limits)), r"cu_seqlens goes from .*; it must rise from 0 to T = 4")
            for limits in ([0, 3], [1, 4], [0, 3, 2, 4], [0], [0, 5])
        ),
        (
            dict(PACKED, cu_seqlens=torch.tensor([0, 1, 4]), state=FastWeightState(torch.zeros(1, H, K, V))),
            r"state.memory has shape \(1, 3, 5, 6\); .*\(2, 3, 5, 6\)",
        ),
        (dict(PACKED, cu_seqlens=torch.tensor([0, 4]), group=object()), r"group is given; B must be 1 and group None"),
        (dict(reset_mask=torch.zeros(B, T)), r"reset_mask is torch.float32 \(2, 4\); it must be a bool tensor"),
        *(
            (dict(attention_norm=divides, eps=x), rf"eps is {x}; it must be a finite number above 0, or None")
            for x in (0.0, float("inf"))
            for divides in (True, False)
        ),
        (
            dict(rule="decay", gates={"f": Q, "z": VALUES}, attention_norm=True),
            r"not defined for rule 'decay'; it is for: sum, gated, delta",
        ),
        (dict(rule="gated_delta", gates={"g": BETA, "beta": BETA}, attention_norm=True), r"not defined for rule 'gated_delta'"),
        (dict(rule="fwm", gates={"beta": BETA}, backend="cuda"), r"rule 'fwm' has no kernel; use backend='auto'"),
        (dict(key_log_scale=BETA, attention_norm=True), r"key_log_scale needs .* rules sum, gated"),
        (dict(**SUM, key_log_scale=BETA), r"key_log_scale needs attention_norm=True"),
        (dict(**SUM, key_log_scale=Q, attention_norm=True), r"key_log_scale is \(2, 3, 4, 5\); .*\(B,H,T\)"),
    ],
)
def test_one_sentence_per_mistake(change, message):
    with pytest.raises(ValueError, match=message) as error:
        fast_weight(**(CALL | change))
    assert "\n" not in str(error.value)


def test_a_rule_of_steps_alone(monkeypatch):
    """It has neither chunks nor kernels; the others run its steps."""
    monkeypatch.setitem(RULES, "steps", replace(RULES["fwm"], sequence=None))
    want, _ = fast_weight(**CALL | dict(rule="fwm"), backend="recurrent")
    for backend in ("auto", "recurrent"):
        assert torch.equal(fast_weight(**CALL | dict(rule="steps"), backend=backend)[0], want)
    for backend, form in (("chunkwise", "chunk form"), ("cuda", "kernel")):
        with pytest.raises(ValueError, match=rf"^rule 'steps' has no {form}; use backend='auto' or 'recurrent'$"):
            fast_weight(**CALL | dict(rule="steps"), backend=backend)


def test_the_unchanged_call_works():
    y, state = fast_weight(**CALL)
    assert y.shape == VALUES.shape and state.memory.shape == (B, H, K, V)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["auto", "recurrent"])
def test_a_call_on_the_meta_device_has_the_shapes_of_its_results(rule, backend):
    gates = {name: torch.rand(gate.shape((B, H, T, K, V)), device="meta") for name, gate in RULES[rule].gates.items()}
    y, state = fast_weight(Q.to("meta"), KEYS.to("meta"), VALUES.to("meta"), rule, gates, backend=backend)
    assert (y.shape, state.memory.shape, y.device.type) == ((B, H, T, V), (B, H, K, V), "meta")


def test_the_example_in_the_docstring():
    results = doctest.testmod(operation)
    assert results.attempted >= 9 and results.failed == 0
