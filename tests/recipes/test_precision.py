"""The precision that recipes train in. A launcher stands in for fairseq, and a module for torch, which sees the GPUs of a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.commands import succeed
from support.recipes import recipe

FORMER = {  # where a GPU has no bf16
    "baevski_auli/finetune.sh decay-32": "--fp16",
    "gpt2/finetune.sh softmax": "--fp16",
    "wikitext103/train.sh small-delta": None,
    "wmt14/train.sh dpfp2": "--fp16",
}
PRECISIONS = {"--fp16", "--bf16", "--amp", "--memory-efficient-fp16", "--memory-efficient-bf16"}
HOPPER, AMPERE, VOLTA = (9, 0), (8, 0), (7, 0)


@pytest.fixture
def launched(tmp_path):
    """The words that a program prints which a recipe starts in place of fairseq. With ``gpus`` None torch is itself."""
    out = tmp_path / "out"
    for start in (out / "decay-32" / "start.pt", out / "softmax" / "start.pt", out / "bin" / "x", out / "data" / "x"):
        start.parent.mkdir(parents=True, exist_ok=True)
        start.touch()

    def run(command: str, *options: str, gpus=(HOPPER,), program="import sys; print(*sys.argv)", **variables) -> list[str]:
        given = {"TOY": "", "BIN": str(Path(sys.executable).parent), "LAUNCH": f"{sys.executable} {tmp_path}/launch.py"} | variables
        given["PYTHONDONTWRITEBYTECODE"] = "1"  # the module below changes more often than its time does
        (tmp_path / "launch.py").write_text(program)
        if gpus is not None:
            given["PYTHONPATH"] = str(tmp_path / "modules")
            (tmp_path / "modules").mkdir(exist_ok=True)
            functions = f"    device_count, get_device_capability = {list(gpus)}.__len__, {list(gpus)}.__getitem__\n"
            (tmp_path / "modules" / "torch.py").write_text(f"class cuda:\n{functions}")
        name, row = command.split()
        done = recipe(name, out, row, *options, **given)
        succeed(done)
        return done.stdout.split()

    return run


def precisions(words: list[str]) -> list[str]:
    return [word for word in words if word in PRECISIONS]


@pytest.mark.parametrize("command", FORMER)
def test_bf16_where_every_gpu_has_it(command, launched):
    former = [FORMER[command]] if FORMER[command] else []
    for gpus, expected in (([AMPERE, HOPPER], ["--bf16"]), ([HOPPER, VOLTA], former), ([], former)):
        assert precisions(launched(command, gpus=gpus)) == expected, gpus
    assert precisions(launched(command, CPU="1", PRECISION="bf16")) == []


@pytest.mark.parametrize("command", FORMER)
def test_one_can_choose(command, launched):
    """Whatever the GPUs have; an option of fairseq comes before PRECISION."""
    for precision, expected in (("fp16", ["--fp16"]), ("bf16", ["--bf16"]), ("fp32", []), ("tf32", [])):
        assert precisions(launched(command, gpus=[VOLTA], PRECISION=precision)) == expected
    for option in PRECISIONS:
        assert precisions(launched(command, option, PRECISION="bf16")) == [option]


@pytest.mark.long
def test_tf32_is_of_all_products(launched):
    """Those of PyTorch, and those of this project's kernels."""
    program = """
import torch
from fw_fairseq.ops.kernels.recurrence import choose_precision
print(torch.backends.cuda.matmul.allow_tf32, choose_precision(torch.float32))
"""
    for precision, expected in (("tf32", ["True", "tf32"]), ("fp32", ["False", "exact"])):
        assert launched("wikitext103/train.sh small-delta", gpus=None, program=program, PRECISION=precision) == expected
