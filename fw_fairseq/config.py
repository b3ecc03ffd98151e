"""Every option of this project once, with its help text. Models add the group to fairseq's own options."""

import argparse
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.utils import safe_getattr
from omegaconf import ListConfig

from .errors import Mistake
from .feature_maps import FEATURE_MAPS, NORMS
from .mixers import MIXERS
from .ops.checks import BACKENDS, NORM_OF
from .rules import RULES

SOFTMAX = "softmax"
REGISTRIES = {"update_rule": RULES, "feature_map": FEATURE_MAPS, "mixer": MIXERS}
SOFTMAX_OPTIONS = ("attention_dropout", "bias_free")
SPARSE_OPTIONS = ("ffn_sparsity", "ffn_controller_dim", "qkv_sparsity", "output_sparsity", "ffn_sru", "reversible")
DECODER_OPTIONS = ("scale_output", "output_dropout", "no_decoding_graph", *SPARSE_OPTIONS)  # which no mixer reads
ATTENTIONS = ("encoder", "decoder", "cross")
# fairseq's options that add a part to a layer, and the name of the part there
EXTRAS = {"scale_fc": "ffn_layernorm", "scale_attn": "attn_ln", "scale_heads": "c_attn", "scale_resids": "w_resid"}


def option(default, help_: str, least: Optional[int] = None, below: Optional[int] = None):
    """A dataclass field with a help text. ``least``: the smallest number allowed; ``below``: a number that it must stay below."""
    bounds = {name: bound for name, bound in {"least": least, "below": below}.items() if bound is not None}
    return field(default=default, metadata={"help": help_} | bounds)


SETTINGS = {name: given for kind in MIXERS.values() for name, given in kind.settings.items()}


def setting(name: str, help_: str):
    """The option of that name, with the default and the bounds that the mixers' setting has."""
    return option(SETTINGS[name].default, help_, SETTINGS[name].least, SETTINGS[name].below)


@dataclass
class FastWeightConfig(FairseqDataclass):
    longest_text = None  # no option: the decoder says how many tokens no text exceeds

    mixer: ChoiceEnum([*MIXERS, SOFTMAX]) = option("fast_weight", "the token mixer of every layer; softmax is fairseq's attention")
    mixer_pattern: str = option(
        "",
        "the mixer of each layer, bottom first, with repeats: 'softmax,fast_weight*3'; short ones repeat; give it in place of"
        " --mixer",
    )
    update_rule: ChoiceEnum(list(RULES)) = setting("update_rule", "the update rule of the fast-weight memory")
    feature_map: ChoiceEnum(list(FEATURE_MAPS)) = setting("feature_map", "the map that queries and keys pass through")
    feature_dim: int = setting(
        "feature_dim", "width of queries and keys per head before the feature map; 0: the width of the values"
    )
    feature_norm: ChoiceEnum(list(NORMS)) = setting(
        "feature_norm", "divide features by their sum (for non-negative maps), by their length (l2), or by neither"
    )
    attention_norm: bool = setting(
        "attention_norm", "divide each read by the product of the query and the keys that the rule has accumulated"
    )
    attention_norm_of: ChoiceEnum(list(NORM_OF)) = setting(
        "attention_norm_of",
        "under delta, divide what an erase reads too (read_and_erase: Schlag et al. 2021, eq. 27) or the output alone (read: Mao"
        " 2022)",
    )
    dpfp_nu: int = setting("dpfp_nu", "nu of the dpfp feature map, which has 2 * nu * feature_dim features")
    favor_features: int = setting(
        "favor_features", "the number m of random directions of favor and rfa, which have 2m features; 0: feature_dim"
    )
    favor_prescale: bool = setting(
        "favor_prescale",
        "favor estimates exp(q.k / sqrt(feature_dim)), as softmax attention weighs, instead of exp(q.k), and needs fewer"
        " features for it",
    )
    write_strength_init: float = setting(
        "write_strength_init",
        "where the gates of write strength start; 0: where their rule has them, mostly near 0.5",
    )
    product_steps: int = setting("product_steps", "how many times each token writes under delta_product")
    negative_eigenvalues: bool = setting(
        "negative_eigenvalues",
        "gates that erase go up to 2, so that a write can turn around what a key reads (Grazzi et al. 2024)",
    )
    key_heads: int = setting("key_heads", "number of heads of queries and keys, which groups of heads share; 0: all have their own")
    short_conv: int = setting(
        "short_conv", "width of a causal convolution over time of each channel of queries, keys and values, then SiLU; 0: none"
    )
    token_shift: bool = setting(
        "token_shift", "make queries, keys, values and gates each of a learnt mixture of a token and the one before it (RWKV)"
    )
    token_shift_rank: int = setting(
        "token_shift_rank",
        "let the mixtures of --token-shift depend on the token by a map of this rank for each part (RWKV 6); 0: they do not",
    )
    rotary: bool = setting(
        "rotary", "turn pairs of features of queries and keys by angles that grow with the position in the text (RetNet)"
    )
    value_mixing_rank: int = setting(
        "value_mixing_rank",
        "mix the values of layer 0 into those of the others, in shares that a map of this rank makes of a token (RWKV 7); 0: none",
    )
    output_norm: bool = setting("output_norm", "divide what each head reads by its root mean square, times learnt weights")
    output_gate: bool = setting("output_gate", "multiply what is read by the SiLU of a projection of the layer's input")
    scale_reads: bool = setting(
        "scale_reads",
        "divide what a memory reads by the square root of the width of a head, before --output-norm and the output projection",
    )
    scale_after_norm: bool = setting(
        "scale_after_norm", "let --scale-reads divide after --output-norm, as in checkpoints that were made before this option"
    )
    bias_free: bool = setting(
        "bias_free", "leave the biases out of the mixer's projections; gates of fast_weight then start around 1/2"
    )
    fast_weight_backend: ChoiceEnum(list(BACKENDS)) = setting(
        "fast_weight_backend", "the form that runs the recurrence; auto chooses the fastest one that fits"
    )
    window_sizes: str = option(
        "",
        "how many tokens additive and leap see in each layer, bottom first: '4,8,0'; 0: all tokens so far; one number holds for"
        " every layer; default: 4, 8, 16 and so on, and 0 in the last layer; leap: 0, 4, 8, 16 and again, as LEAP has them",
    )
    pooling_form: ChoiceEnum(list(SETTINGS["pooling_form"].choices)) = setting(
        "pooling_form",
        "the form of additive and leap; published: additive with its projection after the first pooling, the first result added to"
        " the output, and scores that start at 0; leap without an output projection",
    )
    pooling_dropout: float = setting(
        "pooling_dropout",
        "dropout probability of the pooled vectors of additive, and of q, f, v and the scores of leap; the published runs use the"
        " value of --dropout",
    )
    sru_projection: int = setting("sru_projection", "width of a projection of sru's input before its product; 0: no projection")
    sru_projection_norm: bool = setting(
        "sru_projection_norm", "normalise the projection of --sru-projection, as SRU++ does in layers without attention"
    )
    sru_projection_dropout: float = setting(
        "sru_projection_dropout", "dropout probability of the projection of --sru-projection, after the norm"
    )
    sru_highway_bias: float = setting(
        "sru_highway_bias", "initial bias of the gate of sru and srupp that chooses between state and input"
    )
    sru_rescale: bool = setting("sru_rescale", "scale the input that passes sru's highway, so that it keeps its variance")
    sru_init: ChoiceEnum(list(SETTINGS["sru_init"].choices)) = setting(
        "sru_init",
        "the initial weights of sru and srupp; variance: as in SRU, keeping the variance of the input; xavier: as in SRU++",
    )
    sru_input_bias: bool = setting(
        "sru_input_bias", "a bias in the product u of sru and srupp, which the published units do not have"
    )
    sru_tanh: bool = setting("sru_tanh", "sru and srupp give the tanh of their cell")
    sru_dropout: float = setting(
        "sru_dropout",
        "dropout probability of the highway gates of sru and srupp, drawn once for all tokens; the published runs use the value of"
        " --dropout in all layers but the last",
    )
    srupp_width: int = setting("srupp_width", "width of srupp's attention; 0: a quarter of the layer's width")
    srupp_heads: int = setting("srupp_heads", "number of heads of srupp's attention")
    srupp_memory: int = setting(
        "srupp_memory",
        "how many earlier tokens each token sees in srupp's attention, also in earlier segments; evaluation may use another number",
    )
    srupp_segment: int = setting(
        "srupp_segment",
        "N: a text is cut into groups of N tokens, and token i of a group, counted from 0, sees i tokens more than --srupp-memory;"
        " the published runs train with their --tokens-per-sample and evaluate with 1",
    )
    srupp_rescale: bool = setting("srupp_rescale", "scale the input that passes srupp's highway; the published SRU++ does not")
    srupp_dropout: float = setting(
        "srupp_dropout", "dropout probability of the input of srupp's product; the published runs use the value of --dropout"
    )
    local_window: int = setting("local_window", "how many tokens each token sees in local_attention, counting itself")
    xl_memory: int = setting(
        "xl_memory", "how many earlier tokens each token sees in transformer_xl; evaluation may use another number"
    )
    xl_segment: int = setting(
        "xl_segment",
        "N: a text is cut into groups of N tokens, and token i of a group, counted from 0, sees i tokens more than --xl-memory; the"
        " published runs have their --tokens-per-sample here, in training and evaluation",
    )
    attention_dropout: float = setting("attention_dropout", "dropout probability for attention weights")
    slots: int = setting("slots", "number of keys, and of values, that each head of abc and linformer keeps")
    slot_positions: int = setting(
        "slot_positions", "number of positions that linformer has weights for; later positions use the last weights"
    )
    ffn_sparsity: int = option(
        0,
        "N: each token uses one of each N hidden units of the feed-forward layers; a controller chooses them; 0: it uses all",
        0,
    )
    ffn_controller_dim: int = option(
        0, "rank of the controller of --ffn-sparsity; 0: the number of hidden units divided by --ffn-sparsity", 0
    )
    qkv_sparsity: int = option(
        0,
        "number of modules of a multiplicative dense layer and causal convolutions that make queries, keys and values, without an"
        " output projection; 0: dense projections",
        0,
    )
    output_sparsity: int = option(
        0, "number of modules of a multiplicative dense layer in place of the output projection; 0: a dense projection", 0
    )
    ffn_sru: int = option(0, "number of simple recurrent units beside the feed-forward part of each layer; 0: none", 0)
    reversible: bool = option(
        False,
        "two residual streams, from which the backward computes the activations again, so that their memory does not grow with the"
        " number of layers",
    )
    output_dropout: float = option(0.0, "dropout probability of the last layer's output", 0, below=1)
    scale_output: bool = option(False, "divide the logits by the square root of the width of the layers")
    no_decoding_graph: bool = option(
        False, "generate on a GPU without CUDA graphs; --model-overrides \"{'no_decoding_graph': True}\" sets it for a checkpoint"
    )


@dataclass
class FastWeightTransformerConfig(FastWeightConfig):
    linear_attention: str = option(
        ",".join(ATTENTIONS),
        "the attentions that are linear, of encoder, decoder and cross, separated by commas; '' makes none linear. Update rule and"
        " mixers are those of the decoder; all three use the feature map",
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


def refuse_without_effect(args, kind: type, effective: set[str]) -> None:
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


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def layer_mixers(config: FastWeightConfig, layers: int) -> list[str]:
    """The mixer of each layer, bottom first."""
    if not config.mixer_pattern:
        return [str(config.mixer)] * layers
    names: list[str] = []
    for part in config.mixer_pattern.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*(?:\*\s*(\d+))?\s*", part)
        if not match or match[1] not in (*MIXERS, SOFTMAX) or match[2] == "0":
            allowed = ", ".join([*MIXERS, SOFTMAX])
            raise Mistake(f"--mixer-pattern has {part!r}; each part must be NAME or NAME*COUNT, NAME one of: {allowed}")
        names += [match[1]] * int(match[2] or 1)
    if len(names) > layers:
        raise Mistake(f"--mixer-pattern names {len(names)} layers but the model has {layers}; name at most {layers}")
    return [names[i % len(names)] for i in range(layers)]


def check_numbers(config: FastWeightConfig, kind: Optional[type] = None) -> None:
    """Checks all numbers of the options. Mixers do not check them again, so everything that builds a model calls this first.

    ``kind``: the class of the options, where ``config`` is a DictConfig.
    """
    for f in fields(kind or config):
        least, below, value = f.metadata.get("least"), f.metadata.get("below"), getattr(config, f.name)
        if least is not None and not least <= value < (below or math.inf):
            allowed = f"at least {least}" + (f" and below {below}" if below else "")
            raise Mistake(f"{option_name(f.name)} is {value}; it must be {allowed}")


def check_sizes(args, *names: str) -> None:
    """Refuses sizes of a model, among fairseq's options, that are not positive. A decoder may have no feed-forward layers: 0."""
    for name in names:
        refuse_outside(args, name, int(name != "decoder_ffn_embed_dim"))


def refuse_outside(values, name: str, least: float, most: float = math.inf) -> None:
    """Refuses an option that has, or holds, a number out of these bounds. ``values``: options by their names."""
    value = safe_getattr(values, name)
    for number in value if isinstance(value, (list, ListConfig)) else [value]:
        if number is not None and not (isinstance(number, Real) and least <= number <= most):
            allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise Mistake(f"{option_name(name)} is {number!r}; it must be {allowed}")


@functools.cache
def parser_of(kind: type[FairseqDataclass]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    gen_parser_from_dataclass(parser, kind())
    return parser


def check_values(kind: type[FairseqDataclass], values: dict) -> None:
    """Refuses the first of these values that the command line would refuse for these options, in its words."""
    parser = parser_of(kind)
    for action in parser._actions:
        value = values.get(action.dest)
        if str(value) in REGISTRIES.get(action.dest, ()):  # which may have grown since the command line was defined
            continue
        if action.nargs == 0:  # a flag
            if value is not None and not isinstance(value, (bool, int)):
                raise Mistake(f"argument {action.option_strings[0]}: invalid bool value: {value!r}")
        elif isinstance(value, (str, float)) or type(value) is int:
            try:
                parser._check_value(action, parser._get_value(action, str(getattr(value, "value", value))))
            except argparse.ArgumentError as error:
                raise Mistake(str(error)) from None


def read_config(kind: type, args):
    """Returns the options of this project, of class ``kind``, from all options of a model."""
    given = {f.name: value for f in fields(kind) if (value := safe_getattr(args, f.name, None)) is not None}
    check_values(kind, given)
    config = kind(**given)
    check_numbers(config)
    return config
