"""Generation that reads the prompt in one pass and then continues token by token."""

from __future__ import annotations

import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor


class PromptedGenerator(SequenceGenerator):
    """fairseq's generator, which feeds a prompt token by token. Decoders of this project get all of it first, for one pass."""

    def _generate(self, sample, prefix_tokens=None, constraints=None, bos_token=None):
        decoders = [model.decoder for model in self.model.models if getattr(model.decoder, "reads_prompts", False)]
        if prefix_tokens is not None:
            prompt = self.common_prompt(prefix_tokens, self.eos if bos_token is None else bos_token)
            for decoder in decoders:
                decoder.expect_prompt(prompt, self.beam_size)
        try:
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        finally:
            for decoder in decoders:
                decoder.expect_prompt(None)

    def common_prompt(self, prefix_tokens: Tensor, first: int) -> Tensor:
        """The first token and as many tokens as every prompt has. The rest of longer prompts is read in the steps in which shorter
        ones go on, so nothing is computed for padding. An end of sentence finishes a hypothesis and takes its row out of the batch,
        so the common part stops before the first one."""
        inside = prefix_tokens.ne(self.pad) & prefix_tokens.ne(self.eos)
        shortest = int(inside.long().cumprod(1).sum(1).min())
        return torch.cat([torch.full_like(prefix_tokens[:, :1], first), prefix_tokens[:, :shortest]], dim=1)
