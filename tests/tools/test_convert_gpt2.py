"""fw-convert of a GPT-2 folder, against transformers itself, and its tokens as fairseq's."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from support.gpt2 import MERGES, TEXT, transformers

from fw_fairseq.tools.convert.conversion import convert
from fw_fairseq.tools.convert.pretrained import gpt2_config, gpt2_to_fairseq, read_gpt2

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
pytestmark = pytest.mark.usefixtures("one_thread")


def load(path):
    return checkpoint_utils.load_model_ensemble([str(path)], arg_overrides={"data": str(path.parent)})[0][0].eval()


def ids_of(folder) -> list[int]:
    return transformers.GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))(TEXT)["input_ids"]


@pytest.mark.parametrize("stored", ["safetensors", "bin"])
def test_logits_are_those_of_transformers(stored, gpt2, tmp_path):
    folder, model = gpt2
    if stored == "bin":
        folder = shutil.copytree(folder, tmp_path / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    convert(folder, tmp_path / "out" / "gpt2.pt", "softmax")
    assert load(tmp_path / "out" / "gpt2.pt").state_dict()["decoder.version"] == 3
    symbols = Dictionary.load(str(tmp_path / "out" / "dict.txt"))
    ids = ids_of(folder)
    assert len(set(ids)) > 8 and 257 + MERGES.index("th e") in ids, "the merges were used"
    mapped = [symbols.index(str(i)) for i in ids]
    assert symbols.unk() not in mapped and len(symbols) == 4 + model.config.vocab_size - 1
    with torch.no_grad():
        want = model(torch.tensor([[256, *ids]])).logits[0]
        got = load(tmp_path / "out" / "gpt2.pt")(torch.tensor([[symbols.eos(), *mapped]]))[0][0]
    (tmp_path / "out" / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in symbols.symbols[:3:-1]))
    with pytest.raises(ValueError, match=r"^the source dictionary of the data has other words, or another order"):
        load(tmp_path / "out" / "gpt2.pt")
    columns = [symbols.eos() if i == 256 else symbols.index(str(i)) for i in range(model.config.vocab_size)]
    torch.testing.assert_close(got[:, columns], want, rtol=1e-5, atol=1e-5)


def test_rules_start_from_it(gpt2, tmp_path):
    lines = convert(gpt2[0], tmp_path / "decay.pt", "decay", feature_dim=4)
    assert {line.what for line in lines} == {"copied", "changed", "new"}
    assert load(tmp_path / "decay.pt")(torch.randint(4, 200, (2, 10)))[0].isfinite().all()


def test_the_model_has_the_options_of_its_task(gpt2, tmp_path):
    """fairseq takes these of a model from its task and from the common options."""
    convert(gpt2[0], tmp_path / "gpt2.pt", "softmax")
    cfg = torch.load(tmp_path / "gpt2.pt", weights_only=True)["cfg"]
    for name in ("add_bos_token", "tokens_per_sample", "max_target_positions"):
        assert cfg["model"][name] == cfg["task"][name], name
    assert cfg["model"]["tpu"] == cfg["common"]["tpu"]
    groups = {"common": ("seed", "tpu", "use_plasma_view", "plasma_path"), "dataset": ("batch_size", "data_buffer_size")}
    assert all(cfg["task"][name] == cfg[group][name] for group, names in groups.items() for name in names)


@pytest.mark.parametrize(
    "changed, said",
    [
        (
            {"model_type": "t5", "n_embd": None},
            r"^--pretrained .*changed does not load as a causal language model of transformers: Unrecognized configuration class ",
        ),
        ({"activation_function": "silu"}, "activation_function"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"eos_token_id": 5000}, "has options or parameters of which no model can be made"),
        ({"n_head": 5}, "32; it must be a multiple of --decoder-attention-heads, 5"),
        ({"n_layer": 3}, "decoder.layers.2"),
        ({"n_inner": "a"}, r"^--decoder-ffn-embed-dim is 'a'; it must be at least 0$"),
        ({"eos_token_id": 2.0}, r"has options or parameters of which no model can be made \(its parts do not fit together: "),
    ],
)
def test_what_is_not_gpt2_is_refused(changed, said, gpt2, tmp_path):
    folder = shutil.copytree(gpt2[0], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=said):
        convert(folder, tmp_path / "out.pt", "decay")
    assert not (tmp_path / "out.pt").exists()


def cut(file, count: int) -> None:
    file.write_bytes(file.read_bytes()[:-count])


def as_bin(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": torch.zeros(9, 9)}, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def header_with(file, dtype: str) -> None:
    file.write_bytes(file.read_bytes().replace(b'"F32"', dtype.encode(), 1))


DAMAGED = {
    "short safetensors": (lambda folder: cut(folder / "model.safetensors", 100), r"model\.safetensors cannot be read"),
    "empty safetensors": (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"model\.safetensors cannot be read"),
    "unknown type": (
        lambda folder: header_with(folder / "model.safetensors", '"F8" '),
        r"model\.safetensors .* has dtype F8; fw-conv",
    ),
    "broken header": (lambda folder: header_with(folder / "model.safetensors", '"F32,'), r"model\.safetensors cannot be read"),
    "short bin": (lambda folder: cut(as_bin(folder), 100), r"pytorch_model\.bin cannot be read as a model's weights"),
    "list for a model": (lambda folder: torch.save([1], as_bin(folder)), r"pytorch_model\.bin cannot be read as a model's weights"),
    "broken configuration": (lambda folder: cut(folder / "config.json", 20), r"config\.json cannot be read as a configuration"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_are_refused_by_name(what, gpt2, tmp_path):
    folder, (damage, message) = shutil.copytree(gpt2[0], tmp_path / "damaged"), DAMAGED[what]
    damage(folder)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "out.pt", "decay")


def test_another_models_dictionary_stays(gpt2, tmp_path):
    (tmp_path / "dict.txt").write_text("word 1\n")
    with pytest.raises(ValueError, match=r"dict\.txt"):
        convert(gpt2[0], tmp_path / "out.pt", "decay")
    assert (tmp_path / "dict.txt").read_text() == "word 1\n"
    convert(gpt2[0], tmp_path / "out.pt", "decay", force=True)
    assert (tmp_path / "dict.txt").read_text().startswith("0 1\n1 1\n")
    convert(gpt2[0], tmp_path / "second.pt", "decay")  # the dictionary is its own
    with pytest.raises(ValueError, match=r"^OUTPUT is .*dict\.txt, which is the dictionary too"):
        convert(gpt2[0], tmp_path / "new" / "dict.txt", "decay")


SMALLEST = {"model_type": "gpt2", "n_embd": 1, "n_layer": 1, "n_head": 1, "vocab_size": 50257}


def test_a_conversion_that_is_not_written_leaves_the_dictionary(gpt2, tmp_path, monkeypatch):
    """The disk is full. With --force the dictionary would be replaced."""
    (tmp_path / "dict.txt").write_text("word 1\n")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"out\.pt cannot be written \(No space left on device\)$"):
        convert(gpt2[0], tmp_path / "out.pt", "decay", force=True)
    assert (tmp_path / "dict.txt").read_text() == "word 1\n"


def test_what_an_old_configuration_leaves_out_is_that_of_gpt2(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST))
    config = gpt2_config(tmp_path)
    assert [config[name] for name in ("n_positions", "activation_function", "eos_token_id")] == [1024, "gelu_new", 50256]


@pytest.mark.parametrize(
    "name, taken, refused, allowed",
    [
        ("layer_norm_epsilon", 1e-5, 2e-5, "fw-convert takes: 1e-05"),
        ("scale_attn_weights", True, False, "fw-convert takes: True"),
        ("scale_attn_by_inverse_layer_idx", False, True, "fw-convert takes: False"),
        ("add_cross_attention", False, True, "fw-convert takes: False"),
        ("tie_word_embeddings", True, False, "fw-convert takes: True"),
    ],
)
def test_options_that_gpt2_may_have(name, taken, refused, allowed, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST | {name: taken}))
    assert gpt2_config(tmp_path)[name] == taken
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST | {name: refused}))
    with pytest.raises(ValueError, match=f"config.json has {name} = {refused}; {allowed}$"):
        gpt2_config(tmp_path)


def test_masks_and_the_tied_output_are_left_out():
    names = ("lm_head.weight", "h.3.attn.bias", "transformer.h.3.attn.masked_bias")
    assert all(gpt2_to_fairseq(name, torch.zeros(1, 1, 4, 4), 0) == {} for name in names)


def test_dropout_is_that_of_the_configuration(gpt2, tmp_path):
    folder = shutil.copytree(gpt2[0], tmp_path / "dropout")
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.endswith("_pdrop")}
    for given, expected in (({}, (0.1, 0.0)), ({"resid_pdrop": 0.3, "attn_pdrop": 0.2}, (0.3, 0.2))):
        (folder / "config.json").write_text(json.dumps(config | given))
        options = read_gpt2(folder).options
        assert (options["dropout"], options["attention_dropout"]) == expected
