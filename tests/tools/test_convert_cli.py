"""A converted checkpoint in fairseq's own commands: fine-tuned, restored, evaluated, loaded; and the recipes at toy size."""

from __future__ import annotations

import logging
import re
from argparse import Namespace

import pytest
import torch
import yaml
from fairseq import models
from fairseq.models import ARCH_CONFIG_REGISTRY
from support.commands import ROOT, USER_DIR, fairseq, succeed
from support.language_models import make_task, options_of
from support.pretrained import CONVERTED, SHAPE, perplexity, train
from support.recipes import recipe

from fw_fairseq import Mistake
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModel
from fw_fairseq.patches.checkpoints.model_options import take_options_over
from fw_fairseq.tools.convert.__main__ import main as fw_convert
from fw_fairseq.tools.convert.conversion import convert

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.long
def test_finetuning_goes_on_from_the_converted_model(counting_data, pretrained, tmp_path):
    convert(pretrained, tmp_path / "start.pt", "decay", feature_dim=4)
    convert(pretrained, tmp_path / "softmax.pt", "softmax")
    assert perplexity(counting_data, tmp_path / "softmax.pt") == pytest.approx(perplexity(counting_data, pretrained), abs=0.01)
    start = perplexity(counting_data, tmp_path / "start.pt")
    tuning = [*CONVERTED.split(), "--max-update", 15, "--finetune-from-model", tmp_path / "start.pt"]
    log = train(counting_data, tmp_path / "tuned", *tuning)
    assert "reset" in log and perplexity(counting_data, tmp_path / "tuned" / "checkpoint_best.pt") < start
    restoring = [*CONVERTED.split(), "--max-update", 1, "--restore-file", tmp_path / "start.pt", "--lr", 0]
    train(counting_data, tmp_path / "restored", *restoring)
    before, after = (torch.load(path, weights_only=True)["model"] for path in (
        tmp_path / "start.pt", tmp_path / "restored" / "checkpoint_last.pt"))  # fmt: skip
    assert all(torch.equal(x, after[name]) for name, x in before.items() if "version" not in name)
    model = FastWeightLanguageModel.from_pretrained(str(tmp_path), "start.pt", data_name_or_path=str(counting_data)).eval()
    assert model.score("w1 w2 w3")["positional_scores"].isfinite().all()


@pytest.mark.long
def test_a_converted_model_is_trained_with_its_options(counting_data, pretrained, tmp_path, capsys):
    """Others that fit its shapes are refused. --options-from takes them over, and so does what fw-convert prints."""
    start = tmp_path / "start.pt"
    fw_convert([str(pretrained), str(start), "--rule", "decay", "--feature-dim", "4"])
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    rest = ["--max-update", 1, "--lr", 0]
    given = [*SHAPE.split(), "--save-dir", tmp_path / "wrong", "--finetune-from-model", start, *rest]
    wrong = "--arch fast_weight_lm --update-rule decay --feature-dim 4 --feature-map elu --feature-norm none --no-scale-embedding"
    done = fairseq("train", counting_data, *USER_DIR, *wrong.split(), *given)
    theirs, ours = "--feature-map identity --scale-embedding", "--feature-map elu --no-scale-embedding"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        f"fairseq_cli.train: {start} was made with {theirs}, and this model has {ours}; give the checkpoint's options, or take them"
        f" over with --options-from {start}"
    )
    restored = [option if option != "--finetune-from-model" else "--restore-file" for option in given]
    log = succeed(fairseq("train", counting_data, *USER_DIR, *wrong.split(), *restored))
    assert f"was made with {theirs}, and this model has {ours}; it computes something else" in log
    task = [*SHAPE.split()[:6], *SHAPE.split()[SHAPE.split().index("--optimizer") :]]
    taken = ["--arch", "fast_weight_lm", "--options-from", start, "--finetune-from-model", start]
    for name, options in {"taken": taken, "printed": printed.split("--user-dir fw_fairseq ")[1].split()}.items():
        succeed(fairseq("train", counting_data, *USER_DIR, *task, *options, *rest, "--save-dir", tmp_path / name))
        start.rename(tmp_path / "away.pt")  # what was taken over is in the new checkpoint
        assert perplexity(counting_data, tmp_path / name / "checkpoint_last.pt") == perplexity(counting_data, tmp_path / "away.pt")
        (tmp_path / "away.pt").rename(start)


def test_a_program_takes_options_over_as_the_commands_do(pretrained, tmp_path, caplog):
    """Its options are a Namespace. The log names those that are taken."""
    caplog.set_level(logging.INFO)
    start = tmp_path / "start.pt"
    fw_convert([str(pretrained), str(start), "--rule", "gated", "--feature-dim", "4"])
    given = Namespace(**vars(options_of("fast_weight_lm", options_from=str(start), dropout=0.3)), arch="fast_weight_lm")
    model = models.build_model(given, make_task(24))
    assert (given.options_from, given.update_rule, given.feature_dim, given.dropout) == ("", "gated", 4, 0.3)
    state = torch.load(start, weights_only=False)
    state["cfg"]["model"]["scale_fc"] = True  # as of an older version: the option is there, its part is not
    state["cfg"]["model"]["quant_noise_pq"] = 0.1  # with which the decoder has a layer of its own
    torch.save(state, start.with_name("older.pt"))
    given = Namespace(**vars(options_of("fast_weight_lm", options_from=str(start.with_name("older.pt")))), arch="fast_weight_lm")
    take_options_over(given)
    assert (given.update_rule, given.scale_fc, given.quant_noise_pq) == ("gated", False, 0.1)
    [said] = [record.message for record in caplog.records if record.message.startswith(f"options of {start}: ")]
    assert " --feature-dim 4 " in said and " --update-rule gated" in said and "--dropout" not in said
    assert {layer.self_attn.mixer.rule_name for layer in model.decoder.layers} == {"gated"}


@pytest.mark.parametrize(
    "given, theirs, ours",
    [
        ({"feature_map": "dpfp", "dropout": 0.3}, "--feature-map identity", "--feature-map dpfp"),
        ({"mixer": "sru"}, "--mixer-pattern fast_weight,fast_weight", "--mixer-pattern sru,sru"),
        ({"decoder_layers": 3}, "--decoder-layers 2", "--decoder-layers 3"),
        ({"decoder_input_dim": 7}, "--decoder-input-dim 32", "--decoder-input-dim 7"),
        ({"decoder_embed_dim": 32, "decoder_input_dim": 32}, "", ""),
        ({"decoder_layers": 2}, "", ""),
    ],
)
def test_options_beside_those_that_are_taken_over(given, theirs, ours, pretrained, tmp_path):
    """They may be the same, or such as the checkpoint does not decide."""
    start = tmp_path / "start.pt"
    fw_convert([str(pretrained), str(start), "--rule", "decay"])
    options = Namespace(**vars(options_of("fast_weight_lm", options_from=str(start), **given)), arch="fast_weight_lm")
    if not theirs:
        return take_options_over(options)
    before = vars(options).copy()
    with pytest.raises(Mistake) as caught:
        take_options_over(options)
    both = f"takes {theirs} over, and {ours} is given beside it"
    assert str(caught.value) == f"--options-from {start} {both}; leave out one of the two"
    assert vars(options) == before


def test_an_architecture_gives_no_options(pretrained, tmp_path):
    """What it sets is not the user's, so that the checkpoint decides."""
    start = tmp_path / "start.pt"
    fw_convert([str(pretrained), str(start), "--rule", "decay"])
    options = Namespace(**vars(options_of("fast_weight_lm_gpt2_small", options_from=str(start))), arch="fast_weight_lm_gpt2_small")
    assert options.decoder_layers == 12
    take_options_over(options)
    assert options.decoder_layers == 2


def test_options_come_from_a_model_of_this_project(counting_data, pretrained, tmp_path):
    options = ["--arch", "fast_weight_lm", "--options-from", pretrained, "--max-update", 1, "--save-dir", tmp_path]
    done = fairseq("train", counting_data, *USER_DIR, *SHAPE.split(), *options)
    assert f"--options-from is {pretrained}, which holds no model of this project" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_the_baevski_auli_recipe_at_toy_size(tmp_path):
    """The four scripts as they are; a second prepare.sh leaves what is there."""

    def script(name, *row):
        return succeed(recipe(f"baevski_auli/{name}.sh", tmp_path / "run", *row, PYTHONWARNINGS="ignore"))

    out = tmp_path / "run_toy"
    script("prepare")
    stamps = {path: path.stat().st_mtime_ns for path in (out / "data").iterdir()}
    assert "in_proj gate z" in script("convert", "decay-4")
    log = script("finetune", "decay-4")
    assert 'num_updates": "6"' in log and "loading pretrained model" in log
    printed = script("eval", "decay-4")
    found = re.findall(r"decay-4, context (\d+): ([\d.]+)", printed)
    assert [window for window, _ in found] == ["0", "24"] and all(1 < float(value) < 100 for _, value in found)
    script("prepare")
    assert stamps == {path: path.stat().st_mtime_ns for path in (out / "data").iterdir()}
    options = torch.load(out / "decay-4" / "checkpoint_last.pt", weights_only=True)["cfg"]
    schedule, optimization = options["lr_scheduler"], options["optimization"]
    assert (schedule["_name"], schedule["min_lr"], optimization["clip_norm"], optimization["lr"]) == ("cosine", 2e-6, 0.1, [1e-4])
    assert (options["dataset"]["batch_size"], options["dataset"]["required_batch_size_multiple"]) == (26, 1)


def test_the_yaml_beside_the_recipe_is_the_scripts_model():
    """Every option of the architecture, and the appendix's schedule."""
    config = yaml.safe_load((ROOT / "recipes" / "baevski_auli" / "finetune.yaml").read_text())
    args = Namespace()
    ARCH_CONFIG_REGISTRY["fast_weight_lm_baevski_auli"](args)
    own = {"_name", "update_rule", "feature_dim", "feature_map", "feature_norm"}
    assert {name: getattr(args, name) for name in config["model"] if name not in own} == {
        name: value for name, value in config["model"].items() if name not in own
    }
    assert config["lr_scheduler"] == {"_name": "cosine", "min_lr": 2e-6, "warmup_updates": 4000, "warmup_init_lr": 1e-7}
    assert (
        config["optimization"] == {"lr": [1e-4], "clip_norm": 0.1, "max_update": 100000} and config["dataset"]["batch_size"] == 26
    )
