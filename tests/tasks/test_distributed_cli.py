"""Two workers with batches of 4 are one worker with batches of 8, through fairseq's commands; torchrun."""

from __future__ import annotations

import os
import re
import shutil
import sys

import pytest
import torch
from fairseq import distributed_utils
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf
from support import parallel_text
from support.commands import ROOT, USER_DIR, fairseq, free_port, run, succeed, train_two_workers
from support.lm_data import SMALL
from support.runs import parameters, updates

import fw_fairseq.models  # noqa: F401

TRAIN = (
    "--dropout 0 --optimizer sgd --lr 0.5 --clip-norm 1 --curriculum 9 --max-epoch 1 --log-format json --log-interval 1"
    " --no-epoch-checkpoints"
)
LM = f"{SMALL} --task language_modeling --tokens-per-sample 32"
ADAPTIVE = f"{LM} --adaptive-softmax-cutoff 10,20 --adaptive-input --adaptive-input-cutoff 10,20 --tie-adaptive-weights"
SIZES = "--encoder-layers 1 --decoder-layers 1 --encoder-attention-heads 2 --decoder-attention-heads 2"
WIDTHS = "--encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64"
SMOOTHED = "--criterion fast_weight_label_smoothed_cross_entropy --label-smoothing 0.1"
TRANSLATION = f"--task translation --arch fast_weight_transformer {SIZES} {WIDTHS} {SMOOTHED}"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    parallel_text.write(folder, train=43, valid=10)
    pairs = [part for split in ("train", "valid") for part in (f"--{split}pref", folder / split)]
    succeed(fairseq("preprocess", "--source-lang", "en", "--target-lang", "de", *pairs, "--destdir", folder / "bin"))
    return folder / "bin"


def assert_same_run(one: str, two: str, folder) -> None:
    """By their logs, and the parameters that they saved."""
    one, two = updates(one), updates(two)
    assert one.keys() == two.keys() and len(one) >= 5
    for update, logs in one.items():
        for key in ("loss", "gnorm", "bsz"):
            assert float(two[update][key]) == pytest.approx(float(logs[key]), abs=2e-3, rel=1e-3), (update, key)
    one, two = (parameters(folder / name) for name in ("one", "two"))
    for name in one:
        if name.endswith("_float_tensor"):  # fairseq's, never set
            continue
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize(
    "options",
    [
        f"{ADAPTIVE} --criterion adaptive_loss --ddp-backend legacy_ddp",
        f"{LM} --criterion fast_weight_cross_entropy --loss-chunk 50 --ddp-backend pytorch_ddp",
    ],
    ids=["adaptive", "chunks"],
)
def test_two_workers_with_4_are_one_with_8(options, lm_data, tmp_path):
    one, two = ([lm_data, *options.split(), *TRAIN.split(), "--save-dir", tmp_path / name] for name in ("one", "two"))
    whole = succeed(fairseq("train", *one, "--batch-size", 8, *USER_DIR))
    assert_same_run(whole, train_two_workers(*two, "--batch-size", 4), tmp_path)


@pytest.mark.long
def test_translation_by_workers_of_another_launcher(sentences, tmp_path):
    """Only torchrun, or the environment as mpirun and Kubernetes set it, says how many workers there are. The batches of 4 are odd
    in number: for the last the second has none."""
    options = [sentences, *TRANSLATION.split(), *TRAIN.split(), *USER_DIR]
    whole = succeed(fairseq("train", *options, "--batch-size", 8, "--save-dir", tmp_path / "one"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    variables = ["env", "MASTER_ADDR=localhost", f"MASTER_PORT={free_port()}", "WORLD_SIZE=2"]
    both = ["bash", "-c", 'RANK=1 "$@" & RANK=0 "$@" && wait $!', "both", *variables, sys.executable]
    for launcher in (torchrun, both):
        command = [*launcher, "-m", "fairseq_cli.train", *options, "--batch-size", 4, "--save-dir", tmp_path / "two"]
        assert_same_run(whole, succeed(run(*command, cwd=ROOT)), tmp_path)
        shutil.rmtree(tmp_path / "two")


@pytest.mark.parametrize("page", ["docs/distributed.md", "recipes/README.md"])
@pytest.mark.parametrize("node", [0, 1])
def test_the_slurm_lines_give_each_gpu_its_rank(page, node, tmp_path, monkeypatch):
    """What fairseq makes of them on each of the two machines; scontrol is one that names these machines."""
    [line] = [line for line in (ROOT / page).read_text().splitlines() if "srun --nodes" in line]
    words = line.split()
    gpus, tasks = (int(words[words.index(option) + 1]) for option in ("--gpus-per-node", "--ntasks-per-node"))
    assert words[words.index("--nodes") + 1] == "2"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[3-4]" ] && printf "gpu3\\ngpu4\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = {
        "STEP_NODELIST": "gpu[3-4]",
        "NNODES": 2,
        "NTASKS": 2 * tasks,
        "NTASKS_PER_NODE": tasks,
        "NODEID": node,
        "PROCID": node,
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    world = re.search(r"GPUS=(\d+)|--distributed-world-size (\d+)", line)
    cfg = OmegaConf.structured(FairseqConfig).distributed_training
    cfg.distributed_world_size = int(world[1] or world[2])
    cfg.distributed_port = int(words[words.index("--distributed-port") + 1])
    distributed_utils.infer_init_method(cfg)
    assert cfg.distributed_init_method == "tcp://gpu3:29500"
    assert (cfg.distributed_world_size, cfg.distributed_rank) == (2 * gpus, node * gpus)
    assert cfg.distributed_num_procs == gpus and not cfg.distributed_no_spawn
    assert int(world[1] or world[2]) == 2 * gpus, "the line says how many workers there are"
