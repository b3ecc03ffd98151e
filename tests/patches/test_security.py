"""Checkpoints of somebody else: their options are not run, and what they hold is data or refused, whatever their bytes are."""

from __future__ import annotations

import ast
import collections
import io
import json
import os
import pickle
import re
import sys
import tokenize
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from support.altered import with_pickle
from support.checkpoints import ADAPTIVE, SHAPE, save, save_format
from support.commands import ROOT, USER_DIR, fairseq, preloaded
from support.pretrained import SHAPE as TRAINING

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches.checkpoints import reading
from fw_fairseq.patches.literals import naming, read_literal
from fw_fairseq.patches.mistakes import sentence
from fw_fairseq.tools import standalone
from fw_fairseq.tools.convert import __main__ as convert
from fw_fairseq.tools.explain import __main__ as explain
from fw_fairseq.tools.export_hf import __main__ as export_hf

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSED = "it must be a Python literal: numbers, strings, "
SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-attention-heads 2 --decoder-attention-heads 2 --source-lang a --target-lang b"
)
SMALL += " --encoder-embed-dim 8 --decoder-embed-dim 8 --encoder-ffn-embed-dim 8 --decoder-ffn-embed-dim 8 --task translation"
CONVOLUTIONS = "--task language_modeling --decoder-embed-dim 8 --decoder-layers [(8,3)] --decoder-attention False"
MODELS = {
    "transformer_lm-characters": "--arch transformer_lm --character-embeddings",
    "fast_weight_lm-adaptive": f"--arch fast_weight_lm {ADAPTIVE}",
    "lightconv_lm": "--arch lightconv_lm --decoder-ffn-embed-dim 32 --decoder-kernel-size-list 3,3",
    "fconv_lm": "--arch fconv_lm",
    "fast_weight_transformer": "--arch fast_weight_transformer",
}
EVALUATED = {"adaptive_softmax_cutoff", "adaptive_input_cutoff", "character_filters", "decoder_layers", "decoder_attention"}
EVALUATED |= {"encoder_xformers_att_config", "decoder_xformers_att_config", "decoder_kernel_size_list"}


def code_that_marks(path) -> str:
    return f"__import__('pathlib').Path({str(path)!r}).touch() or [10, 20]"


def checkpoint(name: str, dictionary, languages) -> tuple[dict, Path]:
    """A model's state, with only the groups of options that fairseq reads to load it, which takes less time, and the folder of its
    dictionaries."""
    folder, sizes = {"fconv_lm": (dictionary, CONVOLUTIONS)}.get(name, (dictionary, SHAPE))
    if name.endswith("transformer"):
        folder, sizes = languages, SMALL
    args = [str(folder), *f"{sizes} {MODELS[name]}".split()]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), args))
    tensors = tasks.setup_task(cfg.task).build_model(cfg.model).state_dict()
    groups = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return save_format(tensors, cfg={name: groups[name] for name in ("task", "model")}), folder


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("name", MODELS)
def test_no_option_of_a_checkpoint_is_run(name, dictionary, languages, tmp_path):
    state, folder = checkpoint(name, dictionary, languages)
    mark, said = tmp_path / "mark", {}
    given = vars(state["cfg"]["model"]) if isinstance(state["cfg"]["model"], Namespace) else state["cfg"]["model"]
    for option in [option for option, value in given.items() if value is None or isinstance(value, str)]:
        model = given | {option: code_that_marks(mark)}
        model = Namespace(**model) if given is not state["cfg"]["model"] else model
        other = state | {"cfg": state["cfg"] | {"model": model}}
        try:
            checkpoint_utils.load_model_ensemble_and_task([str(save(other, tmp_path))], arg_overrides={"data": str(folder)})
        except Exception as error:
            said[option] = sentence(error) or ""
        assert not mark.exists(), option
    refused = {option for option, text in said.items() if REFUSED in text}
    assert refused and refused <= EVALUATED
    assert all(
        said[option].startswith(f"{option} is \"__import__('pathlib')") and str(mark) not in said[option] for option in refused
    )


def test_nothing_of_fairseqs_evaluates():
    """Every file of fairseq that names ``eval`` is loaded before its ``eval`` is replaced."""
    root, loaded = Path(utils.__file__).parent, {getattr(module, "__file__", None): module for module in list(sys.modules.values())}
    files = [file for file in root.rglob("*.py") if "examples" not in file.parts and evaluates(file)]
    assert len(files) > 15
    assert all(loaded[str(file)].eval is read_literal for file in files)
    changed = [name for name, module in list(sys.modules.items()) if getattr(module, "__dict__", {}).get("eval") is read_literal]
    assert {name.partition(".")[0] for name in changed} == {"fairseq"}  # other modules keep Python's own


def evaluates(file: Path) -> bool:
    """Calls ``eval`` or ``exec`` that are no methods."""
    words = [token.string for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline)]
    calls = zip(words, words[1:], words[2:])
    return any(word in ("eval", "exec") and before not in (".", "def") and after == "(" for before, word, after in calls)


@pytest.mark.parametrize(
    "text, value",
    [
        ("20000,60000", (20000, 60000)),
        ("[10,20]", [10, 20]),
        (" (0.9, 0.98) ", (0.9, 0.98)),
        ("1e-3", 1e-3),
        ("-0.0005", -0.0005),
        ("{'a': [1, None], 'b': True}", {"a": [1, None], "b": True}),
        ("[(512, 3)] * 2 + [(1024, 3)]", [(512, 3), (512, 3), (1024, 3)]),
        ("'text'", "text"),
        ("[0] * 100000", [0] * 100_000),
    ],
)
def test_literals_are_what_they_were(text, value):
    assert read_literal(text) == value == eval(text)


@pytest.mark.parametrize(
    "text",
    [
        "print(1)",
        "a",
        "[x for x in (1,)]",
        "2**14",
        "().__class__",
        "[0] * 10**9",
        "1 + 2",
        "[1] + (2,)",
        "'ab' * 3",
        "[1] * [2]",
        "[0] * 100001",
        "",
        "(" * 9999,
        "-" * 99999,
    ],
)
def test_what_is_no_literal_is_refused(text):
    with pytest.raises(ValueError, match=f"^option is .*{REFUSED}") as error, naming(Namespace(option=text)):
        read_literal(text)
    assert len(str(error.value)) < 300 and str(error.value) == sentence(error.value)


@pytest.mark.parametrize("length, shown", [(40, "a" * 40), (41, "a" * 37 + "...")])
def test_a_long_string_is_cut(length, shown):
    with pytest.raises(ValueError, match=f"^an option is '{re.escape(shown)}'; {REFUSED}"):
        read_literal("a" * length)


def test_fairseqs_readers_under_all_their_names():
    assert options.eval_str_list("20,40", type=int) == utils.eval_str_list((20, 40), int) == [20, 40]
    assert options.eval_str_list is utils.eval_str_list and utils.eval_str_list("0.5") == [0.5]
    assert options.eval_str_dict("{'a': 1}") == {"a": 1} and options.eval_bool("True") and options.eval_bool(3, default=True)


def called(command, *arguments) -> SimpleNamespace:
    """The command's end, without the time that a process of its own takes to import everything."""
    try:
        command.main([*map(str, arguments)])
    except SystemExit as end:
        return SimpleNamespace(returncode=1, stderr=str(end.code))
    return SimpleNamespace(returncode=0, stderr="")


def commands(evil, data, folder):
    task = ["--task", "language_modeling"]
    student = [*TRAINING.split(), "--arch", "fast_weight_lm", "--save-dir", folder / "saved", "--max-update", 1]
    return {
        "fairseq-eval-lm": lambda: fairseq("eval_lm", data, *USER_DIR, *task, "--path", evil),
        "fw-explain": lambda: called(explain, evil, "w1 w2", "--html", folder / "out.html", "--data", data),
        "fw-export-hf": lambda: called(export_hf, evil, folder / "out", "--data", data),
        "fw-convert": lambda: called(convert, evil, folder / "out", "--rule", "sum"),
        "teacher": lambda: fairseq("train", data, *USER_DIR, *student, "--criterion", "t2r_distillation", "--teacher", evil),
    }


@pytest.mark.parametrize("command", commands("", "", Path()))
def test_the_commands_name_the_option(command, counting_data, pretrained, tmp_path):
    state = torch.load(pretrained, weights_only=True)
    state["cfg"]["model"]["adaptive_softmax_cutoff"] = code_that_marks(tmp_path / "mark")
    torch.save(state, tmp_path / "evil.pt")
    done = commands(tmp_path / "evil.pt", counting_data, tmp_path)[command]()
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode > 0 and "adaptive_softmax_cutoff is \"__import__('pathlib')" in last and REFUSED in last, done.stderr
    assert not (tmp_path / "mark").exists() and not [*tmp_path.glob("out*")] and "Traceback" not in done.stderr


class Reduced:
    """Is pickled as this call, and this state of what it gives."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


REBUILD, SCALAR = (x.__reduce__()[0] for x in (numpy.zeros(1), numpy.float64(0)))
EMPTY = numpy.ndarray, (0,), b"b"
DOUBLE = numpy.dtype("f8")
FORGED = {
    "call": Reduced(numpy.ndarray, ((4,), "O", b"A" * 32)),
    "call-in-a-dict": Reduced(collections.OrderedDict, (Reduced(numpy.ndarray, ((4,), "O", b"A" * 32)),)),
    "buffer": Reduced(numpy.ndarray, ((1000,), "f8", b"A" * 8)),
    "objects": numpy.array(["a", [1]], dtype=object),
    "object-bytes": Reduced(REBUILD, EMPTY, (1, (4,), numpy.dtype("O"), False, b"A" * 32)),
    "object-scalar": Reduced(SCALAR, (numpy.dtype("O"), b"A" * 8)),
    "record": numpy.zeros(2, dtype=[("a", "O"), ("b", "f8")]),
    "number-with-fields": Reduced(numpy.dtype, ("f8", False, True), (3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 8, 0)),
    "void": numpy.zeros(2, dtype="V8"),
    "text": numpy.array(["a"]),
    "time": numpy.datetime64("2020-01-01"),
    "short": Reduced(REBUILD, EMPTY, (1, (4,), DOUBLE, False, b"A" * 31)),
    "long": Reduced(REBUILD, EMPTY, (1, (4,), DOUBLE, False, b"A" * 33)),
    "string": Reduced(REBUILD, EMPTY, (1, (4,), DOUBLE, False, "A" * 32)),
    "overflow": Reduced(REBUILD, EMPTY, (1, (2**32, 2**32), DOUBLE, False, b"")),
    "negative": Reduced(REBUILD, EMPTY, (1, (-1, -4), DOUBLE, False, b"A" * 32)),
    "no-state": Reduced(REBUILD, EMPTY, (1,)),
    "short-scalar": Reduced(SCALAR, (DOUBLE, b"A" * 7)),
    "no-dtype": Reduced(SCALAR, ("f8", b"A" * 8)),
    "subclass": Reduced(REBUILD, (Namespace, (0,), b"b"), (1, (4,), DOUBLE, False, b"A" * 32)),
}


def state_with(extra) -> dict:
    return save_format({"weight": torch.arange(6.0).view(2, 3)[:, 1:]}, cfg={"model": {"a": 1}}) | {"extra": extra}


def load_all(paths: list[Path], said: Path) -> None:
    """In a process of its own: a line for each file, written before the next is read."""

    with said.open("w", buffering=1) as out:
        for path in paths:
            try:
                state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
                print("loaded", len(repr(state)), file=out)  # reads every number
            except ValueError as error:
                print(str(error).replace("\n", " "), file=out)
            except Exception as error:
                print(repr(error), file=out)


def loaded_elsewhere(paths: list[Path], folder: Path) -> list[str]:
    process = preloaded().Process(target=load_all, args=(paths, folder / "said"))
    process.start()
    process.join(120)
    said = (folder / "said").read_text().splitlines()
    assert process.exitcode == 0, (process.exitcode, paths[len(said)], said[-1:])
    return said


def test_forged_arrays_are_refused(tmp_path):
    for name, forged in FORGED.items():
        torch.save(state_with(forged), tmp_path / f"{name}.pt")
    paths = [tmp_path / f"{name}.pt" for name in FORGED]
    answers = loaded_elsewhere(paths, tmp_path)
    assert len(answers) == len(paths)
    for path, said in zip(paths, answers):
        assert said.startswith(f"{path} cannot be read as a fairseq checkpoint (it holds "), (path, said)


def test_a_forged_array_ends_a_command_in_a_sentence(counting_data, tmp_path):
    torch.save({"model": {}, "x": FORGED["call-in-a-dict"]}, tmp_path / "forged.pt")
    done = fairseq("eval_lm", counting_data, *USER_DIR, "--task", "language_modeling", "--path", tmp_path / "forged.pt")
    assert done.returncode == 1 and "it holds a call of numpy.ndarray, which is not run" in done.stderr.splitlines()[-1]


KINDS = "?", "i1", "u1", "<i2", ">i4", "i8", "u8", "f2", ">f4", "f8", "c8", "c16"


def legitimate() -> dict:
    arrays = [numpy.arange(-3, 9).astype(kind).reshape(3, 4) for kind in KINDS]
    arrays += [numpy.asfortranarray(arrays[-1]), arrays[-3][:, ::2], numpy.zeros((0, 3)), numpy.array(2.5)]
    scalars = [numpy.dtype(kind).type(1) for kind in KINDS]
    return {
        "arrays": arrays,
        "scalars": scalars,
        "tuple": (1, (arrays[0], "a"), DOUBLE),
        "tuples": ((arrays[0], arrays[1]), torch.Size((2, 3))),
        "args": Namespace(a=arrays[3], b=scalars[0]),
    }


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        [assert_same(*pair) for pair in zip(one, other)]
    elif isinstance(one, (dict, Namespace)):
        one, other = (dict(x) if isinstance(x, dict) else vars(x) for x in (one, other))
        assert one.keys() == other.keys()
        [assert_same(one[key], other[key]) for key in one]
    elif isinstance(one, numpy.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes() and one.flags.writeable
    else:
        assert one == other


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
@pytest.mark.parametrize("zipped", [True, False])
def test_numbers_of_numpy_are_loaded(module, zipped, tmp_path):
    """As NumPy 1 and 2 write them, in both of torch's formats."""
    content = io.BytesIO()
    torch.save(state_with(legitimate()), content, _use_new_zipfile_serialization=zipped)
    if zipped:
        (tmp_path / "a.pt").write_bytes(with_pickle(content, lambda pickled: renamed(pickled, module)))
    else:
        (tmp_path / "a.pt").write_bytes(renamed(content.getvalue(), module))
    assert_same(checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a.pt"))["extra"], legitimate())


def renamed(pickled: bytes, module: str) -> bytes:
    written = REBUILD.__module__.encode()
    assert written in pickled
    return pickled.replace(b"c" + written + b"\n", b"c" + module.encode() + b"\n")


def test_an_array_that_gets_no_numbers_is_empty(tmp_path):
    torch.save(state_with(Reduced(REBUILD, EMPTY)), tmp_path / "a.pt")
    assert_same(checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a.pt"))["extra"], numpy.zeros(0))


def test_options_are_not_looked_up(tmp_path):
    """One may refer to another or to the environment, which is read where the option is; a name may be unknown here."""
    options = {"a": "${unknown}", "b": [1, {"c": "${oc.env:HOME}"}]}
    torch.save(save_format({}, cfg={"model": options}), tmp_path / "a.pt")
    model = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a.pt"))["cfg"]["model"]
    assert OmegaConf.to_container(model, resolve=False) == options == reading.model_options[str(tmp_path / "a.pt")]
    torch.save(save_format({}, cfg={"task": {"a": 1}}), tmp_path / "a.pt")
    checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a.pt"))
    assert reading.model_options == {str(tmp_path / "a.pt"): {}}
    torch.save(save_format({}), tmp_path / "b.pt")
    checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "b.pt"))
    assert reading.model_options == {}  # only of the file that was read last


@pytest.mark.parametrize("own", [[], [numpy.ndarray, DOUBLE.__class__, (Reduced, "a.name")]])
def test_torchs_list_is_what_it_was(own, tmp_path):
    torch.save(state_with(legitimate()), tmp_path / "good.pt")
    torch.save(state_with(FORGED["call"]), tmp_path / "bad.pt")
    with torch.serialization.safe_globals(own):
        before = set(torch.serialization.get_safe_globals())
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "good.pt"))
        with pytest.raises(ValueError, match="which is not run"):
            checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "bad.pt"))
        assert set(torch.serialization.get_safe_globals()) == before
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "good.pt", weights_only=True)


@pytest.mark.parametrize(
    "code",
    [
        collections.OrderedDict,
        {"a": [Namespace]},
        {(1, torch.Tensor): 2},
        {collections.OrderedDict},
        torch._utils._rebuild_tensor_v2,
    ],
    ids=["class", "within", "key", "set", "function"],
)
@pytest.mark.parametrize("place", ["extra", "cfg"])
def test_names_of_code_are_refused(code, place, tmp_path):
    state = state_with(1)
    if place == "cfg":
        state["cfg"]["model"]["a"] = code
    else:
        state["extra"] = code
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a.pt cannot be read as a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a.pt"))


def test_every_reader_is_restricted():
    """Nothing in the package unpickles or evaluates by itself, and every ``torch.load`` is restricted."""
    loads = 0
    for file in (ROOT / "fw_fairseq").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func)
            assert name not in ("eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "os.system"), (
                file
            )
            if name == "torch.load":
                loads += 1
                assert "weights_only=True" in ast.unparse(call), file
    assert loads > 1


def test_weights_run_nothing(tmp_path):
    """Of a folder with a GPT-2: neither its pickle nor its code."""
    mark = tmp_path / "mark"
    (tmp_path / "modeling_gpt2.py").write_text(f"open({str(mark)!r}, 'w')")
    torch.save({"wte.weight": torch.ones(2, 2), "x": Reduced(os.mkdir, (str(mark),))}, tmp_path / "pytorch_model.bin")
    sizes = {"n_embd": 2, "n_layer": 1, "n_head": 1, "n_positions": 4, "vocab_size": 2, "eos_token_id": 1}
    config = {"model_type": "gpt2", "activation_function": "gelu_new", "auto_map": {"AutoModel": "modeling_gpt2.GPT2"}} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = called(convert, tmp_path, tmp_path / "out.pt", "--rule", "sum")
    assert done.returncode == 1 and "it holds posix.mkdir, which is neither a tensor nor an option, and is not run" in done.stderr
    assert not mark.exists() and not (tmp_path / "out.pt").exists()


def test_the_exported_code_is_the_packages():
    """The file of a folder has a loader, modules as they are in the package, and classes that only name theirs."""
    body = ast.parse(standalone.code()).body
    [sources] = [node.value for node in body if isinstance(node, ast.Assign) and node.targets[0].id == "SOURCES"]
    for name, text in ast.literal_eval(sources).items():
        place = ROOT.joinpath("fw_fairseq", *filter(None, name.split(".")))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert "".join(line[1:] for line in text.splitlines(keepends=True)).rstrip() in file.read_text()
    others = [node for node in body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign))]
    finder, load, *classes = others
    assert (finder.name, load.name) == ("Modules", "load") and len(classes) == 4
    made = "def __init__(self, *args, **kwargs):\n    super().__init__(*args, **kwargs)"
    named = {f"config_class = {name}" for name in ("FastWeightHFConfig", "FastWeightTranslationConfig")}
    assert {ast.unparse(line) for kind in classes for line in kind.body} == {made} | named
    assert {ast.unparse(base) for kind in classes for base in kind.bases} == {f"huggingface.{kind.name}" for kind in classes}


def test_recipes_download_over_https():
    texts = [file.read_text() for file in (ROOT / "recipes").rglob("*.sh")]
    assert any("https://" in text for text in texts) and not any("http://" in text for text in texts)
