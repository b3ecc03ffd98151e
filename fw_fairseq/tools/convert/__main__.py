"""fw-convert: a pretrained softmax Transformer becomes a fast_weight_lm, all but its attention kept (Mao 2022; Kasai et al. 2021).

Queries and keys keep their pretrained maps, through a random linear map W_phi where --feature-dim changes their width, and the
1/sqrt(d) of the softmax is folded into the queries. Values keep theirs, made smaller where a memory would sum up too much. Gates
start at their biases: their weights are zero.
"""

from __future__ import annotations

import argparse
import sys

from ...feature_maps import FEATURE_MAPS, NORMS
from .conversion import TARGETS, convert, table


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fw-convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint of fairseq's transformer_lm, or the folder of a GPT-2")
    parser.add_argument("output", metavar="OUTPUT", help="the checkpoint to write, for --finetune-from-model or --restore-file")
    parser.add_argument(
        "--rule", required=True, choices=TARGETS, help="local_attention: a window of it; softmax: nothing is converted"
    )
    parser.add_argument("--feature-dim", type=int, default=0, help="width of queries and keys per head before the map; 0: as it is")
    parser.add_argument("--feature-map", choices=list(FEATURE_MAPS), help="default: relu for rules that erase, identity for others")
    parser.add_argument("--feature-norm", choices=list(NORMS), help="default: sum or l2 for rules that erase, none for others")
    parser.add_argument("--attention-norm", action="store_true", help="divide what is read by the accumulated keys times the query")
    parser.add_argument("--mixer-pattern", default="", help="one mixer per layer, as in training: 'softmax,fast_weight*3'")
    parser.add_argument("--seed", type=int, default=1, help="of the new parameters and of W_phi")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it exists")
    return parser


def main(arguments=None) -> None:
    args = vars(parser().parse_args(arguments))
    try:
        print(table(convert(args.pop("source"), args.pop("output"), **args)))
    except (OSError, ValueError) as error:
        sys.exit(f"fw-convert: {error}")


if __name__ == "__main__":
    main()
