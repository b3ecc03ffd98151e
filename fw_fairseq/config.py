"""Every option of this project once, with its help text. Models add the group to fairseq's own options."""

import math
import re
from dataclasses import dataclass, field, fields

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.utils import safe_getattr

from .feature_maps import FEATURE_MAPS, NORMS
from .mixers import MIXERS
from .ops.checks import BACKENDS
from .rules import RULES

SOFTMAX = "softmax"
ATTENTIONS = ("encoder", "decoder", "cross")


def option(default, help_: str, least: int | None = None, below: int | None = None):
    """``least``: the smallest number that it may be; ``below``: one that it may not reach."""
    bounds = {name: bound for name, bound in {"least": least, "below": below}.items() if bound is not None}
    return field(default=default, metadata={"help": help_} | bounds)


@dataclass
class FastWeightConfig(FairseqDataclass):
    mixer: ChoiceEnum([*MIXERS, SOFTMAX]) = option("fast_weight", "what mixes tokens in every layer; softmax: fairseq's attention")
    mixer_pattern: str = option(
        "", "one mixer per layer, bottom first, with repeats: 'softmax,fast_weight*3'; a shorter pattern repeats; overrides --mixer"
    )
    update_rule: ChoiceEnum(list(RULES)) = option("delta", "how the fast-weight memory is written")
    feature_map: ChoiceEnum(list(FEATURE_MAPS)) = option("elu", "what queries and keys pass through")
    feature_dim: int = option(0, "width of queries and keys per head before the feature map; 0: that of the values", least=0)
    feature_norm: ChoiceEnum(list(NORMS)) = option(
        "sum", "features divided by their sum (of non-negative maps), by their length (l2), or neither"
    )
    attention_norm: bool = option(False, "divide what is read by the accumulated keys times the query")
    dpfp_nu: int = option(1, "nu of the dpfp feature map; its width is 2 * nu * feature_dim", least=1)
    favor_features: int = option(0, "m random features of favor and rfa, of width 2m; 0: feature_dim", least=0)
    favor_prescale: bool = option(
        False, "favor estimates exp(q.k / sqrt(feature_dim)), as softmax attention weighs, and not exp(q.k): fewer features do"
    )
    fast_weight_backend: ChoiceEnum(list(BACKENDS)) = option("auto", "what runs the recurrence")
    window_sizes: str = option(
        "",
        "tokens that additive and leap see, per layer, bottom first: '4,8,0'; 0: all before; one number is for every layer;"
        " default: 4, 8, 16 and so on, the last layer 0",
    )
    sru_projection: int = option(0, "width that sru's input passes through before the product with its weights; 0: none", least=0)
    sru_highway_bias: float = option(-2.0, "bias of the gate between the state and the input of sru and srupp at the start")
    srupp_width: int = option(0, "width of srupp's attention; 0: a quarter of the layer's", least=0)
    srupp_heads: int = option(1, "heads of srupp's attention", least=1)
    srupp_memory: int = option(
        512,
        "how many tokens before it each token sees in srupp's attention, earlier segments' too; evaluation may have another number",
        least=1,
    )
    srupp_dropout: float = option(
        0.0,
        "share of the numbers that srupp drops, in training, of what its product reads; published: that of --dropout",
        0,
        below=1,
    )
    local_window: int = option(32, "how many tokens each token sees in local_attention, itself among them", least=2)
    xl_memory: int = option(
        256, "how many tokens before it each token sees in transformer_xl; evaluation may have another number", least=1
    )
    slots: int = option(32, "vectors of keys, and as many of values, that a head of abc and linformer keeps", least=1)
    slot_positions: int = option(1024, "positions that linformer has weights for; later ones have the last one's", least=1)
    scale_output: bool = option(False, "divide what the output projection gives by the square root of its input's width")


@dataclass
class FastWeightTransformerConfig(FastWeightConfig):
    linear_attention: str = option(
        ",".join(ATTENTIONS),
        "which attentions are linear, of encoder, decoder and cross, separated by commas; '' is none. Update rule and mixers are"
        " the decoder's; the feature map is that of all three",
    )


def linear_attentions(config: FastWeightTransformerConfig) -> list[str]:
    """The names in --linear-attention."""
    names = [name.strip() for name in config.linear_attention.split(",")] if config.linear_attention.strip() else []
    for name in names:
        if name not in ATTENTIONS:
            raise ValueError(f"--linear-attention has {name!r}; allowed, separated by commas: {', '.join(ATTENTIONS)}")
    return names


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
            raise ValueError(f"--mixer-pattern has {part!r}; each part must be NAME or NAME*COUNT, NAME one of: {allowed}")
        names += [match[1]] * int(match[2] or 1)
    if len(names) > layers:
        raise ValueError(f"--mixer-pattern names {len(names)} layers but the model has {layers}; name at most {layers}")
    return [names[i % len(names)] for i in range(layers)]


def check_numbers(config: FastWeightConfig, kind: type | None = None) -> None:
    """No mixer looks at its numbers again: who builds a model comes here first. ``kind``: its class, where it is a DictConfig."""
    for f in fields(kind or config):
        least, below, value = f.metadata.get("least"), f.metadata.get("below"), getattr(config, f.name)
        if least is not None and not least <= value < (below or math.inf):
            allowed = f"at least {least}" + (f" and below {below}" if below else "")
            raise ValueError(f"{option_name(f.name)} is {value}; it must be {allowed}")


def read_config(kind: type, args):
    """The options of this project among all others."""
    config = kind(**{f.name: value for f in fields(kind) if (value := safe_getattr(args, f.name, None)) is not None})
    check_numbers(config)
    return config
