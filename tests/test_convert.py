"""fw-convert: what is copied is copied exactly, what is changed is changed as documented, and mistakes leave nothing behind."""

from __future__ import annotations

import sys
from argparse import Namespace

import pytest
import torch
from commands import USER_DIR, fairseq, succeed
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import nn

from fw_fairseq import convert
from fw_fairseq.convert import Options
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, HEADS, LAYERS = 32, 4, 2
SMALL = (
    "--arch transformer_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32"
    " --decoder-ffn-embed-dim 48 --decoder-attention-heads 4 --tokens-per-sample 24 --task language_modeling"
)
HISTORY = [{"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 7}]
CUTOFFS = "--adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --adaptive-input-factor 2 --adaptive-softmax-factor 2"
ADAPTIVE = f"--adaptive-input {CUTOFFS} --tie-adaptive-weights --criterion adaptive_loss"
TIED = "--share-decoder-input-output-embed --decoder-learned-pos"
LAYOUTS = {"plain": "--decoder-normalize-before", "tied": TIED, "adaptive": ADAPTIVE}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    words = [f"w{i}" for i in range(36)]
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    for split in ("train", "valid", "test"):
        (folder / split).write_text("\n".join(" ".join(words[i % 36] for i in range(n, n + 9)) for n in range(40)) + "\n")
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", folder / split)]
    succeed(fairseq("preprocess", "--only-source", *prefixes, "--srcdict", folder / "dict.txt", "--destdir", folder / "bin"))
    return folder / "bin"


def make_source(data, path, layout: str = "plain", old: bool = False) -> nn.Module:
    """A transformer_lm with random weights, and its checkpoint; ``old``: as fairseq wrote them until 2019."""
    torch.manual_seed(3)
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [str(data), *SMALL.split(), *LAYOUTS[layout].split()])
    model = tasks.setup_task(args).build_model(args).eval()
    for name, x in model.named_parameters():  # biases are 0 at first
        if name.endswith("bias"):
            nn.init.normal_(x, std=0.1)
    parameters = dict(model.state_dict())
    state = {"args": None, "cfg": OmegaConf.to_container(convert_namespace_to_omegaconf(args)), "model": parameters}
    if old:
        state["cfg"], state["args"] = None, Namespace(**vars(args))
        for layer in range(LAYERS):
            for kind in ("weight", "bias"):
                prefix = f"decoder.layers.{layer}.self_attn."
                packed = [parameters.pop(f"{prefix}{part}_proj.{kind}") for part in "qkv"]
                parameters[f"{prefix}in_proj_{kind}"] = torch.cat(packed)
    torch.save(state | {"extra_state": {}, "optimizer_history": HISTORY, "last_optimizer_state": {"big": 1}}, path)
    return model


def load(path):
    [model], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model.eval()


def log_probabilities(model, tokens):
    return model.get_normalized_probs(model(tokens), log_probs=True, sample={"target": tokens})


def draw_tokens(words: int = 40):
    return torch.randint(4, words, (2, 17))


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_is_the_source(layout, old, data, tmp_path):
    source, tokens = make_source(data, tmp_path / "source.pt", layout, old), draw_tokens()
    rows = convert.convert(tmp_path / "source.pt", tmp_path / "out.pt", Options("softmax"))
    torch.testing.assert_close(
        log_probabilities(load(tmp_path / "out.pt"), tokens), log_probabilities(source, tokens), atol=1e-5, rtol=0
    )
    assert {row.action for row in rows} == {"copied"}


def test_gpt2_is_the_source(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers imports it where it is there, and it may not fit this torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=24, n_embd=WIDTH, n_layer=2, n_head=HEADS, eos_token_id=49, bos_token_id=49)
    source, tokens = GPT2LMHeadModel(config).eval(), torch.randint(0, 50, (2, 17))
    for name, x in source.named_parameters():
        nn.init.normal_(x, std=0.2 if "wte" not in name else 1.0)
    source.save_pretrained(tmp_path / "gpt2")
    convert.convert(tmp_path / "gpt2", tmp_path / "out.pt", Options("softmax"))
    assert (tmp_path / "dict.txt").read_text().splitlines()[:3] == ["0 1", "1 1", "2 1"]
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "out.pt")], {"data": str(tmp_path)})
    assert task.dictionary.index("7") == 11 and len(task.dictionary) == 54
    torch.testing.assert_close(model.eval()(tokens + 4)[0][..., 4:], source(tokens).logits, atol=1e-5, rtol=0)
    convert.convert(tmp_path / "gpt2", tmp_path / "decay.pt", Options("decay", feature_dim=4), force=True)
    decay = torch.load(tmp_path / "decay.pt", weights_only=True)["model"]
    assert torch.equal(decay["decoder.layers.1.fc1.weight"], source.transformer.h[1].mlp.c_fc.weight.mT)


def parts_of(path, layer: int = 1) -> tuple[dict, nn.Module]:
    """The rows of the fused projection, biases as their last column, and the mixer."""
    mixer = load(path).decoder.layers[layer].self_attn.mixer
    fused = torch.cat([mixer.in_proj.weight, mixer.in_proj.bias.unsqueeze(1)], 1).detach()
    return dict(zip(mixer.sizes, fused.split(list(mixer.sizes.values())))), mixer


def with_bias(linear) -> torch.Tensor:
    return torch.cat([linear.weight, linear.bias.unsqueeze(1)], 1).detach()


@pytest.mark.parametrize("rule", RULES)
def test_projections_are_kept_and_scaled(rule, data, tmp_path):
    attention = make_source(data, tmp_path / "source.pt").decoder.layers[1].self_attn
    rows = convert.convert(tmp_path / "source.pt", tmp_path / "out.pt", Options(rule))
    parts, mixer = parts_of(tmp_path / "out.pt")
    torch.testing.assert_close(parts["q"], with_bias(attention.q_proj) * 8**-0.5)
    torch.testing.assert_close(parts["k"], with_bias(attention.k_proj))
    scale = {"decay": 1 - torch.sigmoid(parts.get("z", parts["v"])[:, -1:]), "sum": 1 / 512}.get(rule, 1)
    torch.testing.assert_close(parts["v"], with_bias(attention.v_proj) * scale)
    torch.testing.assert_close(with_bias(mixer.out_proj), with_bias(attention.out_proj))
    if rule in ("delta", "gated_delta"):
        assert mixer.feature_norm == "l2" and torch.sigmoid(parts["beta"][:, -1]).mean().item() == pytest.approx(0.0067, abs=1e-4)
    new = {row.name.split(".")[-1] for row in rows if row.action == "new"}
    assert new == {f"self_attn.gate {gate}".split(".")[-1] for gate in RULES[rule].gates}


def test_narrow_queries_and_keys_have_the_nearest_products(data, tmp_path):
    attention = make_source(data, tmp_path / "source.pt").decoder.layers[1].self_attn
    convert.convert(tmp_path / "source.pt", tmp_path / "out.pt", Options("decay", feature_dim=3))
    parts, _ = parts_of(tmp_path / "out.pt")
    sources = (with_bias(attention.q_proj) * 8**-0.5, with_bias(attention.k_proj))
    for q, k, whole_q, whole_k in zip(parts["q"].chunk(HEADS), parts["k"].chunk(HEADS), *(x.chunk(HEADS) for x in sources)):
        products = whole_q.mT @ whole_k
        error, best = (products - q.mT @ k).norm(), torch.linalg.svdvals(products)[3:].norm()
        assert q.shape == (3, WIDTH + 1) and error == pytest.approx(best.item(), rel=1e-3)


TUNE = (
    "--update-rule decay --feature-map identity --feature-norm none --feature-dim 4 --optimizer adam --lr 0.001 --batch-size 4"
    " --no-epoch-checkpoints --ddp-backend legacy_ddp"
)


def test_a_converted_model_is_fine_tuned_and_evaluated(data, tmp_path):
    make_source(data, tmp_path / "source.pt", "adaptive")
    convert.main([str(tmp_path / "source.pt"), str(tmp_path / "out.pt"), "--rule", "decay", "--feature-dim", "4"])
    arguments = f"{SMALL.replace('transformer_lm', 'fast_weight_lm')} {ADAPTIVE} {TUNE}".split()
    tuned = ["--finetune-from-model", tmp_path / "out.pt", "--save-dir", tmp_path / "tuned", "--max-update", 3]
    assert f"loading pretrained model from {tmp_path / 'out.pt'}" in succeed(fairseq("train", data, *USER_DIR, *arguments, *tuned))
    restored = ["--restore-file", tmp_path / "out.pt", "--save-dir", tmp_path / "restored", "--max-update", 1]
    assert f"Loaded checkpoint {tmp_path / 'out.pt'}" in succeed(fairseq("train", data, *USER_DIR, *arguments, *restored))
    for path in (tmp_path / "out.pt", tmp_path / "tuned" / "checkpoint_last.pt"):
        assert "Perplexity" in succeed(fairseq("eval_lm", data, *USER_DIR, "--path", path, "--tokens-per-sample", 24))


def test_the_table_has_layers_of_a_kind_in_one_line(data, tmp_path, capsys):
    make_source(data, tmp_path / "source.pt")
    convert.main([str(tmp_path / "source.pt"), str(tmp_path / "out.pt"), "--rule", "decay", "--feature-dim", "4"])
    printed = capsys.readouterr().out
    assert "| decoder.layers.*.self_attn.q_proj | changed: times 0.3536, projected from 8 to 4 a head | 2 | 1056 |" in printed
    assert "| decoder.layers.*.self_attn.v_proj | changed: times 1 - sigmoid(b_z) | 2 | 2112 |" in printed
    assert "| decoder.layers.*.self_attn.gate f | new | 2 | 1056 |" in printed
    assert "| decoder.layers.*.fc1.weight | copied | 2 | 3072 |" in printed


def broken(data, folder):
    """Sources that are refused, by what is wrong with them."""
    make_source(data, folder / "good.pt")
    state = torch.load(folder / "good.pt", weights_only=True)
    for name, change in {
        "extra": lambda s: s["model"].update({"decoder.layers.0.self_attn.gate.weight": torch.zeros(2)}),
        "missing": lambda s: s["model"].pop("decoder.layers.1.fc1.weight"),
        "shape": lambda s: s["model"].update({"decoder.layers.1.fc1.weight": torch.zeros(2, 2)}),
        "attention": lambda s: s["model"].pop("decoder.layers.1.self_attn.k_proj.weight"),
        "kind": lambda s: s["cfg"]["model"].update(_name="lstm_lm"),
    }.items():
        changed = {**state, "model": dict(state["model"]), "cfg": {**state["cfg"], "model": dict(state["cfg"]["model"])}}
        change(changed)
        torch.save(changed, folder / f"{name}.pt")
    (folder / "half.pt").write_bytes((folder / "good.pt").read_bytes()[:5000])
    (folder / "empty").mkdir()


@pytest.mark.parametrize(
    "source, more, message",
    [
        ("extra.pt", [], "decoder.layers.0.self_attn.gate.weight is not part of softmax attention"),
        ("missing.pt", [], "decoder.layers.1.fc1.weight is missing"),
        ("shape.pt", [], r"decoder.layers.1.fc1.weight of shape \(2, 2\) has no place"),
        ("attention.pt", [], r"self_attn.k_proj.weight is missing; it must be \(32, 32\)"),
        ("kind.pt", [], "is a checkpoint of a lstm_lm; it must be of a transformer_lm"),
        ("half.pt", [], "cannot be read as a fairseq checkpoint"),
        ("empty", [], "has no config.json; it must be a folder with a Hugging Face GPT-2"),
        ("nothing.pt", [], "does not exist"),
        ("good.pt", ["--feature-dim", "9"], "--feature-dim is 9; it must be at most the width of a head, 8"),
        ("good.pt", ["--attention-norm"], "--attention-norm is not defined for --update-rule decay"),
    ],
)
def test_mistakes(source, more, message, data, tmp_path):
    broken(data, tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=f"fw-convert: error: .*{message}"):
        convert.main([str(tmp_path / source), str(tmp_path / "out.pt"), "--rule", "decay", *more])
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten_without_force(data, tmp_path):
    make_source(data, tmp_path / "source.pt")
    (tmp_path / "out.pt").write_text("precious")
    arguments = [str(tmp_path / "source.pt"), str(tmp_path / "out.pt"), "--rule", "gated"]
    with pytest.raises(SystemExit, match=r"out\.pt exists; give another name, or --force"):
        convert.main(arguments)
    assert (tmp_path / "out.pt").read_text() == "precious"
    convert.main([*arguments, "--force"])
    assert load(tmp_path / "out.pt").decoder.recurrent
