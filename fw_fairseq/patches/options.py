"""Options

The help lists all of them, and a command says which one it lacks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fairseq import models, options, tasks
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks.language_modeling import LanguageModelingTask

from ..errors import Mistake
from ..generation.graphs import VARIABLE
from .literals import naming, read_literal
from .replacing import replaces

GRAPHS = "--no-decoding-graph"
TWO_PRECISIONS = "--fp16 and --bf16 exclude each other, as do --memory-efficient-fp16 and --memory-efficient-bf16; give one of them"


@replaces(options, "parse_args_and_arch")
def list_every_option_in_the_help(
    original: Callable, parser: argparse.ArgumentParser, input_args: list[str] | None = None, *args, **kwargs
) -> object:
    """`--help` leaves out the options of the architecture, the task and the criterion. Now it lists them. Refused are a missing
    `--arch`, `--task` or `--path`, a task that does not train the architecture, and `--bf16` in commands that only read a model,
    where it has no effect. `--bf16` looks for a TPU; now only `--tpu` does. Without updates of its own, `--lr-scheduler
    polynomial_decay` takes those of `--max-update`. Commands that generate take `--no-decoding-graph`, for all their models."""
    given = sys.argv[1:] if input_args is None else input_args
    generates = "--prefix-size" in parser._option_string_actions
    if generates and GRAPHS not in parser._option_string_actions:
        help_ = "generate on a GPU without CUDA graphs"
        parser.add_argument(GRAPHS, action="store_true", default=argparse.SUPPRESS, help=help_)
    if {"-h", "--help"}.isdisjoint(given):
        check_task(parser, given)
    else:
        put_help_off(parser, given)
    try:
        found = original(parser, input_args, *args, **kwargs)
    except RuntimeError as error:  # without a message, where no architecture is named
        if error.args:
            raise
        raise Mistake("--arch is missing; name the architecture to train, for example --arch fast_weight_lm") from error
    except ValueError as error:
        if "--fp16 and --tpu" not in str(error) or "--tpu" in given:
            raise
        raise Mistake(TWO_PRECISIONS) from error
    except KeyError as error:
        if error.args != (None,):
            raise
        raise Mistake("--task is missing; name the task of the model, for example --task language_modeling") from error
    parsed: Any = found[0] if isinstance(found, tuple) else found
    if getattr(parsed, "tpu", False) and "--tpu" not in given:  # with suppress_defaults only what was given is there
        parsed.tpu = False
    with naming(parsed):  # fairseq_cli runs it as Python
        read_literal(getattr(parsed, "model_overrides", "{}"))
    if getattr(parsed, "path", "") is None:
        raise Mistake("--path is missing; name the checkpoint of the model")
    if hasattr(parsed, "path") and getattr(parsed, "bf16", False):
        raise Mistake("--bf16 is for trainings; evaluation and generation take --fp16, or run in fp32")
    if getattr(parsed, "total_num_update", 0) is None:  # as the option's own default says, which Hydra refuses
        parsed.total_num_update = getattr(parsed, "max_update", None) or 0
    if generates and vars(parsed).pop("no_decoding_graph", False):
        os.environ[VARIABLE] = "0"
    return found


def put_help_off(parser: argparse.ArgumentParser, given: list[str]) -> None:
    """Leaves the help to the second of two passes, which knows all options. Without an architecture fairseq has only one."""
    parse = parser.parse_known_args

    def parse_without_help(_: object, namespace: argparse.Namespace | None = None) -> tuple[argparse.Namespace, list[str]]:
        del parser.parse_known_args
        found = parse([word for word in given if word not in ("-h", "--help")], namespace)
        if getattr(found[0], "arch", "") is None:
            parser.print_help()
            parser.exit()
        return found

    vars(parser)["parse_known_args"] = parse_without_help


def check_task(parser: argparse.ArgumentParser, given: list[str]) -> None:
    """Refuses to train a language model by a task of another kind, and a model with an encoder by one of language models. The
    options of the task that was meant would be unknown words to ``parser``."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--arch", "-a")
    early.add_argument("--task", default=parser.get_default("task"))
    named = early.parse_known_args(given)[0]
    model, task = models.ARCH_MODEL_REGISTRY.get(named.arch), tasks.TASK_REGISTRY.get(named.task)
    if model is None or task is None:
        return
    said = f"--arch {named.arch} is {{}}, which --task {named.task} does not train; name its task, for example --task {{}}"
    own = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    task.add_args(own)
    defaults = [field.default for field in fields(getattr(model, "__dataclass", None) or FairseqDataclass)]
    if "${task.tokens_per_sample}" in defaults and "--tokens-per-sample" not in own._option_string_actions:
        raise Mistake(said.format("a language model", "language_modeling"))
    if issubclass(task, LanguageModelingTask) and issubclass(model, FairseqEncoderDecoderModel):
        raise Mistake(said.format("a model with an encoder", "translation"))
