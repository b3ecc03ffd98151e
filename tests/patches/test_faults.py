"""Runs that are killed, and checkpoints that are damaged or not what they should be."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import shutil
import time
from argparse import Namespace
from types import SimpleNamespace

import numpy
import pytest
import torch
from fairseq import checkpoint_utils, file_io
from fairseq.data import indexed_dataset
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from support.commands import USER_DIR, Command, fairseq, succeed
from support.language_models import build

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches.mistakes import sentence
from fw_fairseq.patches.training import say_what_does_not_fit
from fw_fairseq.patches.workers import count_workers_as_their_launcher_does

TRAIN = (
    "--arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32"
    " --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --feature-map favor --dropout 0.1 --tokens-per-sample 16"
    " --batch-size 4 --optimizer adam --lr 0.01 --seed 3 --log-format simple --log-interval 1 --disable-validation"
    " --no-epoch-checkpoints --save-interval-updates 1 --keep-interval-updates 2"
)
UPDATES = 150

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    lines = [" ".join(f"word{draw.randrange(40)}" for _ in range(draw.randint(3, 15))) for _ in range(220)]
    (folder / "train").write_text("\n".join(lines) + "\n")
    both = ["--trainpref", folder / "train", "--validpref", folder / "train"]  # fairseq 0.12.2 opens the second in any case
    succeed(fairseq("preprocess", "--only-source", *both, "--destdir", folder / "bin"))
    return folder / "bin"


def training(data, folder, task, updates):
    return [data, *TRAIN.split(), "--task", task, "--save-dir", folder, "--max-update", updates, *USER_DIR]


@pytest.mark.long
@pytest.mark.parametrize("task, kills", [("language_modeling", 3), ("stateful_language_modeling", 4)])
def test_a_run_that_is_killed_again_and_again_is_the_same_run(task, kills, data, tmp_path):
    """Every update saves, so that kills fall into the writing of checkpoints too; there are four epochs."""
    succeed(fairseq("train", *training(data, tmp_path / "whole", task, UPDATES)))
    draw, command = random.Random(1), training(data, tmp_path / "killed", task, UPDATES)
    for _ in range(kills):
        life = Command("train", *command)
        while life.process.is_alive() and "num_updates" not in life.files[1].read_text():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        assert life.process.is_alive(), life.files[2].read_text()[-2000:]
        life.process.kill()
        life.wait()
    succeed(fairseq("train", *command))
    whole, killed = (torch.load(tmp_path / run / "checkpoint_last.pt", weights_only=True) for run in ("whole", "killed"))
    assert killed["optimizer_history"][-1]["num_updates"] == UPDATES
    for part in ("model", "last_optimizer_state"):
        assert pickle.dumps(flat(killed[part])) == pickle.dumps(flat(whole[part]))


def flat(x):
    if isinstance(x, torch.Tensor):
        return x.numpy().tobytes()
    if isinstance(x, dict):
        return {key: flat(value) for key, value in x.items()}
    return [flat(value) for value in x] if isinstance(x, (list, tuple)) else x


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    succeed(fairseq("train", *training(data, folder, "stateful_language_modeling", 2)))
    return folder


def test_a_damaged_checkpoint_is_named_and_another_one_offered(data, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "run")
    last = folder / "checkpoint_last.pt"
    last.write_bytes(last.read_bytes()[:-5000])
    os.utime(folder / "checkpoint_1_1.pt", (0, 0))
    content = bytearray(last.with_name("checkpoint_1_2.pt").read_bytes())
    content[content.rindex(b"PK\x01\x02") + 1] ^= 1  # an entry of the list of contents
    (folder / "newest.pt").write_bytes(content)
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    done = fairseq("train", *training(data, folder, "stateful_language_modeling", 4))
    sentence = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and sentence.startswith(f"fairseq_cli.train: {last} cannot be read as a fairseq checkpoint (")
    assert sentence.endswith("; the newest whole one in its folder is checkpoint_1_2.pt")
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == before


def loaded(path) -> tuple[object, str]:
    """The model, or why not."""
    try:
        return flat(checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]), ""
    except ValueError as error:
        return None, sentence(error)


def test_flipped_bytes_are_noticed(saved, tmp_path):
    """Or do not matter: they fall into what is not read."""
    draw, whole = random.Random(0), (saved / "checkpoint_last.pt").read_bytes()
    expected, path, said = loaded(saved / "checkpoint_last.pt")[0], tmp_path / "flipped.pt", []
    for _ in range(120):
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        model, why = loaded(path)
        assert model == expected or (model is None and why.startswith(f"{path} cannot be read as a fairseq checkpoint ("))
        said.append(why)
    assert sum(map(bool, said)) > 60


class Foreign:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_foreign_code_is_not_run(saved, tmp_path):
    state = torch.load(saved / "checkpoint_last.pt", weights_only=True)
    torch.save(state | {"extra": Foreign(f"touch {tmp_path / 'ran'}")}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"foreign.pt cannot be read .*it holds posix.system, which is neither a tensor nor"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "foreign.pt"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("iopath", [None, SimpleNamespace()])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_copy_takes_the_place_of_a_file_as_fairseqs_does(iopath, overwrite, tmp_path, monkeypatch):
    """Without iopath always, with it only if told to."""
    monkeypatch.setattr(file_io, "IOPathManager", iopath)
    monkeypatch.setattr(PathManager, "path_requires_pathmanager", lambda path: False)
    for name in "ab":
        (tmp_path / name).write_text(name)
    copied = bool(overwrite or iopath is None)
    assert bool(PathManager.copy(str(tmp_path / "a"), str(tmp_path / "b"), overwrite=overwrite)) == copied
    assert (tmp_path / "b").read_text() == ("a" if copied else "b")
    (tmp_path / "b").write_text("b")
    assert bool(PathManager.copy(str(tmp_path / "a"), str(tmp_path / "b"))) == (iopath is None)  # not told to
    assert PathManager.copy(str(tmp_path / "a"), str(tmp_path / "c")) and (tmp_path / "c").read_text() == "a"


def test_the_last_checkpoint_shares_the_file_of_one_with_a_number(tmp_path):
    """The best one is a file of its own, which may be changed without the others."""
    names = {name: tmp_path / f"checkpoint_{name}.pt" for name in ("1_20", "1_30", "best", "last")}
    for name in ("1_20", "1_30"):
        names[name].write_text(name)
        for other in ("best", "last", "last"):
            PathManager.copy(str(names[name]), str(names[other]), overwrite=True)
        assert names["last"].samefile(names[name]) and not names["best"].samefile(names[name])
    assert names["1_20"].read_text() == "1_20" and names["best"].read_text() == names["last"].read_text() == "1_30"
    PathManager.copy(str(names["best"]), str(names["last"]), overwrite=True)
    assert not names["last"].samefile(names["best"]) and len(list(tmp_path.iterdir())) == 4


def test_a_remote_file_is_copied_by_fairseq(monkeypatch):
    asked = []
    monkeypatch.setattr(PathManager, "path_requires_pathmanager", lambda path: path.startswith("s3:"))
    copy = PathManager.copy.changed_by
    for source, target in (("s3:a", "b"), ("a", "s3:b")):
        copy(lambda *paths: asked.append(paths[:2]), source, target)
    assert asked == [("s3:a", "b"), ("a", "s3:b")]


def test_texts_that_are_not_mapped_are_left_to_fairseq(tmp_path):
    """fairseq returns nothing for a file that is not there, and other kinds of files have no index to check."""
    assert indexed_dataset.make_dataset(str(tmp_path / "nowhere"), "mmap") is None
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "test.bin"))
    builder.add_item(torch.tensor([4, 5]))
    builder.finalize(str(tmp_path / "test.idx"))
    assert indexed_dataset.make_dataset(str(tmp_path / "test"), "lazy", fix_lua_indexing=True)[0].tolist() == [4, 5]
    assert indexed_dataset.make_dataset(str(tmp_path / "test"), "lazy")[0].tolist() == [5, 6]  # as the file counts, from 1


def binarised(folder, *texts: list[int], kind=numpy.uint16) -> str:
    builder = indexed_dataset.MMapIndexedDatasetBuilder(str(folder / "test.bin"), dtype=kind)
    for text in texts:
        builder.add_item(torch.tensor(text))
    builder.finalize(str(folder / "test.idx"))
    return str(folder / "test")


def test_tokens_and_index_fit_the_dictionary_and_each_other(tmp_path):
    """Of six words, whose numbers are 0 to 5; a line may be empty."""
    six = range(6)
    path = binarised(tmp_path, [0, 5], [], [1])
    whole = indexed_dataset.make_dataset(path, "mmap", dictionary=six)
    assert [whole[i].tolist() for i in range(len(whole))] == [[0, 5], [], [1]]
    for text, kind, said in (
        ([0, 6], numpy.uint16, "tokens from 0 to 6, and the dictionary has 6 words"),
        ([-1, 5], numpy.int16, "tokens from -1 to 5, and the dictionary has 6 words"),
        ([0, 5], numpy.float64, "tokens from 0.0 to 5.0, and the dictionary has 6 words"),
    ):
        with pytest.raises(ValueError, match=said):
            indexed_dataset.make_dataset(binarised(tmp_path, text, kind=kind), "mmap", dictionary=six)
    path = binarised(tmp_path)
    for content in (b"a", b"ab"):
        (tmp_path / "test.bin").write_bytes(content)
        with pytest.raises(ValueError, match=f"there are {len(content)} bytes of tokens, and the index names 0"):
            indexed_dataset.make_dataset(path, "mmap", dictionary=six)


@pytest.mark.parametrize(
    "given, workers, gpus, size, method",
    [
        (None, 3, 0, 3, "env://"),
        (None, 2, 0, 2, "env://"),
        (None, 1, 0, 1, None),
        (None, 3, 3, 3, None),
        ("tcp://localhost:1", 3, 0, 7, "tcp://localhost:1"),
    ],
)
def test_the_environment_counts_the_workers_unless_a_method_is_given(given, workers, gpus, size, method, monkeypatch):
    """One worker, and workers on GPUs, are left to fairseq."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "WORLD_SIZE": workers, "RANK": 2}.items():
        monkeypatch.setenv(name, str(value))
    cfg, asked = Namespace(distributed_init_method=given, distributed_world_size=7), []
    count_workers_as_their_launcher_does(lambda cfg: asked.append(cfg.distributed_init_method), cfg)
    assert asked == ([] if method == "env://" else [given])
    assert (cfg.distributed_world_size, cfg.distributed_init_method) == (size, method)
    assert asked or (cfg.distributed_rank, cfg.distributed_no_spawn) == (2, True)  # torchrun has started the others


def test_a_checkpoint_of_another_rule_says_so_when_a_run_goes_on():
    """fairseq says only that the architectures should match."""
    saved, model = build(update_rule="sum").state_dict(), build()

    def original(trainer, filename, reset_optimizer):
        try:
            model.load_state_dict(saved)
        except Exception:
            raise Exception("please ensure that the architectures match.")  # noqa: B904

    with pytest.raises(
        ValueError, match=r"^a.pt: .*differ in decoder.layers.0.self_attn.mixer.in_proj.weight and 3 more"
    ) as caught:
        say_what_does_not_fit(original, SimpleNamespace(task=None), "a.pt")
    assert sentence(caught.value)


def test_half_precision_needs_a_gpu(monkeypatch):
    """One that is there and not left aside by --cpu. Where the options are taken, fairseq's own constructor fails, which gets
    nothing here."""
    options = ("fp16", "bf16", "memory_efficient_fp16", "memory_efficient_bf16", "amp")
    for option, gpu, cpu in itertools.product(options, (False, True), (False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        common = dict.fromkeys(options, False) | {option: True, option[-4:]: True, "cpu": cpu, "tpu": False}  # as fairseq sets them
        works = option == "memory_efficient_fp16" or (gpu and not cpu)
        said = f"^--{option.replace('_', '-')} is for GPUs; leave it out to train on CPUs$"
        with pytest.raises(AttributeError) if works else pytest.raises(ValueError, match=said):
            Trainer(Namespace(common=Namespace(**common)), None, None, None)


def test_a_loss_that_is_not_a_number_says_where_from(data, saved, tmp_path):
    state = torch.load(saved / "checkpoint_last.pt", weights_only=True)
    state["model"]["decoder.layers.1.fc2.weight"][0, 0] = float("nan")
    torch.save(state, tmp_path / "checkpoint_last.pt")
    done = fairseq("train", *training(data, tmp_path, "stateful_language_modeling", 4))
    said = rf"the parameter \S*decoder.layers.1.fc2.weight is not finite, at update 3; {tmp_path}/crash.pt has the parameters$"
    assert done.returncode == 3 and re.search(said, done.stderr.strip()), done.stderr[-900:]
    assert "NaN detected in output of decoder.layers.1.fc2" in done.stdout + done.stderr
