"""fw-convert of folders of flash-linear-attention and of Mamba 2 in transformers."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from fairseq import checkpoint_utils
from safetensors.torch import load_file, save_file
from support import published_layers
from support.published_models import CONFIGS, EPS, SPECIAL, WORDS, logits, save

from fw_fairseq import Mistake
from fw_fairseq.tools.convert.__main__ import main as fw_convert
from fw_fairseq.tools.convert.conversion import convert

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
TOKENS = torch.randint(0, WORDS, (2, 11), generator=torch.Generator().manual_seed(0))


def load(path):
    return checkpoint_utils.load_model_ensemble([str(path)], arg_overrides={"data": str(path.parent)})[0][0].eval()


def symbols_of(model) -> torch.Tensor:
    """The symbol of each token."""
    words = model.decoder.dictionary
    special = {SPECIAL["bos_token_id"]: words.bos(), SPECIAL["eos_token_id"]: words.eos()}
    return torch.tensor([special.get(token, words.index(str(token))) for token in range(WORDS)])


@pytest.mark.parametrize("arch", CONFIGS)
@torch.no_grad()
def test_logits_are_those_of_the_published_model(arch, tmp_path, monkeypatch):
    """At once, and by a prompt and then token by token, in fp32 and in float64."""
    monkeypatch.setattr(published_layers, "EPS", EPS)
    weights, path = save(arch, tmp_path), tmp_path / "out" / "start.pt"
    lines = convert(tmp_path, path)
    assert {line.what for line in lines} == {"copied"}
    want = torch.stack([logits(arch, weights, row) for row in TOKENS])
    model, saved = load(path), torch.load(path, weights_only=True)
    assert saved["cfg"]["model"]["_name"] == arch
    symbols, size = symbols_of(model), want.abs().max().item()
    torch.testing.assert_close(model(symbols[TOKENS])[0][..., symbols], want.float(), rtol=0, atol=1e-5 * size)
    model.double().load_state_dict(saved["model"])
    found, state = model(symbols[TOKENS])[0][..., symbols], {}
    torch.testing.assert_close(found, want, rtol=0, atol=1e-9 * size)
    steps = [model(symbols[TOKENS[:, :end]], incremental_state=state)[0] for end in range(5, TOKENS.shape[1] + 1)]
    torch.testing.assert_close(torch.cat(steps, 1)[..., symbols], want, rtol=0, atol=1e-9 * size)


@torch.no_grad()
def test_rwkv_7_of_another_rank(tmp_path, monkeypatch):
    """As of 1.5 billion parameters, in float64."""
    monkeypatch.setattr(published_layers, "EPS", EPS)
    weights, path = save("rwkv7_lm", tmp_path, decay_low_rank_dim=96, a_low_rank_dim=96), tmp_path / "start.pt"
    for name, x in weights.items():
        if ".w_lora.lora." in name or ".a_lora.lora." in name:
            sizes = [96 if size == 64 else size for size in x.shape]
            weights[name] = x if sizes == [*x.shape] else torch.randn(sizes, dtype=torch.float64) / sizes[-1] ** 0.5
    save_file({name: x.clone() for name, x in weights.items()}, tmp_path / "model.safetensors")
    convert(tmp_path, path)
    model = load(path).double()
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    symbols, want = symbols_of(model), torch.stack([logits("rwkv7_lm", weights, row) for row in TOKENS])
    assert model.decoder.layers[0].self_attn.mixer.sizes["s"] == 96
    torch.testing.assert_close(model(symbols[TOKENS])[0][..., symbols], want, rtol=0, atol=1e-9 * want.abs().max().item())


@torch.no_grad()
def test_mamba_2_of_transformers(tmp_path):
    """An implementation by others, in fp32."""
    sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_heads": 4, "head_dim": 12, "state_size": 6, "n_groups": 1, "num_hidden_layers": 2}
    config = transformers.Mamba2Config(**sizes, **SPECIAL, expand=2, layer_norm_epsilon=EPS, chunk_size=8)
    theirs = transformers.Mamba2ForCausalLM(config).eval()
    for weight in theirs.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)
    theirs.save_pretrained(tmp_path)
    convert(tmp_path, tmp_path / "out" / "start.pt")
    model = load(tmp_path / "out" / "start.pt")
    symbols, want = symbols_of(model), theirs(TOKENS).logits
    torch.testing.assert_close(model(symbols[TOKENS])[0][..., symbols], want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_the_command_says_how_to_train_it(tmp_path, capsys):
    save("gla_lm", tmp_path)
    path = tmp_path / "out" / "start.pt"
    fw_convert([str(tmp_path), str(path)])
    said = capsys.readouterr().out
    assert re.search(r"^copied +decoder\.layers\.\*\.fc1\.weight +5,760$", said, re.MULTILINE)
    assert f"--task language_modeling --arch gla_lm --options-from {path} --finetune-from-model {path}" in said


@pytest.mark.parametrize(
    "arch, changed, said",
    [
        ("gla_lm", {"attn": {"layers": [1]}}, r"config\.json has attn = \{'layers': \[1\]\}; fw-convert takes: None$"),
        ("kda_lm", {"safe_gate": True}, r"has safe_gate = True; fw-convert takes: False$"),
        ("retnet_lm", {"num_kv_heads": 1}, r"has num_kv_heads = 1; fw-convert takes: None, 3$"),
        ("rwkv7_lm", {"decay_low_rank_dim": 96, "a_low_rank_dim": 64}, r"has a_low_rank_dim = 64; fw-convert takes: 96$"),
        ("mamba2_lm", {"dt_limit": [0.0, 0.1]}, r"has dt_limit = \[0\.0, 0\.1\]; fw-convert takes: None, "),
        ("mamba2_lm", {"n_groups": 2}, r"has n_groups = 2; fw-convert takes: 1$"),
        ("gla_lm", {"use_output_gate": False}, r"has in layer 0 other weights than fw-convert knows$"),
        ("gla_lm", {"num_hidden_layers": 2}, r"is not laid out as fw-convert knows it: it has decoder\.layers\.2\."),
    ],
)
def test_what_would_compute_something_else_is_refused(arch, changed, said, tmp_path):
    save(arch, tmp_path, **changed)
    with pytest.raises(Mistake, match=said):
        convert(tmp_path, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("rule", [None, "gated_delta"])
def test_hybrids_of_transformers_are_refused(rule, tmp_path):
    """As transformers writes the text model of Qwen 3.5, and a model with pictures around it."""
    sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3_5TextConfig"):
        pytest.skip("transformers before Qwen 3.5")
    for config in (transformers.Qwen3_5TextConfig(num_hidden_layers=4), transformers.Qwen3_5Config()):
        config.save_pretrained(tmp_path)
        with pytest.raises(Mistake, match=r"has recurrent layers beside softmax .*; run it in transformers, with fw_fairseq\.acc"):
            convert(tmp_path, tmp_path / "out.pt", rule)


def test_a_weight_that_is_missing_is_named(tmp_path):
    save("gla_lm", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Mistake, match=r"it lacks decoder\.layers\.1\.fc2\.weight$"):
        convert(tmp_path, tmp_path / "out.pt")


def test_rules_are_for_transformers(tmp_path):
    save("gla_lm", tmp_path)
    with pytest.raises(Mistake, match=r"is a recurrent model, which stays as it is; leave --rule out$"):
        convert(tmp_path, tmp_path / "out.pt", "delta")
    with pytest.raises(Mistake, match=r"leave --memory-window out$"):
        convert(tmp_path, tmp_path / "out.pt", memory_window=4)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(Mistake, match=r"^--rule is missing; a Transformer becomes one of: sum, "):
        convert(tmp_path, tmp_path / "out.pt")
