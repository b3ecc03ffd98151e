"""fw-convert: checkpoints of every layout, GPT-2 folders, what is copied, scaled and new, and what is refused."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from support.checkpoints import ADAPTIVE, logits, save, save_format, source
from support.commands import preloaded
from support.draws import PLAIN

from fw_fairseq.rules import RULES, Coefficients, Gate, Rule
from fw_fairseq.tools.convert.__main__ import main as convert_command
from fw_fairseq.tools.convert.__main__ import parser
from fw_fairseq.tools.convert.conversion import convert, fast_weight_config, training_options, width_map
from fw_fairseq.tools.convert.pretrained import lm_options, load_mapped, options_of_any_kind, read_fairseq
from fw_fairseq.tools.convert.report import Change, table

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = {
    "plain": "--arch transformer_lm",
    "tied-learned-positions": "--arch transformer_lm_gpt --share-decoder-input-output-embed --decoder-learned-pos",
    "input-width": "--arch transformer_lm --decoder-input-dim 16 --decoder-output-dim 24 --no-token-positional-embeddings",
    "adaptive": f"--arch transformer_lm {ADAPTIVE}",
    "fewer-words-out": "--arch transformer_lm --output-dictionary-size 30",
    "kept-layer": "--arch transformer_lm --decoder-layers-to-keep 0",
    "own-parts": "--arch fast_weight_lm --mixer softmax --scale-output --ffn-sru 8",
    "own-sparse-parts": "--arch fast_weight_lm --mixer softmax --ffn-sparsity 4 --output-sparsity 4",
    "quantised": "--arch transformer_lm --quant-noise-pq 0.1 --quant-noise-pq-block-size 4",
    "baevski": f"--arch transformer_lm_wiki103 {ADAPTIVE} --tie-adaptive-proj",
    "scaled": "--arch transformer_lm --layernorm-embedding --scale-fc --scale-resids --activation-fn gelu --no-scale-embedding",
}


LATER = ("no_decoder_final_norm", "tie_adaptive_proj", "decoder_normalize_before")


def old_format(model, args) -> dict:
    """As checkpoints of 2018 are: one packed projection, norms by number, no norm after the last layer, options as a Namespace."""
    state = dict(model.state_dict())
    for layer in range(2):
        prefix = f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            packed = [state.pop(f"{prefix}self_attn.{x}_proj.{kind}") for x in "qkv"]
            state[f"{prefix}self_attn.in_proj_{kind}"] = torch.cat(packed)
            for number, name in ((0, "self_attn_layer_norm"), (2, "final_layer_norm")):
                state[f"{prefix}layer_norms.{number}.{kind}"] = state.pop(f"{prefix}{name}.{kind}")
    old = {name: value for name, value in vars(args).items() if name not in LATER}
    state["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    kept = ("arch", "task", "data", "tokens_per_sample", "max_target_positions", "add_bos_token", "criterion", "dropout")
    old = {name: value for name, value in old.items() if name in kept or name.startswith(("decoder_", "adaptive_", "tie_"))}
    return save_format(state, args=Namespace(**old, no_tie_adaptive_proj=False))


def load(path, data):
    return checkpoint_utils.load_model_ensemble([str(path)], arg_overrides={"data": str(data)})[0][0].eval()


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_reproduces_the_source(layout, dictionary, tmp_path):
    model, _, state = source(LAYOUTS[layout], dictionary)
    changes = convert(save(state, tmp_path), tmp_path / "out.pt", "softmax")
    assert {change.what for change in changes} == {"copied"}
    options = training_options(tmp_path / "out.pt")
    assert options.startswith("--task language_modeling --arch fast_weight_lm --finetune-from-model ")
    scales = re.findall(r"--scale-(?!output)", options)
    assert not scales, "fairseq has not handed them on to the layers"
    assert sum(change.parameters for change in changes) >= sum(x.numel() for x in model.parameters())
    tokens = torch.randint(4, 64, (3, 20))
    torch.testing.assert_close(logits(load(tmp_path / "out.pt", dictionary), tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
    convert(tmp_path / "source.pt", tmp_path / "decay.pt", "decay")
    assert logits(load(tmp_path / "decay.pt", dictionary), tokens).isfinite().all()


def test_a_buffer_that_nothing_is_written_to_may_be_missing(dictionary, tmp_path):
    model, _, state = source(LAYOUTS["adaptive"], dictionary)
    unset = [name for name in state["model"] if name.endswith("_float_tensor")]
    state["model"] = {name: x for name, x in state["model"].items() if name not in unset}
    convert(save(state, tmp_path), tmp_path / "out.pt", "softmax")
    tokens = torch.randint(4, 64, (3, 20))
    torch.testing.assert_close(logits(load(tmp_path / "out.pt", dictionary), tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
    assert len(unset) == 2


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("arch", ["transformer_lm_wiki103", "transformer_lm --decoder-normalize-before"])
def test_a_checkpoint_of_the_published_kind(arch, dictionary, tmp_path):
    """adaptive_lm_wiki103.v2: a Namespace that misses later options, packed attention, no final norm, tied projections."""
    model, args, _ = source(f"--arch {arch} {ADAPTIVE} --tie-adaptive-proj --no-decoder-final-norm", dictionary)
    convert(save(old_format(model, args), tmp_path), tmp_path / "out.pt", "softmax")
    options, wiki103 = read_fairseq(tmp_path / "source.pt").options, arch == "transformer_lm_wiki103"
    assert options["attention_dropout"] == options["activation_dropout"] == (0.1 if wiki103 else 0.0)
    converted, tokens = load(tmp_path / "out.pt", dictionary), torch.randint(4, 64, (3, 20))
    assert converted.decoder.layer_norm is None and converted.state_dict()["decoder.version"] == 3
    torch.testing.assert_close(logits(converted, tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
    lines = convert(tmp_path / "source.pt", tmp_path / "decay.pt", "decay", feature_dim=4)
    assert any(line.what == "new" and line.name.endswith("gate z") for line in lines)
    assert logits(load(tmp_path / "decay.pt", dictionary), tokens).isfinite().all()


@pytest.fixture(scope="module")
def plain(dictionary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    model, _, state = source("--arch transformer_lm", dictionary)
    return model, save(state, folder)


@pytest.mark.parametrize("rule, width", [*((rule, 4) for rule in PLAIN), ("sum", 0), ("decay", 0), ("delta", 16)])
def test_every_rule(rule, width, plain, dictionary, tmp_path):
    """All but attention is the source's; the pieces of attention are what the report says."""
    model, path = plain
    convert(path, tmp_path / "out.pt", rule, feature_dim=width)
    converted = load(tmp_path / "out.pt", dictionary)
    mine, theirs = converted.state_dict(), model.state_dict()
    assert all(torch.equal(mine[name], x) for name, x in theirs.items() if "self_attn." not in name)
    layers = zip(converted.decoder.layers, model.decoder.layers)
    for mixer, attention in ((layer.self_attn.mixer, other.self_attn) for layer, other in layers):
        pieces = dict(zip(mixer.sizes, mixer.in_proj.weight.split(list(mixer.sizes.values()))))
        biases = dict(zip(mixer.sizes, mixer.in_proj.bias.split(list(mixer.sizes.values()))))
        assert torch.equal(mixer.out_proj.weight, attention.out_proj.weight)
        products = [x.unflatten(0, (4, -1)) for x in (pieces["q"], pieces["k"])]
        assert products[0].shape[1] == (width or 8)
        if width != 4:  # nothing is lost: the products of queries and keys are those of the source
            queries, keys = (x.weight.unflatten(0, (4, -1)) for x in (attention.q_proj, attention.k_proj))
            torch.testing.assert_close(products[0].mT @ products[1], queries.mT @ keys / math.sqrt(8))
        scale = 1 / 512 if rule == "sum" else 1 - torch.sigmoid(biases["z"])[:, None] if rule == "decay" else 1
        torch.testing.assert_close(pieces["v"], attention.v_proj.weight * scale)
        torch.testing.assert_close(biases["v"][:, None], attention.v_proj.bias[:, None] * scale)
        gates = {name: biases[name].sigmoid() for name in mixer.rule.gates}
        assert all(pieces[name].eq(0).all() for name in gates)
        if "delta" in rule:
            assert gates["beta"].allclose(torch.tensor(0.007), atol=5e-4)
        if "gated" in rule:  # uniform over the 32 channels of the model, of which these are the gates of 4 heads
            assert gates["g"].unique().numel() == 4 and (gates["g"] >= 1 / 32).all() and (gates["g"] <= 31 / 32).all()
        if rule == "decay":
            assert (gates["z"] >= 1 / 32).all() and gates["z"].std() > 0.2 and gates["f"].std() > 0.2
    assert logits(converted, torch.randint(4, 64, (2, 32))).isfinite().all()


@pytest.mark.parametrize("rule", [name for name in RULES if name not in PLAIN])
def test_rules_with_gates_of_their_own(rule, plain, dictionary, tmp_path):
    """Queries, keys and values are the source's, those of every write; gates start as in a new model, whatever the token."""
    lines = convert(plain[1], tmp_path / "out.pt", rule)
    converted = load(tmp_path / "out.pt", dictionary)
    for layer, other in zip(converted.decoder.layers, plain[0].decoder.layers):
        mixer, attention = layer.self_attn.mixer, other.self_attn
        pieces = dict(zip(mixer.sizes, mixer.in_proj.weight.split(list(mixer.sizes.values()))))
        torch.testing.assert_close(pieces["q"], attention.q_proj.weight / math.sqrt(8))
        wanted = {"k": attention.k_proj.weight.repeat(0 if rule == "hgrn2" else mixer.writes, 1)}
        wanted["v"] = attention.v_proj.weight.repeat(mixer.writes, 1)
        assert all(torch.equal(pieces[name], x) for name, x in wanted.items())
        assert all(pieces[name].eq(0).all() for name in mixer.rule.gates)
    for name, x in converted.state_dict().items():
        if ".makers." in name:
            part = re.sub(r"\.\d+\.", ".*.", name)
            assert any(line.what == "new" and line.name == part and line.parameters == 2 * x.numel() for line in lines)
    assert logits(converted, torch.randint(4, 64, (2, 32))).isfinite().all()


@pytest.mark.parametrize("bias", [None, 0.0])
def test_a_gate_for_each_channel_of_wide_keys(bias, plain, dictionary, tmp_path, monkeypatch):
    """A bias of 0 is a bias; a gate without one starts uniformly, and may have more channels than the model is wide."""
    gates = {"f": Gate("K", bias), "beta": Gate(bias=bias)}
    rule = Rule(equation="", source="", gates=gates, coefficients=lambda f, beta: Coefficients(f=f, w=beta), normaliser="write")
    monkeypatch.setitem(RULES, "gated", rule)
    changes = convert(plain[1], tmp_path / "out.pt", "gated", feature_dim=16)
    mixer = load(tmp_path / "out.pt", dictionary).decoder.layers[0].self_attn.mixer
    biases = dict(zip(mixer.sizes, mixer.in_proj.bias.split(list(mixer.sizes.values()))))
    said = {change.name: change.how for change in changes}["decoder.layers.*.self_attn.mixer.in_proj gate f"]
    assert len(biases["f"]) == 4 * 16 > mixer.embed_dim
    if bias is None:
        least = torch.logit(torch.tensor(1 / 64)) - 1e-6
        assert said == "starts by uniform gate initialisation" and biases["f"].unique().numel() > 60
        assert all(biases[name].abs().max() <= -least for name in gates) and biases["beta"].unique().numel() == 4
    else:
        assert said == "starts at 0.5000" and all(biases[name].eq(0).all() for name in gates)


def test_layers_that_stay_softmax(plain, dictionary, tmp_path):
    convert(plain[1], tmp_path / "out.pt", "decay", mixer_pattern="softmax,fast_weight")
    names = load(tmp_path / "out.pt", dictionary).state_dict()
    assert "decoder.layers.0.self_attn.q_proj.weight" in names and "decoder.layers.1.self_attn.mixer.in_proj.weight" in names


@pytest.mark.parametrize("given, window", [({}, 32), ({"local_window": 7}, 7)])
def test_local_attention_is_the_source_as_far_as_its_window(given, window, plain, dictionary, tmp_path):
    changes = convert(plain[1], tmp_path / "out.pt", "local_attention", **given)
    assert {change.what for change in changes} == {"copied"}
    tokens = torch.randint(4, 64, (2, 40))
    source, local = (logits(model, tokens) for model in (plain[0], load(tmp_path / "out.pt", dictionary)))
    torch.testing.assert_close(local[:, :window], source[:, :window], rtol=1e-5, atol=1e-5)
    assert (local[:, window] - source[:, window]).abs().amax() > 1e-3


def test_the_window_of_a_pattern(plain, dictionary, tmp_path):
    convert(plain[1], tmp_path / "out.pt", "decay", mixer_pattern="fast_weight,local_attention", local_window=5)
    layers = load(tmp_path / "out.pt", dictionary).decoder.layers
    assert layers[1].self_attn.mixer.reach.most == 4


def test_half_precision_stays(dictionary, tmp_path):
    _, _, state = source("--arch transformer_lm", dictionary)
    state["model"] = {name: x.half() for name, x in state["model"].items()}
    convert(save(state, tmp_path), tmp_path / "out.pt", "decay")
    tensors = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert {x.dtype for name, x in tensors.items() if "self_attn" in name} == {torch.float16}


def drop(state):
    del state["model"]["decoder.layers.1.fc1.bias"]


def widen(state):
    state["model"]["decoder.layers.0.fc1.weight"] = torch.zeros(50, 32)


def add(state):
    state["model"]["decoder.layers.0.extra"] = torch.zeros(1)


def rename(state):
    state["cfg"]["model"]["_name"] = "fconv_lm"


def without_model(state):
    state["model"] = [1]


def without_options(state):
    state["cfg"] = None


def without_task(state):
    del state["cfg"]["task"]


@pytest.mark.parametrize(
    "change, said",
    [
        (without_task, r"has options or parameters of which no model can be made \(it has no 'task'\)"),
        (without_model, r"has options or parameters of which no model can be made \("),
        (without_options, r"has options or parameters of which no model can be made \("),
        (drop, "lacks decoder.layers.1.fc1.bias"),
        (widen, "fc1.weight of shape"),
        (add, "decoder.layers.0.extra"),
        (rename, "fconv_lm"),
    ],
)
def test_unknown_layouts_are_refused_by_their_first_key(change, said, dictionary, tmp_path):
    _, _, state = source("--arch transformer_lm", dictionary)
    change(state)
    with pytest.raises(ValueError, match=said):
        convert(save(state, tmp_path), tmp_path / "out.pt", "decay")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.pt"]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"rule": "softmax", "feature_dim": 4}, "--feature-dim"),
        ({"rule": "local_attention", "feature_norm": "l2"}, "--rule local_attention keeps .* leave --feature-norm out"),
        (
            {"rule": "decay", "mixer_pattern": "sru"},
            "--mixer-pattern has sru; fw-convert makes: fast_weight, local_attention, softmax",
        ),
        ({"rule": "decay", "attention_norm": True}, "--attention-norm"),
        ({"rule": "local_attention", "local_window": 1}, "^--local-window is 1; it must be at least 2$"),
        ({"rule": "delta", "feature_map": "identity", "feature_norm": "none"}, "--feature-norm"),
    ],
)
def test_options_are_refused_by_name(given, said, plain, tmp_path):
    with pytest.raises(ValueError, match=said):
        convert(plain[1], tmp_path / "out.pt", **given)


def test_the_command_prints_a_table_and_overwrites_only_by_force(plain, tmp_path, capsys):
    out = tmp_path / "out.pt"
    convert_command([str(plain[1]), str(out), "--rule", "decay", "--feature-dim", "4"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("copied", "changed", "new", "decoder.layers.*.self_attn.mixer.in_proj gate z"))
    before = out.read_bytes()
    with pytest.raises(SystemExit, match="exists; name another file, or give --force"):
        convert_command([str(plain[1]), str(out), "--rule", "sum"])
    assert out.read_bytes() == before
    convert_command([str(plain[1]), str(out), "--rule", "sum", "--force"])
    assert out.read_bytes() != before
    with pytest.raises(SystemExit, match=r"none\.pt does not exist; .* a model of the Hub must be downloaded first$"):
        convert_command([str(tmp_path / "none.pt"), str(tmp_path / "x.pt"), "--rule", "sum"])


def test_optimizer_state_stays_on_disk(dictionary, tmp_path):
    """Read only where it is used; fairseq reads all of it."""
    _, _, state = source("--arch transformer_lm", dictionary)
    path = save(state | {"last_optimizer_state": torch.ones(10**7)}, tmp_path)
    answers = preloaded().SimpleQueue()
    for read in (load_mapped, checkpoint_utils.load_checkpoint_to_cpu):
        process = preloaded().Process(target=measure, args=(read, path, answers))
        process.start()
        process.join()
    assert answers.get() < 20_000 < 35_000 < answers.get()


def measure(read, path, answers) -> None:
    """In a process of its own: here other tests' memory may be freed meanwhile."""
    before = anonymous_kilobytes()
    state = read(path)
    answers.put(anonymous_kilobytes() - before)
    del state


def anonymous_kilobytes() -> int:
    """This process's memory, files that it maps left out."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_a_seed_makes_the_same_model(plain, tmp_path):
    """By default it is 1, in the command too."""
    found = []
    for name, given in {"a": {}, "b": {"seed": 1}, "c": {"seed": 2}}.items():
        convert(plain[1], tmp_path / name, "decay", feature_dim=4, **given)
        found.append(torch.load(tmp_path / name, weights_only=True)["model"]["decoder.layers.0.self_attn.mixer.in_proj.weight"])
    assert found[0].equal(found[1]) and not found[0].equal(found[2])
    args = parser().parse_args(["a", "b", "--rule", "sum"])
    assert (args.seed, args.feature_dim, args.force, args.attention_norm) == (1, 0, False, False)
    with pytest.raises(SystemExit, match="--rule is missing; a Transformer becomes one of: sum, "):
        convert_command([str(plain[1]), str(tmp_path / "d")])
    assert not (tmp_path / "d").exists()


def test_a_converted_checkpoint_is_at_its_first_update(plain, tmp_path):
    convert(plain[1], tmp_path / "out.pt", "sum")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert state["extra_state"] == {"epoch": 1, "train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}}
    assert state["optimizer_history"][0]["num_updates"] == 0


def test_what_the_source_says_of_its_dictionary_stays(dictionary, tmp_path):
    _, _, state = source("--arch transformer_lm", dictionary)
    origin = {"task": "language_modeling", "dictionaries": {"source": "abc", "target": "abc"}}
    convert(save(state | {"extra_state": {"epoch": 3, "origin": origin}}, tmp_path), tmp_path / "out.pt", "sum")
    kept = torch.load(tmp_path / "out.pt", weights_only=True)["extra_state"]
    assert kept["origin"] == origin and kept["epoch"] == 1
    with pytest.raises(ValueError, match=r"^the source dictionary of the data has other words, .* than that of .*out\.pt; give"):
        load(tmp_path / "out.pt", dictionary)


def test_what_the_report_says_of_attention(plain, tmp_path):
    """Of two layers of width 32."""
    lines = {line.name.rpartition("mixer.")[2]: line for line in convert(plain[1], tmp_path / "out.pt", "sum", feature_dim=4)}
    assert [tuple(lines[f"in_proj {name}"][1:]) for name in "qkv"] == [
        ("changed", 2 * 16 * 33, "times 1/sqrt(8), width per head 8 -> 4"),
        ("changed", 2 * 16 * 33, "width per head 8 -> 4"),
        ("changed", 2 * 32 * 33, "times 1/512"),
    ]
    lines = {line.name.rpartition("mixer.")[2]: line for line in convert(plain[1], tmp_path / "delta.pt", "delta")}
    assert tuple(lines["in_proj k"][1:]) == tuple(lines["in_proj v"][1:]) == ("copied", 2 * 32 * 33, "")
    assert lines["feature_map.weight"][1:] == ("new", 2 * 4 * 8 * 8, "starts as the identity")
    lines = convert(plain[1], tmp_path / "favor.pt", "sum", feature_map="favor")
    assert {line.how for line in lines if "feature_map." in line.name} == {""}


def test_the_report_counts_every_number_once(dictionary, tmp_path):
    """Also where words share their embeddings with the output."""
    _, _, state = source("--arch transformer_lm --share-decoder-input-output-embed", dictionary)
    lines = convert(save(state, tmp_path), tmp_path / "out.pt", "decay")
    tensors = torch.load(tmp_path / "out.pt", weights_only=True)["model"].values()
    assert sum(line.parameters for line in lines) == sum({x.data_ptr(): x.numel() for x in tensors}.values())


def test_the_table_has_columns_and_totals():
    changes = [Change("first", "copied", 1200, ""), Change("b", "changed", 30, "doubled"), Change("c", "changed", 4, "")]
    assert table(changes).splitlines() == [
        "copied   first  1,200",
        "changed  b         30  doubled",
        "changed  c          4",
        "copied   all    1,200",
        "changed  all       34",
        "new      all        0",
    ]


def test_maps_to_another_width_are_orthogonal():
    """Narrower ones are scaled, so that products of random queries and keys stay as large on average."""
    wide, narrow = width_map(3, 16, 8), width_map(3, 4, 8)
    torch.testing.assert_close(wide.mT @ wide, torch.eye(8).expand(3, 8, 8))
    torch.testing.assert_close(narrow @ narrow.mT, 2 * torch.eye(4).expand(3, 4, 4))


def test_features_that_a_rule_gets_by_default():
    for (rule, *given), expected in {
        ("delta",): ("relu", "sum"),
        ("delta", "identity"): ("identity", "l2"),
        ("delta", "relu", "l2"): ("relu", "l2"),
        ("decay",): ("identity", "none"),
        ("decay", "relu"): ("relu", "none"),
    }.items():
        config = fast_weight_config(rule, *given)
        assert (config.feature_map, config.feature_norm) == expected


def test_options_that_a_source_leaves_out():
    options = lm_options({"quant_noise_pq": False, "no_scale_embedding": True})
    assert options["quant_noise_pq"] == 0 and not isinstance(options["quant_noise_pq"], bool)
    assert options["no_scale_embedding"] is True and options["add_bos_token"] is False and options["tpu"] is False
    assert options["tokens_per_sample"] == 1024 and options["max_target_positions"] is None


@pytest.mark.parametrize("of_task, expected", [(40, 40), (None, 24)])
def test_the_longest_text_is_that_of_the_task(of_task, expected, dictionary, tmp_path):
    _, _, state = source("--arch transformer_lm", dictionary)
    state["cfg"]["model"] |= {"max_target_positions": None, "tokens_per_sample": 24}
    state["cfg"]["task"] |= {"max_target_positions": of_task}
    assert read_fairseq(save(state, tmp_path)).options["max_target_positions"] == expected


def test_options_may_have_a_namespace_among_them():
    assert options_of_any_kind({"model": Namespace(width=3)})["model"].width == 3
