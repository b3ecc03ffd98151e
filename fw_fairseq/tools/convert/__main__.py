"""fw-convert: makes a recurrent model of a pretrained softmax Transformer (Mao 2022; Kasai et al. 2021).

Everything but attention is copied. The projections of queries and keys are kept, and pass through a random linear map W_phi where
--feature-dim changes their width; queries are also multiplied by the 1/sqrt(d) of the softmax. The projection of values is kept, or
made smaller where a memory would sum up too much. The weights of gates are zero, so that gates start at their biases.

A checkpoint of fairseq and a GPT-2 become a fast_weight_lm; any other decoder of transformers becomes a pretrained_lm, which keeps
its modules. A recurrent model of flash-linear-attention, or Mamba 2 of transformers, keeps all that it is, and takes no --rule.
"""

from __future__ import annotations

import argparse

from ...feature_maps import FEATURE_MAPS, NORMS
from ...ops.checks import NORM_OF
from ..command import make_parser, mistakes_as_sentences
from .conversion import TARGETS, convert, training_options
from .report import table

PROG = "fw-convert"
EXAMPLE = "fw-convert transformer_lm.pt start.pt --rule decay --feature-dim 32"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, __doc__, EXAMPLE)
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint of fairseq's transformer_lm, or the folder of a model")
    parser.add_argument("output", metavar="OUTPUT", help="the checkpoint to write, for --finetune-from-model or --restore-file")
    parser.add_argument(
        "--rule",
        choices=TARGETS,
        help="an update rule makes fast weights; local_attention keeps softmax attention within a window; softmax leaves everything"
        " as it is",
    )
    parser.add_argument("--feature-dim", type=int, default=0, help="width of queries and keys per head before the map; 0: as it is")
    parser.add_argument("--feature-map", choices=list(FEATURE_MAPS), help="default: relu for rules that erase, identity for others")
    parser.add_argument("--feature-norm", choices=list(NORMS), help="default: sum or l2 for rules that erase, none for others")
    parser.add_argument("--attention-norm", action="store_true", help="divide what is read by the accumulated keys times the query")
    parser.add_argument("--attention-norm-of", choices=list(NORM_OF), help="as in training; default: read_and_erase")
    parser.add_argument("--mixer-pattern", default="", help="one mixer per layer, as in training: 'softmax,fast_weight*3'")
    parser.add_argument(
        "--local-window", type=int, help="tokens that each one sees in local_attention, counting itself; default: 32"
    )
    parser.add_argument(
        "--memory-window", type=int, default=0, help="of a decoder of transformers: tokens that softmax reads beside the memory"
    )
    parser.add_argument("--drop-rotary", action="store_true", help="of a decoder of transformers: leave rotary positions out")
    parser.add_argument("--seed", type=int, default=1, help="of the new parameters and of W_phi")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it exists")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    args = vars(parser().parse_args(arguments))
    with mistakes_as_sentences(PROG):
        output = args.pop("output")
        print(table(convert(args.pop("source"), output, **args)))
        print(f"\nto train it: fairseq-train DATA --user-dir fw_fairseq {training_options(output)}")


if __name__ == "__main__":
    main()
