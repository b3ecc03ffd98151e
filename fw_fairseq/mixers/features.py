"""The way from options to a feature map, and the combinations of options that are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Mistake
from ..feature_maps import FEATURE_MAPS, FeatureMap, normalised, wide
from ..ops import RowMap
from ..ops.checks import NORM_OF, missing_form
from ..rules import RULES, Gate, Rule
from ..rules.gates import Place
from .options import PRODUCT_STEPS

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


def makes_gates_of_keys(rule: Rule) -> bool:
    """Whether a gate is made of the features of keys."""
    return any(gate.of == "k" for gate in rule.gates.values())


def build_feature_map(config, head_dim: int, num_heads: int) -> FeatureMap:
    name, width, options = str(config.feature_map), config.feature_dim or head_dim, {}
    if name == "dpfp":
        if config.dpfp_nu >= 2 * width:
            raise Mistake(f"--dpfp-nu is {config.dpfp_nu}; with keys of width {width} per head it must be at most {2 * width - 1}")
        options = {"nu": config.dpfp_nu}
    elif name == "relu":
        options = {"heads": num_heads}
    elif name in ("favor", "rfa"):
        options = {"features": config.favor_features or width}
        if name == "favor":
            options["prescale"] = config.favor_prescale
    return FEATURE_MAPS[name](width, **options)


def check_combination(config, phi: FeatureMap, heads: int = 1) -> None:
    """Refuses options that cannot work together, in one sentence that says which to use. ``heads``: of the layer."""
    name, norm, map_name = str(config.update_rule), str(config.feature_norm), str(config.feature_map)
    rule = RULES[name]
    missing = missing_form(rule, str(config.fast_weight_backend))
    if missing is not None:
        raise Mistake(f"--update-rule {name} has no {missing}; use --fast-weight-backend auto or recurrent")
    check_feature_norm(config, phi)
    if config.attention_norm and rule.normaliser is None:
        able = ", ".join(n for n, r in RULES.items() if r.normaliser)
        raise Mistake(f"--attention-norm is not defined for --update-rule {name}; leave it out, or use one of: {able}")
    if config.attention_norm and not phi.non_negative:
        able = ", ".join(n for n, kind in FEATURE_MAPS.items() if kind.non_negative)
        raise Mistake(f"--attention-norm divides by sums of features, which {map_name} lets vanish; use one of: {able}")
    check_norm_of(config, rule)
    check_start(config, rule)
    check_around(config, rule, heads)
    check_rotary(config, rule, phi)
    divides_erase = config.attention_norm and str(config.attention_norm_of) == NORM_OF[0]
    if rule.erases and norm == "none" and not divides_erase and not phi.at_most_one:
        better = "sum" if phi.non_negative else "l2"
        raise Mistake(f"--update-rule {name} diverges with keys longer than 1, as {map_name} gives; use --feature-norm {better}")


def check_around(config, rule: Rule, heads: int) -> None:
    """Refuses options of the parts around a recurrence that this rule or this number of heads does not have."""
    key_heads = config.key_heads
    if config.product_steps != PRODUCT_STEPS and not rule.several:
        able = " or ".join(n for n, r in RULES.items() if r.several)
        raise Mistake(f"--product-steps is {config.product_steps}; that is for --update-rule {able}: leave it out")
    if config.negative_eigenvalues and not any(gate.erases for gate in rule.gates.values()):
        able = ", ".join(n for n, r in RULES.items() if any(gate.erases for gate in r.gates.values()))
        raise Mistake(f"--negative-eigenvalues doubles a gate that erases; leave it out, or use a rule that has one: {able}")
    if key_heads and heads % key_heads:
        raise Mistake(f"--key-heads is {key_heads}; it must divide the number of heads, {heads}")
    if config.token_shift_rank and not config.token_shift:
        raise Mistake(f"--token-shift-rank is {config.token_shift_rank}; that is for --token-shift: add it, or leave this out")
    if config.scale_after_norm and not (config.scale_reads and config.output_norm):
        raise Mistake("--scale-after-norm is for --scale-reads with --output-norm; add both, or leave it out")
    if config.short_conv == 1:
        raise Mistake("--short-conv is 1; it must be 0, for none, or at least 2")


def check_rotary(config, rule: Rule, phi: FeatureMap) -> None:
    """Refuses rotary positions where nothing can be turned, or where only a part of it would be."""
    if not config.rotary:
        return
    if rule.keyless or makes_gates_of_keys(rule):
        able = ", ".join(n for n, r in RULES.items() if not r.keyless and not makes_gates_of_keys(r))
        raise Mistake(f"--rotary turns queries and keys, and nothing else that --update-rule {config.update_rule} has; use: {able}")
    if config.attention_norm:
        raise Mistake("--rotary gives --attention-norm divisors that may vanish; leave one of them out")
    if phi.out_dim % 2:
        raise Mistake(f"--rotary turns pairs of features, and keys have {phi.out_dim}; choose an even --feature-dim")


def check_norm_of(config, rule: Rule) -> None:
    norm_of = str(config.attention_norm_of)
    if norm_of != NORM_OF[0] and not (config.attention_norm and rule.normaliser == "keys"):
        able = " or ".join(n for n, r in RULES.items() if r.normaliser == "keys")
        raise Mistake(f"--attention-norm-of is {norm_of}; that is for --attention-norm with --update-rule {able}")


def check_feature_norm(config, phi: FeatureMap) -> None:
    if str(config.feature_norm) == "sum" and not phi.non_negative:
        name = str(config.feature_map)
        raise Mistake(f"--feature-norm sum needs a non-negative --feature-map, not {name}; use --feature-norm none or l2")


def check_start(config, rule: Rule) -> None:
    """Refuses --write-strength-init where no gate starts there, and beside --bias-free."""
    start, free = config.write_strength_init, config.bias_free
    able = [n for n, r in RULES.items() if any(gate.writes and gate.projected for gate in r.gates.values())]
    if start and config.update_rule not in able:
        able = ", ".join(able)
        raise Mistake(f"--write-strength-init is {start}; --update-rule {config.update_rule} has no such gate; use one of: {able}")
    if start and free:
        raise Mistake(f"--write-strength-init is {start}, a bias; leave it out, or leave --bias-free out")


def initial_bias(gate: Gate, place: Place, write_strength: float = 0) -> Tensor:
    """The bias of a gate at each number of a place: that of ``write_strength`` where it is given and this gate is one, else the
    gate's own."""
    if write_strength and gate.writes:
        return torch.full((place.count,), write_strength).logit()
    return gate.bias(place) if callable(gate.bias) else drawn_bias(gate.bias, place.count)


def drawn_bias(bias: float | str | None, count: int) -> Tensor:
    """A constant, 0 for None, or uniform gate initialisation."""
    if bias == "uniform":
        return torch.logit(torch.empty(count).uniform_(1 / count, 1 - 1 / count)) if count > 2 else torch.zeros(count)
    return torch.full((count,), float(bias or 0))
