"""Generates with the model of a folder, and compares with a pass over the same words.

``fw-export-hf`` runs this text as a program of its own, without fairseq and this package, so that the folder has torch and
transformers alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

TOKENS, BEAMS = 4, 3


def load(folder: str) -> Any:
    """Returns the model in float64, where a state and a pass over all tokens hardly differ; refuses other weights than its own."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    translates = AutoConfig.from_pretrained(folder, trust_remote_code=True).is_encoder_decoder
    kind: Any = AutoModelForSeq2SeqLM if translates else AutoModelForCausalLM
    model, found = kind.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    for what in ("missing", "unexpected", "mismatched"):
        if names := found[f"{what}_keys"]:
            sys.exit(f"the weights have {what} parameters, {sorted(map(str, names))[0]} among them")
    return model.double().eval()


def draw(config: Any, most: int) -> torch.Tensor:
    """Returns random words for two sequences, at most as many as the model has positions."""
    count = min(most, config.max_position_embeddings or most)
    return torch.randint(config.vocab_size, (2, count), generator=torch.Generator().manual_seed(0))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def difference(model: Any) -> float:
    """Returns how far the log probabilities of generated words are from those of a pass over all words, with the state and
    without; the scores of a beam search too."""
    config, translates = model.config, model.config.is_encoder_decoder
    if translates:
        ids, count = draw(config.encoder, TOKENS), draw(config.decoder, TOKENS).shape[1]
    else:
        words = draw(config, 2 * TOKENS)
        count = max(1, words.shape[1] // 2)
        ids = words[:, :count]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "return_dict_in_generate": True}
    found = model.generate(**given, **options, num_beams=1, output_logits=True)
    read = found.sequences[:, :-1]
    whole = given | {"decoder_input_ids": read} if translates else {"input_ids": read}
    expected = model(**whole, use_cache=False).logits[:, -count:].log_softmax(-1)
    searched = [
        model.generate(**given, **options, num_beams=BEAMS, use_cache=cached, output_scores=True).sequences_scores
        for cached in (True, False)
    ]
    return max(relative(torch.stack(found.logits, 1).log_softmax(-1), expected), relative(*searched))


if __name__ == "__main__":
    absent: Any = dict.fromkeys(("fairseq", "torchaudio", "fw_fairseq"))
    sys.modules.update(absent)  # whose import fails from now on
    print(difference(load(sys.argv[1])))
