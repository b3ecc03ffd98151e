"""The recipes of the publications, the same scripts at toy size."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from support import programs
from support.commands import ENVIRONMENT, ROOT, succeed
from support.language_models import make_task, options_of
from support.recipes import load, recipe, results_script

from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModel
from fw_fairseq.modules.sparse.projections import Convolutions, Multiplicative

BIN = str(Path(sys.executable).parent)


@pytest.mark.long
def test_conversion_on_wikitext2(tmp_path):
    """Start, warm start and fine-tune; a second call only prints."""
    out = tmp_path / "out_toy"
    printed = succeed(recipe("wikitext2/conversion.sh", out, "delta-4-distilled"))
    [row] = [line for line in printed.splitlines() if line.startswith("| delta-4-distilled | ")]
    assert all(50 < value < 5000 for value in perplexities(row)) and len(perplexities(row)) == 2
    [log] = [path.read_text() for path in out.glob("start-8-delta-4-distilled-8/warm.log")]
    assert '"train_distil_match"' in log and '"train_num_updates": "4"' in log
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")}
    assert row in succeed(recipe("wikitext2/conversion.sh", out, "delta-4-distilled"))
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")}


@pytest.mark.long
def test_table_of_several_seeds(tmp_path):
    """Mean and standard deviation of what each seed reached."""
    words = [f"w{i}" for i in range(12000)]  # more than the cutoffs of the adaptive softmax
    for split, count in (("train", 12000), ("valid", 300), ("test", 300)):
        (tmp_path / f"{split}.txt").write_text("".join(" ".join(words[i : i + 30]) + "\n" for i in range(0, count, 30)))
    call, setting = (tmp_path / "out", "sru"), {"TOY": "", "DATA": str(tmp_path), "UPDATES": "2", "SEEDS": "1 2"}
    done = recipe("wikitext2/table.sh", *call, **setting)
    [row] = [line for line in succeed(done).splitlines() if line.startswith("| sru | ")]
    reached = [
        [float(number) for number in re.findall(r"[\d.]+", line)[1:]] for line in done.stderr.splitlines() if ", seed " in line
    ]
    assert len(reached) == 2 and reached[0] != reached[1]
    for cell, (one, other) in zip(row.split(" | ")[1:3], zip(*reached)):
        mean, deviation = map(float, cell.split(" ± "))
        assert mean == pytest.approx((one + other) / 2, abs=0.01) and deviation == pytest.approx(
            abs(one - other) / 2**0.5, abs=0.01
        )
    table = tmp_path / "out" / "perplexity-2.txt"
    for _ in range(2):  # the lines of a second call replace those of the first
        for sliding in (False, True):
            assert results_script("figures/wikitext2.py").read_parts(table, sliding) == {
                "sru": {"": [values[sliding] for values in reached]}
            }
        assert row in succeed(recipe("wikitext2/table.sh", *call, **setting))


def test_sparse_rows_of_wikitext2_have_as_many_parameters_as_dense_ones():
    """Within a thousandth, for the 33,280 words of WikiText-2."""
    text = (ROOT / "recipes/wikitext2/rows.sh").read_text()
    declared = text[text.index("model=(") : text.index("renamed")]
    counts = {}
    for row in ("softmax", "sparse_ffn_equal", "softmax_full", "sparse_equal"):
        script = f"source recipes/mixers.sh; {declared}\n"
        script += "[[ ${row_options[$1]} == *--criterion* ]] && adaptive=(); echo ${model[@]} ${adaptive[@]} ${row_options[$1]}"
        done = subprocess.run(["bash", "-c", script, "-", row], cwd=ROOT, check=True, capture_output=True, text=True)
        given = ["data", "--task", "language_modeling", *done.stdout.split()]
        args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), given)
        with torch.device("meta"):
            model = FastWeightLanguageModel.build_model(convert_namespace_to_omegaconf(args).model, make_task(33280))
        counts[row] = sum(p.numel() for p in model.parameters())
    for sparse, dense in (("sparse_ffn_equal", "softmax"), ("sparse_equal", "softmax_full")):
        assert counts[sparse] == pytest.approx(counts[dense], rel=1e-3)


def test_rows_of_rules_with_parts_around_them():
    """An ending adds one part or all three to a rule's row, and to no other mixer's."""
    parts = {"conv": ["--short-conv", "4"], "norm": ["--output-norm"], "gate": ["--output-gate"]}
    parts["parts"] = [option for part in parts.values() for option in part]

    def options(row: str) -> list[str]:
        script = f"source recipes/mixers.sh; own_options {row} && echo ${{own[@]}}"
        return subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True).stdout.split()

    for ending, added in parts.items():
        assert options(f"sum_elu-{ending}") == options("sum_elu") + added
        assert options(f"sru-{ending}") == []
    assert options("sum_elu-other") == [] and options("sum_elu")[:2] == ["--update-rule", "sum"]


@pytest.mark.long
def test_rows_with_published_layers():
    """Each is built at the sizes of the table, with the mixer of its architecture."""
    script = "source recipes/mixers.sh; for row in $published_layers sru; do own_options $row-published && echo ${own[@]}; done; :"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    sizes = "data --task language_modeling --arch fast_weight_lm --tokens-per-sample 32 --decoder-layers 2 --decoder-embed-dim 64"
    sizes += " --decoder-ffn-embed-dim 128 --decoder-attention-heads 4"
    for line in lines:
        given = [*sizes.split(), *line.split()]
        args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), given)
        with torch.device("meta"):
            model = FastWeightLanguageModel.build_model(convert_namespace_to_omegaconf(args).model, make_task(100))
        rule = {"delta_net": "delta"}.get(args.arch[:-3], args.arch[:-3])
        assert (args.mixer if rule == "gsa" else args.update_rule) == rule
        assert [layer.fc1.weight.shape for layer in model.decoder.layers] == [(128, 64)] * 2
        around = args.no_scale_embedding, args.no_token_positional_embeddings, args.layernorm_embedding
        assert (args.norm_form, args.activation_fn, *around) == ("layer", "relu", False, False, False)
    assert len(lines) == 14


@pytest.mark.long
def test_gpt2(tmp_path):
    """The four scripts as they are: a row starts from the model that the row softmax tuned, or else from GPT-2 itself."""
    out, row = tmp_path / "out_toy", "delta-4-baseline"
    succeed(recipe("gpt2/prepare.sh", out))
    done = recipe("gpt2/convert.sh", out, "decay-4-phi")
    assert "softmax/checkpoint_best.pt is not there: decay-4-phi starts from GPT-2 itself" in done.stderr, done.stderr
    for script in ("convert", "finetune"):
        succeed(recipe(f"gpt2/{script}.sh", out, "softmax"))
    for script in ("convert", "finetune", "eval"):
        printed = succeed(recipe(f"gpt2/{script}.sh", out, row))
    assert 100 < float(re.fullmatch(rf"{row}, valid, context 0: ([\d.]+)", printed.splitlines()[-1])[1]) < 1000
    stamp = (out / row / "start.pt").stat().st_mtime_ns
    done = recipe("gpt2/convert.sh", out, row)
    assert (done.returncode, done.stderr) == (0, f"{out}/{row}/start.pt is there and stays; --force writes over it\n")
    assert (out / row / "start.pt").stat().st_mtime_ns == stamp
    done = recipe("gpt2/convert.sh", out, row, "--seed", 5)
    assert done.returncode and "start.pt exists; name another file, or give --force to replace it" in done.stderr, "another start"
    os.utime(out / "softmax/checkpoint_best.pt")
    assert recipe("gpt2/convert.sh", out, row).returncode, "it is not made of this checkpoint"
    succeed(recipe("gpt2/convert.sh", out, row, "--force"))
    assert (out / row / "start.pt").stat().st_mtime_ns > stamp
    name = "decoder.layers.0.self_attn.{}out_proj.weight"
    tuned, start, raw = (
        torch.load(out / file, weights_only=False)["model"]
        for file in ("softmax/checkpoint_best.pt", f"{row}/start.pt", "decay-4-phi/start.pt")
    )
    assert torch.equal(start[name.format("mixer.")], tuned[name.format("")])
    assert not torch.equal(start[name.format("mixer.")], raw[name.format("mixer.")])
    results_script("figures/tables.py").main("mao1", str(out), str(out / "table.csv"))
    [line] = [line for line in (out / "table.csv").read_text().splitlines() if line.startswith("Delta,baseline,21.6,")]
    updates, state = line.split(",")[4:]
    assert (updates, float(state)) == ("6", 2 * 4 * (4 * 8 + 4) / 1e6), "memories and normalisers"
    options = torch.load(out / row / "checkpoint_last.pt", weights_only=True)["cfg"]
    assert (options["lr_scheduler"]["_name"], options["optimization"]["clip_norm"], options["optimization"]["lr"]) == (
        "cosine",
        1.0,
        [6e-4],
    )
    model = options["model"]
    assert (model["feature_map"], model["feature_norm"], model["attention_norm"]) == ("relu", "sum", True)
    assert model["attention_norm_of"] == "read", "Mao 2022, eq. 6"


@pytest.mark.parametrize(
    "recipe_yaml, arch, extra, batch",
    [
        ("gpt2/finetune.yaml", "fast_weight_lm_gpt2_small", {"no_scale_embedding": True, "activation_fn": "gelu_accurate"}, 32),
        ("wikitext103/train.yaml", "fast_weight_lm_wiki103_small", {}, 96),
    ],
)
def test_yaml_is_the_scripts_model(recipe_yaml, arch, extra, batch):
    config = yaml.safe_load((ROOT / "recipes" / recipe_yaml).read_text())
    own = {"_name", "mixer", "update_rule", "feature_dim", "feature_map", "feature_norm", "attention_norm"}
    expected = vars(options_of(arch, **extra))
    assert {name: value for name, value in config["model"].items() if name not in own} == {
        name: expected[name] for name in config["model"] if name not in own
    }
    assert config["dataset"]["batch_size"] == batch


def perplexities(row: str) -> list[float]:
    return [float(x) for x in re.findall(r"\| (\d+\.\d+)", row)]


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    out = tmp_path_factory.mktemp("recipes") / "wikitext103_toy"
    succeed(recipe("wikitext103/prepare.sh", out))
    return out


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("delta_schlag", marks=pytest.mark.long),
        pytest.param("transformer_schlag", marks=pytest.mark.long),
        pytest.param("transformer_xl_stream", marks=pytest.mark.long),
        pytest.param("transformer_xl_stream_schlag", marks=pytest.mark.long),
    ],
)
def test_wikitext103(row, wikitext):
    succeed(recipe("wikitext103/train.sh", wikitext, f"small-{row}", "--max-update", 4))
    log = succeed(recipe("wikitext103/train.sh", wikitext, f"small-{row}", "--max-update", 6))
    assert 'num_updates": "6"' in log and "Loaded checkpoint" in log, "goes on from its last checkpoint"
    memory = {"XL_MEMORY": "15"} if "xl" in row else {}
    printed = succeed(recipe("wikitext103/eval.sh", wikitext, f"small-{row}", SPLIT="valid", **memory)).splitlines()[-1]
    assert printed.startswith(f"| small-{row}{', memory 15' * len(memory)} | valid | ") and 50 < perplexities(printed)[0] < 5000


@pytest.mark.parametrize(
    "name, args, message",
    [
        ("wikitext103/train.sh", ["tiny-delta"], "ROW is tiny-delta; it must be SIZE-NAME, for example small-delta"),
        ("wikitext103/train.sh", ["small-detla"], "ROW is small-detla; it must be SIZE-NAME"),
        ("wikitext103/train.sh", ["small-srupp"], "ROW is small-srupp; base goes with srupp and srupp5"),
        ("wikitext103/train.sh", ["small-abc_schlag"], "the ending _schlag goes with transformer, transformer_xl_stream, linear,"),
        ("wikitext103/train.sh", ["--lr", "1"], "ROW is missing; it must be SIZE-NAME"),
        ("wikitext103/eval.sh", ["small-linear"], "run recipes/wikitext103/train.sh small-linear with the same OUT and TOY first"),
        ("gpt2/convert.sh", ["delta-4-phi"], "ROW is delta-4-phi; delta diverges without a feature map"),
        ("gpt2/convert.sh", ["decay-4"], "ROW is decay-4; it must be softmax, local_attention or RULE-M-VARIANT"),
        ("wikitext2/conversion.sh", ["decay-4-scratch"], "ROW is decay-4-scratch; it must be softmax, RULE-M or RULE-M-distilled"),
        ("wikitext2/conversion.sh", ["foo-16"], "ROW is foo-16; it must be softmax, RULE-M or RULE-M-distilled"),
        ("baevski_auli/convert.sh", ["abc-4"], "ROW is abc-4; abc starts from nothing and is not converted"),
        ("baevski_auli/finetune.sh", ["decay"], "ROW is decay; it must be RULE-M, abc-M or linformer-M"),
        ("synthetic/sweep.sh", ["retrieval"], "ROW is retrieval; it must begin with capacity or updates"),
        ("workers/speed.sh", ["delta-fast"], "ROW is delta-fast; it must be RULE-batches, RULE-streams or RULE-long"),
    ],
)
def test_mistakes(name, args, message, wikitext):
    """One sentence, the last line of what the recipe prints."""
    done = recipe(name, wikitext, *args)
    assert done.returncode != 0 and message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "name, variable", [("gpt2/eval.sh", "START"), ("enwik8/train.sh", "LENGTH"), ("wmt14/train.sh", "ATTENTIONS"),
                       ("wikitext2/table.sh", "ROWS"), ("synthetic/sweep.sh", "SIZES"), ("workers/speed.sh", "RULES")]
)  # fmt: skip
def test_variables_of_before_are_not_ignored(name, variable, tmp_path):
    done = recipe(name, tmp_path, "capacity", **{variable: "48"})
    assert done.returncode == 1 and f"{variable} is set, which this recipe does not read; " in done.stderr


@pytest.mark.parametrize(
    "name, args", [("wikitext2/table.sh", []), ("wikitext2/speed.sh", []),
                   ("multi30k/table.sh", []), ("streaming/memory.sh", []), ("synthetic/point.sh", ["capacity-2-softmax"]),
                   ("synthetic/sweep.sh", ["capacity-2"]), ("workers/speed.sh", []), ("demo.sh", []),
                   ("smollm2/prepare.sh", []), ("smollm2/finetune.sh", ["gated_delta"]), ("smollm2/harness.sh", ["softmax"])]
)  # fmt: skip
def test_recipes_without_a_toy_size_refuse_it(name, args, tmp_path):
    """In one sentence that says what to do, before anything is downloaded, made or trained."""
    done = recipe(name, tmp_path / "out", *args)
    assert (done.returncode, done.stdout) == (1, "") and not list(tmp_path.iterdir())
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"{Path(name).name}: TOY is set, and this recipe has no toy size; leave TOY out")


@pytest.mark.parametrize(
    "name, variable, value, allowed",
    [
        ("convergence/language.sh", "SEEDS", "1,2", "one or more whole numbers"),
        ("wikitext2/table.sh", "SEEDS", " ", "one or more whole numbers"),
        ("convergence/translation.sh", "DROPOUT", "2", "a number from 0 to below 1"),
        ("synthetic/sweep.sh", "JOBS", "x", "a whole number of at least 1"),
        ("streaming/memory.sh", "TOKENS", "1e6", "a whole number of at least 1"),
        ("demo.sh", "UPDATES", "0", "a whole number of at least 1"),  # which fairseq takes for no limit
        ("gpt2/finetune.sh", "WARMUP", "-1", "a whole number"),
        ("wmt14/train.sh", "PRECISION", "--fp16", "bf16, fp16, fp32 or tf32"),
    ],
)
def test_variables_with_other_values_are_refused(name, variable, value, allowed, tmp_path):
    done = recipe(name, tmp_path / "out", **{variable: value, "TOY": ""})
    assert (done.returncode, done.stdout) == (1, "") and not list(tmp_path.iterdir())
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"{Path(name).name}: {variable} is {value}; it must be {allowed}")


def test_the_demo_takes_no_arguments(tmp_path):
    done = recipe("demo.sh", tmp_path / "out", "foo", TOY="")
    assert (done.returncode, done.stdout) == (1, "") and not list(tmp_path.iterdir())
    assert done.stderr == "demo.sh: foo has no effect here; leave it out\n"


@pytest.mark.parametrize("name", ["multi30k/table.sh", "convergence/translation.sh"])
def test_small_translations_do_not_download_wmt14(name, tmp_path):
    """Whose recipe prepares their text."""
    done = recipe(name, tmp_path / "out", "softmax", TOY="")
    assert done.returncode == 1 and "DATA is missing; it must be the folder with train, val and test_2016_flickr" in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_recipe_prints_its_head():
    """--help alone, without data, programs or folders; each head has the same parts, and its examples name the script."""
    parts = ["Paper", "Data", "Hardware", "Time", "Expected", "Usage"]
    scripts = [path for path in ROOT.glob("recipes/**/*.sh") if os.access(path, os.X_OK) and path.name != "gpu_check.sh"]
    assert len(scripts) >= 26
    for path in scripts:
        done = subprocess.run([path, "--help"], env={"PATH": "/usr/bin:/bin"}, cwd="/", capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), path
        found = re.findall(r"^([A-Z]\w+): ", done.stdout, re.MULTILINE)
        name = str(path.relative_to(ROOT))
        assert found == parts, path
        assert name in done.stdout and not done.stdout.startswith("#"), path


def test_every_recipe_can_be_called_through_a_link(tmp_path):
    """And finds its own files: a recipe that went on without lib.sh would write and remove in folders that are not its own."""
    for path in ROOT.glob("recipes/**/*.sh"):
        if not os.access(path, os.X_OK):
            continue
        link = tmp_path / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        done = subprocess.run([link, "--help"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "") and "recipes/" in done.stdout, path
        copy = tmp_path / "alone" / path.name
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
        if "lib.sh" in path.read_text():
            done = subprocess.run(
                [copy, "row"], env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 1 and "lib.sh: No such file" in done.stderr and len(done.stderr.splitlines()) == 1, path


def test_help_of_programs_without_the_common_part(tmp_path):
    for command, said in (
        (["bash", ROOT / "recipes/gpu_check.sh", "--help"], "OUT/report.json, written after every step"),
        ([sys.executable, ROOT / "recipes/step_time.py", "--help"], "Predicts the time of a training update"),
    ):
        done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert said in succeed(done) and not list(tmp_path.iterdir())
    done = subprocess.run(
        ["bash", ROOT / "recipes/gpu_check.sh", "--fast"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "--fast is no option; the argument is OUT" in done.stderr and not list(tmp_path.iterdir())
    command = [sys.executable, ROOT / "recipes/step_time.py", "wikitext103/train.sh"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "give a step and its row, such as wikitext103/train.sh small-delta" in done.stderr


@pytest.mark.parametrize(
    "name, args",
    [("convergence/language.sh", ["softmax"]), ("wikitext2/table.sh", ["softmax"]), ("wikitext2/conversion.sh", ["softmax"]),
     ("terraformer/prepare.sh", []), ("additive/prepare.sh", [])],
)  # fmt: skip
def test_a_text_that_is_missing_is_named(name, args, tmp_path):
    (tmp_path / "train.txt").write_text("some words\n")
    done = recipe(name, tmp_path / "out", *args, DATA=str(tmp_path), TOY="")
    [sentence] = done.stderr.splitlines()
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert sentence.endswith(f": {tmp_path}/valid.txt is missing; DATA must be the folder with train.txt, valid.txt and test.txt")
    done = recipe(name, tmp_path / "out", *args, TOY="")
    assert done.stderr.endswith(": DATA is missing; it must be the folder with train.txt, valid.txt and test.txt\n")


def test_switches_are_on_or_off(tmp_path):
    """TOY=0 and CPU=0 are as without them, and other values are refused."""
    done = recipe("synthetic/point.sh", tmp_path, "capacity", TOY="0")
    assert "ROW is capacity; it must be FIGURE-KEYS-RULE-MAP" in done.stderr
    for variable in ("TOY", "CPU"):
        done = recipe("synthetic/probe.sh", tmp_path, "recall-delta", **{variable: "yes"})
        assert (done.returncode, done.stderr) == (1, f"probe.sh: {variable} is yes; it must be 1, or 0 as without it\n")


def test_a_file_is_no_folder_for_results(tmp_path):
    (tmp_path / "out_toy").write_text("a file")
    done = recipe("enwik8/prepare.sh", tmp_path / "out")
    assert (done.returncode, done.stderr) == (1, f"prepare.sh: OUT is {tmp_path}/out_toy, which is not a folder\n")


def test_a_launcher_that_cannot_be_read_is_named(tmp_path):
    """In a recipe that sends the output of training to a log."""
    done = recipe("streaming/memory.sh", tmp_path / "out", "delta", TOY="", TOKENS="400", LAUNCH="it's")
    assert done.returncode == 1 and "LAUNCH is it's; its quotes must be in pairs" in done.stderr.splitlines()[-1]


def test_a_sweep_keeps_the_points_of_earlier_calls(tmp_path):
    """Of one figure, sorted; those of a second call are new, or in place of the first."""
    out = tmp_path / "out"
    out.mkdir()
    for row, loss in (("setting1-4-sum-dpfp_--dpfp-nu_1", 0.5), ("setting1-4-sum-softmax_", 0.25)):
        (out / f"{row}.log").write_text(f"best_eval_loss={loss}\n")
    first = recipe("synthetic/sweep.sh", out, "capacity-4-dpfp1", TOY="")
    assert (first.returncode, first.stdout) == (0, "dpfp1 4 0.5\n")
    (out / "setting1-4-sum-dpfp_--dpfp-nu_1.log").write_text("best_eval_loss=0.125\n")
    for row in ("capacity-4-softmax", "capacity-4-dpfp1"):
        succeed(recipe("synthetic/sweep.sh", out, row, TOY=""))
    assert (out / "capacity.txt").read_text() == "dpfp1 4 0.125\nsoftmax 4 0.25\n"


def test_a_sweep_without_a_result_leaves_no_file(tmp_path):
    done = recipe("synthetic/sweep.sh", tmp_path / "out", "capacity-20-foo", TOY="")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "sweep.sh: no point has a result"
    assert not list((tmp_path / "out").glob("capacity*"))


@pytest.mark.long
def test_paths_with_spaces_are_the_callers(tmp_path):
    """OUT and DATA are relative to where the user stands; the words of LAUNCH are split as in a shell."""
    here, programs = tmp_path / "my texts", tmp_path / "my programs"
    (here / "data").mkdir(parents=True)
    programs.mkdir()
    for split in ("train", "valid", "test"):
        (here / "data" / f"{split}.txt").write_text("some words of a text\n" * 40)
    start = programs / "start it"
    start.write_text(f'#!/bin/sh\necho "started by $1"\nshift\nexec "{sys.executable}" "$@"\n')
    start.chmod(0o755)
    given = {"cwd": here, "TOY": "", "CPU": "1"}
    succeed(recipe("wikitext103/prepare.sh", "my runs", DATA="data", **given))
    assert (here / "my runs" / "bin" / "train.bin").is_file()
    launch = {"LAUNCH": f"'{start}' 'two words' -m fairseq_cli.train", "GPUS": "2"}
    small = "--max-update 1 --decoder-layers 1 --decoder-ffn-embed-dim 8 --adaptive-input-cutoff 5 --adaptive-softmax-cutoff 5"
    options = [*small.split(), "--distributed-world-size", 1, "--tokens-per-sample", 8]
    log = succeed(recipe("wikitext103/train.sh", "my runs", "small-delta", *options, **given, **launch))
    assert "started by two words" in log and (here / "my runs/runs/small-delta/checkpoint_best.pt").is_file()
    assert torch.load(here / "my runs/runs/small-delta/checkpoint_best.pt", weights_only=True)["cfg"]["dataset"]["batch_size"] == 48
    done = recipe("wikitext103/train.sh", "my runs", "small-delta", **given, GPUS="7", LAUNCH="echo")
    assert "an update has 98 in its batch, and 96 in the paper: 7 GPUs take 14 each, 1 times" in done.stderr
    assert "--batch-size 14 --update-freq 1" in succeed(done)


def test_programs_are_found_or_one_sentence_says_where(tmp_path):
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes" / "lib.sh", tmp_path / "recipes")
    script = f"source {tmp_path}/recipes/lib.sh; find_programs; command -v fairseq-train"

    def found(**variables):
        command = ["bash", "-c", script, "some.sh"]
        return subprocess.run(command, env={"PATH": "/usr/bin:/bin"} | variables, capture_output=True, text=True, timeout=60)

    assert found(BIN=BIN).stdout == found(PATH=f"/usr/bin:/bin:{BIN}").stdout == f"{BIN}/fairseq-train\n"
    done = found()
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"some.sh: fairseq-train is not in {tmp_path}/.venv/bin or on the PATH; ")
    (tmp_path / ".venv").symlink_to(Path(BIN).parent)
    assert found().stdout == f"{tmp_path}/.venv/bin/fairseq-train\n"


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck():
    scripts = [str(path) for path in ROOT.glob("recipes/**/*.sh")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_srupp_on_wikitext103(wikitext):
    succeed(recipe("wikitext103/train.sh", wikitext, "base-srupp", "--max-update", 3, "--srupp-width", 8))
    assert (wikitext / "runs" / "base-srupp" / "checkpoint_best.pt").is_file()


@pytest.mark.long
@pytest.mark.parametrize("row", ["large-srupp10", "billion-srupp5", "small-dpfp2_delta", "small-performer32_schlag"])
def test_further_rows_of_wikitext103(row, wikitext):
    """Units alone in the models of Lei 2021: two, of which the second one has attention."""
    succeed(recipe("wikitext103/train.sh", wikitext, row, "--max-update", 1))
    saved = torch.load(wikitext / "runs" / row / "checkpoint_best.pt", weights_only=True)
    names, options = {name for name in saved["model"] if name.startswith("decoder.layers.")}, saved["cfg"]["model"]
    if "srupp" in row:
        assert not [name for name in names if ".self_attn.mixer." not in name], "nothing is around the units"
        assert [f"decoder.layers.{i}.self_attn.mixer.kv_proj.weight" in names for i in range(2)] == [False, True]
    else:
        assert (options["dpfp_nu"], options["favor_features"]) == ((2, 0) if "dpfp" in row else (1, 32))


@pytest.mark.long
def test_enwik8(tmp_path):
    """Bytes and nothing but bytes, in order; bits per character."""
    out = tmp_path / "out_toy"
    succeed(recipe("enwik8/prepare.sh", out))
    texts = [(out / "bytes" / f"{split}.txt").read_text() for split in ("train", "valid", "test")]
    restored = b"\n".join(bytes(map(int, line.split())) for line in texts[0].split("\n"))
    original = (out / "enwik8").read_bytes()
    assert len(original) == 20000 and original[:18000].removesuffix(b"\n") + b"\n" == restored
    succeed(recipe("enwik8/train.sh", out, "srupp", "--lr", 0.01))
    printed = succeed(recipe("enwik8/eval.sh", out, "srupp", SRUPP_MEMORY="70")).splitlines()[-1]
    assert printed.startswith("| srupp, memory 70 | test | ") and 3 < perplexities(printed)[0] < 8
    succeed(recipe("enwik8/train.sh", out, "srupp10", "--max-update", 1))
    assert "ROW is gru; it must be" in recipe("enwik8/train.sh", out, "gru").stderr


def test_enwik8_of_a_wrong_file(tmp_path):
    (tmp_path / "text").write_bytes(b"short\n" * 20)
    done = recipe("enwik8/prepare.sh", tmp_path / "out", DATA=str(tmp_path / "text"), SHA256="0" * 64, TOY="")
    assert done.returncode and "has another checksum than SHA256" in done.stderr and not (tmp_path / "out" / "bin").exists()


def test_download(tmp_path):
    """Goes on with what is there, keeps what is whole, and refuses what is not what it should be, or no longer what it was."""
    content = b"".join(b"%d\n" % i for i in range(9999))
    wanted, file = hashlib.sha256(content).hexdigest(), tmp_path / "file"
    (tmp_path / "source").write_bytes(content)

    def download(source, *sums):
        script = f"source recipes/lib.sh; download file://{tmp_path / source} {file} '{' '.join(sums)}'"
        return subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)

    (tmp_path / "file.part").write_bytes(b"another start")
    done = download("source", wanted)
    assert done.returncode == 1 and f"{file} has SHA-256 " in done.stderr and file.read_bytes() != content
    assert file.read_bytes()[13:] == content[13:], "the rest of it came"
    file.unlink()
    (tmp_path / "file.part").write_bytes(content[:5000])
    succeed(download("source", wanted))
    assert file.read_bytes() == content
    succeed(download("nowhere"))
    file.write_bytes(content[:-1])
    assert download("nowhere").returncode == 1
    file.unlink()
    assert download("nowhere").returncode != 0 and not file.exists()


class Redirecting(BaseHTTPRequestHandler):
    """Sends a client on to another address without encryption."""

    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/first" else 200)
        self.send_header("Location", "/second")
        self.end_headers()
        self.wfile.write(b"anything")


def test_a_download_follows_no_redirect_without_encryption(tmp_path):
    with ThreadingHTTPServer(("localhost", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://localhost:{server.server_port}/first"
        script = f"source recipes/lib.sh; download {url} {tmp_path / 'file'}"
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert done.returncode and "disabled" in done.stderr and not (tmp_path / "file").exists()


@pytest.mark.long
def test_additive(tmp_path):
    """Pieces of a vocabulary trained on the text; perplexity and bits per character, which is less than a byte's 8."""
    out = tmp_path / "out_toy"
    succeed(recipe("additive/prepare.sh", out))
    pieces = (out / "pieces" / "valid.txt").read_text().splitlines()
    text = (out / "text" / "valid.txt").read_text().splitlines()
    assert "".join(pieces[0].split()).replace("▁", " ").strip() == text[0] and len(pieces) == len(text)
    succeed(recipe("additive/train.sh", out, "windowed", "--max-update", 10))
    printed = succeed(recipe("additive/eval.sh", out, "windowed")).splitlines()[-1]
    perplexity, bits = perplexities(printed)
    assert printed.startswith("| windowed | valid | ") and 20 < perplexity < 700 and 1 < bits < 8


@pytest.mark.long
def test_terraformer(tmp_path):
    """All sparse parts: a perplexity in one pass over the text, and a prompt that is continued token by token."""
    out = tmp_path / "out_toy"
    succeed(recipe("terraformer/prepare.sh", out))
    succeed(recipe("terraformer/train.sh", out, "terraformer", "--max-update", 6))
    printed = succeed(recipe("terraformer/eval.sh", out, "terraformer")).splitlines()[-1]
    assert printed.startswith("| terraformer | test | ") and 50 < perplexities(printed)[0] < 1000
    command = ["bash", str(ROOT / "recipes/terraformer/decode.sh"), "terraformer"]
    variables = ENVIRONMENT | {"OUT": str(out), "BIN": programs.folder(), "TOY": "1", "TOKENS": "7"}
    done = subprocess.run(command, env=variables, input="the", capture_output=True, text=True, timeout=600)
    text, row = succeed(done).splitlines()[-2:]
    assert len(text.split()) == 7 and re.fullmatch(r"\| terraformer \| 7 \| [\d.]+ \|", row)
    assert "ROW is all; it must be dense, ffn, softmax or terraformer" in recipe("terraformer/train.sh", out, "all").stderr


def test_missing_text(tmp_path):
    done = recipe("wikitext103/prepare.sh", tmp_path / "out", DATA=str(tmp_path), TOY="")
    assert done.returncode != 0 and "has neither train.txt nor wiki.train.tokens" in done.stderr
    assert not (tmp_path / "out" / "bin").exists()


TOYS = sorted(path.parent.name for path in ROOT.glob("recipes/*/prepare.sh") if "TOY=1" in path.read_text())


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("name", TOYS)
def test_toy_data_are_never_taken_for_real_data(name, tmp_path):
    """One OUT for both: the real recipe finds nothing of the toy's, and does not take its folder."""
    script, out, missing = f"{name}/prepare.sh", tmp_path / "out", str(tmp_path / "missing")
    succeed(recipe(script, out))
    assert not out.exists()
    [binarised] = {path.parent for path in (tmp_path / "out_toy").rglob("train*.bin")}
    again = succeed(recipe(script, out))
    known = binarised.with_name("raw") if name == "wmt14" else binarised  # of which all others are made
    assert f"{known} is there and was made with these options" in again.splitlines()
    real = {"TOY": "", "DATA": missing, "CHECKPOINT": missing, "MODEL": missing}
    assert recipe(script, out, **real).returncode != 0
    assert not list(tmp_path.glob("out/*/train*.bin"))
    refused = recipe(script, f"{out}_toy/", **real)
    assert refused.returncode != 0 and f"OUT is {out}_toy; only the folders of TOY=1 end in _toy" in refused.stderr


@pytest.mark.parametrize("name", ["additive/train.sh", "enwik8/train.sh", "wikitext103/train.sh"])
def test_training_without_toy_does_not_read_toy_data(name, tmp_path):
    (tmp_path / "out_toy" / "bin").mkdir(parents=True)
    row = {"additive/train.sh": "windowed", "enwik8/train.sh": "delta", "wikitext103/train.sh": "small-delta"}[name]
    done = recipe(name, tmp_path / "out", row, TOY="")
    assert done.returncode == 1 and f"{tmp_path / 'out' / 'bin'} is missing" in done.stderr


def test_other_options_than_the_data_were_made_with(tmp_path):
    """The same again is told, other text or another dictionary refused, and so are data that nobody knows the options of."""
    out, texts = tmp_path / "out", {name: tmp_path / name for name in ("one", "two")}
    for name, folder in texts.items():
        folder.mkdir()
        for split in ("train", "valid", "test"):
            (folder / f"{split}.txt").write_text(f"a text {name}\n" * 9)

    def prepare(**variables):
        return recipe("wikitext103/prepare.sh", out, TOY="", **variables)

    succeed(prepare(DATA=str(texts["one"])))
    made = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert succeed(prepare(DATA=f"{texts['two']}/../one/")) == f"{out}/bin is there and was made with these options\n"
    for variables in ({"DATA": str(texts["two"])}, {"DATA": str(texts["one"]), "DICT": "dict.txt"}, {}):
        done = prepare(**variables)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(f"prepare.sh: {out}/bin was made with TOY= DATA={texts['one']} DICT=, not with TOY= DATA=")
    assert made == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    (out / "bin.options").unlink()
    assert f"{out}/bin was made with unknown options" in prepare(DATA=str(texts["one"])).stderr


def test_a_killed_preparation_starts_again_with_other_options(tmp_path):
    """Only data that are there hold one to their options."""
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_bytes(b"some bytes\n" * 400)
    out.mkdir()
    (out / "bin.options").write_text("TOY=\nDATA=elsewhere\nSHA256=\n")
    (out / "bin.part").mkdir()
    succeed(recipe("enwik8/prepare.sh", out, TOY="", DATA=str(text)))
    assert (out / "bin.options").read_text() == f"TOY=\nDATA={text}\nSHA256=\n" and (out / "bin" / "train.bin").is_file()


@pytest.fixture(scope="module")
def step_time():
    """The command, which puts the folder of its modules on Python's path."""
    return load("step_time.py")


def counted(step_time, step: str, row: str) -> dict:
    """The counts of the toy."""
    return step_time.answer(ROOT / "recipes" / "step_time.py", step, row, TOY="1")


def products(counts: dict, name: str) -> list[float]:
    """Multiply-adds of one pass, for each of the batches that are counted."""
    return [sum(work[1] for work in sequences[name] if work[0] == "product") for sequences in counts["sequences"]]


@pytest.mark.long
def test_counted_products(step_time):
    """Of the toy's delta network, written out: 2 layers of width 32, 8 heads, feed-forward 2048, 208 words, 32 tokens; backward is
    twice as many. The memories are in kernels, one for each layer."""
    counts = counted(step_time, "enwik8/train.sh", "delta")
    width, heads = 32, 8
    per_token = 2 * (4 * width * width + heads * width + 2 * width * 2048) + 208 * width
    assert products(counts, "forward") == [2 * 32 * per_token, 3 * 32 * per_token]
    assert products(counts, "backward") == [2 * n for n in products(counts, "forward")]
    shape = [2, heads, 32, width // heads]
    for kernel in counts["sequences"][0]["kernels"]:
        assert [kernel["shapes"][name] for name in "qkve"] == [shape, shape, shape, shape[:3]] and kernel["settings"][2] == "delta"
    assert len(counts["sequences"][0]["kernels"]) == 2
    assert (counts["batch"], counts["length"], counts["updates"]) == (4, 32, 20)


@pytest.mark.long
def test_counted_products_of_sparse_layers(step_time):
    """The toy's Terraformer, written out: 2 layers of width 32, 4 heads, feed-forward 64, 4 modules, 32 units, 32000 words. Weights
    of a multiplicative layer and of convolutions are used 4 times, and reversible layers compute the forward twice."""
    counts = counted(step_time, "terraformer/train.sh", "terraformer")
    width, heads, modules, units = 32, 4, 4, 32
    part = width // modules  # of a vector, in each module
    convolutions = modules * (2 * part * 3 * 3 * part + part * 3 * part) + 2 * heads * width
    feed_forward = 2 * width * 64 + (64 // 16) * (width + 64)
    recurrence = width * units + 3 * units * units + units * width
    layers, words = 2 * (width * width + convolutions + feed_forward + recurrence), 32000 * width
    assert products(counts, "forward") == [n * 32 * (layers + words) for n in (2, 3)]
    assert products(counts, "backward") == [n * 32 * (3 * layers + 2 * words) for n in (2, 3)]


@pytest.mark.parametrize(
    "layer, times",
    [(Multiplicative(32, 32, 4), 4), (Convolutions(32, 4, {"q": 32, "k": 32, "v": 32, "g": 4}), 4)],
    ids=["dense", "heads"],
)
def test_modules_use_their_weights_again(step_time, layer, times):
    """As often as the layer multiplies by them. Gains are a product of vectors."""
    tokens = 5
    with import_module("timing.counted").Count() as count:
        layer(torch.randn(tokens, 1, layer.in_features))
    own = {
        name: p.numel() * (times if p.dim() == 4 or isinstance(layer, Multiplicative) else 1)
        for name, p in layer.named_parameters()
    }
    weights = sum(own[name] for name, p in layer.named_parameters() if p.dim() > 1 and name != "gains")
    assert sum(work[1] for work in count.work) == tokens * weights


def test_time_of_an_update(step_time):
    """Rates in, seconds out: a product by its multiply-adds, another by its bytes, the rest by its bytes; a batch of 10 sequences
    on the line through those of 2 and 3."""
    rates = import_module("timing.rates")
    gpu = rates.Gpu(dict.fromkeys(rates.PRECISIONS, 1e12), 1e9, rates.GPUS["H100"].cycles)

    def sequences(n: int) -> dict:
        forward = [["product", n * 1e9, n * 1e3, 0], ["product", n * 1e3, n * 1e6, 0], ["other", 0, 5e6 + n * 1e6, n * 1e5]]
        return {"forward": forward, "backward": [["kernel", 0, 0, 0]], "attention": n * 1e9, "kernels": ["one", "two"]}

    counts = {"batch": 10, "length": 7, "micro_batches": 3, "parameters": 1e6, "updates": 0, "epochs": 2, "workers": 2}
    counts |= {
        "sequences": [sequences(2), sequences(3)],
        "optimizer": {"flat": [["other", 0, 7e6, 0]], "each": [["other", 0, 9e6, 0]] * 4},
    }
    for precision, size in (("bf16", 2), ("fp32", 4)):
        x = rates.update(counts, gpu, precision, lambda kernel, batch, _: {"one": 2.0, "two": 3.0}[kernel] * batch)
        optimizer = (4 * 7e6 + 12e6) / 1e9 if size == 2 else 4 * 4 * 9e6 / 1e9
        want = 3 * (2 * 10e9 / 1e12 + size * 10e6 / 1e9), 3 * (size * 15e6 + 1e6) / 1e9, 3 * 7 * 10e9 / 0.25e12, 3 * 0.05, optimizer
        assert x[:5] == pytest.approx(want) and x.launches == 3 * 4 + (1 if size == 2 else 4)
    counts["sequences"][1]["forward"] += [["other", 0, 1e6, 0]]  # in two operations
    counts["sequences"][1]["forward"][2][2] -= 1e6
    added = 3 * 4 * (10e6 + 10e3) / 1e9  # the bytes of both products, which take longer than their multiply-adds
    assert rates.update(counts, gpu, "fp32", lambda *given: 0.0)[:2] == pytest.approx((added, want[1]))
    assert rates.update(counts, gpu, "fp32", lambda *given: 0.0).launches == 3 * (4 + 8) + 4
    assert rates.tokens(counts) == 210 and rates.updates(counts) == pytest.approx(2 * 4.5e6 * 7 / (210 * 2))


@pytest.mark.long
def test_modelled_kernels_grow_with_the_sequences(step_time):
    """The model of the machine code in tests/counts, twice as long where the device is full twice; fp32 takes longer than bf16."""
    kernels = import_module("timing.kernels")
    shapes = {name: [2, 8, 64, 16] for name in "qkv"} | dict.fromkeys("fzew")
    kernel = {"shapes": shapes, "settings": [0.0, 0.0, "linear"], "row_map": ["identity", 1, "none"]}
    few, many = (kernels.kernel_ms(kernel, n, "bf16") for n in (1000, 2000))
    assert many == pytest.approx(2 * few, rel=0.1) and kernels.kernel_ms(kernel, 1000, "fp32") > few > 0


@pytest.mark.parametrize("step", ["wikitext2/table.sh", "enwik8/prepare.sh", "none/train.sh", "terraformer/finetune.sh"])
def test_steps_that_train_no_model_of_a_known_size_have_no_step_time(step):
    done = subprocess.run(
        [sys.executable, ROOT / "recipes" / "step_time.py", step, "delta"], capture_output=True, text=True, timeout=60
    )
    [sentence] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence.startswith(
        f"step_time.py: the step is {step}; it must be one of wikitext103/train.sh, baevski_auli/finetune.sh, "
    )
    assert sentence.endswith(", terraformer/train.sh")
