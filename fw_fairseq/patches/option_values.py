"""Options

The help lists all of them, and wrong ones that come from a checkpoint, `--model-overrides` or Hydra are refused in the words of the
command line.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import fields

import torch
from fairseq import models, options, tasks
from fairseq.data import data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.modules.quantization import scalar
from fairseq.modules.quantization.scalar.utils import MAPPING as KINDS
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import safe_getattr

from ..config import refuse_outside
from ..errors import Mistake
from ..generation.graphs import VARIABLE
from .literals import NotALiteral, read_literal
from .replacing import replaces

# the least and the largest value of fairseq's options whose other values end in a traceback or mean something else than they say
BOUNDS = {
    "common": {"seed": (0, 2**32 - 1), "log_interval": (1, math.inf)},
    "dataset": {
        "num_workers": (0, math.inf),
        "max_tokens": (1, math.inf),
        "batch_size": (1, math.inf),
        "max_tokens_valid": (1, math.inf),
        "batch_size_valid": (1, math.inf),
        "validate_interval": (1, math.inf),
    },
    "optimization": {"update_freq": (1, math.inf), "lr": (0, math.inf), "clip_norm": (0, math.inf)},
    "checkpoint": {"save_interval": (1, math.inf), "save_interval_updates": (0, math.inf)},
    "generation": {"beam": (1, math.inf), "nbest": (1, math.inf), "max_len_b": (0, math.inf)},
}
SHARES = [f"{name}dropout" for name in ("", "attention_", "activation_", "relu_", "adaptive_softmax_")]
SHARES += ["encoder_layerdrop", "decoder_layerdrop", "quant_noise_pq", "quant_noise_scalar"]


def check_shares(cfg) -> None:
    """Refuses the first of a model's probabilities that is none."""
    for name in SHARES:
        refuse_outside(cfg, name, 0, 1)
    if safe_getattr(cfg, "quant_noise_pq", None) == 1:
        raise Mistake("--quant-noise-pq is 1; it must be below 1, since noise on all blocks leaves no weights")


def check_bounds(cfg) -> None:
    """Refuses the first of the options of a command that is out of its bounds."""
    for group, bounds in BOUNDS.items():
        for name, (least, most) in bounds.items():
            refuse_outside(safe_getattr(cfg, group), name, least, most)


def check_training(cfg) -> None:
    """Refuses a learning rate's schedule, and an Adam, without the numbers that they need."""
    schedule, optimization, optimizer = (safe_getattr(cfg, group) for group in ("lr_scheduler", "optimization", "optimizer"))
    name, most, lr = safe_getattr(schedule, "_name"), safe_getattr(optimization, "max_update"), safe_getattr(optimization, "lr")
    given = {key: safe_getattr(schedule, key) for key in ("total_num_update", "max_lr", "lr_period_updates", "phase_ratio")}
    said = f"--lr-scheduler {name} needs"
    if name == "polynomial_decay" and not (given["total_num_update"] or 0) > 0:
        raise Mistake(f"{said} --total-num-update, the updates until the learning rate has fallen, or --max-update")
    if name == "triangular" and not given["max_lr"] > lr[0]:
        raise Mistake(f"{said} --max-lr above --lr, {lr[0]:g}; it is {given['max_lr']:g}")
    if name == "cosine" and not max(given["lr_period_updates"], most) > 0:
        raise Mistake(f"{said} --lr-period-updates, the updates of the first period, or --max-update")
    if name == "tri_stage" and not (schedule.decay_steps if given["phase_ratio"] is None else most) > 0:
        raise Mistake(f"{said} --decay-steps, or --phase-ratio with --max-update")
    betas = safe_getattr(optimizer, "adam_betas")
    if betas is not None and not is_pair_of_shares(betas):
        raise Mistake(f"--adam-betas is {betas}; it must be two numbers, each at least 0 and below 1, such as '(0.9, 0.98)'")


def is_pair_of_shares(value: object) -> bool:
    """Whether a value, or the string that it is written as, is two numbers that are at least 0 and below 1."""
    try:
        numbers = read_literal(value) if isinstance(value, str) else value
        return len(numbers) == 2 and all(0 <= x < 1 for x in numbers)
    except (NotALiteral, TypeError):
        return False


@replaces(scalar, "quantize_model_")
def quantise_layers_of_other_classes(original, model, *args, **kwargs):
    """With `--quant-noise-scalar` a dense layer of a class of its own, as those of sru and srupp, ends in a KeyError. Now it is
    quantised as torch's dense layers are. Without a GPU the first batch ends in a traceback; now one sentence says so before."""
    if not torch.cuda.is_available():
        raise Mistake("--quant-noise-scalar needs a GPU, on which fairseq computes its scales; leave it out on CPUs")
    for module in model.modules():
        for kind, quantised in list(KINDS.items()):
            if isinstance(module, kind):
                KINDS.setdefault(type(module), quantised)
    return original(model, *args, **kwargs)


@replaces(options, "parse_args_and_arch")
def list_every_option_in_the_help(original, parser, input_args=None, *args, **kwargs):
    """fairseq's commands print `--help` and end before they read the options of the architecture, the task and the criterion that
    the command line names. Now their help lists these too. An architecture that is missing, or that the task does not train, and a
    `--path` that is missing are refused in one sentence, and so is `--bf16` in the commands that only read a model, where it has no
    effect. `--lr-scheduler polynomial_decay` without `--total-num-update` ends in Hydra's traceback; now its
    updates are those of `--max-update`. `--bf16` looks for a TPU, and on a GPU ends in a traceback; now only `--tpu` does, and
    `--bf16` trains on GPUs."""
    given = sys.argv[1:] if input_args is None else input_args
    if not {"-h", "--help"}.isdisjoint(given):
        parse = parser.parse_known_args

        def parse_without_help(_, namespace=None):
            """In place of the first of two passes, of which the second one knows all options."""
            del parser.parse_known_args
            found = parse([word for word in given if word not in ("-h", "--help")], namespace)
            if getattr(found[0], "arch", "") is None:  # fairseq has no sentence for that
                parser.print_help()
                parser.exit()
            return found

        parser.parse_known_args = parse_without_help
    else:
        name_the_task_that_a_model_needs(named_early(parser, given))
    try:
        found = original(parser, input_args, *args, **kwargs)
    except RuntimeError as error:  # without a message, where no architecture is named
        if error.args:
            raise
        raise Mistake("--arch is missing; name the architecture to train, for example --arch fast_weight_lm") from error
    except KeyError as error:
        if error.args != (None,):
            raise
        raise Mistake("--task is missing; name the task of the model, for example --task language_modeling") from error
    args = found[0] if isinstance(found, tuple) else found
    if getattr(args, "tpu", False) and "--tpu" not in given:  # with suppress_defaults only what was given is there
        args.tpu = False
    name_the_task_that_a_model_needs(args)
    if getattr(args, "model_overrides", None) is not None:
        read_overrides(args.model_overrides)
    if getattr(args, "path", "") is None:
        raise Mistake("--path is missing; name the checkpoint of the model")
    if hasattr(args, "path") and getattr(args, "bf16", False):
        raise Mistake("--bf16 is for trainings; evaluation and generation take --fp16, or run in fp32")
    if getattr(args, "total_num_update", 0) is None:  # as the option's own default says, which Hydra refuses
        args.total_num_update = getattr(args, "max_update", None) or 0
    return found


def read_overrides(text: str) -> dict:
    """Returns what `--model-overrides` gives."""
    try:
        found = read_literal(text)
    except NotALiteral:
        found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise Mistake(f"--model-overrides is {text}; it must be a dict such as {{'xl_memory': 128}}")
    return found


def named_early(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    """Returns the architecture, where no task is named, with the default task. If that task is not for it, its options are unknown
    words to ``parser``."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--arch", "-a")
    early.add_argument("--task")
    found = early.parse_known_args(given)[0]
    found.task = parser.get_default("task") if found.task is None else None
    return found


def name_the_task_that_a_model_needs(args: argparse.Namespace) -> None:
    """Refuses to train a language model by a task of another kind, and a model with an encoder by one of language models."""
    model = models.ARCH_MODEL_REGISTRY.get(getattr(args, "arch", None))
    task = tasks.TASK_REGISTRY.get(getattr(args, "task", None))
    if model is None or task is None:
        return
    said = f"--arch {args.arch} is {{}}, which --task {args.task} does not train; name its task, for example --task {{}}"
    defaults = [field.default for field in fields(getattr(model, "__dataclass", None) or FairseqDataclass)]
    if "${task.tokens_per_sample}" in defaults and not hasattr(args, "tokens_per_sample"):
        raise Mistake(said.format("a language model", "language_modeling"))
    if issubclass(task, LanguageModelingTask) and issubclass(model, FairseqEncoderDecoderModel):
        raise Mistake(said.format("a model with an encoder", "translation"))


@replaces(data_utils, "infer_language_pair")
def name_the_languages(original, path):
    """A folder that names no pair of languages ends `--task translation` in a traceback. Now one sentence names the folder and the
    options."""
    pair = original(path)
    if None in pair:
        said = f"DATA {path} has no text of two languages, such as train.en-de.en.idx"
        raise Mistake(
            f"{said}; name a folder of fairseq-preprocess, and its languages by --source-lang and --target-lang, or another --task,"
            " such as language_modeling for a language model"
        )
    return pair


class WithoutGraphs(argparse.Action):
    """Switches CUDA graphs off for this process, whatever the models' own options say."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        os.environ[VARIABLE] = "0"


@replaces(options, "add_generation_args")
def switch_graphs_off(original, parser):
    """The commands that generate know no option of a model. Now `fairseq-generate` and `fairseq-interactive` take
    `--no-decoding-graph`, which switches CUDA graphs off for all models of the command."""
    group = original(parser)
    help_ = "generate on a GPU without CUDA graphs"
    group.add_argument("--no-decoding-graph", action=WithoutGraphs, nargs=0, default=argparse.SUPPRESS, help=help_)
    return group
