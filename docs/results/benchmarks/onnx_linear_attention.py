"""ONNX's LinearAttention, opset 27, as functions that ``python -m fw_fairseq.conformance`` examines; needs onnx and onnxruntime.

PYTHONPATH=docs/results/benchmarks python -m fw_fairseq.conformance kda=onnx_linear_attention:kda_in_onnxruntime
"""

from __future__ import annotations

from functools import partial

import onnxruntime
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

RULES = {
    "linear_attn": "linear",
    "simple_gla": "gated",
    "gla": "gated",
    "delta_rule": "delta",
    "gated_delta_rule": "gated_delta",
    "kda": "gated_delta",
}
TYPES = {torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE}


def run(rule, runtime, q, k, v, g=None, beta=None, initial_state=None, output_final_state=False, scale=None, normalize=False):
    """One node with the arguments of flash-linear-attention's functions."""
    given = {"query": q, "key": k, "value": v, "past_state": initial_state, "decay": g, "beta": beta}
    inputs = {
        name: (x if name == "past_state" else x.flatten(2)).detach().contiguous().numpy()
        for name, x in given.items()
        if x is not None
    }
    heads = {"q_num_heads": q.shape[2], "kv_num_heads": v.shape[2], "scale": scale or q.shape[3] ** -0.5}
    names = [name if name in inputs else "" for name in given]
    node = helper.make_node("LinearAttention", names, ["output", "present_state"], update_rule=RULES[rule], **heads)
    declared = [helper.make_tensor_value_info(name, TYPES[q.dtype], x.shape) for name, x in inputs.items()]
    results = [helper.make_tensor_value_info(name, TYPES[q.dtype], None) for name in node.output]
    graph = helper.make_graph([node], rule, declared, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=11)
    y, state = map(torch.from_numpy, runtime(model).run(None, inputs))
    return y.view(v.shape), state


def session(model):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


for rule in RULES:
    globals()[f"{rule}_in_onnx"] = partial(run, rule, ReferenceEvaluator)
    globals()[f"{rule}_in_onnxruntime"] = partial(run, rule, session)
