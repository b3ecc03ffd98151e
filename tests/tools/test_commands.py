"""The form that the five commands share: help with an example, a version, and sentences for mistakes."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest

from fw_fairseq import Mistake
from fw_fairseq.patches.non_finite import NotFinite
from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.command import mistakes_as_sentences
from fw_fairseq.tools.convert import __main__ as convert
from fw_fairseq.tools.explain import __main__ as explain
from fw_fairseq.tools.export_hf import __main__ as export_hf
from fw_fairseq.tools.plot import __main__ as plot

COMMANDS = {"fw-bench": bench, "fw-convert": convert, "fw-explain": explain, "fw-export-hf": export_hf, "fw-plot": plot}
MISTAKES = {
    "fw-bench": "model --resume --json broken.json --tokens 4 --contexts 4",
    "fw-convert": "none.pt out.pt --rule sum",
    "fw-explain": "none.pt w1 --html out.html",
    "fw-export-hf": "none.pt out",
    "fw-plot": "curves none.log --out out.svg",
}


def exit_of(command, arguments: str) -> object:
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments.split())
    return exit_.value.code


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_version(name, capsys):
    command = COMMANDS[name]
    assert exit_of(command, "--help") == 0
    assert capsys.readouterr().out.rstrip().endswith(f"example:\n  {command.EXAMPLE}")
    assert exit_of(command, "--version") == 0
    assert capsys.readouterr().out == f"{name} {metadata.version('fw_fairseq')}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_is_one_that_the_command_takes(name):
    command = COMMANDS[name]
    first, *arguments = command.EXAMPLE.replace('"', "").replace("the game was released in japan", "text").split()
    assert first == name
    getattr(command, "parser", getattr(command, "build_parser", None))().parse_args(arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_option_is_a_matter_of_usage(name, capsys):
    for arguments in ("--no-such-option", ""):
        assert exit_of(COMMANDS[name], arguments) == 2
        assert f"{name}: error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_is_a_sentence(name, tmp_path, monkeypatch):
    """``sys.exit`` prints it and ends with exit code 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    said = exit_of(COMMANDS[name], MISTAKES[name])
    assert said.startswith(f"{name}: ") and "error:" not in said and "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]
    monkeypatch.setenv("FW_TRACEBACK", "1")
    with pytest.raises((OSError, ValueError)) as error:
        COMMANDS[name].main(MISTAKES[name].split())
    assert said == f"{name}: {error.value}{'' if isinstance(error.value, Mistake) else ' (FW_TRACEBACK=1 shows where)'}"


@pytest.mark.parametrize(
    "command, said",
    [
        ((plot, "curves a.svg --out a.svg"), "--out is a.svg, which is LOG too; name another file"),
        ((plot, "curves x=a.svg --out b.svg ./a.svg"), "--out is a.svg, which is LOG too; name another file"),
        ((plot, "curves text.txt --out b.svg b.svg"), "--out is b.svg, which is given twice; name another file"),
        ((bench, "ops --json b.svg --figure b.svg"), "--figure is b.svg, which is --json too; name another file"),
        ((bench, "ops --json a.pt"), "--json is a.pt, which is no report of fw-bench and would be lost; name another file"),
        ((bench, "ops --figure a.pt"), "--figure is a.pt; it must end in .svg, .pdf or .png"),
        ((bench, "ops --json folder.json"), "--json is folder.json, which is a folder; name a file"),
        ((bench, "ops --figure folder.svg"), "--figure is folder.svg, which is a folder; name a file"),
        ((plot, "curves text.txt --out folder.svg"), "--out is folder.svg, which is a folder; name a file"),
        ((convert, "text.txt b.pt --rule sum --feature-dim -3"), "--feature-dim is -3; it must be at least 0"),
        ((convert, "a.pt a.pt --rule sum --force"), "OUTPUT is a.pt, which is SOURCE too; name another file"),
        (
            (convert, "a.pt text.txt --rule sum --force"),
            "OUTPUT text.txt is no checkpoint, and --force would delete it; name another file",
        ),
        ((plot, "curves a.pt --out b.svg"), "a.pt is not a log of fairseq-train, as it is no text in UTF-8"),
    ],
)
def test_nothing_is_written_over_by_a_slip(command, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {"a.pt": b"\xf6", "a.svg": b"kept", "text.txt": b"m 1 0.5"}
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    for name in ("folder.json", "folder.svg"):
        (tmp_path / name).mkdir()
    program, arguments = command
    assert exit_of(program, arguments) == f"{program.PROG}: {said}"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == kept


@pytest.mark.parametrize(
    "outputs, said",
    [
        ("--html a.pt", "--html is a.pt, which is CHECKPOINT too; name another file"),
        ("--html text.txt", "--html is text.txt, which is TEXT too; name another file"),
        ("--html b.pt", "--html is b.pt; it must end in .html or .htm"),
        ("--html x.html --png b.pt", "--png is b.pt; it must end in .png or .svg or .pdf"),
        ("--png new.gif", "--png is new.gif; it must end in .png or .svg or .pdf"),
        ("--html folder.html", "--html is folder.html, which is a folder; name a file"),
        ("--html ./x.html --png x.html", "--png is x.html, which is --html too; name another file"),
    ],
)
def test_fw_explain_writes_over_nothing_that_it_reads(outputs, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = dict.fromkeys(("a.pt", "b.pt", "text.txt"), "kept")
    for name, content in kept.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "folder.html").mkdir()
    assert exit_of(explain, f"a.pt text.txt {outputs}").startswith(f"fw-explain: {said}")
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == kept


@pytest.mark.parametrize(
    "error, code", [(Mistake("m"), "p: m"), (OSError("o"), "p: o (FW_TRACEBACK=1 shows where)"), (NotFinite("n"), 3)]
)
def test_exit_codes(error, code, capsys):
    with pytest.raises(SystemExit) as end, mistakes_as_sentences("p"):
        raise error
    assert end.value.code == code and capsys.readouterr().err == ("p: n\n" if code == 3 else "")


def test_an_interrupted_command_says_so(capsys):
    """And ends as a program that SIGINT has ended."""
    with pytest.raises(SystemExit) as end, mistakes_as_sentences("p"):
        raise KeyboardInterrupt
    assert end.value.code == 130 and capsys.readouterr().err == "\np: interrupted\n"


def test_libraries_log_only_warnings_while_a_command_runs():
    logger = logging.getLogger("fairseq")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with mistakes_as_sentences("fw-test"):
            assert logger.level == logging.WARNING
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
    assert logging.getLogger("fairseq.tasks.text_to_speech").level == logging.WARNING
