"""The features of a layer's queries and keys, the start of its gates, and the combinations of options that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import Mistake
from ...feature_maps import FEATURE_MAPS, FeatureMap, normalised, wide
from ...ops import RowMap
from ...ops.checks import NORM_OF, missing_form
from ...rules import RULES, Gate, Rule
from ...rules.gates import Place
from ..options import DECLARED, PRODUCT_STEPS, option_name

NEEDED = {  # what an option needs
    "output_norm_of": ("output_norm",),
    "output_norm_eps": ("output_norm",),
    "norm_after_gate": ("output_norm", "output_gate"),
    "output_gate_form": ("output_gate",),
    "output_gate_rank": ("output_gate",),
    "scale_reads_of": ("scale_reads",),
    "scale_after_norm": ("scale_reads", "output_norm"),
    "short_conv_bias": ("short_conv",),
    "token_shift_rank": ("token_shift",),
}
FEATURE_OPTIONS = ("feature_map", "feature_dim", "feature_norm")  # and those of the chosen map


def normalised_features(phi: FeatureMap, norm: str, x: Tensor, keep_scale: bool) -> tuple[Tensor, Tensor | None]:
    """Returns phi(x) after --feature-norm and, with ``keep_scale`` and where no norm cancels it, the log of the factor that was
    divided out; else None."""
    if keep_scale:
        x = with_room(phi, x)
    if norm != "none":
        return normalised(lambda x: phi.scaled(x)[0], norm, x), None
    return phi.scaled(x) if keep_scale else (phi(x), None)


def with_room(phi: FeatureMap, x: Tensor) -> Tensor:
    """x, in fp32 at least where attention normalisation divides by products of features that 16 bits do not hold; fp16 does not
    hold the gradient of a small one."""
    return wide(x) if phi.eps < FeatureMap.eps or x.dtype == torch.float16 else x


def with_common_scale(keys: Tensor, log_scale: Tensor | None) -> Tensor:
    """The features of keys (...,S,K) that stand for keys exp(log_scale), with log_scale (...,S), divided by one factor for all S,
    which cancels in attention normalisation; at most ``keys``. None: they stand for themselves."""
    if log_scale is None:
        return keys
    return keys * (log_scale - log_scale.detach().amax(-1, keepdim=True)).exp().unsqueeze(-1)


def row_map_of(phi: FeatureMap, norm: str) -> RowMap | None:
    """The part of phi, and of --feature-norm, that ``fast_weight`` can apply itself: all after the part that has parameters."""
    return None if phi.row_map is None else RowMap(phi.row_map, getattr(phi, "nu", 1), norm)


def low_rank(gate: Gate) -> bool:
    """Whether a gate comes from a rank of its own, which --gate-rank may be in place of."""
    return isinstance(gate.rank, int)


def makes_gates_of_keys(rule: Rule) -> bool:
    """Whether a gate is made of the features of keys."""
    return any(gate.of == "k" for gate in rule.gates.values())


def build_feature_map(config: Any, head_dim: int, num_heads: int) -> FeatureMap:
    """The feature map of a layer, by its settings."""
    return FEATURE_MAPS[str(config.feature_map)].of_settings(config.feature_dim or head_dim, num_heads, config)


def check_combination(config: Any, phi: FeatureMap, heads: int = 1) -> None:
    """Refuses options that cannot work together, in one sentence that says which to use. ``heads``: of the layer."""
    name, norm, norm_of = str(config.update_rule), str(config.feature_norm), str(config.attention_norm_of)
    rule, divides = RULES[name], config.attention_norm
    check_feature_norm(config, phi)
    check_needed(config)
    missing = missing_form(rule, str(config.fast_weight_backend))
    divides_erase, start = divides and norm_of == NORM_OF[0], config.write_strength_init
    vanishing = divides and not phi.non_negative
    growing = rule.erases and norm == "none" and not divides_erase and not phi.at_most_one
    unturned = rule.keyless or makes_gates_of_keys(rule)
    wrong: tuple[tuple[object, Callable[[], str]], ...] = (
        (missing is not None, lambda: f"--update-rule {name} has no {missing}; use --fast-weight-backend auto or recurrent"),
        (
            divides and rule.normaliser is None,
            lambda: (
                f"--attention-norm is not defined for --update-rule {name}; leave it out, or use one of:"
                f" {names_of(lambda r: r.normaliser)}"
            ),
        ),
        (
            vanishing and not config.allow_divergence,
            lambda: (
                f"--attention-norm divides by sums of features, which {config.feature_map!s} lets vanish; use one of:"
                f" {', '.join(n for n, kind in FEATURE_MAPS.items() if kind.non_negative)}"
            ),
        ),
        (
            norm_of != NORM_OF[0] and not (divides and rule.normaliser == "keys"),
            lambda: (
                f"--attention-norm-of is {norm_of}; that is for --attention-norm with --update-rule"
                f" {names_of(lambda r: r.normaliser == 'keys', ' or ')}"
            ),
        ),
        (
            start and not any(starts_at_strength(gate) for gate in rule.gates.values()),
            lambda: (
                f"--write-strength-init is {start}; --update-rule {name} has no such gate; use one of:"
                f" {names_of(lambda r: any(starts_at_strength(gate) for gate in r.gates.values()))}"
            ),
        ),
        (start and config.bias_free, lambda: f"--write-strength-init is {start}, a bias; leave it out, or leave --bias-free out"),
        (
            config.product_steps != PRODUCT_STEPS and not rule.several,
            lambda: (
                f"--product-steps is {config.product_steps}; that is for --update-rule"
                f" {names_of(lambda r: r.several, ' or ')}: leave it out"
            ),
        ),
        (
            config.negative_eigenvalues and not any(gate.erases for gate in rule.gates.values()),
            lambda: (
                "--negative-eigenvalues doubles a gate that erases; leave it out, or use a rule that has one:"
                f" {names_of(lambda r: any(gate.erases for gate in r.gates.values()))}"
            ),
        ),
        (
            config.key_heads and heads % config.key_heads,
            lambda: f"--key-heads is {config.key_heads}; it must divide the number of heads, {heads}",
        ),
        (
            config.exponential_decay and not any(gate.decays for gate in rule.gates.values()),
            lambda: (
                f"--exponential-decay is for sigmoids that decay the memory, and --update-rule {name} has none; use:"
                f" {names_of(lambda r: any(gate.decays for gate in r.gates.values()))}"
            ),
        ),
        (
            config.gate_rank and not any(low_rank(gate) for gate in rule.gates.values()),
            lambda: (
                f"--gate-rank is {config.gate_rank}; --update-rule {name} has no gate of low rank; use one of:"
                f" {names_of(lambda r: any(low_rank(gate) for gate in r.gates.values()))}"
            ),
        ),
        (
            config.read_own_value and divides,
            lambda: "--read-own-value adds products that --attention-norm does not divide; leave one of them out",
        ),
        (config.short_conv == 1, lambda: "--short-conv is 1; it must be 0, for none, or at least 2"),
        (
            config.rotary and unturned,
            lambda: (
                f"--rotary turns queries and keys, and nothing else that --update-rule {name} has; use:"
                f" {names_of(lambda r: not r.keyless and not makes_gates_of_keys(r))}"
            ),
        ),
        (
            config.allow_divergence and not (vanishing or growing),
            lambda: "--allow-divergence has nothing to allow: without it, these options are taken too; leave it out",
        ),
        (config.rotary and divides, lambda: "--rotary gives --attention-norm divisors that may vanish; leave one of them out"),
        (
            config.rotary and phi.out_dim % 2,
            lambda: f"--rotary turns pairs of features, and keys have {phi.out_dim}; choose an even --feature-dim",
        ),
        (
            growing and not config.allow_divergence,
            lambda: (
                f"--update-rule {name} diverges with keys longer than 1, as {config.feature_map!s} gives; use --feature-norm"
                f" {'sum' if phi.non_negative else 'l2'}"
            ),
        ),
    )
    for is_wrong, sentence in wrong:
        if is_wrong:
            raise Mistake(sentence())


def check_needed(config: Any) -> None:
    """Refuses an option that changes a part which is off."""
    for option, parts in NEEDED.items():
        value = getattr(config, option)
        if str(value) != str(DECLARED[option].default) and not all(getattr(config, part) for part in parts):
            said = option_name(option) if value is True else f"{option_name(option)} is {value}; that"
            named, add = " with ".join(map(option_name, parts)), "it" if len(parts) == 1 else "both"
            raise Mistake(f"{said} is for {named}: add {add}, or leave this out")


def names_of(able: Callable[[Rule], object], between: str = ", ") -> str:
    """The names of the rules that are able."""
    return between.join(name for name, rule in RULES.items() if able(rule))


def starts_at_strength(gate: Gate) -> bool:
    """Whether --write-strength-init is the start of the gate."""
    return gate.writes and gate.projected


def check_feature_norm(config: Any, phi: FeatureMap) -> None:
    """Refuses a norm that divides by a sum of features that may vanish."""
    if str(config.feature_norm) == "sum" and not phi.non_negative:
        name = str(config.feature_map)
        raise Mistake(f"--feature-norm sum needs a non-negative --feature-map, not {name}; use --feature-norm none or l2")


def initial_bias(gate: Gate, place: Place, write_strength: float = 0) -> Tensor:
    """The bias of a gate at each number of a place: that of ``write_strength`` where it is given and this gate is one, else the
    gate's own."""
    if write_strength and gate.writes:
        return torch.full((place.size,), write_strength).logit()
    return gate.bias(place) if callable(gate.bias) else drawn_bias(gate.bias, place.size)


def drawn_bias(bias: float | str | None, count: int) -> Tensor:
    """A constant, 0 for None, or uniform gate initialisation."""
    if bias == "uniform":
        return torch.logit(torch.empty(count).uniform_(1 / count, 1 - 1 / count)) if count > 2 else torch.zeros(count)
    return torch.full((count,), float(bias or 0))
