"""The layers of an exported model, without fairseq."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Mistake
from ..feature_maps import check_not_offloaded
from ..generation.kv_cache import Past, attend
from ..generation.layer import swiglu
from ..mixers import MIXERS
from ..mixers.base import join_heads, split_heads
from ..mixers.options import MixerOptions
from ..mixers.parts.channel_mixing import ChannelMixing, LastToken
from .configuration import FastWeightHFConfig
from .rollback import TakesBack
from .small import grow, shrink
from .steps import Steps

Bands = Sequence[Sequence[int]]  # the number of words and the width of each


def _gelu_of_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _unchanged(x: Tensor) -> Tensor:
    return x


ACTIVATIONS = {  # named functions, which a pickled model can have
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_accurate": _gelu_of_tanh,
    "gelu_fast": _gelu_of_tanh,
    "relu_squared": _relu_squared,
    "swish": F.silu,
    "tanh": torch.tanh,
    "linear": _unchanged,
}


def make_norm(config: FastWeightHFConfig) -> nn.Module:
    """Returns a norm as layers have it."""
    return (nn.RMSNorm if config.norm_form == "rms" else nn.LayerNorm)(config.hidden_size, eps=config.norm_eps)


class SoftmaxAttention(nn.Module):
    """fairseq's attention with the interface of a mixer, for the softmax layers of a hybrid."""

    takes_shared, takes_keep_state, norms_residual, alone = False, True, False, False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(
        self,
        x: Tensor,
        state: Past | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        keep_state: bool = True,
        **unused,
    ) -> tuple[Tensor, Past | None]:
        """Maps x (T,B,C) to y (T,B,C) and the state after the last token. After a reset, earlier tokens are not seen."""
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        hidden, text = padding_mask, None
        if state is not None or keep_state:
            state = (Past.empty(k, 0) if state is None else state).add(k, v, padding_mask)
            k, v, hidden = state.tokens()
        if reset_mask is not None:
            text = F.pad(reset_mask, (k.shape[2] - len(x), 0)).cumsum(1)
            if state is not None:
                before = text.ne(text[:, -1:])
                state = state._replace(hidden=before if hidden is None else hidden | before)
        return self.out_proj(join_heads(attend(q, k, v, hidden, True, text=text))), state


class Cache(TakesBack):
    """The state that ``generate`` keeps between tokens: the state of each layer, and how many tokens each sequence has read.

    ``steps`` reads token by token. It has the states meanwhile, and ``states`` takes them back. Without ``keep_state`` nobody
    reads on from the cache, and layers may leave None in it.
    """

    is_compileable = False
    is_linear = (False,)  # transformers asks for it, and leaves the tokens that were read out of a prompt where it is not True

    def __init__(self, keep_state: bool = True) -> None:
        super().__init__()
        self.keep_state = keep_state
        self.kept: dict[int, Any] = {}
        self.steps: Steps | None = None
        self.tokens: Any = None  # (B,)
        self.length = 0  # with padding

    @property
    def states(self) -> dict[int, Any]:
        self.take_back()
        self.kept = {layer: grow(state) for layer, state in self.kept.items()}
        return self.kept

    @states.setter
    def states(self, states: dict[int, Any]) -> None:
        self.kept, self.steps = states, None

    def shrink(self, feedback: bool = True) -> None:
        """Keeps the memories in int8 until the next token: a quarter of fp32, or half with ``feedback``, what rounding left."""
        self.take_back()
        self.kept = {layer: shrink(state, feedback) for layer, state in self.kept.items()}

    def take_back(self) -> None:
        """Takes the states from ``steps``, where it has them."""
        if self.steps is not None:
            self.kept, self.steps = self.steps.states(), None

    def step(self, model: Any, x: Tensor, graph: bool) -> Tensor | None:
        """Maps the embeddings of the next token, (B,1,C), to the input of the output layer, (B,1,C), where the layers can read one
        token at a time in place; else returns None."""
        device = x.device.type
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device) or torch.compiler.is_compiling():
            return None
        if self.steps is not None and self.steps.model is not model:
            self.take_back()
        if self.steps is None:
            if len(self.kept) != len(model.layers) or not Steps.can_read(model, Layer):
                return None
            self.steps, self.kept = Steps(model, self.states, graph), {}
        y = self.steps(x.squeeze(1)).unsqueeze(1)
        self.tokens, self.length = self.tokens + 1, self.length + 1
        return y

    def __getstate__(self) -> dict:
        self.take_back()
        return dict(vars(self))

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return self.length

    def reorder_cache(self, order: Tensor) -> None:
        """Replaces the states by those of the sequences ``order``, for beam search."""
        order = order.long()  # beam search has shorter numbers
        self.forget()
        self.again = None if self.again is None else self.again.index_select(0, order)
        if self.steps is not None and len(order) == len(self.tokens):
            self.steps.reorder(order)
        else:
            self.states = {layer: state.index_select(order) for layer, state in self.states.items()}
        self.tokens = self.tokens.index_select(0, order)


class Layer(nn.Module):
    """A mixer and a feed-forward network, as in fairseq's decoder."""

    self_attn: Any
    self_attn_layer_norm: Any
    activation: Any
    fc1: Any
    fc2: Any
    final_layer_norm: Any
    channel_mixing: Any
    _gradient_checkpointing_func: Any
    gradient_checkpointing = False  # transformers changes it, and adds ``_gradient_checkpointing_func``

    def __init__(self, config: FastWeightHFConfig, index: int) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.self_attn = self.make_mixer(config, index)
        self.self_attn_layer_norm = None if getattr(self.self_attn, "alone", False) else make_norm(config)
        gated = config.ffn_form == "swiglu"
        self.final_layer_norm, self.channel_mixing = make_norm(config) if inner else None, None
        if config.ffn_form.startswith("rwkv"):
            depth = 1 - index / config.num_hidden_layers
            self.channel_mixing, inner = ChannelMixing(width, inner, config.ffn_form == "rwkv6", depth, _unchanged), 0
        self.fc1 = nn.Linear(width, (1 + gated) * inner, bias=not gated) if inner else None
        self.fc2 = nn.Linear(inner, width, bias=not gated) if inner else None
        self.activation, self.before = swiglu if gated else ACTIVATIONS[config.activation], config.normalize_before

    def make_mixer(self, config: FastWeightHFConfig, index: int) -> nn.Module:
        width, heads, name = config.hidden_size, config.num_attention_heads, config.mixers[index]
        if name == "softmax":
            return SoftmaxAttention(width, heads)
        limit = config.max_position_embeddings if config.positions == "learned" else None
        options = MixerOptions.of(config.mixer_options)
        options.longest_text = limit
        return MIXERS[name].of_layer(width, heads, options, index, config.num_hidden_layers)

    def forward(self, x: Tensor, *rest) -> Any:
        """Calls ``compute``, with gradient checkpointing where it is on."""
        if self.gradient_checkpointing and self.training:
            if getattr(self.self_attn, "takes_shared", False):
                raise Mistake("gradient checkpointing computes layers again without the first layer's values; switch it off")
            return self._gradient_checkpointing_func(self.compute, x, *rest)
        return self.compute(x, *rest)

    def compute(
        self,
        x: Tensor,
        state: Any,
        padding_mask: Tensor | None,
        reset_mask: Tensor | None = None,
        keep_state: bool = True,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        """Maps x (T,B,C) to the output (T,B,C) and the mixer's state after the last token. reset_mask: (B,T), True at the first
        token of a new text. keep_state and shared: see ``Mixer.forward``."""
        x, state = self.mix(x, state, padding_mask, reset_mask, keep_state, shared)
        return self.feed(x), state

    def mix(
        self,
        x: Tensor,
        state: Any,
        padding_mask: Tensor | None,
        reset_mask: Tensor | None,
        keep_state: bool,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        """Returns x after the mixer and its norm, and the mixer's state."""
        one = x.shape[0] == 1 and state is not None and not torch.is_grad_enabled()
        inner = self.self_attn_layer_norm(x) if self.before and self.self_attn_layer_norm is not None else x
        x = inner if self.self_attn.norms_residual else x
        more: dict[str, Any] = {"shared": shared} if self.self_attn.takes_shared else {}
        more |= {"keep_state": keep_state} if self.self_attn.takes_keep_state else {}
        y, state = self.self_attn(inner, state, padding_mask=padding_mask, reset_mask=reset_mask, decoding=one, **more)
        if self.self_attn.alone:
            return y, state
        return (x + y if self.before else self.self_attn_layer_norm(x + y)), state

    def mix_channels(
        self, x: Tensor, state: Any, padding_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, LastToken]:
        """Returns x (T,B,C) after RWKV's channel mixing, which is in place of the feed-forward network, and its state."""
        inner = self.final_layer_norm(x) if self.before else x
        y, state = self.channel_mixing(inner, state, padding_mask, reset_mask)
        return (x + y if self.before else self.final_layer_norm(x + y)), state

    def feed(self, x: Tensor) -> Tensor:
        """Returns x after the feed-forward network and its norm."""
        if self.fc1 is None:
            return x
        y = self.fc2(self.activation(self.fc1(self.final_layer_norm(x) if self.before else x)))
        return x + y if self.before else self.final_layer_norm(x + y)


class BandedEmbedding(nn.Module):
    """Embeddings whose width depends on the band of the word: frequent words are wider. Ids are numbered through all bands."""

    words: Any
    maps: Any

    def __init__(self, bands: Bands, width: int) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(count, size) for count, size in bands)
        self.maps = nn.ModuleList(nn.Linear(size, width, bias=False) for _, size in bands)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids to embeddings of one width."""
        result, start = self.maps[0].weight.new_zeros(*ids.shape, self.maps[0].out_features), 0
        for words, linear in zip(self.words, self.maps):
            mine = (ids >= start) & (ids < start + words.num_embeddings)
            result[mine] = linear(words(ids[mine] - start)).to(result.dtype)  # which autocast may compute in another
            start += words.num_embeddings
        return result


def scores_of(x: Tensor, words: Any) -> Tensor:
    """Maps hidden states to the scores of words by their embeddings. Only an embedding itself can load its offloaded weight."""
    check_not_offloaded(words.weight, x, "the embeddings are", "the output layer reads them too", "embed_tokens")
    return F.linear(x, words.weight)


class BandedOutput(nn.Module):
    """The output layer of an adaptive vocabulary. With ``tied``, it uses the input's embeddings."""

    def __init__(self, bands: Bands, width: int, tied: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleList(
            nn.Linear(width, size, bias=False) if size != width or i else None  # type: ignore[misc]
            for i, (_, size) in enumerate(bands)
        )
        self.words = None if tied else nn.ModuleList(nn.Linear(size, count, bias=False) for count, size in bands)
        self.bands = nn.Linear(width, len(bands) - 1, bias=False)

    def forward(self, x: Tensor, embedding: BandedEmbedding) -> Tensor:
        """Returns log probabilities of all words."""
        words = self.words if self.words is not None else embedding.words
        scores = [scores_of(x if mapped is None else mapped(x), band) for mapped, band in zip(self.maps, words)]
        first = torch.cat([scores[0], self.bands(x)], -1).log_softmax(-1)
        chosen = first[..., scores[0].shape[-1] :].split(1, dim=-1)
        return torch.cat([first[..., : scores[0].shape[-1]], *(p + s.log_softmax(-1) for p, s in zip(chosen, scores[1:]))], -1)
