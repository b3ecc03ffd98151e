"""What the options of sparse and reversible layers cannot go with, because it would be left out in silence."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from fairseq.utils import safe_getattr
from torch import nn

from ...config import FastWeightConfig, option_name
from ...errors import Mistake

TIED = ("adaptive_softmax_cutoff", "plain_adaptive_softmax", "share_all_embeddings", "share_decoder_input_output_embed")


def check_sparse(config: FastWeightConfig, args: Namespace) -> None:
    """Refuses options of a model that its sparse and reversible parts would ignore."""
    for name in TIED if config.output_sparsity else ():
        if safe_getattr(args, name, None):
            raise Mistake(f"--output-sparsity replaces the output projection, which {option_name(name)} shares or cuts")
    if config.ffn_controller_dim and not config.ffn_sparsity:
        raise Mistake("--ffn-controller-dim has no effect without --ffn-sparsity; leave it out")
    form = str(getattr(config, "ffn_form", "plain"))
    if form != "plain" and (config.ffn_sparsity or not args.decoder_ffn_embed_dim):
        other = "--ffn-sparsity" if config.ffn_sparsity else "--decoder-ffn-embed-dim 0"
        raise Mistake(f"--ffn-form {form} does not work with {other}; leave one of them out")
    if config.qkv_sparsity and safe_getattr(args, "cross_self_attention", False):
        raise Mistake("--qkv-sparsity does not work with --cross-self-attention; leave one of them out")
    parts = [part for part in ("encoder", "decoder") if safe_getattr(args, f"{part}_layers", None)]
    for part in parts if config.reversible else ():
        if not safe_getattr(args, f"{part}_normalize_before", False):
            raise Mistake(f"--reversible has norms before the layers; add --{part}-normalize-before")


def check_reversible(layers: Iterable[nn.Module]) -> None:
    """Refuses parts that change the residual stream, which reversible layers have two of."""
    for layer in layers:
        if layer.norms_residual:
            raise Mistake("--reversible does not work with --pooling-form published, whose layers add their normed input")
        if layer.alone:
            raise Mistake("--reversible does not work with --units-alone, whose layers add nothing to what they read")
        if layer.w_resid is not None:
            raise Mistake("--reversible does not work with --scale-resids; leave one of them out")
