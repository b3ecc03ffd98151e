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
NORM_FORMS = ("layer", "rms")  # of language models, as are the next
FFN_FORMS = ("plain", "swiglu", "rwkv6", "rwkv7")
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
        "divide features by their sum (non-negative maps only), by their length (l2; l2_eps adds 1e-6 to its square, as "
        "published layers do), or by nothing (none)",
        choices=NORMS,
    )
    attention_norm: bool = option(False, "divide each read by the product of the query and the accumulated keys")
    attention_norm_of: str = option(
        "read_and_erase",
        "under delta, divide the output and what an erase reads (read_and_erase: Schlag et al. 2021, eq. 27), or the output "
        "alone (read: Mao 2022)",
        choices=NORM_OF,
    )
    dpfp_nu: int = option(1, "nu of dpfp, which makes 2 * nu * feature_dim features", least=1)
    favor_features: int = option(
        0,
        "number m of random directions; favor and rfa make 2m features, favor_relu m; 0: feature_dim",
        least=0,
    )
    favor_prescale: bool = option(
        False,
        "favor estimates exp(q.k / sqrt(feature_dim)), as softmax attention has it, instead of exp(q.k), and needs fewer features",
    )
    write_strength_init: float = option(
        0.0,
        "initial write strength; 0: that of the rule, mostly near 0.5",
        least=0,
        below=1,
    )
    product_steps: int = option(PRODUCT_STEPS, "number of writes of each token under delta_product", least=1)
    negative_eigenvalues: bool = option(
        False,
        "gates that erase go up to 2, so that a write can reverse what a key reads (Grazzi et al. 2024)",
    )
    key_heads: int = option(
        0, "number of heads of queries and keys, each shared by a group of heads; 0: all have their own", least=0
    )
    short_conv: int = option(
        0,
        "width of a causal convolution of each channel of queries, keys and values, followed by SiLU; 0: none",
        least=0,
    )
    token_shift: bool = option(
        False,
        "make queries, keys, values and gates of learnt mixtures of a token and the one before it (RWKV)",
    )
    token_shift_rank: int = option(
        0,
        "let the mixtures of --token-shift depend on the token, by maps of this rank (RWKV 6); 0: they do not",
        least=0,
    )
    rotary: bool = option(
        False,
        "rotate pairs of features of queries and keys by the position in the text (RetNet)",
    )
    value_mixing_rank: int = option(
        0,
        "mix the values of layer 0 into those of the others, in shares from a map of this rank (RWKV 7); 0: none",
        least=0,
    )
    expand_values: float = option(1.0, "total width of the values, as a multiple of the layer's width", least=0.01)
    output_norm: bool = option(False, "divide what each head reads by its root mean square, times learnt weights")
    output_norm_of: str = option(
        "head",
        "what is normalised: each head, with weights that heads share; all_heads together, with weights per channel (HGRN 2); "
        "centred_head, each head minus its mean, with weights and biases per channel (RWKV)",
        choices=NORMS_OF_READS,
    )
    output_norm_eps: float = option(1e-5, "what --output-norm adds to the mean square", least=0)
    norm_after_gate: bool = option(False, "let --output-norm follow --output-gate (Mamba 2)")
    output_gate: bool = option(False, "multiply what is read by the SiLU of a projection of the layer's input")
    output_gate_form: str = option(
        "silu",
        "the gate of --output-gate: the SiLU or sigmoid of its projection, or a map of sigmoids (of_sigmoid, RWKV 7)",
        choices=GATE_FORMS,
    )
    output_gate_rank: int = option(0, "rank of the projection of --output-gate; 0: full", least=0)
    exponential_decay: bool = option(
        False,
        "decay gates are exp(-exp(A) softplus(x + b)), A for each head, instead of a sigmoid (Gated DeltaNet)",
    )
    gate_rank: int = option(0, "rank of the maps that make gates of low rank (GLA, RWKV); 0: that of the rule", least=0)
    read_own_value: bool = option(
        False,
        "add to what a head reads, after --output-norm, the token's own value times the learnt product of its query and key "
        "(RWKV 7)",
    )
    short_conv_bias: bool = option(False, "give --short-conv a bias per channel (Mamba 2)")
    scale_reads: bool = option(
        False,
        "divide reads by the square root of the width of a head, before --output-norm and the output projection",
    )
    scale_reads_of: str = option("values", "whose width --scale-reads takes", choices=WIDTHS)
    scale_after_norm: bool = option(
        False,
        "apply --scale-reads after --output-norm, as checkpoints from before this option do",
    )
    projection_init: str = option(
        "xavier",
        "rwkv7: orthogonal queries and values, keys of a tenth of that, an output projection of 0, and weights of --output-norm"
        " that grow with the layers; xavier: as in fairseq's attention",
        choices=PROJECTION_INITS,
    )
    allow_divergence: bool = option(
        False,
        "allow keys of any length with a rule that erases, and --attention-norm with sums that may vanish; papers report that "
        "these diverge",
    )
    bias_free: bool = option(False, "no biases in the mixer's projections; gates of fast_weight then start around 1/2")
    fast_weight_backend: str = option(
        "auto",
        "the form that runs the recurrence; auto: the fastest that fits",
        choices=BACKENDS,
    )
    window_sizes: str = option(
        "",
        "number of tokens that each layer of additive and leap sees, bottom first: '4,8,0'; 0: all so far; one number is for "
        "every layer; default: 4, 8, 16 and so on, and 0 in the last layer; leap: 0, 4, 8, 16, repeated",
    )
    pooling_form: str = option(
        "adapted",
        "published: additive projects after the first pooling, adds the first result to the output, and starts with scores of "
        "0; leap has no output projection",
        choices=FORMS,
    )
    pooling_dropout: float = option(
        0.0,
        "dropout of the pooled vectors of additive, and of q, f, v and the scores of leap; published runs use the value of "
        "--dropout",
        least=0,
        below=1,
    )
    sru_projection: int = option(0, "width of a projection of sru's input; 0: none", least=0)
    sru_projection_norm: bool = option(
        False,
        "normalise the output of --sru-projection, as SRU++ does in layers without attention",
    )
    sru_projection_dropout: float = option(
        0.0,
        "dropout of the output of --sru-projection, after the norm",
        least=0,
        below=1,
    )
    sru_highway_bias: float = option(
        -2.0,
        "initial bias of the gate of sru and srupp that chooses between state and input",
        least=-100,
        below=100,
    )
    sru_rescale: bool = option(True, "scale the input that passes sru's highway, to keep its variance")
    sru_init: str = option(
        "variance",
        "initial weights; variance: as in SRU, keeping the variance of the input; xavier: as in SRU++",
        choices=INITS,
    )
    sru_input_bias: bool = option(True, "a bias in the product u, which the published units do not have")
    sru_tanh: bool = option(False, "output the tanh of the cell")
    sru_dropout: float = option(
        0.0,
        "dropout of the highway gates, drawn once for all tokens; published runs use the value of --dropout in all layers but "
        "the last",
        least=0,
        below=1,
    )
    units_alone: bool = option(
        False,
        "layers are the units of sru, srupp, lstm and fwm_lstm alone, as published: no residual connection, norm and dropout "
        "around them",
    )
    fwm_width: int = option(32, "width of the values of fwm_lstm, and of both halves of its keys", least=1)
    fwm_reads: int = option(3, "number of reads of fwm_lstm, each of which makes the next query", least=1)
    srupp_width: int = option(0, "width of srupp's attention; 0: a quarter of the layer's width", least=0)
    srupp_heads: int = option(1, "number of heads of srupp's attention", least=1)
    srupp_memory: int = option(
        512,
        "number of earlier tokens that srupp's attention sees, also in earlier segments; evaluation may use another number",
        least=1,
    )
    srupp_segment: int = option(
        1,
        "N: in groups of N tokens, token i, counted from 0, sees i tokens more than --srupp-memory; published runs train with "
        "their --tokens-per-sample and evaluate with 1",
        least=1,
    )
    srupp_rescale: bool = option(True, "scale the input that passes srupp's highway; the published SRU++ does not")
    srupp_dropout: float = option(
        0.0,
        "dropout of the input of srupp's product; published runs use the value of --dropout",
        least=0,
        below=1,
    )
    local_window: int = option(32, "number of tokens that local_attention sees, with the token itself", least=2)
    xl_memory: int = option(
        256,
        "number of earlier tokens that transformer_xl sees, also in earlier segments; evaluation may use another number",
        least=1,
    )
    xl_segment: int = option(
        1,
        "N: as --srupp-segment, with --xl-memory; published runs use their --tokens-per-sample, in training and evaluation",
        least=1,
    )
    attention_dropout: float = option(0.0, "dropout of attention weights", least=0, below=1)
    slots: int = option(32, "number of keys, and of values, that each head of abc, gsa and linformer keeps", least=1)
    slot_positions: int = option(
        1024,
        "number of positions that linformer has weights for; later ones use the last weights",
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
