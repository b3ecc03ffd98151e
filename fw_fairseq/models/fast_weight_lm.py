"""fast_weight_lm: fairseq's Transformer language model with fast weights in place of attention, layer by layer."""

import functools
import logging
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Optional

import torch
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.utils import eval_str_list, safe_getattr
from torch import Tensor, nn

from ..config import (
    DECODER_OPTIONS,
    FastWeightConfig,
    LanguageModelConfig,
    check_sizes,
    command_line,
    layer_mixers,
    option,
    option_name,
    options_read,
    read_config,
    refuse_without_effect,
)
from ..errors import Mistake
from ..mixers.base import check_heads
from ..modules.plain_softmax import Band
from .fast_weight_decoder import FastWeightDecoder
from .model_options import KnowsItsUpdates, NamesWhatDiffers, add_opposites, keep_layers

logger = logging.getLogger(__name__)
SIZES = [f"decoder_{name}" for name in ("layers", "embed_dim", "input_dim", "output_dim", "ffn_embed_dim")]
SIZES += ["tokens_per_sample", "max_target_positions"]


@command_line
@dataclass
class FastWeightLanguageModelConfig(LanguageModelConfig, TransformerLanguageModelConfig):
    """Options of fast_weight_lm. The defaults are the architecture of that name, small enough for a laptop."""

    decoder_layers: int = option(4, "num decoder layers")
    decoder_embed_dim: int = option(128, "decoder embedding dimension")
    decoder_input_dim: int = option(128, "decoder input dimension")
    decoder_output_dim: int = option(128, "decoder output dimension")
    decoder_ffn_embed_dim: int = option(512, "decoder embedding dimension for FFN")
    decoder_attention_heads: int = option(8, "num decoder attention heads")
    plain_adaptive_softmax: bool = option(
        False,
        "bands of --adaptive-softmax-cutoff share one embedding table with the input, with biases and without projections, as "
        "in Transformer-XL's code",
    )
    positions_from_end: bool = option(
        False,
        "count sinusoidal positions back from the end of each segment, as the code of Schlag et al. 2021 does; such a model "
        "cannot generate",
    )
    init_std: float = option(
        0.0,
        "width of the normal distribution of initial weights: linear maps and embeddings around 0, norms around 1, as in "
        "Transformer-XL's code; rows of 0 stay; 0: fairseq's start",
        0,
        below=1,
    )
    options_from: str = option(
        "",
        "a checkpoint, for example from fw-convert, whose options the new model takes over: those that decide what it computes,"
        " not dropout",
    )
    train_only: str = option(
        "all",
        "new: train only what fw-convert makes anew: query and key projections, gates and feature maps; --weight-decay still "
        "shrinks the value projections",
        choices=("all", "new"),
    )


@register_model("fast_weight_lm", dataclass=FastWeightLanguageModelConfig)
class FastWeightLanguageModel(KnowsItsUpdates, NamesWhatDiffers, TransformerLanguageModel):
    """fairseq's Transformer language model with fast weights in place of attention."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds all options, each switch with its opposite."""
        super().add_args(parser)
        add_opposites(parser, [f.name for f in fields(FastWeightConfig)])

    @classmethod
    def build_model(cls, args: Any, task: FairseqTask) -> TransformerLanguageModel:
        check_sizes(args, *SIZES)
        check_cutoffs(args, len(task.target_dictionary))
        keep_layers(args)
        config = read_config(FastWeightLanguageModelConfig, args)
        if not config.feature_dim or {*layer_mixers(config, args.decoder_layers)} != {"fast_weight"}:
            check_heads(args.decoder_embed_dim, args.decoder_attention_heads, "decoder")  # before fairseq does, by an assertion
        own = LanguageModelConfig(**{f.name: getattr(config, f.name) for f in fields(LanguageModelConfig)})
        decoder = functools.partial(FastWeightDecoder, config=own, carries_over=getattr(task, "carries_over", False))
        model = build_with(decoder, cls, args, task)
        if config.init_std:
            start_from(model, config.init_std)
        if config.train_only == "new":
            model.freeze_all_but_new()
        if not next(model.parameters()).is_meta:
            logger.info(model.describe_state())
        return model

    def options_read(self, args: Namespace) -> set[str]:
        """Returns the names of this project's options that a part of the model reads."""
        config = self.decoder.fast_weight_config
        names = layer_mixers(config, args.decoder_layers)
        return options_read(config, names, "mixer", "mixer_pattern", *DECODER_OPTIONS)

    def refuse_without_effect(self, args: Namespace) -> None:
        """Refuses options that no part of a new model reads."""
        refuse_without_effect(args, FastWeightConfig, self.options_read(args))

    def forward(self, src_tokens: Tensor, src_lengths: Optional[Tensor] = None, **kwargs) -> tuple:
        return self.decoder(src_tokens, **kwargs)

    def state_size(self) -> int:
        """The number of numbers that the mixers keep of one sequence. What softmax layers keep grows and does not count."""
        return sum(attention.mixer.state_size() for attention in self.decoder.mixers)

    def describe_state(self) -> str:
        """One line for the log: the state size in millions of numbers, as Schlag et al. 2021 report it."""
        softmax = len(self.decoder.layers) - len(self.decoder.mixers)
        growing = f", and {2 * softmax * self.decoder.embed_dim} numbers more with each token" if softmax else ""
        return f"state size: {self.state_size() / 1e6:.4g} million numbers for a sequence{growing}"

    def freeze_all_but_new(self) -> None:
        """Freezes all parameters but those with new rows. The gradients of their other rows are set to 0."""
        self.requires_grad_(False)
        for attention in self.decoder.mixers:
            pretrained = attention.mixer.pretrained()
            for name, parameter in attention.mixer.named_parameters():
                rows = pretrained.get(name, slice(0))
                if rows == slice(None):
                    continue
                parameter.requires_grad_(True)
                parameter.register_hook(functools.partial(without_rows, rows=rows))
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise Mistake("--train-only new leaves nothing to train, since the attention of all layers is unchanged")


def build_with(decoder: Callable, cls: type, args: Namespace, task: FairseqTask) -> TransformerLanguageModel:
    """Calls fairseq's ``build_model`` with ``decoder`` in place of the class that its code names, which has no hook to choose it.

    A model that is built by ``super().build_model`` first has a decoder of softmax attention, at its full cost in memory.
    """
    build = TransformerLanguageModel.build_model.__func__
    names = build.__globals__ | {"TransformerDecoder": decoder}
    return types.FunctionType(build.__code__, names, build.__name__, build.__defaults__, build.__closure__)(cls, args, task)


@torch.no_grad()
def start_from(model: TransformerLanguageModel, std: float) -> None:
    """Draws the weights of all linear maps, embeddings and norms anew. Rows that are 0, as that of padding, stay so. Biases become
    0, but those of mixers, where gates start, stay."""
    inside = {part for attention in model.decoder.mixers for part in attention.modules()}
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.normal_(module.weight, 1.0, std)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            still = module.weight.eq(0).all(-1, keepdim=True)
            nn.init.normal_(module.weight, std=std).masked_fill_(still, 0)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and module not in inside:
                nn.init.zeros_(bias)
        elif isinstance(module, Band) and module.classes is not None:
            nn.init.normal_(module.classes, std=std)


def check_cutoffs(args: Namespace, words: int) -> None:
    """Refuses bands of an adaptive vocabulary that end beyond it, which fairseq refuses by an assertion."""
    for name in ("adaptive_input", "adaptive_softmax"):
        cutoff = safe_getattr(args, f"{name}_cutoff", None)
        used = cutoff and (name == "adaptive_softmax" or safe_getattr(args, name))
        ends = eval_str_list(cutoff, type=int) if used else []
        if ends and (max(ends) > words or ends != sorted({*ends})):
            raise Mistake(
                f"{option_name(name)}-cutoff is {cutoff}, and the dictionary has {words} words; its numbers must grow, and be at"
                " most that"
            )


def without_rows(gradient: Tensor, rows: slice) -> Tensor:
    """The gradient with 0 in these rows."""
    gradient = gradient.clone()
    gradient[rows] = 0
    return gradient
