"""Options of a model that a checkpoint was made with.

Its parameters show the options that decide their shapes. Others change what the same parameters compute.
"""

from __future__ import annotations

import logging
import shlex
from argparse import Namespace
from dataclasses import fields
from enum import Enum
from types import SimpleNamespace
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.trainer import Trainer
from fairseq.utils import safe_getattr
from omegaconf import DictConfig, open_dict

from ...config import EXTRAS, FastWeightTransformerConfig, layer_mixers, option_name
from ...errors import Mistake
from .reading import model_options

logger = logging.getLogger(__name__)
SHAPES = [f"decoder_{name}" for name in ("layers", "embed_dim", "input_dim", "output_dim", "ffn_embed_dim", "learned_pos")]
SHAPES += ["no_decoder_final_norm", "layernorm_embedding", "share_decoder_input_output_embed", "share_all_embeddings"]
SHAPES += [f"adaptive_{name}" for name in ("input", "input_factor", "input_cutoff", "softmax_cutoff", "softmax_factor")]
SHAPES += ["tie_adaptive_weights", "tie_adaptive_proj", "plain_adaptive_softmax", "scale_fc", "scale_attn", "scale_heads"]
SHAPES += ["scale_resids", "quant_noise_pq", "quant_noise_pq_block_size"]  # with noise, the decoder has a layer more
UNSEEN = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("attention_heads", "normalize_before")]
UNSEEN += [
    "norm_form",
    "norm_eps",
    "ffn_form",
    "activation_fn",
    "no_scale_embedding",
    "no_token_positional_embeddings",
    "positions_from_end",
]
TRAINING = {"write_strength_init", "fast_weight_backend", "sru_highway_bias", "sru_init"}
TRAINING |= {"xl_memory", "xl_segment", "srupp_memory", "srupp_segment"}  # which a trained model may change
OWN = {f.name for f in fields(FastWeightTransformerConfig) if not f.name.startswith("_")} - TRAINING
OWN = {name for name in OWN if not name.endswith("dropout")}
PRETRAINED = {"pretrained_config", "memory_window", "drop_rotary"}  # of pretrained_lm
DERIVED = {"decoder_input_dim", "decoder_output_dim"}  # from --decoder-embed-dim, where they are not given
LAST = "checkpoint_last.pt"  # the default of --restore-file
WAYS = ("mixer", "mixer_pattern")  # to say the same


def written(name: str, value: object) -> str:
    """Returns an option as it is written on the command line, where every switch has an opposite."""
    if not isinstance(value, bool):
        return f"{option_name(name)} {shlex.quote(str(value))}"
    opposite = name[3:] if name.startswith("no_") else f"no_{name}"
    return option_name(name if value else opposite)


def value_of(options: Any, name: str) -> Any:
    """Returns an option, of any of fairseq's kinds, as plain data."""
    value = options.get(name) if isinstance(options, dict) else safe_getattr(options, name, None)
    return value.value if isinstance(value, Enum) else value


def deciding(options: dict) -> set[str]:
    """Returns the names of the options that decide what a model with these options computes. The longest text is one of them where
    positions are learned."""
    learned = value_of(options, "decoder_learned_pos") and not value_of(options, "no_token_positional_embeddings")
    return {*SHAPES, *UNSEEN, *OWN, *PRETRAINED} | ({"max_target_positions"} if learned else set())


def differing(saved: dict, now: Any, names: set[str]) -> dict[str, tuple[object, object]]:
    """Returns the value saved and the value now of each of these options that both have and that differ."""
    layered = names.issuperset(WAYS)
    singly = sorted(names.difference(WAYS if layered else ()))
    pairs = {name: (value_of(saved, name), value_of(now, name)) for name in singly}
    found: dict[str, tuple] = {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
    if layered and value_of(saved, "mixer") is not None:
        ways: list[Any] = [SimpleNamespace(**{way: value_of(options, way) or "" for way in WAYS}) for options in (saved, now)]
        mixers = [",".join(layer_mixers(way, value_of(now, "decoder_layers"))) for way in ways]
        found |= {"mixer_pattern": tuple(mixers)} if len({*mixers}) > 1 else {}
    return found


def check_options(trainer: Trainer, filename: str) -> None:
    """Refuses a checkpoint of a model with other options that change what the same parameters compute. With an explicit
    ``--restore-file``, the log names them."""
    saved = model_options.get(str(filename), {})
    if "update_rule" not in saved:
        return
    model, now = getattr(trainer.model, "module", trainer.model), trainer.cfg.model
    if not hasattr(model, "options_read"):
        return
    found = differing(saved, now, model.options_read(now) & (OWN | PRETRAINED) | {*UNSEEN})
    if not found:
        return
    theirs, ours = (" ".join(written(name, pair[i]) for name, pair in found.items()) for i in (0, 1))
    said = f"{filename} was made with {theirs}, and this model has {ours}"
    if trainer.cfg.checkpoint.restore_file == LAST:
        raise Mistake(f"{said}; give the checkpoint's options, or take them over with --options-from {filename}")
    logger.warning("%s; it computes something else with the same parameters", said)


def take_options_over(cfg: object) -> None:
    """Changes ``cfg`` itself, which is what checkpoints hold, if it names a checkpoint in ``options_from``: it gets those options
    that decide what the model computes."""
    source = value_of(cfg, "options_from")
    if not source:
        return
    parameters = checkpoint_utils.load_checkpoint_to_cpu(str(source))["model"]
    saved = model_options.get(str(source), {})
    if "update_rule" not in saved:
        raise Mistake(f"--options-from is {source}, which holds no model of this project; name a checkpoint of fast_weight_lm")
    taken = {name: value_of(saved, name) for name in saved.keys() & deciding(saved) if saved[name] is not None}
    for name, part in EXTRAS.items():  # an older checkpoint may hold one that had no effect
        if taken.get(name) and not any(f".{part}" in key for key in parameters):
            del taken[name]
    refuse_others(cfg, taken, source)
    if isinstance(cfg, DictConfig):
        with open_dict(cfg):
            cfg.update(taken | {"options_from": ""})
    else:
        vars(cfg).update(taken | {"options_from": ""})
    logger.info("options of %s: %s", source, " ".join(written(name, taken[name]) for name in sorted(taken)))


def refuse_others(cfg: object, taken: dict, source: object) -> None:
    """Refuses options that were given beside a checkpoint's own and differ from them. One that has its default may not have been
    given."""
    defaults, same = defaults_of(cfg), {name for name in DERIVED if value_of(cfg, name) == value_of(cfg, "decoder_embed_dim")}
    given = {name for name in taken if value_of(cfg, name) != value_of(defaults, name)} - same - {"max_target_positions"}
    given |= {*WAYS} if given.intersection(WAYS) else set()
    if found := differing(taken, SimpleNamespace(**taken | {name: value_of(cfg, name) for name in given}), given):
        theirs, ours = (" ".join(written(name, pair[i]) for name, pair in found.items()) for i in (0, 1))
        raise Mistake(f"--options-from {source} takes {theirs} over, and {ours} is given beside it; leave out one of the two")


def defaults_of(cfg: object) -> SimpleNamespace:
    """Returns the options of a language model's architecture where none is given."""
    name = value_of(cfg, "arch") or value_of(cfg, "_name")
    of_architecture = Namespace()
    ARCH_CONFIG_REGISTRY.get(name, lambda options: None)(of_architecture)
    model = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY.get(name, name)]
    return SimpleNamespace(**{f.name: f.default for f in fields(model)} | vars(of_architecture))
