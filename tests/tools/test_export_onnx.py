"""fw-export-hf --onnx: what onnxruntime and onnx's own evaluator compute of the file."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from support.checkpoints import save, source
from support.commands import ROOT

from fw_fairseq import Mistake

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
pytest.importorskip("transformers")
onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
if not hasattr(torch.onnx, "ops"):
    pytest.skip("torch 2.8 or later writes the node", allow_module_level=True)
from fw_fairseq.huggingface import FastWeightForCausalLM, FastWeightHFConfig  # noqa: E402
from fw_fairseq.tools.export_hf.__main__ import main as export_command  # noqa: E402
from fw_fairseq.tools.export_hf.onnx import refuse, write  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = {"feature_map": "identity", "feature_norm": "l2"}
MODELS = {  # options of the mixer, and of the model
    "gated_delta": (PLAIN | {"short_conv": 4, "output_gate": True, "output_norm": True}, {}),
    "kda": (PLAIN, {}),
    "sum": ({"feature_map": "elu", "feature_norm": "none", "attention_norm": True}, {"positions": "sinusoidal"}),
    "gated": ({"feature_map": "relu", "feature_dim": 6}, {"positions": "learned", "max_position_embeddings": 64}),
    "delta": ({"feature_map": "dpfp"}, {}),
    "retnet": (PLAIN | {"rotary": True}, {}),
    "gla": (PLAIN | {"key_heads": 1}, {}),
    "mamba2": (PLAIN, {}),
    "hgrn2": (PLAIN, {}),
    "rwkv6": (PLAIN | {"token_shift": True}, {}),
    "delta_product": (PLAIN | {"product_steps": 2}, {}),
    "gated_delta_product": (PLAIN | {"product_steps": 2}, {}),
}


def model_of(rule: str, options: dict, **more) -> FastWeightForCausalLM:
    """Two small layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    chosen = {"mixers": ["fast_weight"] * 2, "positions": "none", "mixer_options": options | {"update_rule": rule}}
    return FastWeightForCausalLM(FastWeightHFConfig(**sizes | chosen | more)).eval()


def in_parts(session, ids: np.ndarray, ends: list[int]) -> np.ndarray:
    """The logits of ids that are read in parts, each from the states after the one before."""
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    given = [x for x in session.get_inputs() if x.name != "input_ids"]
    past, logits = {x.name: np.zeros([len(ids), *x.shape[1:]], kinds[x.type]) for x in given}, []
    assert [x.name for x in session.get_outputs()] == ["logits", *(name.replace("past", "present") for name in past)]
    for part in np.split(ids, ends, axis=1):
        y, *present = session.run(None, {"input_ids": part, **past})
        past = dict(zip(past, present))
        logits.append(y)
    return np.concatenate(logits, axis=1)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("rule", MODELS)
@torch.no_grad()
def test_prompts_and_tokens_give_the_models_logits(rule, tmp_path):
    options, more = MODELS[rule]
    model, file = model_of(rule, options, **more), tmp_path / "model.onnx"
    write(model, file)
    ids = torch.randint(30, (3, 21))
    expected = model.double()(ids).logits.numpy()
    one = onnxruntime.SessionOptions()
    one.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, one, providers=["CPUExecutionProvider"])
    for ends in ([], [11, 12, 13, 20], [1]):
        np.testing.assert_allclose(in_parts(session, ids.numpy(), ends), expected, rtol=0, atol=2e-5)
    nodes = onnx.load(file).graph.node
    kinds = [node.op_type for node in nodes]
    assert (kinds.count("LinearAttention"), kinds.count("CausalConvWithState")) == (2, 2 if "short_conv" in options else 0)
    assert {node.domain for node in nodes} == {""}


@pytest.mark.long
@torch.no_grad()
def test_onnxs_own_evaluator_agrees(tmp_path):
    """Of a prompt shorter than the convolution, and of the tokens after it."""
    model, file = model_of("gated_delta", PLAIN | {"short_conv": 4}), tmp_path / "model.onnx"
    write(model, file)
    ids = torch.randint(30, (1, 6))
    session = onnx.reference.ReferenceEvaluator(str(file))
    shapes = {"memory": [1, 2, 8, 8], "recent": [1, 3, 48]}
    past = {name: np.zeros(shapes.get(name.split(".")[-1], [1]), np.float32) for name in session.input_names[1:]}
    past["past.length"], logits = past["past.length"].astype(np.int64), []
    for part in np.split(ids.numpy(), [2, 5], axis=1):
        y, *present = session.run(None, {"input_ids": part, **past})
        past = dict(zip(past, present))
        logits.append(y)
    np.testing.assert_allclose(np.concatenate(logits, 1), model.double()(ids).logits.numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "model, said",
    [
        (("decay", {"feature_map": "identity", "feature_norm": "none"}), "no rule that decays values"),
        (("rwkv7", PLAIN), "no rule that erases under another key"),
    ],
)
def test_a_rule_that_onnx_does_not_have_is_refused(model, said, tmp_path):
    with pytest.raises(Mistake, match=said):
        write(model_of(*model), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_other_layers_and_vocabularies_are_refused():
    with pytest.raises(Mistake, match="--mixer softmax"):
        refuse(model_of("delta", PLAIN, mixers=["fast_weight", "softmax"]))
    with pytest.raises(Mistake, match="an adaptive vocabulary"):
        refuse(model_of("delta", PLAIN, output_bands=[[20, 16], [10, 4]]))


@pytest.mark.long
def test_the_page_generates_with_the_file(dictionary, tmp_path, monkeypatch, capsys):
    """As it is printed."""
    options = "--no-token-positional-embeddings --update-rule gated_delta --feature-map identity --feature-norm l2"
    _, _, state = source(f"--arch fast_weight_lm {options}", dictionary)
    export_command([str(save(state, tmp_path)), str(tmp_path / "folder"), "--data", str(dictionary), "--onnx"])
    page = (ROOT / "docs" / "howto" / "export.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(program, {})
    assert len(capsys.readouterr().out.split()) >= 10
