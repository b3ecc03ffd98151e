"""Training

Errors are clear, and fairseq-eval-lm takes ensembles.
"""

from __future__ import annotations

import os
import re

import numpy
import torch
from fairseq import checkpoint_utils, models, utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import LMContextWindowDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer
from fairseq.utils import safe_getattr

from ..errors import Mistake
from ..mixers import FastWeight
from .checkpoints.model_options import LAST, check_options, take_options_over
from .checkpoints.origin import check_origin, check_the_last_one
from .checkpoints.plateau import PATIENCE
from .checkpoints.reading import ModelOverrides, add_options
from .checkpoints.resuming import with_averages
from .literals import naming, plain
from .option_values import check_shares
from .replacing import replaces
from .texts import shorter

WHOLE = (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)  # criterions that read the probabilities of all words


@replaces(Trainer, "__init__")
def refuse_what_cannot_be_trained(original, trainer, cfg, task, model, criterion, *args, **kwargs) -> None:
    """With `--fp16` or `--bf16` and no GPU, fairseq fails in the middle of its work, or looks for a TPU, and `--amp` does nothing.
    `--adaptive-softmax-cutoff` with a criterion that reads all words' probabilities ends in a traceback after the first batch. Now
    these options are refused before the run starts, and so is `--tpu` without torch_xla. `--memory-efficient-fp16` trains on
    CPUs."""
    halves = ("memory_efficient_bf16", "fp16", "bf16", "amp")
    given = next((name for name in halves if getattr(cfg.common, name)), None)
    works = cfg.common.memory_efficient_fp16 or (cfg.common.tpu and utils.xm is not None)
    if given and not works and (cfg.common.cpu or not torch.cuda.is_available()):
        raise Mistake(f"--{given.replace('_', '-')} is for GPUs; leave it out to train on CPUs")
    if cfg.common.tpu and utils.xm is None and not given:
        raise Mistake("--tpu needs the package torch_xla, which is not installed; leave it out to train on CPUs or GPUs")
    adaptive = getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None
    if adaptive and isinstance(criterion, WHOLE) and not hasattr(criterion, "adaptive"):
        raise Mistake(
            f"--criterion is {safe_getattr(cfg.criterion, '_name', type(criterion).__name__)}, which does not train the adaptive"
            " softmax of --adaptive-softmax-cutoff; use fast_weight_cross_entropy or adaptive_loss"
        )
    original(trainer, cfg, task, model, criterion, *args, **kwargs)


@replaces(AdaptiveLoss, "build_criterion")
def name_the_backend_of_adaptive_losses(original, *args, **kwargs):
    """`--criterion adaptive_loss` with the default `--ddp-backend` ends in a traceback, with one worker too. Now one sentence names
    the option."""
    try:
        return original(*args, **kwargs)
    except Exception as error:
        if "DistributedDataParallel" not in str(error):
            raise
        raise Mistake("--criterion adaptive_loss needs --ddp-backend legacy_ddp; fast_weight_cross_entropy does not") from error


@replaces(Trainer, "load_checkpoint")
def say_what_does_not_fit(original, trainer, filename, reset_optimizer=False, *args, **kwargs):
    """fairseq replaces the message about parameters that do not fit by "please ensure that the architectures match". Now the
    message names them. A run that resumes with another optimizer or criterion, or with other parameters to train, ends in a
    traceback; now in one sentence. fairseq also resumes with another task or dictionary, at a wrong place of the text or with
    wrong words, and it loads parameters into a model with options that make another model of them, such as another
    `--feature-map`. Now this is refused; with an explicit `--restore-file` the log names such options. Where that file is
    missing, fairseq trains from scratch; now it is refused. A run that is resumed with `--store-ema`, where its checkpoint has no
    averages, ends in a KeyError; now the averages start from the parameters. fairseq counts the validations of `--patience` from
    0 after each stop; now the count goes on."""
    try:
        with with_averages(trainer):
            extra_state = original(trainer, filename, reset_optimizer, *args, **kwargs)
    except AssertionError as error:
        if found := re.fullmatch(r"(Criterion|Optimizer) does not match; .*\. (\w+) vs (\w+)", str(error)):
            name, before, now = found.groups()
            said = f"--{name.lower()} is another one ({now}) than that of {filename} ({before})"
            raise Mistake(f"{said}; give the same one, or begin a run with --finetune-from-model") from error
        raise
    except Exception as error:
        if type(error) is Exception and isinstance(error.__context__, ValueError):
            check_the_last_one(trainer.task)
            raise Mistake(f"{filename}: {error.__context__}") from error
        if isinstance(error, ValueError) and str(error).startswith("loaded state dict"):  # of the optimizer, by torch
            raise Mistake(
                f"{filename} is of a run that trains other parameters; give its --train-only, or another --save-dir and"
                f" --finetune-from-model {filename}"
            ) from error
        raise
    if extra_state is not None:
        check_options(trainer, filename)
    elif (given := safe_getattr(trainer.cfg.checkpoint, "restore_file", LAST)) != LAST:
        raise Mistake(f"--restore-file is {given}, where there is no file; name the checkpoint from which the run starts")
    check_origin(trainer, filename, extra_state, reset_optimizer)
    fresh = extra_state is None or reset_optimizer or kwargs.get("reset_meters", False)
    trainer.patience_read = {} if fresh else extra_state.get(PATIENCE, {})
    return extra_state


@replaces(checkpoint_utils, "load_model_ensemble_and_task")
def split_ensembles(original, filenames, arg_overrides=None, task=None, strict=True, suffix="", *args, **kwargs):
    """`fairseq-eval-lm` takes `--path a.pt:b.pt` for one file, unlike fairseq's other tools. Now it is an ensemble everywhere."""
    whole = {name for name in filenames if os.path.exists(name) or os.path.exists(name.replace(".pt", f"{suffix}.pt"))}
    split = [part for name in filenames for part in ([name] if name in whole else utils.split_paths(name))]
    if task is not None:  # it has its own options, and all overrides are for the model
        arg_overrides = ModelOverrides(arg_overrides or {})
    return original(split, arg_overrides, task, strict, suffix, *args, **kwargs)


@replaces(LanguageModelingTask, "load_dataset")
def refuse_blocks_without_tokens(original, task, *args, **kwargs):
    """`fairseq-eval-lm` takes `--context-window` off `--tokens-per-sample`, and shows a traceback if nothing is left. Now one
    sentence names both."""
    if task.args.tokens_per_sample < 1:
        raise Mistake(f"--tokens-per-sample less --context-window is {task.args.tokens_per_sample}; it must be at least 1")
    return original(task, *args, **kwargs)


@replaces(LanguageModelingTask, "eval_lm_dataloader")
def score_every_block(original, task, dataset, *args, max_positions=None, context_window: int = 0, **kwargs):
    """`fairseq-eval-lm` leaves out texts that are longer than the model's positions, and reports the perplexity of the others; with
    `--context-window` learned positions end in an IndexError. Now both are refused."""
    sizes = numpy.asarray(dataset.sizes)
    tokens = int(min(sizes.max(initial=0) + context_window, sizes.sum()))
    if isinstance(max_positions, int) and tokens > max_positions:
        said = f"texts of {tokens} tokens are longer than the model's {max_positions} positions"
        raise Mistake(f"{said}; give {shorter(task, max_positions)}")
    return original(task, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs)


@replaces(LMContextWindowDataset, "collater")
def read_the_context_from_the_text(original, windows, samples):
    """`--context-window` takes as context what the same process has read last, so that with several `--num-workers` or shards words
    get the context of another place, and the perplexity is wrong. Now it takes the words before them."""
    context, at, missing = [], int(samples[0]["id"]) if samples else 0, windows.context_window
    while at and missing > 0:
        at -= 1
        context.insert(0, windows.dataset[at]["source"][-missing:].numpy())
        missing -= len(context[0])
    windows.prev_tokens = numpy.concatenate(context) if context else numpy.empty([0])
    return original(windows, samples) if samples else {}


@replaces(FairseqTask, "filter_indices_by_size")
def refuse_texts_that_are_too_long(original, *args, **kwargs):
    """A text longer than the model's positions ends `fairseq-generate` and `fairseq-interactive` in a traceback. Now its last
    sentence, which names the text and the option that leaves it out, is all that is shown."""
    try:
        return original(*args, **kwargs)
    except Exception as error:
        if type(error) is Exception:
            raise Mistake(str(error)) from error
        raise


@replaces(models, "build_model")
def build_what_the_options_say(original, cfg, task, from_checkpoint: bool = False):
    """fairseq runs some option strings as Python when it builds a model. Now they must be Python literals, and one that is not is
    refused by the name of its option. fairseq takes every option, whether the model reads it or not. Now a new model of this
    project refuses an option that no part of it reads, and every model a probability such as `--dropout 2`, which ends in a
    traceback. fairseq takes options from the command line alone; now `--options-from` takes those of a checkpoint over, and new
    checkpoints hold them as if they had been given. fairseq's commands take a checkpoint with any dictionary of its size, and their
    results are nonsense. Now a dictionary with other words, or in another order, is refused."""
    if from_checkpoint:
        check_the_last_one(task)
    take_options_over(cfg)
    if not from_checkpoint:  # its checkpoints say so, although models of translation leave out what was not given
        add_options(cfg, dict.fromkeys(FastWeight.of_before(plain(cfg)), False))
    check_shares(cfg)
    with naming(cfg):
        model = original(cfg, task, from_checkpoint)
    if from_checkpoint and isinstance(task, LanguageModelingTask) and isinstance(model, models.FairseqEncoderDecoderModel):
        raise Mistake(
            f"--path names a checkpoint of {type(model).__name__}, a model with an encoder, which no task of language models reads;"
            " evaluate it by fairseq-generate or fairseq-validate with its own task"
        )
    if not from_checkpoint and hasattr(model, "refuse_without_effect"):
        model.refuse_without_effect(cfg)
    return model
