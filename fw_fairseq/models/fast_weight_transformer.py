"""fast_weight_transformer: fairseq's translation Transformer with linear attention in any of its three attentions."""

import logging

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, transformer_iwslt_de_en
from fairseq.models.transformer import base_architecture as fairseq_base
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.models.transformer.transformer_encoder import TransformerEncoder
from fairseq.models.transformer.transformer_legacy import transformer_vaswani_wmt_en_de_big
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.utils import safe_getattr

from .. import Mistake
from ..config import ATTENTIONS, SOFTMAX, FastWeightTransformerConfig, linear_attentions, read_config
from ..modules import LinearEncoderLayer, TranslationDecoderLayer
from .checkpoint_options import NamesWhatDiffers, keep_layers
from .fast_weight_decoder import FastWeightDecoder
from .lm_architectures import defaults

logger = logging.getLogger(__name__)


class TranslationEncoder(TransformerEncoder):
    """fairseq's encoder. Where the decoder's cross attention is linear, beam search keeps its output for the first step only."""

    def __init__(self, args, dictionary, embed_tokens, return_fc=False):
        self.fast_weight_config = read_config(FastWeightTransformerConfig, args)
        self.read_once = "cross" in linear_attentions(self.fast_weight_config)
        super().__init__(args, dictionary, embed_tokens, return_fc)

    def build_encoder_layer(self, args):
        cfg = TransformerConfig.from_namespace(args)
        layer = LinearEncoderLayer(cfg, self.fast_weight_config, self.return_fc)
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations) if cfg.checkpoint_activations else layer

    def reorder_encoder_out(self, encoder_out, new_order):
        """Beam search begins with the copies for its hypotheses, which linear cross attention does without; it has no need of the
        source after the first step."""
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
    config_class, layer_class = FastWeightTransformerConfig, TranslationDecoderLayer

    def mixer_names(self, layers: int) -> list[str]:
        linear = "decoder" in linear_attentions(self.fast_weight_config)
        return super().mixer_names(layers) if linear else [SOFTMAX] * layers

    def forward(self, prev_output_tokens, *args, alignment_layer=None, alignment_heads=None, **kwargs):
        if alignment_layer is not None or alignment_heads is not None:
            refuse_alignments("alignment_layer and alignment_heads", self.fast_weight_config)
            kwargs |= {"alignment_layer": alignment_layer, "alignment_heads": alignment_heads}
        return super().forward(prev_output_tokens, *args, **kwargs)


@register_model("fast_weight_transformer")
class FastWeightTransformer(NamesWhatDiffers, TransformerModel):
    @classmethod
    def add_args(cls, parser):
        super().add_args(parser)
        gen_parser_from_dataclass(parser, FastWeightTransformerConfig(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        check_options(args)
        keep_layers(args, FastWeightTransformerConfig)
        return super().build_model(args, task)

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        return TranslationEncoder(args, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens):
        return TranslationDecoder(args, tgt_dict, embed_tokens, no_encoder_attn=args.no_cross_attention)

    def prepare_for_inference_(self, cfg):
        for name in ("print_alignment", "replace_unk"):
            if getattr(cfg.generation, name, None) is not None:
                refuse_alignments("--" + name.replace("_", "-"), self.decoder.fast_weight_config)
        if getattr(cfg.generation, "retain_iter_history", False):
            logger.warning("--retain-iter-history is for models that refine a translation in rounds; this one writes it once")
            cfg.generation.retain_iter_history = False
        super().prepare_for_inference_(cfg)


def refuse_alignments(option: str, config) -> None:
    if "cross" in linear_attentions(config):
        raise Mistake(
            f"{option} needs the weights of softmax cross attention, which linear attention never computes;"
            " train with --linear-attention encoder,decoder"
        )


def check_options(args) -> None:
    """Refuses what only softmax attention has where nothing has it."""
    config = read_config(FastWeightTransformerConfig, args)
    linear = {*linear_attentions(config)}
    if safe_getattr(args, "cross_self_attention", False) and linear & {"decoder", "cross"}:
        raise Mistake(
            "--cross-self-attention needs softmax attention in the decoder; leave it out or use --linear-attention encoder"
        )
    for part, users in (("encoder", {"encoder", "cross"}), ("decoder", {"decoder"})):
        if safe_getattr(args, f"{part}_xformers_att_config", None) and linear & users:
            taken = " and ".join(sorted(users))
            raise Mistake(f"--{part}-xformers-att-config is for softmax attention; take {taken} out of --linear-attention")
    if safe_getattr(args, "attention_dropout", 0) and linear == {*ATTENTIONS}:
        raise Mistake("--attention-dropout drops softmax weights, and no attention here has any; leave it out")
    if safe_getattr(args, "load_alignments", False):
        refuse_alignments("--load-alignments", config)


@register_model_architecture("fast_weight_transformer", "fast_weight_transformer")
def fast_weight_transformer(args):
    """fairseq's base: 6+6 layers, width 512, 8 heads."""
    fairseq_base(args)


@register_model_architecture("fast_weight_transformer", "fast_weight_transformer_iwslt_de_en")
def fast_weight_transformer_iwslt_de_en(args):
    transformer_iwslt_de_en(args)


@register_model_architecture("fast_weight_transformer", "fast_weight_transformer_wmt_en_de_big")
def fast_weight_transformer_wmt_en_de_big(args):
    """Schlag et al. 2021, appendix E: 6+6 layers, width 1024, 16 heads, feed-forward 4096, as Ott et al. 2018."""
    softmax = {*linear_attentions(read_config(FastWeightTransformerConfig, args))} != {*ATTENTIONS}
    defaults(args, attention_dropout=0.1 if softmax else 0.0)
    transformer_vaswani_wmt_en_de_big(args)
