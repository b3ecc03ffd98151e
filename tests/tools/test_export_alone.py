"""The last check of fw-export-hf, in a process that has torch and transformers alone, and --renew."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save, source
from support.commands import ROOT

from fw_fairseq.tools.export_hf import alone, folders
from fw_fairseq.tools.export_hf.__main__ import main
from fw_fairseq.tools.export_hf.export import export

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
FIRST = ROOT / "tests" / "files" / "first_generation"
CHANGES = {
    "dead": ("return cache\n", "return cache.dead\n", "AttributeError: 'Cache' object has no attribute 'dead'"),
    "without its state": (
        "cache.length = states, tokens",
        "cache.length = {}, tokens",
        r"its state changes what it generates, by \S+",
    ),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(monkeypatch, before: str, after: str) -> None:
    """From now on, folders get another code than the package's."""
    text = folders.standalone.code()
    assert before in text
    monkeypatch.setattr(folders.standalone, "code", lambda: text.replace(before, after))


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_that_does_not_generate_is_not_written(name, dictionary, tmp_path, monkeypatch):
    """Although the package, which is installed here, generates."""
    before, after, said = CHANGES[name]
    changed(monkeypatch, before, after)
    _, _, state = source("--arch fast_weight_lm --no-token-positional-embeddings", dictionary)
    wanted = rf"^CHECKPOINT \S+ does not generate in transformers {transformers.__version__} \({said}\); nothing was written$"
    with pytest.raises(ValueError, match=wanted):
        export(save(state, tmp_path), tmp_path / "out", data=dictionary)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


@pytest.fixture
def first(tmp_path) -> Path:
    """A folder of the first generation."""
    shutil.unpack_archive(FIRST / "files.tar.xz", tmp_path)
    return tmp_path / "exported"


@pytest.mark.long
def test_renewed_folders_generate_what_they_did(first, tmp_path, capsys):
    """Nothing but their code changes, and no other code in them is run, as transformers would run that of generation."""
    before = contents(first)
    (first / "custom_generate").mkdir()
    (first / "custom_generate" / "generate.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    main(["--renew", str(first)])
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(first / "custom_generate")
    assert capsys.readouterr().out.splitlines()[-1] == f"{first}: renewed"
    after = contents(first)
    assert after.pop(folders.CODE_FILE) == folders.standalone.code().encode() != before.pop(folders.CODE_FILE)
    assert after == before
    model = transformers.AutoModelForCausalLM.from_pretrained(first, trust_remote_code=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(first)
    tokens = model.generate(**tokenizer("the old", return_tensors="pt"), do_sample=False, max_new_tokens=10)
    assert tokenizer.decode(tokens[0]) == json.loads((FIRST / "expected.json").read_text())["written_on"]


@pytest.mark.long
def test_a_folder_is_renewed_whole_or_not_at_all(first):
    def refused(said: str) -> None:
        before = contents(first)
        with pytest.raises(ValueError, match=f"^--renew {said}"):
            folders.renew(first)
        assert contents(first) == before

    weights = load_file(first / "model.safetensors")
    del weights["layers.0.fc1.weight"]
    save_file(weights, first / "model.safetensors", {"format": "pt"})
    refused(r"\S+ does not generate in \S+ \S+ \(the weights have missing parameters, layers\.0\.fc1\.weight among them\); nothing")


@pytest.mark.parametrize("named", ["other.FastWeightHFConfig", "somebody/else--modeling_fw_fairseq.FastWeightHFConfig"])
def test_other_folders_are_not_renewed(named, first, tmp_path, monkeypatch):
    """Nor is code of them run, or of where they point to."""
    monkeypatch.setattr(folders, "check_alone", lambda *_: pytest.fail("it must be refused first"))
    with pytest.raises(
        ValueError, match=r"^--renew is .*, which is no folder of fw-export-hf, as it has no modeling_fw_fairseq\.py$"
    ):
        folders.renew(tmp_path)
    config = json.loads((first / "config.json").read_text())
    config["auto_map"]["AutoConfig"] = named
    (first / "config.json").write_text(json.dumps(config))
    before = contents(first)
    with pytest.raises(ValueError, match=f"^--renew is .*, which is no folder of fw-export-hf, as its config.json names {named}$"):
        folders.renew(first)
    (first / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json cannot be read as a model's configuration"):
        folders.renew(first)
    assert contents(first).keys() == before.keys()


@pytest.mark.parametrize("arguments", ["--renew folder out", "--renew folder --force", "checkpoint.pt"])
def test_a_folder_is_renewed_or_written(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2 and ("--renew takes" in capsys.readouterr().err) == ("--renew" in arguments)


def test_the_difference_is_relative_to_the_largest_number():
    assert alone.relative(torch.tensor([1.0, -3.0]), torch.tensor([1.0, -4.0])) == 0.25
