"""The architectures of fast_weight_lm. Each name stands for sizes and a mixer."""

import re
from argparse import Namespace

from fairseq.models import register_model_architecture
from fairseq.models.transformer_lm import base_lm_architecture
from fairseq.models.transformer_lm import transformer_lm_baevski_wiki103 as fairseq_baevski_wiki103
from fairseq.utils import safe_getattr

from ..config import mixer_options
from . import fast_weight_lm  # noqa: F401  registers the model of these architectures


@register_model_architecture("fast_weight_lm", "additive_lm")
def additive_lm(args: Namespace) -> None:
    """The size of "Additive Attention Is All You Need?" on WikiText-2. The paper trains it with --tokens-per-sample 2048."""
    choose_mixer(args, "additive")
    defaults(args, decoder_layers=6, decoder_embed_dim=128, decoder_ffn_embed_dim=512, decoder_attention_heads=4)
    defaults(args, dropout=0.1, activation_dropout=0.1, activation_fn="gelu")
    gpt2_like(args)


@register_model_architecture("fast_weight_lm", "additive_lm_gpt2_small")
def additive_lm_gpt2_small(args: Namespace) -> None:
    """The shape of GPT-2 small, with additive attention in place of softmax attention."""
    choose_mixer(args, "additive")
    defaults(args, no_scale_embedding=True, scale_output=True)
    fast_weight_lm_gpt2_small(args)


@register_model_architecture("fast_weight_lm", "leap_lm")
def leap_lm(args: Namespace) -> None:
    """The size of additive_lm, with LEAP."""
    choose_mixer(args, "leap")
    additive_lm(args)


@register_model_architecture("fast_weight_lm", "additive_lm_published")
def additive_lm_published(args: Namespace) -> None:
    """The model of "Additive Attention Is All You Need?": additive attention as its code has it, and a norm of the embeddings in
    place of the one at the end."""
    choose_mixer(args, "additive", pooling_form="published", pooling_dropout=0.1)
    defaults(args, activation_dropout=0.0, layernorm_embedding=True, no_decoder_final_norm=True)
    additive_lm(args)


@register_model_architecture("fast_weight_lm", "leap_lm_published")
def leap_lm_published(args: Namespace) -> None:
    """The model of LEAP at the size of additive_lm: its own windows, no output projection, and logits that are not scaled."""
    choose_mixer(args, "leap", pooling_form="published", pooling_dropout=0.1, window_sizes="leap")
    defaults(args, activation_dropout=0.0, scale_output=False)
    additive_lm(args)


@register_model_architecture("fast_weight_lm", "sru_lm")
def sru_lm(args: Namespace) -> None:
    """A model of 6 SRU layers of width 512."""
    choose_mixer(args, "sru")
    defaults(args, decoder_layers=6, decoder_embed_dim=512, decoder_ffn_embed_dim=2048, decoder_attention_heads=1)
    defaults(args, no_token_positional_embeddings=True, share_decoder_input_output_embed=True)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "fwm_lstm_lm")
def fwm_lstm_lm(args: Namespace) -> None:
    """The model of Schlag et al. 2021b for language modeling on catbAbI: one LSTM of width 256 with a fast weight memory."""
    choose_mixer(args, "fwm_lstm", units_alone=True)
    defaults(args, decoder_layers=1, decoder_embed_dim=256, decoder_ffn_embed_dim=0, decoder_attention_heads=1)
    defaults(args, no_token_positional_embeddings=True, no_scale_embedding=True, no_decoder_final_norm=True, dropout=0.0)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "srupp_lm_enwik8_base")
def srupp_lm_enwik8_base(args: Namespace) -> None:
    """The base SRU++ of Lei 2021 on enwik8, 108M parameters: 10 layers of width 3072, each with attention of width 768."""
    srupp_base(args)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "srupp_lm_wiki103_base")
def srupp_lm_wiki103_base(args: Namespace) -> None:
    """The base SRU++ of Lei 2021 on WikiText-103, with tied adaptive embeddings of width 1024.

    It has 151M parameters and the paper's has 148M, because fairseq does not tie the projection of the most frequent words
    (3.1M).
    """
    defaults(args, adaptive_input=True, adaptive_input_factor=4, adaptive_input_cutoff="20000,40000,200000")
    defaults(args, adaptive_softmax_factor=4, adaptive_softmax_cutoff="20000,40000,200000", tie_adaptive_weights=True)
    defaults(args, tie_adaptive_proj=True, decoder_input_dim=1024, decoder_output_dim=1024)
    srupp_base(args)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "transformer_xl_lm")
def transformer_xl_lm(args: Namespace) -> None:
    """The standard Transformer-XL of Dai et al. 2019 on WikiText-103, 152M parameters. Train it with
    --task stateful_language_modeling --tokens-per-sample 150, so that its segments are those of the task."""
    choose_mixer(args, "transformer_xl", xl_memory=150, xl_segment=150)
    defaults(args, no_token_positional_embeddings=True)
    defaults(args, decoder_ffn_embed_dim=2100, decoder_attention_heads=10)
    wiki103(args, width=410)


@register_model_architecture("fast_weight_lm", "terraformer_lm")
def terraformer_lm(args: Namespace) -> None:
    """A small Terraformer (Jaszczur et al. 2021) with gated_delta in place of softmax attention: sparse feed-forward layers, sparse
    queries, keys and values, a sparse output projection, recurrent units and reversible layers."""
    defaults(args, decoder_layers=4, decoder_embed_dim=128, decoder_ffn_embed_dim=512, decoder_attention_heads=4)
    defaults(args, ffn_sparsity=16, qkv_sparsity=4)
    terraformer_parts(args)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "terraformer_lm_medium")
def terraformer_lm_medium(args: Namespace) -> None:
    """The decoder of the published medium Terraformer: 24 layers of width 1024 and 6144, 16 heads, one of 64 hidden units, and 16
    modules for queries, keys and values. --mixer softmax has its attention."""
    defaults(args, decoder_layers=24, decoder_embed_dim=1024, decoder_ffn_embed_dim=6144, decoder_attention_heads=16)
    defaults(args, ffn_sparsity=64, qkv_sparsity=16)
    terraformer_parts(args)
    base_lm_architecture(args)


def terraformer_parts(args: Namespace) -> None:
    """Sets what all sizes of Terraformer share."""
    if "fast_weight" in chosen_mixers(args):
        defaults(args, update_rule="gated_delta")
    defaults(args, output_sparsity=4, ffn_sru=32, reversible=True, dropout=0.1, no_token_positional_embeddings=True)


def srupp_base(args: Namespace) -> None:
    """Sets the sizes that both SRU++ architectures share."""
    choose_mixer(args, "srupp", srupp_width=768)
    defaults(args, decoder_layers=10, decoder_embed_dim=3072, decoder_ffn_embed_dim=0, decoder_attention_heads=1)
    defaults(args, no_token_positional_embeddings=True)


def gpt2_like(args: Namespace) -> None:
    """Sets norms before the layers, learned positions, tied embeddings, and logits divided by the square root of the width."""
    defaults(args, decoder_learned_pos=True, share_decoder_input_output_embed=True, no_scale_embedding=True, scale_output=True)
    base_lm_architecture(args)


def defaults(args: Namespace, **values) -> None:
    """Sets the options that were not given."""
    for name, value in values.items():
        setattr(args, name, safe_getattr(args, name, value))


def chosen_mixers(args: Namespace) -> set[str]:
    """The names in --mixer-pattern, or else that of --mixer."""
    return {*re.findall(r"[a-z_]\w*", safe_getattr(args, "mixer_pattern", "") or str(safe_getattr(args, "mixer", "fast_weight")))}


def choose_mixer(args: Namespace, name: str, **options) -> None:
    """Makes ``name`` the mixer unless another was given, and sets the mixer's options in a model that has it."""
    if not safe_getattr(args, "mixer_pattern", ""):
        defaults(args, mixer=name)
    if name in chosen_mixers(args):
        defaults(args, **options)


def drop_attention_only_where_it_is_read(args: Namespace) -> None:
    """Sets no dropout of attention weights in a model without such weights."""
    if not any("attention_dropout" in mixer_options(name) for name in chosen_mixers(args)):
        defaults(args, attention_dropout=0.0)


def wiki103_sizes(args: Namespace, width: int) -> None:
    """Sets the sizes of Schlag et al. 2021, sec. 6.3: 16 layers, 8 heads, and the bands of the vocabulary."""
    defaults(args, decoder_layers=16, decoder_embed_dim=width, decoder_ffn_embed_dim=2048, decoder_attention_heads=8, dropout=0.1)
    defaults(args, adaptive_softmax_cutoff="20000,40000,200000")


def wiki103(args: Namespace, width: int) -> None:
    """Sets those sizes with fairseq's adaptive softmax, which shares the embeddings of the input."""
    wiki103_sizes(args, width)
    defaults(args, adaptive_input=True, adaptive_input_factor=1, adaptive_input_cutoff="20000,40000,200000")
    defaults(args, adaptive_softmax_factor=1, tie_adaptive_weights=True)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_wiki103_small")
def fast_weight_lm_wiki103_small(args: Namespace) -> None:
    """The small model of Schlag et al. 2021 on WikiText-103, width 128."""
    wiki103(args, width=128)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_wiki103_medium")
def fast_weight_lm_wiki103_medium(args: Namespace) -> None:
    """The medium model of Schlag et al. 2021 on WikiText-103, width 256."""
    wiki103(args, width=256)


def schlag(args: Namespace, width: int) -> None:
    """Sets the model of the authors' code: norms after the layers, dropout in the feed-forward layers and at the end, reads divided
    by sqrt(width of a head), no biases in the projections, positions from the end of the segment, one table of embeddings with
    biases at the output, weights from N(0, 0.02)."""
    norm_before = safe_getattr(args, "decoder_normalize_before", False)
    wiki103_sizes(args, width)
    defaults(args, activation_dropout=0.1, output_dropout=0.1, init_std=0.02)
    if "fast_weight" in chosen_mixers(args):
        defaults(args, scale_reads=True)
    if any("bias_free" in mixer_options(name) for name in chosen_mixers(args)):
        defaults(args, bias_free=True)
    other_positions = safe_getattr(args, "no_token_positional_embeddings") or safe_getattr(args, "decoder_learned_pos")
    defaults(args, plain_adaptive_softmax=True, positions_from_end=not other_positions)
    base_lm_architecture(args)
    args.decoder_normalize_before = norm_before  # fairseq sets it for every language model


@register_model_architecture("fast_weight_lm", "fast_weight_lm_wiki103_small_schlag")
def fast_weight_lm_wiki103_small_schlag(args: Namespace) -> None:
    """The small model of the code that Schlag et al. 2021 published, 44.03M parameters with the delta rule."""
    schlag(args, width=128)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_wiki103_medium_schlag")
def fast_weight_lm_wiki103_medium_schlag(args: Namespace) -> None:
    """The medium model of the code that Schlag et al. 2021 published, 89.87M parameters with the delta rule."""
    schlag(args, width=256)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_baevski_auli")
def fast_weight_lm_baevski_auli(args: Namespace) -> None:
    """The shape of fairseq's transformer_lm_wiki103."""
    drop_attention_only_where_it_is_read(args)
    fairseq_baevski_wiki103(args)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_small")
def fast_weight_lm_small(args: Namespace) -> None:
    """A model to begin with: gated_delta without positions, 4 layers of width 256, for a text that a CPU can learn."""
    choose_mixer(args, "fast_weight", update_rule="gated_delta", feature_map="identity", feature_norm="l2")
    defaults(args, decoder_layers=4, decoder_embed_dim=256, decoder_ffn_embed_dim=1024, decoder_attention_heads=4, dropout=0.2)
    defaults(args, decoder_normalize_before=True, share_decoder_input_output_embed=True, no_token_positional_embeddings=True)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_gpt2_small")
def fast_weight_lm_gpt2_small(args: Namespace) -> None:
    """The shape of GPT-2 small, 124M parameters: 12 layers, 12 heads, width 768, learned positions, tied embeddings."""
    defaults(args, decoder_layers=12, decoder_embed_dim=768, decoder_ffn_embed_dim=3072, decoder_attention_heads=12, dropout=0.1)
    defaults(args, activation_fn="gelu", decoder_learned_pos=True, share_decoder_input_output_embed=True)
    base_lm_architecture(args)
