"""Tokenizers of the words of dict.txt, and the order of embeddings where a tokenizer is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import Mistake
from ...files import tokenizer_size

# That follow without a space.
MARKS_AFTER = (",", ".", ";", ":", "!", "?", ")", "]", "%", "n't", "'s", "'m", "'re", "'ve", "'ll", "'d")


def renumber(model: Any, dictionary: Any, tokenizer: Path) -> torch.Tensor:
    """Sorts embeddings by the tokenizer's ids. Its token i is the dictionary's symbol 'i', and the one without a symbol is </s>.
    Returns the dictionary's number of each id."""
    numbers = dictionary.symbols[dictionary.nspecial :]
    size = len(numbers) + 1
    missing = sorted(set(map(str, range(size))).difference(numbers), key=int)
    if model.config.input_bands or model.config.output_bands or len(missing) != 1:
        raise Mistake("--tokenizer needs a checkpoint that fw-convert made of a GPT-2; leave it out for the words of dict.txt")
    if (found := tokenizer_size(tokenizer)) != size:
        raise Mistake(f"--tokenizer {tokenizer} has {found} tokens; it must be that of CHECKPOINT's GPT-2, which has {size}")
    end = int(missing[0])
    order = torch.tensor([dictionary.eos() if i == end else dictionary.index(str(i)) for i in range(size)])
    model.embed_tokens = nn.Embedding.from_pretrained(model.embed_tokens.weight[order].detach(), freeze=False)
    if model.output is not None:
        model.output.weight = nn.Parameter(model.output.weight[order].detach())
    model.config.update({"vocab_size": size, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None})
    return order


def word_tokenizer(dictionary: Any, before: bool = True, first: int | None = None) -> Any:
    """Returns a tokenizer that splits at spaces and puts a symbol before each text, or the end of sentence after it.

    ``before`` is for language models: the tokenizer then also decodes with a space before the first word, so that it continues a
    prompt. Where a text was split at its marks, it decodes without those spaces. first: the number of the symbol that is put
    before texts; by default the end of sentence.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    eos = dictionary.eos_word
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dictionary.symbols)}, unk_token=dictionary.unk_word))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bos = eos if first is None else dictionary.symbols[first]
    numbers = {word: dictionary.symbols.index(word) for word in dict.fromkeys([bos, eos])}
    place, after = (f"{bos} $A", f"{bos}:1 $B:1") if before else (f"$A {eos}", f"$B:1 {eos}:1")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=place, pair=f"{place} {after}", special_tokens=[*numbers.items()]
    )
    joined = [decoders.Replace(f" {mark}", mark) for mark in MARKS_AFTER] + [decoders.Replace(f"{mark} ", mark) for mark in "(["]
    joined += [decoders.Replace(" @-@ ", "-"), decoders.Replace(" @,@ ", ","), decoders.Replace(" @.@ ", ".")]  # of WikiText
    if any(word.endswith("@@") for word in dictionary.symbols):
        joined.insert(0, decoders.Replace("@@ ", ""))  # pieces of words
    spaced = decoders.Replace(Regex(f"^(?!{'|'.join(map(re.escape, numbers))})"), " ")
    stripped = [] if before else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([spaced, decoders.Fuse(), *joined, *stripped])
    special = {"bos_token": bos, "eos_token": eos, "unk_token": dictionary.unk_word, "pad_token": dictionary.pad_word}
    names = ["input_ids", "attention_mask"]
    side = "left" if before else "right"  # generation goes on at the right; labels of translations begin at the left
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side=side, model_input_names=names, **special)
