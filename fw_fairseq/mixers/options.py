"""The options of mixers, each declared once: its name, type, default, bounds, choices and help text.

They are the settings of a mixer in Python and options of the command line alike.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Optional, Union, cast

from ..errors import Mistake
from ..feature_maps import FEATURE_MAPS, NORMS
from ..ops.checks import BACKENDS, NORM_OF
from ..rules import RULES

Value = Union[bool, int, float, str]
FORMS = ("adapted", "published")  # of additive attention and LEAP
NORMS_OF_READS = ("head", "all_heads", "centred_head")
GATE_FORMS = ("silu", "sigmoid", "of_sigmoid")
WIDTHS = ("values", "keys")
PROJECTION_INITS = ("xavier", "rwkv7")
INITS = ("variance", "xavier")  # of SRU and SRU++
PRODUCT_STEPS = 2  # writes of a token where the rule has several and nothing else is said


def option(
    default: Value,
    help_: str,
    least: Optional[float] = None,
    below: Optional[float] = None,
    choices: Optional[Collection[str]] = None,
) -> Any:
    """A field of a class of options. ``least``: the smallest number allowed; ``below``: a number that it must stay below."""
    given = {"help": help_, "least": least, "below": below, "choices": choices}
    return field(default=default, metadata={name: value for name, value in given.items() if value is not None})


@dataclass
class MixerOptions:
    """The options that mixers read."""

    longest_text = cast(Optional[int], None)  # no option: the number of tokens that no text exceeds, where a model knows it

    update_rule: str = option("delta", "the update rule of the fast-weight memory", choices=RULES)
    feature_map: str = option("elu", "the map that queries and keys pass through", choices=FEATURE_MAPS)
    feature_dim: int = option(0, "width of queries and keys per head before the feature map; 0: that of the layer / heads", least=0)
    feature_norm: str = option(
        "sum",
        "divide features by their sum (for non-negative maps), by their length (l2), by the root of their square and 1e-6 "
        "(l2_eps, as published layers do), or by none",
        choices=NORMS,
    )
    attention_norm: bool = option(False, "divide each read by the product of the query and the keys that the rule has accumulated")
    attention_norm_of: str = option(
        "read_and_erase",
        "under delta, divide what an erase reads too (read_and_erase: Schlag et al. 2021, eq. 27) or the output alone "
        "(read: Mao 2022)",
        choices=NORM_OF,
    )
    dpfp_nu: int = option(1, "nu of the dpfp feature map, which has 2 * nu * feature_dim features", least=1)
    favor_features: int = option(
        0,
        "the number m of random directions of favor and rfa, which have 2m features, and favor_relu, which has m; 0: feature_dim",
        least=0,
    )
    favor_prescale: bool = option(
        False,
        "favor estimates exp(q.k / sqrt(feature_dim)), as softmax attention weighs, instead of exp(q.k), and needs fewer "
        "features for it",
    )
    write_strength_init: float = option(
        0.0,
        "where the gates of write strength start; 0: where their rule has them, mostly near 0.5",
        least=0,
        below=1,
    )
    product_steps: int = option(PRODUCT_STEPS, "how many times each token writes under delta_product", least=1)
    negative_eigenvalues: bool = option(
        False,
        "gates that erase go up to 2, so that a write can turn around what a key reads (Grazzi et al. 2024)",
    )
    key_heads: int = option(0, "number of heads of queries and keys, which groups of heads share; 0: all have their own", least=0)
    short_conv: int = option(
        0,
        "width of a causal convolution over time of each channel of queries, keys and values, then SiLU; 0: none",
        least=0,
    )
    token_shift: bool = option(
        False,
        "make queries, keys, values and gates each of a learnt mixture of a token and the one before it (RWKV)",
    )
    token_shift_rank: int = option(
        0,
        "let the mixtures of --token-shift depend on the token by a map of this rank for each part (RWKV 6); 0: they do not",
        least=0,
    )
    rotary: bool = option(
        False,
        "turn pairs of features of queries and keys by angles that grow with the position in the text (RetNet)",
    )
    value_mixing_rank: int = option(
        0,
        "mix the values of layer 0 into those of the others, in shares that a map of this rank makes of a token (RWKV 7); 0: none",
        least=0,
    )
    expand_values: float = option(1.0, "the width of the values of all heads, as a multiple of the layer's width", least=0.01)
    output_norm: bool = option(False, "divide what each head reads by its root mean square, times learnt weights")
    output_norm_of: str = option(
        "head",
        "what --output-norm takes together: each head, with weights that all heads share; all heads, with weights for each channel "
        "(HGRN 2); or centred_head, each head after its mean is taken out, with weights and biases for each channel (RWKV)",
        choices=NORMS_OF_READS,
    )
    output_norm_eps: float = option(1e-5, "what --output-norm adds to the mean square", least=0)
    norm_after_gate: bool = option(False, "let --output-norm follow --output-gate (Mamba 2)")
    output_gate: bool = option(False, "multiply what is read by the SiLU of a projection of the layer's input")
    output_gate_form: str = option(
        "silu",
        "the gate of --output-gate: the SiLU or the sigmoid of its projection, or a map U of sigmoids (of_sigmoid, RWKV 7)",
        choices=GATE_FORMS,
    )
    output_gate_rank: int = option(0, "make the gate of --output-gate by a low rank; 0: by one projection", least=0)
    exponential_decay: bool = option(
        False,
        "make gates that decay the memory exp(-exp(A) softplus(x + b)), A for each head, in place of a sigmoid (Gated DeltaNet)",
    )
    read_own_value: bool = option(
        False,
        "add to what a head reads, after --output-norm, the token's own value times the product of its query and key, whose "
        "features have learnt weights (RWKV 7)",
    )
    short_conv_bias: bool = option(False, "add a number for each channel in --short-conv (Mamba 2)")
    scale_reads: bool = option(
        False,
        "divide what a memory reads by the square root of the width of a head, before --output-norm and the output projection",
    )
    scale_reads_of: str = option("values", "whose width --scale-reads takes", choices=WIDTHS)
    scale_after_norm: bool = option(
        False,
        "let --scale-reads divide after --output-norm, as in checkpoints that were made before this option",
    )
    projection_init: str = option(
        "xavier",
        "how projections start: as fairseq's attention, or rwkv7: orthogonal queries, values and, a tenth of it, keys, an output "
        "projection of 0, and weights of --output-norm that grow with the layers",
        choices=PROJECTION_INITS,
    )
    allow_divergence: bool = option(
        False,
        "let a rule that erases have keys of any length, and --attention-norm divide by sums that may vanish, which papers report "
        "to diverge",
    )
    bias_free: bool = option(False, "leave the biases out of the mixer's projections; gates of fast_weight then start around 1/2")
    fast_weight_backend: str = option(
        "auto",
        "the form that runs the recurrence; auto chooses the fastest one that fits",
        choices=BACKENDS,
    )
    window_sizes: str = option(
        "",
        "how many tokens additive and leap see in each layer, bottom first: '4,8,0'; 0: all tokens so far; one number "
        "holds for every layer; default: 4, 8, 16 and so on, and 0 in the last layer; leap: 0, 4, 8, 16 and again, as "
        "LEAP has them",
    )
    pooling_form: str = option(
        "adapted",
        "the form of additive and leap; published: additive with its projection after the first pooling, the first result "
        "added to the output, and scores that start at 0; leap without an output projection",
        choices=FORMS,
    )
    pooling_dropout: float = option(
        0.0,
        "dropout probability of the pooled vectors of additive, and of q, f, v and the scores of leap; the published runs "
        "use the value of --dropout",
        least=0,
        below=1,
    )
    sru_projection: int = option(0, "width of a projection of sru's input before its product; 0: no projection", least=0)
    sru_projection_norm: bool = option(
        False,
        "normalise the projection of --sru-projection, as SRU++ does in layers without attention",
    )
    sru_projection_dropout: float = option(
        0.0,
        "dropout probability of the projection of --sru-projection, after the norm",
        least=0,
        below=1,
    )
    sru_highway_bias: float = option(
        -2.0,
        "initial bias of the gate of sru and srupp that chooses between state and input",
        least=-100,
        below=100,
    )
    sru_rescale: bool = option(True, "scale the input that passes sru's highway, so that it keeps its variance")
    sru_init: str = option(
        "variance",
        "the initial weights of sru and srupp; variance: as in SRU, keeping the variance of the input; xavier: as in SRU++",
        choices=INITS,
    )
    sru_input_bias: bool = option(True, "a bias in the product u of sru and srupp, which the published units do not have")
    sru_tanh: bool = option(False, "sru and srupp give the tanh of their cell")
    sru_dropout: float = option(
        0.0,
        "dropout probability of the highway gates of sru and srupp, drawn once for all tokens; the published runs use the "
        "value of --dropout in all layers but the last",
        least=0,
        below=1,
    )
    srupp_width: int = option(0, "width of srupp's attention; 0: a quarter of the layer's width", least=0)
    srupp_heads: int = option(1, "number of heads of srupp's attention", least=1)
    srupp_memory: int = option(
        512,
        "how many earlier tokens each token sees in srupp's attention, also in earlier segments; evaluation may use another number",
        least=1,
    )
    srupp_segment: int = option(
        1,
        "N: a text is cut into groups of N tokens, and token i of a group, counted from 0, sees i tokens more than "
        "--srupp-memory; the published runs train with their --tokens-per-sample and evaluate with 1",
        least=1,
    )
    srupp_rescale: bool = option(True, "scale the input that passes srupp's highway; the published SRU++ does not")
    srupp_dropout: float = option(
        0.0,
        "dropout probability of the input of srupp's product; the published runs use the value of --dropout",
        least=0,
        below=1,
    )
    local_window: int = option(32, "how many tokens each token sees in local_attention, counting itself", least=2)
    xl_memory: int = option(
        256,
        "how many earlier tokens each token sees in transformer_xl; evaluation may use another number",
        least=1,
    )
    xl_segment: int = option(
        1,
        "N: a text is cut into groups of N tokens, and token i of a group, counted from 0, sees i tokens more than "
        "--xl-memory; the published runs have their --tokens-per-sample here, in training and evaluation",
        least=1,
    )
    attention_dropout: float = option(0.0, "dropout probability for attention weights", least=0, below=1)
    slots: int = option(32, "number of keys, and of values, that each head of abc and linformer keeps", least=1)
    slot_positions: int = option(
        1024,
        "number of positions that linformer has weights for; later positions use the last weights",
        least=1,
    )

    @classmethod
    def of(cls, options: object) -> "MixerOptions":
        """The options that an object or a dictionary has; the others have their defaults."""
        if isinstance(options, MixerOptions):
            return options
        given = options if isinstance(options, dict) else {} if options is None else vars(options)
        return cls(**{f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None})


DECLARED: dict[str, Field] = {f.name: f for f in fields(MixerOptions)}


def option_name(name: str) -> str:
    """The option on the command line."""
    return "--" + name.replace("_", "-")


def check_values(declared: Iterable[Field], values: object, named: Callable[[str], str] = option_name) -> None:
    """Refuses values that options cannot have. ``values``: an object with attributes, or a dictionary."""
    for one in declared:
        choices, least, below = (one.metadata.get(name) for name in ("choices", "least", "below"))
        value = values[one.name] if isinstance(values, dict) else getattr(values, one.name)
        kind: type = type(one.default)
        allowed = None
        if choices is not None:
            allowed = None if str(value) in choices else f"one of: {', '.join(choices)}"
        elif isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
            allowed = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}[kind]
        elif (least is not None and not value >= least) or (below is not None and not value < below):  # or NaN
            allowed = f"at least {least}" + (f" and below {below}" if below is not None else "")
        if allowed is not None:
            raise Mistake(f"{named(one.name)} is {value!r}; it must be {allowed}")
