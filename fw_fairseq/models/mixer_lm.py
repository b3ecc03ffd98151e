"""Architectures of fast_weight_lm with another mixer than fast weights."""

from fairseq.models import register_model_architecture
from fairseq.models.transformer_lm import base_lm_architecture

from .fast_weight_lm import defaults, fast_weight_lm_gpt2_small


@register_model_architecture("fast_weight_lm", "additive_lm")
def additive_lm(args):
    """The size of "Additive Attention Is All You Need?" on WikiText-2, which trains with --tokens-per-sample 2048."""
    defaults(args, mixer="additive", decoder_layers=6, decoder_embed_dim=128, decoder_ffn_embed_dim=512, decoder_attention_heads=4)
    defaults(args, dropout=0.1, activation_dropout=0.1, activation_fn="gelu")
    gpt2_like(args)


@register_model_architecture("fast_weight_lm", "additive_lm_gpt2_small")
def additive_lm_gpt2_small(args):
    """GPT-2 small's shape with additive attention in place of softmax."""
    defaults(args, mixer="additive", decoder_normalize_before=True, no_scale_embedding=True, scale_output=True)
    fast_weight_lm_gpt2_small(args)


@register_model_architecture("fast_weight_lm", "leap_lm")
def leap_lm(args):
    """The size of additive_lm."""
    defaults(args, mixer="leap")
    additive_lm(args)


@register_model_architecture("fast_weight_lm", "sru_lm")
def sru_lm(args):
    """6 layers of SRU of width 512."""
    defaults(args, mixer="sru", decoder_layers=6, decoder_embed_dim=512, decoder_ffn_embed_dim=2048, decoder_attention_heads=1)
    defaults(args, decoder_normalize_before=True, no_token_positional_embeddings=True, share_decoder_input_output_embed=True)
    base_lm_architecture(args)


def gpt2_like(args) -> None:
    """Norms before, learned positions, tied embeddings, logits divided by the square root of the width."""
    defaults(args, decoder_normalize_before=True, decoder_learned_pos=True, share_decoder_input_output_embed=True)
    defaults(args, no_scale_embedding=True, scale_output=True)
    base_lm_architecture(args)
