"""fw-export-hf of pretrained_lm: a folder that stands alone, and plain transformers where all layers are softmax."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from support.pretrained_models import ARCHITECTURES, build, make, stirred, symbols, texts, transformers

from fw_fairseq import Mistake
from fw_fairseq.tools.checkpoints import load_model
from fw_fairseq.tools.convert.conversion import convert
from fw_fairseq.tools.export_hf import decoders, folders
from fw_fairseq.tools.export_hf.export import ARCHITECTURES as EXPORTED
from fw_fairseq.tools.export_hf.export import export

pytestmark = [pytest.mark.usefixtures("one_thread")]
HYBRID = {"mixer_pattern": "fast_weight,softmax,fast_weight", "memory_window": 5}


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer of as many words as the tiny models have."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="w1", eos_token="w7", pad_token="w7")
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def trained(name, rule, place, **options):
    """A checkpoint whose parameters, the new ones too, are no longer those of the conversion, and its model."""
    make(name).save_pretrained(place / "model")
    path = place / "checkpoint.pt"
    convert(place / "model", path, rule, **options)
    state = torch.load(path, weights_only=False)
    torch.manual_seed(5)
    for key, x in state["model"].items():
        if x.is_floating_point():
            x.add_(torch.randn_like(x) * (0.3 if ".heads." in key else 0.02))
    torch.save(state, path)
    return path, load_model(path, place, "a test", EXPORTED)[0]


def check_same(ours, folder) -> None:
    """The model of the folder has fairseq's logits in one pass and token by token, and so has the one that it saves again."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokens = texts()
    order = symbols(ours, torch.arange(50)[None])[0]
    torch.testing.assert_close(model(tokens).logits, ours(symbols(ours, tokens))[0][..., order], rtol=1e-5, atol=1e-5)
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(tokens[:, :9], **asked, return_dict_in_generate=True, output_logits=True)
    again = ours(symbols(ours, found.sequences))[0][:, 8:-1, order]
    torch.testing.assert_close(torch.stack(found.logits, 1), again, rtol=1e-4, atol=1e-5)
    model.save_pretrained(folder / "again")
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True).eval()
    torch.testing.assert_close(saved(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("options", [HYBRID, {"mixer_pattern": "fast_weight"}], ids=["hybrid", "all"])
def test_a_folder_has_the_logits_of_fairseq(name, options, tmp_path, monkeypatch):
    ours = build(make(name), monkeypatch, update_rule="gated_delta", **options)
    for heads in ours.decoder.heads.values():
        stirred(heads, 0.3)
    folders.write(decoders.build(ours.decoder), {}, tmp_path / "out")
    check_same(ours, tmp_path / "out")


@torch.no_grad()
@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt2"])
def test_an_export_stands_alone(name, tokenizer, tmp_path):
    """Export checks generation, also with beams, in a process that has torch and transformers alone."""
    path, ours = trained(name, "gated_delta", tmp_path, **HYBRID)
    export(path, tmp_path / "out", tmp_path, tokenizer)
    check_same(ours, tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w9")["input_ids"] == [3, 9]


@torch.no_grad()
@pytest.mark.parametrize("options", [HYBRID, {"mixer": "softmax"}], ids=["hybrid", "softmax"])
def test_adapters_are_merged(options, tmp_path, monkeypatch):
    ours = build(make("llama"), monkeypatch, train_only="adapters", **options)
    for part in ours.decoder.attentions:
        stirred(part, 0.1)
    folders.write(decoders.build(ours.decoder), {}, tmp_path / "out")
    check_same(ours, tmp_path / "out")
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "adapter" in name]


@pytest.mark.long
@torch.no_grad()
def test_softmax_becomes_a_folder_of_transformers(tokenizer, tmp_path):
    path, ours = trained("qwen3", "softmax", tmp_path)
    export(path, tmp_path / "out", tmp_path, tokenizer)
    assert not [*(tmp_path / "out").glob("*.py")]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    model, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), texts()
    order = symbols(ours, torch.arange(50)[None])[0]
    torch.testing.assert_close(model(tokens).logits, ours(symbols(ours, tokens))[0][..., order], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_exported_is_refused(tokenizer, tmp_path):
    path, _ = trained("llama", "decay", tmp_path)
    with pytest.raises(Mistake, match="--tokenizer is missing; it is the folder of the pretrained model"):
        export(path, tmp_path / "out", tmp_path)
    with pytest.raises(Mistake, match="--onnx is for a CHECKPOINT of fast_weight_lm"):
        export(path, tmp_path / "out", tmp_path, tokenizer, onnx_file=True)
    assert not (tmp_path / "out").exists()
