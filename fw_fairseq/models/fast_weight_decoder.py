"""fairseq's Transformer decoder with a mixer in each layer in place of attention."""

from __future__ import annotations

import contextlib
import copy

import torch
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.utils import safe_getattr

from ..config import SOFTMAX, FastWeightConfig, layer_mixers, read_config
from ..modules import CarriedState, FastWeightDecoderLayer, MixerAttention

UNLIMITED = 10**9


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
