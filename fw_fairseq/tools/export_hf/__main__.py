"""fw-export-hf: writes a checkpoint of this project's models as a folder for Hugging Face transformers.

AutoModelForCausalLM.from_pretrained(OUTPUT, trust_remote_code=True), or AutoModelForSeq2SeqLM for translation, loads it wherever
torch and transformers are installed, because the folder has the code of the model. The tokenizers in the folder add what fairseq
adds: texts begin with the end of sentence, or with <s> after --add-bos-token, and sources end with the end of sentence.
--renew puts the code of today into an earlier folder, for a newer transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from ...errors import Mistake
from ..command import make_parser, mistakes_as_sentences
from .export import PROG, export
from .folders import renew

EXAMPLE = "fw-export-hf checkpoint_best.pt folder --data DATA"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, __doc__, EXAMPLE)
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        help="a checkpoint of fast_weight_lm, fast_weight_transformer or pretrained_lm",
    )
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help="the folder to write")
    parser.add_argument("--data", metavar="FOLDER", help="the folder of the dictionaries; default: that of the training")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the tokenizer of the model that fw-convert made CHECKPOINT of")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it is an earlier export")
    parser.add_argument("--onnx", dest="onnx_file", action="store_true", help="add model.onnx, which keeps its state")
    parser.add_argument("--renew", type=Path, metavar="FOLDER", help="an earlier export that gets the code of today; given alone")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    asked = parser()
    args = vars(asked.parse_args(arguments))
    folder = args.pop("renew")
    if folder is None and args["output"] is None:
        asked.error("CHECKPOINT and OUTPUT are required")
    if folder is not None and any(args.values()):
        asked.error("--renew takes its folder alone")
    with mistakes_as_sentences(PROG):
        if importlib.util.find_spec("transformers") is None:
            raise Mistake("transformers is missing; install fw_fairseq with the extra [huggingface], on Python 3.10 or later")
        if folder is not None:
            renew(folder)
            said = "renewed"
        else:
            model = export(**args)
            config = getattr(model.config, "decoder", model.config)  # of the decoder in translation
            mixers = dict.fromkeys(getattr(config, "mixers", ["softmax"]))
            said = f"{model.num_parameters():,} parameters, {', '.join(mixers)}"
    print(f"{folder or args['output']}: {said}")


if __name__ == "__main__":
    main()
