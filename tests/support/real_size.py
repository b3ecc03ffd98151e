"""Texts and checkpoints of the sizes that recipes are for, drawn at random: python -m support.real_size KIND FOLDER SCALE

text        WikiText-103: 103 million words of 267,734 types, of which each occurs three times or more
pairs       a tenth of WMT14: 450,000 pairs of 25 words, with 200,000 types on each side
checkpoint  the model of Baevski and Auli 2019 as fairseq wrote it then, with 247 million parameters, for the text in FOLDER/text
gpt2        GPT-2 small with a vocabulary of 50,257, learnt from FOLDER/text, and 20 MB of documents

SCALE is a share of those amounts of text; the sizes of models and vocabularies stay.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy
import torch

TYPES = 267_734  # beside the end of a line
LINES = {"train": 1_801_350, "valid": 3_760, "test": 4_358}  # of WikiText-103
PAIRS = {"train": 450_000, "valid": 3_000, "test": 3_000}
WORDS = 56  # of a line
draw = numpy.random.default_rng(1)


def names(count: int) -> numpy.ndarray:
    """Words of letters, of which the frequent ones are short."""
    letters = numpy.array(list("etaoinshrdlucmfwygpb"))
    digits = numpy.arange(count)[:, None] // 20 ** numpy.arange(6) % 20
    lengths = numpy.maximum(1, numpy.ceil(numpy.log(numpy.arange(count) + 2) / numpy.log(20)).astype(int))
    return numpy.array(["".join(word[:length]) for word, length in zip(letters[digits], lengths)])


def drawn(words: numpy.ndarray, count: int) -> numpy.ndarray:
    """By Zipf's law."""
    chances = 1 / (numpy.arange(len(words)) + 2.7)
    return words[numpy.searchsorted(chances.cumsum() / chances.sum(), draw.random(count)).clip(max=len(words) - 1)]


def lines(words: numpy.ndarray, count: int, mean: int) -> Iterable[str]:
    for _ in range(0, count, 20_000):
        lengths = draw.poisson(mean, min(20_000, count)).clip(min=1)
        chosen, ends = drawn(words, lengths.sum()), lengths.cumsum()
        yield from (" ".join(chosen[end - length : end]) for end, length in zip(ends, lengths))
        count -= 20_000


def write(path: Path, text: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in text)


def text(folder: Path, scale: float) -> None:
    types = names(TYPES)
    for split, count in LINES.items():
        count = max(40, int(count * scale))
        write(folder / "text" / f"wiki.{split}.tokens", lines(types, count, WORDS))
        if split == "train":
            with (folder / "text" / "wiki.train.tokens").open("a") as file:
                file.writelines(f"{' '.join(types[begin : begin + WORDS])}\n" for begin in list(range(0, len(types), WORDS)) * 3)


def pairs(folder: Path, scale: float) -> None:
    for language in ("en", "de"):
        types = names(200_000)
        for split, count in PAIRS.items():
            write(
                folder / "pairs" / f"{split}.{language}",
                (f"{line.capitalize()}." for line in lines(types, max(40, int(count * scale)), 25)),
            )


def checkpoint(folder: Path, scale: float) -> None:
    """Its dictionary is that of the text. Old attentions have one weight for queries, keys and values."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
    from fairseq.tasks.language_modeling import LanguageModelingTask

    words = Dictionary()
    Dictionary.add_file_to_dictionary(str(folder / "text" / "wiki.train.tokens"), words, str.split, 1)
    words.finalize()
    (folder / "published").mkdir(exist_ok=True)
    words.save(str(folder / "published" / "dict.txt"))
    arch, args = "transformer_lm_baevski_wiki103", Namespace(tokens_per_sample=512, max_target_positions=512)
    ARCH_CONFIG_REGISTRY[arch](args)
    args.arch, args.task, args.data = arch, "language_modeling", "data"
    torch.manual_seed(1)
    state = ARCH_MODEL_REGISTRY[arch].build_model(args, LanguageModelingTask(args, words)).state_dict()
    for kind in ("weight", "bias"):
        for name in [name for name in state if name.endswith(f"q_proj.{kind}")]:
            parts = [state.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            state[name.replace(f"q_proj.{kind}", f"in_proj_{kind}")] = torch.cat(parts)
    history = [{"criterion_name": "AdaptiveLoss", "optimizer_name": "FairseqNAG", "lr_scheduler_state": {}, "num_updates": 286_000}]
    where = {"train_iterator": {"epoch": 1}}
    saved = {"args": args, "model": state, "optimizer_history": history, "extra_state": where, "last_optimizer_state": None}
    torch.save(saved, folder / "published" / "model.pt", _use_new_zipfile_serialization=False)


def gpt2(folder: Path, scale: float) -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    target = folder / "gpt2"
    target.mkdir(exist_ok=True)
    learnt = ByteLevelBPETokenizer()
    learnt.train(str(folder / "text" / "wiki.test.tokens"), vocab_size=50256, special_tokens=[], show_progress=False)
    learnt.save_model(str(target))
    vocabulary = json.loads((target / "vocab.json").read_text())
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (target / "vocab.json").write_text(json.dumps(vocabulary))
    torch.manual_seed(1)
    end = vocabulary["<|endoftext|>"]
    GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), bos_token_id=end, eos_token_id=end)).save_pretrained(target)
    types = names(20_000)
    for split, count in (("train", 3_600), ("valid", 40), ("test", 40)):
        documents = (json.dumps({"text": line}) for line in lines(types, max(20, int(count * scale)), 1000))
        write(folder / "documents" / f"{split}.jsonl", documents)


if __name__ == "__main__":
    kinds: dict[str, Callable] = {"text": text, "pairs": pairs, "checkpoint": checkpoint, "gpt2": gpt2}
    sys.modules.setdefault("torchaudio", None)  # type: ignore[arg-type]  # fairseq's, of another torch: transformers trips over it
    kinds[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]))
