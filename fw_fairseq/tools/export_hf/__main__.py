"""fw-export-hf: writes a checkpoint of fast_weight_lm or fast_weight_transformer as a folder for Hugging Face transformers.

AutoModelForCausalLM.from_pretrained(OUTPUT, trust_remote_code=True), or AutoModelForSeq2SeqLM for translation, loads it wherever
torch and transformers are installed, because the folder has the code of the model. The tokenizers in the folder add what fairseq
adds: texts begin with the end of sentence, or with <s> after --add-bos-token, and sources end with the end of sentence.
"""

from __future__ import annotations

import argparse
import importlib.util

from ... import Mistake
from ..command import make_parser, mistakes_as_sentences
from .export import PROG, export

EXAMPLE = "fw-export-hf checkpoint_best.pt folder --data DATA"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, __doc__, EXAMPLE)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of fast_weight_lm or fast_weight_transformer")
    parser.add_argument("output", metavar="OUTPUT", help="the folder to write")
    parser.add_argument("--data", metavar="FOLDER", help="the folder of the dictionaries; default: that of the training")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the tokenizer of the GPT-2 that fw-convert made CHECKPOINT of")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it is an earlier export")
    return parser


def mixers_of(model) -> str:
    """Returns the names of the mixers of a model's layers, of the decoder's in translation."""
    return ", ".join(dict.fromkeys(getattr(model.config, "decoder", model.config).mixers))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    args = vars(parser().parse_args(arguments))
    with mistakes_as_sentences(PROG):
        if importlib.util.find_spec("transformers") is None:
            raise Mistake("transformers is missing; install fw_fairseq with the extra [huggingface], on Python 3.10 or later")
        model = export(**args)
    print(f"{args['output']}: {model.num_parameters():,} parameters, {mixers_of(model)}")


if __name__ == "__main__":
    main()
