"""Prints the words per second of forward and backward of several models, which take turns.

speed.py DATA ROUNDS NAME=OPTIONS... -- COMMON OPTIONS

Weights and tokens are random, and there is one thread. Each figure is a median over the rounds; ratios are to the first row of
the same round.
"""

import math
import shlex
import statistics
import sys
import time

import torch
from fairseq import options, tasks

SENTENCES, LENGTH = 4, 256


def build(data: str, arguments: list[str]):
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [data, "--task", "language_modeling", "--cpu", *arguments])
    task = tasks.setup_task(args)
    return task.build_model(args).train(), task.build_criterion(args), task.source_dictionary


def step(model, criterion, sample) -> float:
    start = time.perf_counter()
    loss, _, _ = criterion(model, sample)
    loss.backward()
    model.zero_grad()
    return SENTENCES * LENGTH / (time.perf_counter() - start)


def main(data: str, rounds: int, rows: dict[str, str], common: list[str]) -> None:
    torch.set_num_threads(1)
    built = {name: build(data, [*common, *shlex.split(text)]) for name, text in rows.items()}
    found: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(rounds + 1):
        for name, (model, criterion, dictionary) in built.items():
            ranks = torch.rand(SENTENCES, LENGTH + 1).mul(math.log(len(dictionary) - dictionary.nspecial)).exp()  # few are rare
            tokens = dictionary.nspecial + ranks.long() - 1
            inputs = {"src_tokens": tokens[:, :-1], "src_lengths": torch.full((SENTENCES,), LENGTH)}
            speed = step(
                model, criterion, {"net_input": inputs, "target": tokens[:, 1:].contiguous(), "ntokens": SENTENCES * LENGTH}
            )
            if round_:
                found[name].append(speed)
    first = next(iter(found.values()))
    print("| row | words/s | times the first row |\n|---|---:|---:|")
    for name, speeds in found.items():
        ratio = statistics.median(a / b for a, b in zip(speeds, first))
        print(f"| {name} | {statistics.median(speeds):.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(sys.argv[1], int(sys.argv[2]), dict(part.split("=", 1) for part in sys.argv[3:split]), sys.argv[split + 1 :])
