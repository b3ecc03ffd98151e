"""The options of sparse and reversible layers: which of fairseq's options and of each other they go with."""

from __future__ import annotations

from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.utils import safe_getattr
from torch import nn

from ..config import SPARSE_OPTIONS, FastWeightConfig, option_name
from ..errors import Mistake
from ..modules import MixerAttention
from ..modules.updates import refuse_extras

TIED = ("adaptive_softmax_cutoff", "plain_adaptive_softmax", "share_all_embeddings", "share_decoder_input_output_embed")


def check_sparse(config: FastWeightConfig, args) -> None:
    """Refuses sparse and reversible layers with options that they cannot go with."""
    cfg = TransformerConfig.from_namespace(args)
    for name in ("ffn_sparsity", "qkv_sparsity", "output_sparsity"):
        if getattr(config, name) == 1:
            raise Mistake(f"{option_name(name)} is 1; it must be 0 or at least 2")
        if getattr(config, name) and safe_getattr(args, "init_std", None):
            raise Mistake(f"--init-std draws the weights of dense layers, not those of {option_name(name)}; leave one of them out")
    if config.ffn_controller_dim and not config.ffn_sparsity:
        raise Mistake("--ffn-controller-dim has no effect without --ffn-sparsity; leave it out")
    if safe_getattr(args, "train_only", "all") == "new":
        for name in SPARSE_OPTIONS:
            if getattr(config, name):
                raise Mistake(f"--train-only new is for models that fw-convert made, which have no {option_name(name)}")
    if config.qkv_sparsity and config.token_shift:
        raise Mistake("--token-shift mixes tokens before a dense projection, which --qkv-sparsity replaces; leave one of them out")
    if config.token_shift and cfg.quant_noise.pq > 0:
        raise Mistake("--token-shift does not work with --quant-noise-pq; leave one of them out")
    if config.output_sparsity:
        for name in TIED:
            if safe_getattr(args, name, None):
                raise Mistake(f"--output-sparsity replaces the output projection, which {option_name(name)} shares or cuts")
    parts = [("decoder", cfg.decoder)] + ([("encoder", cfg.encoder)] if safe_getattr(args, "encoder_layers", None) else [])
    for part, sizes in parts:
        check_layers(config, cfg, part, sizes)
    if getattr(config, "decoder_attentions", 1) > 1:
        refuse_extras(cfg, "--decoder-attentions")
    if config.reversible and cfg.checkpoint_activations:
        raise Mistake("--reversible computes activations again as --checkpoint-activations does; leave one of them out")


def check_layers(config: FastWeightConfig, cfg, part: str, sizes) -> None:
    """Refuses what the layers of the encoder or the decoder cannot do."""
    for option in ("ffn_sparsity", "ffn_sru", "qkv_sparsity", "reversible"):
        if getattr(config, option):
            refuse_extras(cfg, option_name(option))
    for option in ("ffn_sparsity", "qkv_sparsity"):
        if getattr(config, option) and cfg.quant_noise.pq > 0:
            raise Mistake(f"{option_name(option)} does not work with --quant-noise-pq; leave one of them out")
    if config.qkv_sparsity and (cfg.cross_self_attention or sizes.xformers_att_config):
        option = "--cross-self-attention" if cfg.cross_self_attention else f"--{part}-xformers-att-config"
        raise Mistake(f"--qkv-sparsity does not work with {option}; leave one of them out")
    if config.ffn_sparsity and sizes.ffn_embed_dim % config.ffn_sparsity:
        raise Mistake(f"--ffn-sparsity is {config.ffn_sparsity}; it must divide --{part}-ffn-embed-dim, {sizes.ffn_embed_dim}")
    for option in ("ffn_sparsity", "reversible"):
        if getattr(config, option) and not sizes.ffn_embed_dim:
            raise Mistake(f"{option_name(option)} needs feed-forward layers, and --{part}-ffn-embed-dim is 0")
    if config.reversible and not sizes.normalize_before:
        raise Mistake(f"--reversible has norms before the layers; add --{part}-normalize-before")


def check_reversible(layers: list[nn.Module]) -> None:
    """Refuses mixers whose residual connection takes their normed input."""
    for layer in layers:
        if isinstance(layer.self_attn, MixerAttention) and layer.self_attn.mixer.norms_residual:
            raise Mistake("--reversible does not work with --pooling-form published, whose layers add their normed input")
