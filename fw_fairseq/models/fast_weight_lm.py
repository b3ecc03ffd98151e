"""fast_weight_lm: fairseq's Transformer language model with fast weights in place of attention, layer by layer."""

import contextlib
import copy
import functools
import logging
from dataclasses import dataclass

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig, base_lm_architecture
from fairseq.models.transformer_lm import transformer_lm_baevski_wiki103 as fairseq_baevski_wiki103
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.utils import safe_getattr

from ..config import SOFTMAX, FastWeightConfig, layer_mixers, option, read_config
from ..mixers.base import check_heads
from ..modules import CarriedState, FastWeightDecoderLayer, MixerAttention
from .other_options import NamesWhatDiffers, keep_layers

UNLIMITED = 10**9
logger = logging.getLogger(__name__)


@dataclass
class FastWeightLanguageModelConfig(FastWeightConfig, TransformerLanguageModelConfig):
    """Its defaults are the architecture fast_weight_lm, small enough for a laptop."""

    decoder_layers: int = option(4, "num decoder layers")
    decoder_embed_dim: int = option(128, "decoder embedding dimension")
    decoder_input_dim: int = option(128, "decoder input dimension")
    decoder_output_dim: int = option(128, "decoder output dimension")
    decoder_ffn_embed_dim: int = option(512, "decoder embedding dimension for FFN")
    decoder_attention_heads: int = option(8, "num decoder attention heads")
    train_only: ChoiceEnum(["all", "new"]) = option(
        "all",
        "new: only what fw-convert makes anew, query and key projections, gates and feature maps; the rest stays as it is"
        " (values shrink with --weight-decay)",
    )


class FastWeightDecoder(TransformerDecoder):
    """fairseq's decoder; its layers mix tokens as the options say.

    Incremental decoding takes a prompt of several tokens in one pass where every layer is recurrent and nothing was decoded yet.
    With ``carried``, the layers start from the states there and leave their last ones there.
    """

    config_class, layer_class = FastWeightConfig, FastWeightDecoderLayer

    def __init__(self, args, dictionary, embed_tokens, no_encoder_attn=False, output_projection=None):
        self.fast_weight_config = read_config(self.config_class, args)
        names = self.mixer_names(args.decoder_layers)
        self._mixers, self.recurrent = iter(enumerate(names)), SOFTMAX not in names
        if safe_getattr(args, "tie_adaptive_weights", False):
            args = copy.copy(args)  # the input's projections, used backwards, start from the layers' width
            args.decoder_output_dim = args.decoder_embed_dim
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn, output_projection)
        self.mixers = [module for module in self.modules() if isinstance(module, MixerAttention)]
        self.expect_prompt(None)

    def mixer_names(self, layers: int) -> list[str]:
        return layer_mixers(self.fast_weight_config, layers)

    def build_decoder_layer(self, args, no_encoder_attn=False):
        index, mixer = next(self._mixers)
        cfg = TransformerConfig.from_namespace(args)
        layer = self.layer_class(cfg, self.fast_weight_config, mixer, index, no_encoder_attn)
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations) if cfg.checkpoint_activations else layer

    def forward(self, prev_output_tokens, *args, incremental_state=None, carried=None, reset_mask=None, score_last=0, **kwargs):
        """fairseq's forward. carried, reset_mask: see MixerAttention; score_last: outputs at that many last tokens only."""
        if carried is not None:
            carried = carried.of(self)
            carried.advance()
            carried.resets = reset_mask is not None
        for mixer in self.mixers:
            mixer.carried, mixer.reset_mask = carried, reset_mask
        if incremental_state is not None and self.prompt is not None and prev_output_tokens.shape[1] <= self.prompt.shape[1]:
            return self.read_prompt(prev_output_tokens.shape[1], incremental_state)
        if self.starts_with_a_prompt(prev_output_tokens, incremental_state):
            return self.take_prompt(prev_output_tokens, *args, incremental_state=incremental_state, **kwargs)
        if carried is not None and carried.group is not None:
            with counted_from(self.embed_positions, carried.group.rank() * prev_output_tokens.shape[1]):
                return super().forward(prev_output_tokens, *args, **kwargs)
        if score_last:
            features, extra = super().forward(prev_output_tokens, *args, **kwargs, features_only=True)
            return self.output_layer(features[:, -score_last:]), extra
        return super().forward(prev_output_tokens, *args, incremental_state=incremental_state, **kwargs)

    def starts_with_a_prompt(self, tokens, incremental_state) -> bool:
        return incremental_state is not None and self.recurrent and tokens.shape[1] > 1 and not incremental_state

    def take_prompt(self, tokens, *args, incremental_state, **kwargs):
        """One pass over all tokens; the states go into ``incremental_state``. Returns the outputs at every token."""
        states = CarriedState()
        output = self.forward(tokens, *args, carried=states, **kwargs)
        for mixer in self.mixers:
            mixer._set_input_buffer(incremental_state, states.after[mixer.layer])
            mixer.carried = None
        return output

    def expect_prompt(self, prompt) -> None:
        """The next incremental decoding begins with these tokens, (B,P), given in steps or not; None: no such promise."""
        self.prompt, self.prompt_features = prompt, None

    def read_prompt(self, tokens: int, incremental_state):
        """The outputs at one of the prompt's tokens. The first call reads all of it in one pass."""
        if self.prompt_features is None:
            self.prompt_features, _ = self.take_prompt(self.prompt, incremental_state=incremental_state, features_only=True)
        return self.output_layer(self.prompt_features[:, tokens - 1 : tokens]), {"attn": [None]}

    def output_layer(self, features):
        return super().output_layer(features * features.shape[-1] ** -0.5 if self.fast_weight_config.scale_output else features)

    def max_positions(self) -> int:
        """Without positional embeddings and softmax nothing limits the length."""
        return UNLIMITED if self.recurrent and self.embed_positions is None else super().max_positions()

    def buffered_future_mask(self, tensor):
        """T x T, and only softmax layers look at it."""
        return None if self.recurrent else super().buffered_future_mask(tensor)


@contextlib.contextmanager
def counted_from(embed_positions, start: int):
    """Tokens get the positions that they have after ``start`` others."""
    if embed_positions is None or start == 0:
        yield
        return

    def with_others(module, inputs):
        (tokens,) = inputs
        return (torch.cat([torch.full_like(tokens[:, :1], module.padding_idx + 1).expand(-1, start), tokens], dim=1),)

    hooks = [
        embed_positions.register_forward_pre_hook(with_others),
        embed_positions.register_forward_hook(lambda module, inputs, output: output[:, start:]),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@register_model("fast_weight_lm", dataclass=FastWeightLanguageModelConfig)
class FastWeightLanguageModel(NamesWhatDiffers, TransformerLanguageModel):
    num_updates = 0  # for criterions that change on the way

    @classmethod
    def build_model(cls, args, task):
        check_heads(args.decoder_embed_dim, args.decoder_attention_heads)  # before fairseq does, by an assertion
        keep_layers(args)
        model = super().build_model(args, task)
        model = cls(FastWeightDecoder(args, task.target_dictionary, model.decoder.embed_tokens, no_encoder_attn=True))
        if safe_getattr(args, "train_only", "all") == "new":
            model.freeze_all_but_new()
        if not next(model.parameters()).is_meta:
            logger.info(model.state_size())
        return model

    def forward(self, src_tokens, src_lengths=None, **kwargs):
        return self.decoder(src_tokens, **kwargs)

    def set_num_updates(self, num_updates):
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def state_size(self) -> str:
        """In millions of numbers, as Schlag et al. 2021 report it."""
        kept, softmax = sum(x.mixer.state_size() for x in self.decoder.mixers), len(self.decoder.layers) - len(self.decoder.mixers)
        growing = f", and {2 * softmax * self.decoder.embed_dim} numbers more with each token" if softmax else ""
        return f"state size: {kept / 1e6:.4g} million numbers for a sequence{growing}"

    def freeze_all_but_new(self) -> None:
        """The optimizer holds what has new rows; the gradients of the other rows are 0."""
        self.requires_grad_(False)
        for attention in self.decoder.mixers:
            pretrained = attention.mixer.pretrained()
            for name, parameter in attention.mixer.named_parameters():
                rows = pretrained.get(name, slice(0))
                if rows == slice(None):
                    continue
                parameter.requires_grad_(True)
                parameter.register_hook(functools.partial(without_rows, rows=rows))
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError("--train-only new leaves nothing to train: the attention of all layers is as it was")


def without_rows(gradient, rows: slice):
    gradient = gradient.clone()
    gradient[rows] = 0
    return gradient


def defaults(args, **values) -> None:
    """Sets the options that were not given."""
    for name, value in values.items():
        setattr(args, name, safe_getattr(args, name, value))


def wiki103(args, width: int) -> None:
    """Schlag et al. 2021, sec. 6.3: 16 layers, 8 heads, the vocabulary's embeddings shared."""
    defaults(args, decoder_layers=16, decoder_embed_dim=width, decoder_ffn_embed_dim=2048, decoder_attention_heads=8, dropout=0.1)
    defaults(args, adaptive_input=True, adaptive_input_factor=1, adaptive_input_cutoff="20000,40000,200000")
    defaults(args, adaptive_softmax_factor=1, adaptive_softmax_cutoff="20000,40000,200000", tie_adaptive_weights=True)
    base_lm_architecture(args)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_wiki103_small")
def fast_weight_lm_wiki103_small(args):
    wiki103(args, width=128)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_wiki103_medium")
def fast_weight_lm_wiki103_medium(args):
    wiki103(args, width=256)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_baevski_auli")
def fast_weight_lm_baevski_auli(args):
    """The shape of fairseq's transformer_lm_wiki103."""
    fairseq_baevski_wiki103(args)


@register_model_architecture("fast_weight_lm", "fast_weight_lm_gpt2_small")
def fast_weight_lm_gpt2_small(args):
    """GPT-2 small, 124M parameters: 12 layers, 12 heads, width 768, learned positions, tied embeddings."""
    defaults(args, decoder_layers=12, decoder_embed_dim=768, decoder_ffn_embed_dim=3072, decoder_attention_heads=12, dropout=0.1)
    defaults(args, activation_fn="gelu", decoder_learned_pos=True, share_decoder_input_output_embed=True)
    base_lm_architecture(args)
