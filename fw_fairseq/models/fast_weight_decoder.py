"""fairseq's Transformer decoder with a mixer in each layer in place of attention."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.utils import eval_str_list, safe_getattr
from torch import Tensor, nn

from ..config import SOFTMAX, FastWeightConfig, LanguageModelConfig, layer_mixers, read_config
from ..errors import Mistake
from ..modules import FastWeightDecoderLayer, MixerAttention, Stateful, Streams, of_this_thread, with_arguments
from ..modules.forms import FAIRSEQ_NORM, choose_norms
from ..modules.plain_softmax import PlainAdaptiveSoftmax
from ..modules.positions import PositionsFromEnd
from ..modules.sparse import Multiplicative, SparseAttention, Stack, check_reversible, check_sparse
from ..modules.training_graphs import stack_of
from .generation import GENERATION, Generation, generation_in, start
from .model_options import check_value_mixing
from .promises import ReadsPromises

UNLIMITED = 10**9


class FastWeightDecoder(ReadsPromises, TransformerDecoder):
    """fairseq's decoder; its layers mix tokens as the options say.

    Incremental decoding takes a prompt of several tokens in one pass where nothing was decoded yet.
    ``carries_over``: states may carry over from one text, or segment, to the next.
    """

    config_class: type[FastWeightConfig] = FastWeightConfig
    layer_class: type[FastWeightDecoderLayer] = FastWeightDecoderLayer
    embed_positions: Any
    layers: Any
    output_projection: Any
    adaptive_softmax: Any

    def __init__(
        self,
        args: Any,
        dictionary: Any,
        embed_tokens: Any,
        no_encoder_attn: bool = False,
        output_projection: Any = None,
        *,
        config: FastWeightConfig | None = None,
        carries_over: bool = False,
    ) -> None:
        self.fast_weight_config: Any = read_config(self.config_class, args) if config is None else config
        self.fast_weight_config.longest_text = None if carries_over else longest_text(args)
        check_sparse(self.fast_weight_config, args)
        names = self.mixer_names(args.decoder_layers)
        check_value_mixing(self.fast_weight_config, args, names)
        self.plain_softmax = safe_getattr(args, "plain_adaptive_softmax")
        self._mixers, self.recurrent = iter(enumerate(names)), SOFTMAX not in names
        if safe_getattr(args, "tie_adaptive_weights"):
            args = copy.copy(args)  # the input's projections, used backwards, start from the layers' width
            args.decoder_output_dim = args.decoder_embed_dim
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn, output_projection)
        own = self.fast_weight_config
        if isinstance(own, LanguageModelConfig) and (str(own.norm_form), own.norm_eps) != FAIRSEQ_NORM:
            choose_norms(self, own)
        if safe_getattr(args, "positions_from_end"):
            self.embed_positions = PositionsFromEnd.in_place_of(self.embed_positions, self.embed_dim, self.padding_idx)
        self.reversible = self.fast_weight_config.reversible
        self.in_front = getattr(self.fast_weight_config, "source_in_front", False)
        if self.reversible:
            check_reversible(self.layers.children())
        if self.reversible or self.in_front or self.fast_weight_config.graph_training:
            self.layers = stack_of(self.layers, self.fast_weight_config, self.decoder_layerdrop, args, self.in_front)
        self.stateful = [module for module in self.modules() if isinstance(module, Stateful)]
        self.mixers = [module for module in self.modules() if isinstance(module, MixerAttention)]
        self.softmax = [module for module in self.modules() if isinstance(module, (MultiheadAttention, SparseAttention))]
        self.output_dropout = FairseqDropout(self.fast_weight_config.output_dropout, module_name="output")
        self.promises = {}

    def mixer_names(self, layers: int) -> list[str]:
        return layer_mixers(self.fast_weight_config, layers)

    def build_output_projection(self, args: Any, dictionary: Any, embed_tokens: Any) -> None:
        if count := self.fast_weight_config.output_sparsity:
            self.output_projection = Multiplicative(self.output_embed_dim, len(dictionary), count)
            return
        if not self.plain_softmax:
            super().build_output_projection(args, dictionary, embed_tokens)
            return
        cfg = TransformerConfig.from_namespace(args)
        cutoff = eval_str_list(cfg.adaptive_softmax_cutoff, type=int) if cfg.adaptive_softmax_cutoff else []
        self.adaptive_softmax = PlainAdaptiveSoftmax(embed_tokens, cutoff, cfg.adaptive_softmax_dropout)

    def build_decoder_layer(self, args: Any, no_encoder_attn: bool = False) -> nn.Module:
        index, mixer = next(self._mixers)
        cfg = TransformerConfig.from_namespace(args)
        layer = self.layer_class(cfg, self.fast_weight_config, mixer, index, no_encoder_attn)
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations) if cfg.checkpoint_activations else layer

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict | None = None,
        incremental_state: dict | None = None,
        features_only: bool = False,
        *,
        streams: Streams | None = None,
        reset_mask: Tensor | None = None,
        score_last: int = 0,
        **kwargs,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Calls fairseq's forward, or in generation what reads the tokens there.

        streams: the rows are the next segments of these streams; the layers start from the states there and leave their last ones
            there.
        reset_mask: (B,T), True at the first token of a new text, before which the states are emptied.
        score_last: outputs at that many last tokens only; 0: at all.
        """
        tokens = prev_output_tokens
        self.check_length(tokens)
        features, extra = None, {"attn": [None]}
        if incremental_state is not None:
            features = self.generated(tokens, encoder_out, incremental_state, kwargs)
        if features is None:
            with self.reading(streams, reset_mask, tokens.shape[1]):
                features, extra = super().forward(tokens, encoder_out, incremental_state, features_only=True, **kwargs)
            features = features[:, -score_last:]
        return features if features_only else self.output_layer(features), extra

    def generated(self, tokens: Tensor, encoder_out: dict | None, incremental_state: dict, kwargs: dict) -> Tensor | None:
        """The features, (B,T,C), of a prompt, or (B,1,C) of the last token of a generation; None where fairseq's forward must read
        it."""
        if isinstance(self.embed_positions, PositionsFromEnd):
            raise Mistake("--positions-from-end moves all positions with each new token; such a model scores and does not generate")
        if self.promises:
            read = partial(self.take_prompt, incremental_state=incremental_state)
            reorder = partial(super().reorder_incremental_state_scripting, incremental_state)
            if (features := self.promised(tokens.shape[1], read, reorder)) is not None:
                return features
        if tokens.shape[1] > 1 and not incremental_state and self.reads_prompts:
            return self.take_prompt(tokens, incremental_state=incremental_state, encoder_out=encoder_out, **kwargs)
        generation = self.generation(tokens, encoder_out, incremental_state, kwargs)
        return None if generation is None else generation.features(tokens)

    def check_length(self, tokens: Tensor) -> None:
        """Refuses more tokens than there are learned positions, where the lookup would fail. Padding has none."""
        table, learned = self.embed_positions, isinstance(self.embed_positions, nn.Embedding)
        if not learned or tokens.shape[1] <= table.max_positions:
            return
        longest = int(tokens.ne(self.padding_idx).sum(1).max())
        if longest > table.max_positions:
            raise Mistake(
                f"a text has {longest} tokens, and the model has {table.max_positions} learned positions; give shorter texts, or"
                " train with more --max-target-positions"
            )

    @contextlib.contextmanager
    def reading(self, streams: Streams | None, reset_mask: Tensor | None, tokens: int) -> Iterator[None]:
        """fairseq's forward, within this, reads the next ``tokens`` tokens of the streams: see ``Streams``."""
        states, start = None, 0
        if streams is not None:
            states = streams.of(self)
            states.advance(resets=reset_mask is not None)
            start = 0 if states.group is None else states.group.rank() * tokens
        layers = [self.layers] if isinstance(self.layers, Stack) else self.layers.children()
        layers = [layer for layer in layers if isinstance(layer, (FastWeightDecoderLayer, Stack))]
        given: dict[str, Any] = {
            "states": states,
            "reset_mask": reset_mask,
            "shared": {} if self.fast_weight_config.value_mixing_rank else None,
        }
        with counted_from(self.embed_positions, start), with_arguments(layers, **given):
            yield

    def generation(self, tokens: Tensor, encoder_out: dict | None, incremental_state: dict, kwargs: dict) -> Generation | None:
        """The object that reads this generation's tokens, from the first single one on; None where the general path must read them.
        ``incremental_state`` has False in its place if the model has parts that it does not know."""
        generation: Any = generation_in(incremental_state)
        if generation is False or (generation is not None and generation.decoder is not self):  # of another model
            return None
        known = not any(value is not None for value in kwargs.values())
        known = known and (not self.in_front or bool(incremental_state))  # the first token reads the source
        if known and not tokens[:, -1].eq(self.padding_idx).any():
            if generation is None and (tokens.shape[1] == 1 or incremental_state):
                generation = incremental_state[GENERATION] = start(self, incremental_state, encoder_out)
            return generation or None
        if generation is not None:
            incremental_state.pop(GENERATION).release(incremental_state)
        return None

    def reorder_incremental_state_scripting(self, incremental_state: dict, new_order: Tensor) -> None:
        """Gives each hypothesis of a beam search the states of the hypothesis that it continues."""
        generation: Any = generation_in(incremental_state)
        if generation and generation.decoder is self:
            generation.reorder(new_order)
        else:
            super().reorder_incremental_state_scripting(incremental_state, new_order)

    @property
    def reads_prompts(self) -> bool:
        """Whether one pass over several tokens leaves the states of decoding. fairseq's softmax attention does where it is plain
        and alone."""
        own = [attention for attention in self.softmax if isinstance(attention, MultiheadAttention)]
        return not self.in_front and all(attention.self_attention and not attention.use_xformers for attention in own)

    def take_prompt(self, tokens: Tensor, *, incremental_state: dict, **kwargs) -> Tensor:
        """One pass over all tokens; the states go into ``incremental_state``. Returns the features at every token."""
        streams = Streams()
        with with_arguments(self.softmax, incremental_state=incremental_state):  # where they leave their keys and values
            features, _ = self.forward(tokens, features_only=True, streams=streams, **kwargs)
        after: dict[Any, Any] = streams.of(self).after
        for part in self.stateful:
            if part.layer in after:
                part._set_input_buffer(incremental_state, after[part.layer])
        return features

    def output_layer(self, features: Tensor) -> Tensor:
        features = self.output_dropout(features)
        return super().output_layer(features * features.shape[-1] ** -0.5 if self.fast_weight_config.scale_output else features)

    def max_positions(self) -> int:
        """Without positional embeddings and softmax nothing limits the length."""
        return UNLIMITED if self.recurrent and self.embed_positions is None else super().max_positions()

    def buffered_future_mask(self, tensor: Tensor) -> Tensor | None:
        """T x T, and only softmax layers look at it."""
        return None if self.recurrent else super().buffered_future_mask(tensor)


def longest_text(args: Any) -> int | None:
    """The number of tokens that no text exceeds, since there are no more learned positions; None: there is no such number."""
    free = safe_getattr(args, "no_token_positional_embeddings") or not safe_getattr(args, "decoder_learned_pos")
    return None if free else safe_getattr(args, "max_target_positions")


@contextlib.contextmanager
def counted_from(embed_positions: nn.Module | None, start: int) -> Iterator[None]:
    """Tokens get the positions that they have after ``start`` others, in calls by this thread."""
    if embed_positions is None or start == 0:
        yield
        return

    @of_this_thread
    def with_others(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        (tokens,) = inputs
        return (torch.cat([torch.full_like(tokens[:, :1], module.padding_idx + 1).expand(-1, start), tokens], dim=1),)

    @of_this_thread
    def without_them(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return output[:, start:]

    hooks = [embed_positions.register_forward_pre_hook(with_others), embed_positions.register_forward_hook(without_them)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
