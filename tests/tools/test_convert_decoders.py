"""fw-convert of folders of transformers other than GPT-2, and of a GPT-2 by both roads."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from fairseq import checkpoint_utils
from safetensors.torch import load_file, save_file
from support.gpt2 import save_gpt2
from support.pretrained_models import ARCHITECTURES, build, make, symbols, texts

from fw_fairseq import Mistake
from fw_fairseq.tools.convert.__main__ import main as fw_convert
from fw_fairseq.tools.convert.conversion import convert

pytestmark = [pytest.mark.usefixtures("one_thread")]
RULES = ["sum", "gated", "decay", "delta", "gated_delta", "kda"]


def load(path):
    return checkpoint_utils.load_model_ensemble([str(path)], arg_overrides={"data": str(path.parent)})[0][0].eval()


@pytest.fixture
def folder(tmp_path):
    make("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt2"])
def test_softmax_stands_alone_with_the_logits_of_transformers(name, tmp_path):
    library = make(name)
    library.save_pretrained(tmp_path / "model")
    lines = convert(tmp_path / "model", tmp_path / "out" / "start.pt", "softmax")
    shutil.rmtree(tmp_path / "model")
    assert {line.what for line in lines} == {"copied"}
    assert sum(line.parameters for line in lines) == library.num_parameters()
    model, tokens = load(tmp_path / "out" / "start.pt"), texts()
    with torch.no_grad():
        want, got = library(tokens).logits, model(symbols(model, tokens))[0]
    order = symbols(model, torch.arange(want.shape[-1])[None])[0]
    torch.testing.assert_close(got[..., order], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_hybrids(rule, folder, tmp_path, monkeypatch):
    given = {"mixer_pattern": "softmax,fast_weight", "memory_window": 4}
    lines = convert(folder, tmp_path / "out" / "start.pt", rule, **given)
    new = sum(line.parameters for line in lines if line.what == "new")
    assert sum(line.parameters for line in lines if line.what == "copied") == make("qwen3").num_parameters()
    model, tokens = load(tmp_path / "out" / "start.pt"), texts()
    assert new == sum(x.numel() for heads in model.decoder.heads.values() for x in heads.parameters()) > 0
    assert [*model.decoder.heads] == [1]
    scores = model(symbols(model, tokens))[0]
    assert scores.isfinite().all()
    map_, norm = ("relu", "sum") if "delta" in rule or rule == "kda" else ("identity", "none")
    library = make("qwen3")
    torch.manual_seed(1)
    own = build(library, monkeypatch, update_rule=rule, feature_map=map_, feature_norm=norm, **given)
    torch.testing.assert_close(scores, own(symbols(own, tokens))[0])


def test_the_command_says_how_to_train_it(folder, tmp_path, capsys):
    fw_convert([str(folder), str(tmp_path / "start.pt"), "--rule", "gated_delta", "--drop-rotary"])
    said = capsys.readouterr().out
    assert re.search(r"^new +model\.layers\.\*\.self_attn\.heads\.in_proj\.weight +768 +zero$", said, re.MULTILINE)
    assert f"--arch pretrained_lm --options-from {tmp_path}/start.pt --finetune-from-model {tmp_path}/start.pt" in said
    assert load(tmp_path / "start.pt").decoder.model.model.layers[0].self_attn.drops_rotary


@pytest.mark.parametrize("rule", ["softmax", "sum", "decay", "gated_delta", "local_attention"])
def test_gpt2_by_both_roads(rule, tmp_path, monkeypatch):
    library = save_gpt2(tmp_path)
    convert(tmp_path, tmp_path / "out" / "gpt2.pt", rule, local_window=5)
    ours = load(tmp_path / "out" / "gpt2.pt")
    options = {"mixer": rule, "local_window": 5}
    if rule not in ("softmax", "local_attention"):
        map_, norm = ("relu", "sum") if rule == "gated_delta" else ("identity", "none")
        options = {"update_rule": rule, "feature_map": map_, "feature_norm": norm}
    model = build(library, monkeypatch, **options)
    for number, heads in model.decoder.heads.items():  # random biases of gates, and what is scaled by them
        mixer = ours.decoder.layers[number].self_attn.mixer
        if rule in ("decay", "gated_delta"):
            heads.in_proj.bias.data.copy_(torch.cat([*mixer.in_proj.bias.split([*mixer.sizes.values()])[3:]]))
        if rule == "decay":
            gate = heads.in_proj.bias[heads.sizes["f"] :].sigmoid()
            heads.value_scale.data.copy_((1 - gate).view_as(heads.value_scale))
    tokens = torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, got = ours(tokens)[0], model(tokens)[0]
    known = model.decoder.known
    torch.testing.assert_close(got[..., known], want[..., known], rtol=1e-4, atol=1e-5)


def test_weights_of_another_model_are_refused(folder, tmp_path):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(Mistake, match=r"lacks model\.layers\.1\.mlp\.up_proj.*its weights are of another model"):
        convert(folder, tmp_path / "start.pt", "decay")
