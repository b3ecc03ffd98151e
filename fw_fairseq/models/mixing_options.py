"""The option of value mixing: which of fairseq's options and of this project's it goes with."""

from __future__ import annotations

from fairseq.utils import safe_getattr

from ..config import FastWeightConfig, FastWeightTransformerConfig
from ..errors import Mistake


def check_value_mixing(config: FastWeightConfig, args, mixers: list[str]) -> None:
    """Refuses value mixing where later layers could not get the values of layer 0, or not with their gradient."""
    if not config.value_mixing_rank:
        return
    rank = f"--value-mixing-rank is {config.value_mixing_rank}"
    if isinstance(config, FastWeightTransformerConfig):
        raise Mistake(f"{rank}; it is for language models, leave it out")
    if mixers[0] != "fast_weight":
        raise Mistake(
            f"{rank}; it mixes in the values of layer 0, which is {mixers[0]} and has none: make it fast_weight, or give 0"
        )
    reasons = {
        "decoder_layerdrop": "may leave out layer 0, whose values the others mix in",
        "checkpoint_activations": "computes layers again without the values of layer 0",
        "offload_activations": "computes layers again without the values of layer 0",
        "reversible": "computes layers again without the values of layer 0",
        "qkv_sparsity": "replaces the projection that makes the shares",
    }
    for name, reason in reasons.items():
        if safe_getattr(args, name, None):
            raise Mistake(f"--{name.replace('_', '-')} {reason}; leave it out, or give --value-mixing-rank 0")


def check_kept(rank: int, kept: list[int]) -> None:
    """Refuses to leave out the layer whose values the others mix in."""
    if rank and 0 not in kept:
        raise Mistake("--decoder-layers-to-keep leaves out layer 0, whose values the others mix in; keep it")
