"""Predicts the time of a training update, and of the whole training, of any row of a recipe, from counts and assumed rates.

    python recipes/step_time.py [--gpu H100] [--precision bf16]                              a table of all rows
    python recipes/step_time.py wikitext103/train.sh small-delta [--gpu A100] [--precision fp32]

Each step of a recipe runs as it is, except that LAUNCH is this file: its options build the model, and forward, backward, clipping
and optimizer of two and of three sequences run on the CPU, where every operation is counted; the rest of the batch is on the line
through both. It trains nothing and needs no data, but fairseq, minutes for a large model, and for models with kernels the packages
of the tests.
- A product takes its multiply-adds at the rate of its precision, or its bytes at that of the memory, whichever is longer.
- Everything else takes its bytes; softmax attention a quarter of the rate of products, and half of the pairs where it is causal
  without a mask.
- The project's kernels take what tests/counts models of their machine code on an H100, times what was measured over it so far, with
  gates near 1; on an A100 longer by its multiprocessors and clock.
- The host takes 5.5 microseconds a launch; an update takes as long as host or device, whichever is slower.
Rates are in recipes/timing/rates.py. All numbers are PREDICTED: none was measured on these models. GPUs: A100, H100, H200;
precisions: bf16, fp16, tf32 (products of fp32 with 11 bits), fp32. Data, validation, checkpoints, and workers that wait for each
other are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests"), str(ROOT)]

from timing.rows import STEPS, answer  # noqa: E402

ROWS = (
    *(
        ("wikitext103/train.sh", row)
        for row in ("small-transformer", "small-delta", "medium-transformer", "medium-delta", "base-srupp")
    ),
    *(("enwik8/train.sh", row) for row in ("srupp", "delta")),
    *(("wmt14/train.sh", row) for row in ("softmax", "dpfp2")),
    *(("gpt2/finetune.sh", row) for row in ("softmax", "decay-32-phi")),
    ("baevski_auli/finetune.sh", "decay-32"),
    ("additive/train.sh", "windowed"),
    *(("terraformer/train.sh", row) for row in ("dense", "terraformer")),
)
HEAD = ("recipe", "parameters", "tokens of an update", "products, ms", "other, ms", "attention, ms", "kernels, ms", "optimizer, ms")
HEAD += ("launches", "update, ms", "tokens/s", "GPU-hours")


def main(arguments: list[str]) -> None:
    from timing.rates import GPUS, PRECISIONS

    parser = argparse.ArgumentParser(prog="step_time.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("row", nargs="*", help="a step and its row, such as wikitext103/train.sh small-delta; default: all rows")
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    args = parser.parse_args(arguments)
    if len(args.row) not in (0, 2):
        sys.exit("step_time.py: give a step and its row, such as wikitext103/train.sh small-delta, or nothing for all rows")
    if args.row and args.row[0] not in STEPS:
        sys.exit(f"step_time.py: the step is {args.row[0]}; it must be one of {', '.join(STEPS)}")
    print(f"Predicted for one {args.gpu} in {args.precision}, not measured:\n")
    print(f"| {' | '.join(HEAD)} |\n|---|{'---:|' * (len(HEAD) - 1)}")
    for step, row in [tuple(args.row)] if args.row else ROWS:
        counts = answer(Path(__file__), step, row)
        print(f"| {' | '.join((f'`{step} {row}`', *cells(counts, args.gpu, args.precision)))} |", flush=True)


def cells(counts: dict, gpu: str, precision: str) -> list[str]:
    """The columns after the name."""
    from timing.kernels import kernel_ms
    from timing.rates import GPUS, tokens, update, updates

    x = update(counts, GPUS[gpu], precision, kernel_ms)
    slower, size = max(x.device, x.host), tokens(counts)
    hours = updates(counts) * slower * counts["workers"] / 3600
    parts = [f"{1e3 * part:.3g}" if part else "" for part in x[:5]]
    whole = f"{1e3 * slower:.3g}" + (" (host)" if x.host > x.device else "")
    return [
        f"{counts['parameters'] / 1e6:.3g}M",
        f"{size:.0f}",
        *parts,
        f"{x.launches:.0f}",
        whole,
        f"{size / slower:.3g}",
        f"{hours:.2g}",
    ]


if __name__ == "__main__":
    if sys.argv[1:3] == ["-m", "fairseq_cli.train"]:
        from timing.counted import count

        count(sys.argv[3:])
    else:
        main(sys.argv[1:])
