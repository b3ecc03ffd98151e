"""Every option of this project once, with its help text. Models add the group to fairseq's own options."""

import copy
import re
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.utils import safe_getattr

from .errors import Mistake
from .feature_maps import FEATURE_MAPS
from .mixers import MIXERS
from .mixers.options import DECLARED, FFN_FORMS, NORM_FORMS, MixerOptions, check_values, option, option_name

SOFTMAX = "softmax"
MIXER_NAMES: ChainMap[str, Any] = ChainMap({SOFTMAX: None}, MIXERS)  # which grows with MIXERS
SOFTMAX_OPTIONS = ("attention_dropout", "bias_free")
SPARSE_OPTIONS = ("ffn_sparsity", "ffn_controller_dim", "qkv_sparsity", "output_sparsity", "ffn_sru", "reversible")
DECODER_OPTIONS = ("scale_output", "output_dropout", "no_decoding_graph", "graph_training", *SPARSE_OPTIONS)  # which no mixer reads
ATTENTIONS = ("encoder", "decoder", "cross")
# fairseq's options that add a part to a layer, and the name of the part there
EXTRAS = {"scale_fc": "ffn_layernorm", "scale_attn": "attn_ln", "scale_heads": "c_attn", "scale_resids": "w_resid"}


def command_line(kind: Any) -> Any:
    """Decorates a dataclass of options for the command line: an option with choices has them as its type."""
    for name, declared in kind.__dataclass_fields__.items():
        if "choices" in declared.metadata and declared.type is str:
            kind.__dataclass_fields__[name] = declared = copy.copy(declared)
            kind.__annotations__[name] = declared.type = ChoiceEnum(list(declared.metadata["choices"]))
    return kind


@command_line
@dataclass
class FastWeightConfig(MixerOptions, FairseqDataclass):
    """The options of this project's models."""

    mixer: str = option("fast_weight", "the token mixer of every layer; softmax is fairseq's attention", choices=MIXER_NAMES)
    mixer_pattern: str = option(
        "",
        "the mixer of each layer, bottom first, in place of --mixer: 'softmax,fast_weight*3'; a short pattern repeats",
    )
    ffn_sparsity: int = option(
        0,
        "N: each token uses one of every N hidden units of the feed-forward layers, chosen by a controller; 0: all",
        0,
    )
    ffn_controller_dim: int = option(0, "rank of the controller of --ffn-sparsity; 0: the number of hidden units / N", 0)
    qkv_sparsity: int = option(
        0,
        "number of modules of a multiplicative dense layer that makes queries, keys and values, with causal convolutions, "
        "without an output projection; 0: dense",
        0,
    )
    output_sparsity: int = option(
        0, "number of modules of a multiplicative dense layer in place of the output projection; 0: a dense projection", 0
    )
    ffn_sru: int = option(0, "number of simple recurrent units beside each feed-forward layer; 0: none", 0)
    reversible: bool = option(
        False,
        "two residual streams, from which the backward recomputes activations, so that their memory does not grow with the "
        "number of layers",
    )
    output_dropout: float = option(0.0, "dropout of the last layer's output", 0, below=1)
    scale_output: bool = option(False, "divide the logits by the square root of the width of the layers")
    no_decoding_graph: bool = option(
        False, "generate on a GPU without CUDA graphs; --model-overrides \"{'no_decoding_graph': True}\" sets it for a checkpoint"
    )
    graph_training: bool = option(
        False,
        "train the layers on a GPU as two CUDA graphs, forward and backward, captured for each of the first 16 shapes of batches",
    )


@command_line
@dataclass
class LanguageModelConfig(FastWeightConfig):
    """The options of language models."""

    norm_form: str = option(
        "layer",
        "the norms of layers, of --layernorm-embedding and of the last output: layer norm, or rms, which divides by the root mean "
        "square and has no biases",
        choices=NORM_FORMS,
    )
    norm_eps: float = option(1e-5, "what these norms add to the mean square", 0)
    ffn_form: str = option(
        "plain",
        "the feed-forward layers: plain has --activation-fn between two maps; swiglu multiplies SiLU and a second map, without "
        "biases; rwkv6 and rwkv7 mix channels of a token and the one before it, with squared ReLU",
        choices=FFN_FORMS,
    )


@dataclass
class FastWeightTransformerConfig(FastWeightConfig):
    """The options of translation models."""

    linear_attention: str = option(
        ",".join(ATTENTIONS),
        "which of encoder, decoder and cross attention are linear, separated by commas; '' for none; all three use the feature "
        "map, update rule and mixers are the decoder's",
    )
    source_in_front: bool = option(
        False,
        "put the encoder's output in front of the target, where the decoder's self-attention reads it, in place of cross attention",
    )
    decoder_attentions: int = option(1, "number of self-attention layers in each decoder layer", 1)


def linear_attentions(config: FastWeightTransformerConfig) -> list[str]:
    """The names that --linear-attention lists."""
    names = [name.strip() for name in config.linear_attention.split(",")] if config.linear_attention.strip() else []
    for name in names:
        if name not in ATTENTIONS:
            raise Mistake(f"--linear-attention has {name!r}; allowed, separated by commas: {', '.join(ATTENTIONS)}")
    return names


def mixer_options(name: str) -> set[str]:
    """The names of the options that a mixer reads, those of its feature map aside."""
    options = SOFTMAX_OPTIONS if name == SOFTMAX else MIXERS[name].options
    return {*options}.difference(*(phi.options for phi in FEATURE_MAPS.values()))


def options_read(config: FastWeightConfig, mixers: Iterable[str], *others: str) -> set[str]:
    """The names of the options that these mixers read, of ``others``, and of the feature map where one is read."""
    names = {*others}.union(*map(mixer_options, mixers))
    return names | {*FEATURE_MAPS[str(config.feature_map)].options} if "feature_map" in names else names


def refuse_without_effect(args: object, kind: type, effective: set[str]) -> None:
    """Refuses an option that has another value than its default and that is none of ``effective``."""
    defaults = {f.name: f.default for f in fields(kind)}
    for name, default in defaults.items():
        value = safe_getattr(args, name, None)
        if not name.startswith("_") and name not in effective and value is not None and value != default:
            owners = [f"--mixer {mixer}" for mixer in (SOFTMAX, *MIXERS) if name in mixer_options(mixer)]
            if "linear_attention" in defaults and "mixer" not in effective and (owners or name in ("mixer", "mixer_pattern")):
                owners = ["decoder in --linear-attention"]
            owners += [f"--feature-map {phi}" for phi, made in FEATURE_MAPS.items() if name in made.options]
            belongs = f" without {' or '.join(owners)}" if owners else " in this model"
            raise Mistake(f"{option_name(name)} has no effect{belongs}; leave it out")
    mixer = safe_getattr(args, "mixer", None) or defaults["mixer"]
    if "mixer" in effective and safe_getattr(args, "mixer_pattern", "") and str(mixer) != str(defaults["mixer"]):
        raise Mistake("--mixer has no effect beside --mixer-pattern; leave one of them out")


def refuse_beside(option: str, args: object, *others: str) -> None:
    """Refuses an option of a model beside these others."""
    for name in others:
        if safe_getattr(args, name, None):
            raise Mistake(f"{option} does not work with {option_name(name)}; leave one of them out")


def layer_mixers(config: FastWeightConfig, layers: int) -> list[str]:
    """The mixer of each layer, bottom first."""
    if not config.mixer_pattern:
        return [str(config.mixer)] * layers
    names: list[str] = []
    for part in config.mixer_pattern.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*(?:\*\s*(\d+))?\s*", part)
        if not match or match[1] not in MIXER_NAMES or match[2] == "0":
            allowed = ", ".join(MIXER_NAMES)
            raise Mistake(f"--mixer-pattern has {part!r}; each part must be NAME or NAME*COUNT, NAME one of: {allowed}")
        names += [match[1]] * int(match[2] or 1)
    if len(names) > layers:
        raise Mistake(f"--mixer-pattern names {len(names)} layers but the model has {layers}; name at most {layers}")
    return [names[i % len(names)] for i in range(layers)]


def check_sizes(args: object, *names: str) -> None:
    """Refuses sizes of a model, among fairseq's options, that are not positive. A decoder may have no feed-forward layers: 0."""
    for name in names:
        refuse_below(args, name, int(name != "decoder_ffn_embed_dim"))


def refuse_below(values: object, name: str, least: float) -> None:
    """Refuses an option of fairseq's that has a smaller number. ``values``: options by their names."""
    value = safe_getattr(values, name)
    if value is not None and not (isinstance(value, (int, float)) and value >= least):
        raise Mistake(f"{option_name(name)} is {value!r}; it must be at least {least}")


def check_options(config: FairseqDataclass, kind: Optional[type] = None) -> None:
    """Checks the values of this project's options. Mixers do not check them again, so all that builds a model calls this first.

    ``kind``: the class of the options, where ``config`` is a DictConfig.
    """
    limited = {"least", "below", "choices"}
    check_values([f for f in fields(kind or config) if f.name in DECLARED or limited & {*f.metadata}], config)


def read_config(kind: type, args: object) -> Any:
    """Returns the options of this project, of class ``kind``, from all options of a model."""
    given = {f.name: value for f in fields(kind) if (value := safe_getattr(args, f.name, None)) is not None}
    config = kind(**given)
    check_options(config)
    return config
