"""A decoder of transformers as fairseq's: its tokens are symbols of a dictionary, and its states are those of streams or of a
generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor
from transformers import DynamicCache

from ...errors import Mistake
from ...huggingface.parts import CACHE
from ...mixers.look_back import places_in_texts
from ...modules import Streams
from ...ops.state import tensor_state
from ...pretrained.adapter import all_heads, attentions
from ...pretrained.attention import Pass
from ...pretrained.folders import NEVER, tokens_of, written
from ..fast_weight_decoder import UNLIMITED
from ..promises import ReadsPromises

POSITION, READ = "position", "pretrained"
FEW = 8  # runs of tokens, which are joined faster than each is looked up


@tensor_state
class PositionState(NamedTuple):
    """How many tokens of each stream were read."""

    position: Tensor  # (B)


@dataclass
class Reading:
    """What a generation has read: the library's cache, with the states of converted layers in it, and how many tokens."""

    cache: Any = field(default_factory=DynamicCache)
    length: int = 0


class PretrainedDecoder(ReadsPromises, FairseqIncrementalDecoder):
    """Runs a model of transformers on fairseq's symbols. ``arguments``: those of ``adapt``, as ``ConvertedConfig`` takes them."""

    def __init__(self, dictionary: Any, model: Any, arguments: dict[str, Any]) -> None:
        super().__init__(dictionary)
        self.model, self.arguments, self.configuration = model, arguments, written(model.config)
        self.layer_mixers = mixers = arguments["mixers"]
        tokens, known = tokens_of(dictionary.symbols, model.config, "the pretrained model")
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("known", known, persistent=False)
        self.pad = dictionary.pad()
        self.recurrent = "softmax" not in mixers
        self.relative = getattr(model.config, "rope_parameters", None) is not None
        ends = [0, *((tokens.diff() != 1).nonzero().flatten() + 1).tolist(), len(tokens)]
        self.runs = [*zip(ends, ends[1:])]  # of symbols that stand for consecutive tokens
        self.promises = {}

    @property
    def heads(self) -> dict[int, Any]:
        """The heads of the converted layers."""
        return all_heads(self.model)

    @property
    def attentions(self) -> list[Any]:
        """The attention of each layer, converted or not."""
        return attentions(self.model)

    @property
    def reads_prompts(self) -> bool:
        return True

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
        **unused,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Maps symbols (B,T) to the scores of the next ones; the keywords are those of ``FastWeightDecoder``. In a generation the
        scores are those after the last token, and with the first call after all tokens of the prompt."""
        if incremental_state is not None:
            return self.generated(prev_output_tokens, incremental_state, features_only), {"attn": [None]}
        states, memories, position = None, Pass(reset_mask=reset_mask), None
        if streams is not None:
            states = self.begin_segment(streams, memories, resets=reset_mask is not None)
        if states is not None or reset_mask is not None:
            position, after = self.positions(prev_output_tokens, states, reset_mask)
        output = self.run(prev_output_tokens, features_only, score_last, memories=memories, position_ids=position, use_cache=False)
        if states is not None:
            states.after = memories.after | {POSITION: PositionState(after)}
        return output, {"attn": [None]}

    def begin_segment(self, streams: Streams, memories: Pass, resets: bool) -> Any:
        """Gives a pass the states of streams before their next segment, and returns those of this decoder."""
        states = streams.of(self)
        if states.group is not None:
            raise Mistake("--sequence-parallel cuts texts within the attention of transformers; leave it out")
        states.advance(resets=resets)
        memories.before = {layer: state for layer, state in states.before.items() if layer != POSITION}
        return states

    def positions(self, tokens: Tensor, states: Any, reset_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The positions of a segment's tokens in their texts, (B,T), and of the next ones. Learned positions begin anew in each
        segment."""
        start = tokens.new_zeros(len(tokens))
        before = None if states is None else states.before.get(POSITION)
        if before is not None and self.relative:
            start = PositionState(*before).position.to(tokens.device)
        padding = tokens.eq(self.pad)
        places, after = places_in_texts(start, tokens.shape[1], padding if padding.any() else None, reset_mask)
        return places.clamp(min=0), after

    def run(self, tokens: Tensor, features_only: bool, last: int, *, memories: Pass, **given) -> Tensor:
        """Calls the library's model with symbols (B,T). ``last``: scores at so many last tokens only; 0: at all."""
        padding = tokens.eq(self.pad)
        if padding.any():
            memories.padding_mask = padding
            if given.get(CACHE) is None:
                real = ~padding
                given["attention_mask"] = real.long()
                if given.get("position_ids") is None:
                    given["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
        if features_only:
            return self.model.base_model(self.tokens[tokens], memories=memories, **given).last_hidden_state[:, -last:]
        logits = self.model(self.tokens[tokens], memories=memories, logits_to_keep=last, **given).logits
        return self.in_symbols(logits)

    def in_symbols(self, logits: Tensor) -> Tensor:
        """The scores of tokens, (B,T,V), as those of symbols. Slices that are joined take less time than numbers to look up."""
        if len(self.runs) > FEW:
            return logits[..., self.tokens].masked_fill(~self.known, NEVER)
        parts = []
        for start, stop in self.runs:
            first = int(self.tokens[start])
            part = logits[..., first : first + stop - start]
            parts.append(part if self.known[start:stop].all() else part.masked_fill(~self.known[start:stop], NEVER))
        return torch.cat(parts, -1)

    def attention_distance(self, tokens: Tensor) -> Tensor:
        """How far the heads are from the softmax whose place they take, a mean over converted layers. Each of them gets what the
        unchanged model has there: the layers share everything but the heads, so that there is no second model."""
        for part in self.attentions:
            if getattr(part, "softmax", "sdpa") != "sdpa" or getattr(part, "drops_rotary", False):
                raise Mistake("attention_transfer compares with softmax as it was: it needs sdpa, and no --drop-rotary")
        memories = Pass(distances=[])
        self.run(tokens, True, 0, memories=memories, use_cache=False)
        if not memories.distances:
            raise Mistake("attention_transfer needs a converted layer, and all of them are softmax")
        return torch.stack(memories.distances).mean()

    def generated(self, tokens: Tensor, incremental_state: dict, features_only: bool) -> Tensor:
        """The scores after the tokens that this generation has not read yet."""
        read = partial(self.read_on, incremental_state=incremental_state, features_only=features_only)
        promised = self.promised(tokens.shape[1], read, partial(self.reorder_incremental_state_scripting, incremental_state))
        return read(tokens) if promised is None else promised

    def read_on(self, tokens: Tensor, incremental_state: dict, features_only: bool) -> Tensor:
        """Reads the tokens after those that the generation has read."""
        reading: Reading = incremental_state.setdefault(READ, Reading())
        new = tokens[:, reading.length :]
        if new.eq(self.pad).any():
            raise Mistake("a text that is generated has padding; give texts of one length, or one at a time")
        reading.length = tokens.shape[1]
        memories = Pass(decoding=True)
        return self.run(new, features_only, 0, memories=memories, use_cache=True, **{CACHE: reading.cache})

    def reorder_incremental_state_scripting(self, incremental_state: dict, new_order: Tensor) -> None:
        """Gives each hypothesis of a beam search the states of the hypothesis that it continues."""
        if READ in incremental_state:
            cache = incremental_state[READ].cache
            if len(new_order):
                cache.batch_select_indices(new_order)

    def output_layer(self, features: Tensor) -> Tensor:
        return self.in_symbols(self.model.get_output_embeddings()(features))

    def max_positions(self) -> int:
        """Where neither softmax nor learned positions limit a text, nothing does."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return UNLIMITED if limit is None or (self.recurrent and self.relative) else limit
