"""fast_weight_transformer: fairseq's translation Transformer with linear attention in any of its three attentions."""

import logging
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import Optional

from fairseq.data import Dictionary
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, transformer_iwslt_de_en
from fairseq.models.transformer import base_architecture as fairseq_base
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.models.transformer.transformer_encoder import TransformerEncoder
from fairseq.models.transformer.transformer_legacy import transformer_vaswani_wmt_en_de_big
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.utils import safe_getattr
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from ..config import (
    ATTENTIONS,
    DECODER_OPTIONS,
    SOFTMAX,
    FastWeightTransformerConfig,
    check_sizes,
    linear_attentions,
    option_name,
    options_read,
    read_config,
    refuse_without_effect,
)
from ..errors import Mistake
from ..modules import LinearAttention, LinearEncoderLayer, TranslationDecoderLayer
from ..modules.sparse import check_sparse
from ..modules.training_graphs import stack_of
from .fast_weight_decoder import FastWeightDecoder
from .lm_architectures import chosen_mixers, defaults
from .model_options import KnowsItsUpdates, NamesWhatDiffers, add_opposites, keep_layers, write_kept_layers

logger = logging.getLogger(__name__)
SIZES = [
    f"{part}_{name}" for part in ("encoder", "decoder") for name in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
]
SIZES += ["max_source_positions", "max_target_positions"]


class TranslationEncoder(TransformerEncoder):
    """fairseq's encoder. With linear cross attention in the decoder, beam search keeps the encoder's output for the first
    step only."""

    def __init__(self, args: Namespace, dictionary: Dictionary, embed_tokens: nn.Module, return_fc: bool = False) -> None:
        self.fast_weight_config = read_config(FastWeightTransformerConfig, args)
        in_front = self.fast_weight_config.source_in_front
        self.read_once = "cross" in linear_attentions(self.fast_weight_config) and not in_front
        super().__init__(args, dictionary, embed_tokens, return_fc)
        if self.fast_weight_config.reversible or self.fast_weight_config.graph_training:
            self.layers: nn.Module = stack_of(self.layers, self.fast_weight_config, self.encoder_layerdrop, args)

    def build_encoder_layer(self, args: Namespace) -> nn.Module:
        """Returns one layer, with linear attention if --linear-attention names the encoder."""
        cfg = TransformerConfig.from_namespace(args)
        layer = LinearEncoderLayer(cfg, self.fast_weight_config, self.return_fc)
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations) if cfg.checkpoint_activations else layer

    def reorder_encoder_out(self, encoder_out: dict[str, list], new_order: Tensor) -> dict[str, list]:
        """Returns the encoder's output for the hypotheses ``new_order``. Beam search first asks for one copy for each
        hypothesis, which linear cross attention does not need; after the first step it does not need the source either."""
        if not self.read_once:
            return super().reorder_encoder_out(encoder_out, new_order)
        output, mask = encoder_out["encoder_out"][0], encoder_out["encoder_padding_mask"][0]
        if "kept" in encoder_out:
            rest = {"encoder_out": [output[:0]], "encoder_padding_mask": [mask[:, :0]]}
            return {name: [] for name in encoder_out} | rest
        beam, sentences = len(new_order) // output.shape[1], output.shape[1]
        if new_order.equal(new_order.new_tensor(range(sentences)).repeat_interleave(beam)):
            return encoder_out | {"kept": []}
        return super().reorder_encoder_out(encoder_out, new_order)


class TranslationDecoder(FastWeightDecoder):
    """fairseq's decoder, with linear self-attention or cross attention where --linear-attention names it."""

    config_class, layer_class = FastWeightTransformerConfig, TranslationDecoderLayer

    def mixer_names(self, layers: int) -> list[str]:
        """Returns the name of each layer's mixer."""
        linear = "decoder" in linear_attentions(self.fast_weight_config)
        return super().mixer_names(layers) if linear else [SOFTMAX] * layers

    def forward(
        self,
        prev_output_tokens: Tensor,
        *args,
        alignment_layer: Optional[int] = None,
        alignment_heads: Optional[int] = None,
        **kwargs,
    ) -> tuple:
        """Refuses alignments where cross attention is linear; otherwise runs the decoder."""
        if alignment_layer is not None or alignment_heads is not None:
            refuse_alignments("alignment_layer and alignment_heads", self.fast_weight_config)
            kwargs |= {"alignment_layer": alignment_layer, "alignment_heads": alignment_heads}
        return super().forward(prev_output_tokens, *args, **kwargs)


@register_model("fast_weight_transformer")
class FastWeightTransformer(KnowsItsUpdates, NamesWhatDiffers, TransformerModel):
    """fairseq's translation Transformer with linear attention where --linear-attention names it."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds the options of FastWeightTransformerConfig to those of fairseq's Transformer, each switch with its opposite."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, FastWeightTransformerConfig(), delete_default=True)
        add_opposites(parser, [f.name for f in fields(FastWeightTransformerConfig)])

    @classmethod
    def build_model(cls, args: Namespace, task: FairseqTask) -> TransformerModel:
        """Checks the options and builds the model."""
        check_sizes(args, *SIZES)
        check_options(args)
        write_kept_layers(args)
        keep_layers(args, FastWeightTransformerConfig)
        if isinstance(args, DictConfig):  # fairseq-hydra-train; fairseq reads options that are not its own from a Namespace only
            args = Namespace(**OmegaConf.to_container(args, resolve=True))
        return super().build_model(args, task)

    @classmethod
    def build_encoder(cls, args: Namespace, src_dict: Dictionary, embed_tokens: nn.Module) -> TranslationEncoder:
        """Returns the encoder."""
        return TranslationEncoder(args, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Namespace, tgt_dict: Dictionary, embed_tokens: nn.Module) -> TranslationDecoder:
        """Returns the decoder."""
        in_front = safe_getattr(args, "source_in_front", False)
        return TranslationDecoder(args, tgt_dict, embed_tokens, no_encoder_attn=args.no_cross_attention or in_front)

    def options_read(self, args: Namespace) -> set[str]:
        """Returns the names of this project's options that a part of the model reads."""
        config = self.decoder.fast_weight_config
        linear = {*linear_attentions(config)}
        mixers = self.decoder.mixer_names(args.decoder_layers)
        others = ["linear_attention", "source_in_front", "decoder_attentions", *DECODER_OPTIONS]
        if linear != {*ATTENTIONS}:
            others.append("attention_dropout")
        if "decoder" in linear:
            others += ["mixer", "mixer_pattern"]
        if linear & {"encoder", "cross"}:
            others += LinearAttention.options
        return options_read(config, mixers, *others)

    def refuse_without_effect(self, args: Namespace) -> None:
        """Refuses options that no part of a new model reads."""
        refuse_without_effect(args, FastWeightTransformerConfig, self.options_read(args))

    def prepare_for_inference_(self, cfg: TransformerConfig) -> None:
        """Prepares the model for generation, and refuses options that need softmax cross attention."""
        for name in ("print_alignment", "replace_unk"):
            if getattr(cfg.generation, name, None) is not None:
                refuse_alignments("--" + name.replace("_", "-"), self.decoder.fast_weight_config)
        if getattr(cfg.generation, "retain_iter_history", None):
            logger.warning("--retain-iter-history is for models that refine a translation in rounds; this one writes it once")
            cfg.generation.retain_iter_history = False
        super().prepare_for_inference_(cfg)


def refuse_alignments(option: str, config: FastWeightTransformerConfig) -> None:
    """Refuses an option that needs the weights of cross attention where there are none."""
    if config.source_in_front or "cross" in linear_attentions(config):
        raise Mistake(f"{option} needs the weights of softmax cross attention; train with --linear-attention encoder,decoder")


def check_options(args: Namespace) -> None:
    """Refuses options that need softmax attention, or cross attention, where there is none."""
    config = read_config(FastWeightTransformerConfig, args)
    linear = {*linear_attentions(config)}
    check_sparse(config, args)
    for name in ("no_cross_attention", "cross_self_attention") if config.source_in_front else ():
        if safe_getattr(args, name):
            raise Mistake(f"--source-in-front takes the place of cross attention; leave {option_name(name)} out")
    if safe_getattr(args, "cross_self_attention") and linear & {"decoder", "cross"}:
        raise Mistake(
            "--cross-self-attention needs softmax attention in the decoder; leave it out or use --linear-attention encoder"
        )
    if safe_getattr(args, "load_alignments"):
        refuse_alignments("--load-alignments", config)


@register_model_architecture("fast_weight_transformer", "fast_weight_transformer")
def fast_weight_transformer(args: Namespace) -> None:
    """The size of fairseq's base: 6+6 layers, width 512, 8 heads."""
    fairseq_base(args)


@register_model_architecture("fast_weight_transformer", "fast_weight_transformer_iwslt_de_en")
def fast_weight_transformer_iwslt_de_en(args: Namespace) -> None:
    """The size of fairseq's transformer_iwslt_de_en."""
    transformer_iwslt_de_en(args)


@register_model_architecture("fast_weight_transformer", "fast_weight_transformer_wmt_en_de_big")
def fast_weight_transformer_wmt_en_de_big(args: Namespace) -> None:
    """The size of Schlag et al. 2021, appendix E, as in Ott et al. 2018: 6+6 layers, width 1024, 16 heads, feed-forward 4096."""
    softmax = {*linear_attentions(read_config(FastWeightTransformerConfig, args))} != {*ATTENTIONS}
    defaults(args, attention_dropout=0.1 if softmax else 0.0)
    transformer_vaswani_wmt_en_de_big(args)


@register_model_architecture("fast_weight_transformer", "terraformer")
def terraformer(args: Namespace) -> None:
    """A Terraformer of Jaszczur et al. 2021 with gated_delta in the decoder: 6+6 layers of width 512, the source in front of the
    target, two attention layers in each decoder layer, sparse and reversible layers. The encoder has softmax attention."""
    defaults(args, linear_attention="decoder", source_in_front=True, decoder_attentions=2)
    if "decoder" in linear_attentions(read_config(FastWeightTransformerConfig, args)) and "fast_weight" in chosen_mixers(args):
        defaults(args, update_rule="gated_delta")
    defaults(args, ffn_sparsity=64, qkv_sparsity=16, output_sparsity=4, ffn_sru=32, reversible=True)
    defaults(args, no_token_positional_embeddings=True, encoder_normalize_before=True, decoder_normalize_before=True)
    fairseq_base(args)
