"""The programs in examples/, run as a reader would run them, with fewer updates."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import pytest
import torch
from support import parallel_text
from support.commands import ENVIRONMENT, ROOT, USER_DIR, fairseq, run, succeed

from fw_fairseq.rules import RULES

EXAMPLES = ROOT / "examples"
TRAINED = "--arch fast_weight_transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32" \
    " --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0" \
    " --optimizer adam --lr 0.01 --max-tokens 1000 --max-update 40 --no-epoch-checkpoints --seed 1"  # fmt: skip
WITHOUT_FAIRSEQ = (
    "import runpy, sys; sys.modules['fairseq'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def printed(example: str, *arguments: object) -> str:
    """What an example prints where fairseq cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_FAIRSEQ, str(EXAMPLES / example), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_int8_keeps_more_than_bf16_with_its_error():
    found = dict(line.split(": ") for line in printed("int8_state.py", "--tokens", 400).splitlines())
    assert 0 < 10 * float(found["int8 with its error"]) < float(found["bf16"]) < float(found["int8"]) < 0.1


def test_from_scratch_fits_on_a_page():
    assert len((EXAMPLES / "from_scratch.py").read_text().splitlines()) <= 100


@pytest.mark.long
def test_from_scratch_learns_a_text(tmp_path):
    text = tmp_path / "text"
    text.write_text("0123456789" * 200)
    out = printed("from_scratch.py", "--text", text, "--updates", 25, "--prompt", "012", "--count", 20)
    last = float(re.findall(r"update 25: ([\d.]+) bits per byte", out)[0])
    assert last < 0.5 and out.splitlines()[-1].startswith("01234567"), out


def test_from_scratch_writes_from_a_state_of_constant_size(one_thread):
    """What it writes one byte at a time is what it would choose if it read all of the text again before each byte."""
    names = runpy.run_path(str(EXAMPLES / "from_scratch.py"))
    model, prompt = names["ByteModel"](width=32, heads=2).eval(), b"abcd"
    written = names["generate"](model, prompt, 30, temperature=1e-6)
    with torch.no_grad():
        logits, states = model(torch.tensor(list(written))[:, None])
        _, before = model(torch.tensor(list(prompt))[:, None])
    assert logits[len(prompt) - 1 : -1, 0].argmax(-1).tolist() == list(written[len(prompt) :])
    assert [[x.shape for x in state if x is not None] for state in states] == [
        [x.shape for x in state if x is not None] for state in before
    ]


def test_own_rule_is_its_equation_and_learns(one_thread, capsys):
    names = runpy.run_path(str(EXAMPLES / "own_rule.py"))
    try:
        names["main"](["--updates", "100"])
    finally:
        RULES.pop("erase_and_write")
    out = capsys.readouterr().out
    assert float(re.search(r"equation: (\S+)", out)[1]) < 1e-12
    assert int(re.search(r"update 100: (\d+)%", out)[1]) > 50  # by chance 12


@pytest.mark.long
def test_the_notebook(one_thread, capsys):
    """Its cells in order, with fewer updates: the layer is the same in pieces, the model learns, the state does not grow."""
    cells = json.loads((EXAMPLES / "first_model.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.count("UPDATES = 400") == 1
    names = {"__name__": "notebook"}
    exec(code.replace("UPDATES = 400", "UPDATES = 300"), names)
    out = capsys.readouterr().out
    assert float(re.search(r"largest difference: (\S+)", out)[1]) < 1e-5
    assert names["right"] > 0.6  # a guess: 1/3
    assert len({*re.findall(r"(\d+) numbers in the state", out)}) == 1 and sorted(names["times"]) == [16, 256, 4096]


@pytest.mark.long
def test_translate(tmp_path):
    parallel_text.write(tmp_path, train=300, valid=20)
    preprocess = [
        "-s",
        "de",
        "-t",
        "en",
        "--trainpref",
        tmp_path / "train",
        "--validpref",
        tmp_path / "valid",
        "--destdir",
        tmp_path / "bin",
    ]
    succeed(fairseq("preprocess", *preprocess))
    succeed(fairseq("train", tmp_path / "bin", *USER_DIR, *TRAINED.split(), "--save-dir", tmp_path / "run"))
    sentences = (tmp_path / "valid.de").read_text().splitlines()[:2]
    out = succeed(
        run(sys.executable, EXAMPLES / "translate.py", tmp_path / "run", tmp_path / "bin", *sentences, "--beam", 3, cwd=ROOT)
    )
    for sentence in sentences:
        assert re.search(rf"^{re.escape(sentence)} -> The \w+", out, re.MULTILINE)
    found = re.findall(r"^ *(-[\d.]+)  .+?\((.+)\)$", out, re.MULTILINE)
    assert len(found) == 3
    for score, pieces in found:  # the mean over the pieces, the end of the sentence too
        each = [float(x) for x in re.findall(r" (-?\d+\.\d+)", pieces)]
        assert float(score) == pytest.approx(sum(each) / len(each), abs=0.02)
