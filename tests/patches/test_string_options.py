"""No string among the options of fairseq's and this project's models, tasks, optimizers and losses is run as Python."""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import io
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from fairseq import models, registry, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import gen_parser_from_dataclass

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches.literals import NotALiteral

pytestmark = pytest.mark.usefixtures("one_thread")

FLAGS = {"adaptive_input": True, "adaptive_input_cutoff": "20,40", "wer_kenlm_model": None}
POSITIONS = {
    "max_source_positions": 64,
    "max_target_positions": 64,
    "tokens_per_sample": 64,
    "no_token_positional_embeddings": True,
}
SIZES = {"layers": 1, "heads": 1, "dim": 32, "features": 8, "size": 8, "width": 8}
RUN_BY_MODELS = """adaptive_softmax_cutoff adaptive_input_cutoff decoder_layers encoder_layers decoder_attention
conv_feature_layers encoder_xformers_att_config decoder_xformers_att_config""".split()  # noqa: SIM905
RUN_BY_OTHERS = "adam_betas adamax_betas adafactor_eps wer_args".split()  # noqa: SIM905
PARTS = "optimizer", "criterion", "lr_scheduler"


class Lenient(Namespace):
    """Options that other groups would bring are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def options_of(kind: type, arch: str | None = None) -> Namespace:
    """The options of a class with their defaults, or those of an architecture; others are None."""
    parser = argparse.ArgumentParser()
    add = getattr(kind, "add_args", None)
    if add is not None:
        add(parser)
    dataclass = getattr(kind, "__dataclass", None)
    if dataclass is not None and not parser._option_string_actions.keys() - {"-h", "--help"}:
        gen_parser_from_dataclass(parser, dataclass())
    values = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    args = Namespace(**{name: value for name, value in values.items() if value not in (None, argparse.SUPPRESS)})
    if arch is not None:
        models.ARCH_CONFIG_REGISTRY[arch](args)
    dataclass = getattr(kind, "__dataclass", None)
    defaults = {} if dataclass is None else {name: x for name, x in vars(dataclass()).items() if not str(x).startswith("${")}
    return Namespace(**dict.fromkeys(values) | defaults | vars(args))


def small(args: Namespace) -> Namespace:
    for name, value in vars(args).items():
        size = next((size for end, size in SIZES.items() if name.endswith(end)), None)
        if type(value) is int and value and size:
            setattr(args, name, size)
    flags = {name: value for name, value in FLAGS.items() if hasattr(args, name)}
    return Namespace(
        **POSITIONS | {name: value for name, value in vars(args).items() if value is not None or name not in POSITIONS} | flags
    )


def words() -> Dictionary:
    dictionary = Dictionary()
    for i in range(60):
        dictionary.add_symbol(f"w{i}")
    return dictionary


def task() -> SimpleNamespace:
    names = "source_dictionary", "target_dictionary", "dictionary", "src_dict", "tgt_dict"
    own = dict.fromkeys(names, words())
    options = Namespace(data="data", labels="ltr", sample_rate=16000, langs=["a", "b"], max_positions=64, sampling_rate=16000)
    return SimpleNamespace(**own, cfg=options, args=options, dicts={"a": words(), "b": words()}, langs=["a", "b"],
                           label_dictionary=words(), num_dictionaries=1, target_dictionaries=[words()])  # fmt: skip


def builders() -> Iterator[tuple[str, Namespace, object]]:
    """The name, the options and the builder of everything that a checkpoint's options may choose."""
    for name, kind in models.MODEL_REGISTRY.items():
        with contextlib.suppress(Exception):  # a model whose options need a package that is not here
            args = options_of(kind, next(iter(models.ARCH_MODEL_INV_REGISTRY.get(name, [])), None))
            yield f"model {name}", small(args), lambda args, kind=kind: kind.build_model(args, task())
    for name, kind in tasks.TASK_REGISTRY.items():
        with contextlib.suppress(Exception):
            yield f"task {name}", options_of(kind), lambda args, kind=kind: kind.setup_task(Lenient(**vars(args)))
    parameters = [torch.nn.Parameter(torch.ones(2))]
    subjects = {"optimizer": [parameters], "criterion": [task()], "lr_scheduler": [None]}
    for part in PARTS:
        for name, kind in registry.REGISTRIES[part]["registry"].items():
            with contextlib.suppress(Exception):
                builder = functools.partial(build, getattr(kind, f"build_{part}", kind), subjects.get(part, []))
                yield f"{part} {name}", options_of(kind), builder


def build(builder: Callable, subjects: list, args: Namespace) -> object:
    return builder(Lenient(**vars(args) | {"lr": [0.1]}), *subjects)


def refusal(error: BaseException | None) -> NotALiteral | None:
    while error is not None and not isinstance(error, NotALiteral):
        error = error.__cause__ or error.__context__
    return error


def no_network(*args) -> None:
    raise ConnectionRefusedError("some parts download files")


def test_no_string_option_is_run(tmp_path, monkeypatch):
    mark, refused, tried = tmp_path / "mark", {}, {}
    code = f"__import__('pathlib').Path({str(mark)!r}).touch() or [10, 20]"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    for name, args, builder in builders():
        for option, value in vars(args).items():
            if not (value is None or isinstance(value, str)) or isinstance(value, enum.Enum):
                continue
            tried.setdefault(name, []).append(option)
            with contextlib.redirect_stdout(io.StringIO()), torch.device("meta"):
                try:
                    builder(Namespace(**vars(args) | {option: code}))
                except (Exception, SystemExit) as error:
                    if refusal(error):
                        refused.setdefault(name.partition(" ")[0], set()).add(option)
            assert not mark.exists(), (name, option)
    assert len(tried) > 120 and sum(map(len, tried.values())) > 600, tried
    assert refused["model"] >= {*RUN_BY_MODELS} and refused["optimizer"] | refused["criterion"] >= {*RUN_BY_OTHERS}, refused


def test_the_mark_would_be_left(tmp_path):
    """The sweep tries a string that Python's own ``eval`` would run."""
    eval(f"__import__('pathlib').Path({str(tmp_path / 'mark')!r}).touch() or [10, 20]")
    assert (tmp_path / "mark").exists()
