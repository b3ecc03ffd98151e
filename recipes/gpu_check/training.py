"""Training updates of the recipes' models by fairseq's own trainer, on drawn words: softmax attention beside rules.

    python recipes/gpu_check/training.py OUT.json                                             all cases; half an hour of a GPU
    python recipes/gpu_check/training.py OUT.json wikitext103/train.sh small-delta bf16 ...    these cases, by threes
    TOY=1 python recipes/gpu_check/training.py OUT.json wikitext103/train.sh small-delta fp32  a tiny model on the CPU

Of each case: tokens in a second, ms of an update, ms of forward and backward and what of it the host takes until all is enqueued;
on a GPU also the device's ms by kind of kernel, launches of an update, peak memory. The row softmax of baevski_auli is fairseq's
own model with softmax attention. Each case runs without CUDA graphs of its layers and, where fairseq-train has --graph-training,
with them. The steps of the recipes run as they are, except that LAUNCH is this file.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests"), str(ROOT)]

BAEVSKI_AULI = "baevski_auli/finetune.sh"
CASES = [(BAEVSKI_AULI, row, "bf16") for row in ("softmax", "decay-32", "delta-32", "gated-32", "sum-32")]
CASES += [("wikitext103/train.sh", f"small-{row}", p) for row in ("transformer", "delta", "linear") for p in ("bf16", "tf32")]
CASES += [("wikitext103/train.sh", f"medium-{row}", "bf16") for row in ("transformer", "delta", "linear")]
CASES += [("wmt14/train.sh", row, "bf16") for row in ("softmax", "dpfp2")]
GRAPHS = "--graph-training"
KINDS = {  # of kernels, by words in their names
    "own": ("linear_", "delta_", "decay_", "divided"),
    "attention": ("fmha", "attention", "flash"),
    "products": ("gemm", "cutlass", "nvjet", "cublas"),
    "softmax": ("softmax", "nll"),
}
WARM, UPDATES, BATCHES, PROFILED = 6, 15, 4, 3


def main(out: Path, cases: list[tuple[str, str, str]]) -> int:
    from timing.rows import answer

    rows: list[dict[str, Any]] = []
    for (step, row, precision), graphs in itertools.product(cases or CASES, (False, True)):
        softmax = step == BAEVSKI_AULI and row == "softmax"
        given = {"PRECISION": precision, "SOFTMAX": "1" if softmax else "", "GRAPHS": "1" if graphs else ""}
        try:
            found = answer(Path(__file__), step, "decay-32" if softmax else row, **given)
        except SystemExit as failure:
            found = {"failed": str(failure)}
        rows.append({"step": step, "row": row, "precision": precision, "graphs": graphs} | found)
        print(json.dumps(rows[-1]), flush=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")
    return any("failed" in row for row in rows)


def of_softmax(arguments: list[str]) -> list[str]:
    """The arguments of fairseq's own model in place of one with a rule."""
    kept, skipped = [], False
    for word in arguments:
        ours = word in ("--update-rule", "--feature-dim", "--feature-map", "--feature-norm")
        if not ours and not skipped:
            kept.append("transformer_lm_wiki103" if word == "fast_weight_lm_baevski_auli" else word)
        skipped = ours
    return [*kept, "--decoder-attention-heads", "8"]


def measured(arguments: list[str], graphs: bool) -> dict[str, Any]:
    """One case."""
    import torch
    from fairseq.trainer import Trainer
    from timing.counted import SENTENCE, drawn
    from timing.rows import configured

    if graphs and GRAPHS not in known_options(arguments):
        return {"not there": GRAPHS}
    config, task, model, criterion = configured([*arguments, *[GRAPHS] * graphs])
    length = config.task.get("tokens_per_sample") or SENTENCE
    size = int(config.dataset.batch_size or config.dataset.max_tokens // length)
    trainer = Trainer(config, task, model, criterion)
    batches = [drawn(model, task, size, length, seed) for seed in range(BATCHES)]
    trainer._dummy_batch = batches[0]
    cuda = trainer.cuda
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    turns = itertools.cycle(batches)
    for _ in range(WARM):
        trainer.train_step([next(turns)])
    update, _ = timed(lambda: trainer.train_step([next(turns)]), wait)
    prepared = itertools.cycle([trainer._prepare_sample(batch)[0] for batch in batches])

    def passes() -> None:
        trainer.model.zero_grad(set_to_none=True)
        trainer.criterion(trainer.model, next(prepared))[0].backward()

    both, host = timed(passes, wait)
    found = {"update_ms": update, "passes_ms": both, "passes_host_ms": host, "tokens_per_second": size * length / update * 1e3}
    if cuda:
        found |= profiled(lambda: trainer.train_step([next(turns)]), wait)
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def known_options(arguments: list[str]) -> str:
    """The help of fairseq-train for the architecture in the arguments."""
    from fairseq import options
    from fairseq.models import ARCH_MODEL_REGISTRY

    parser = options.get_training_parser()
    ARCH_MODEL_REGISTRY[arguments[arguments.index("--arch") + 1]].add_args(parser)
    return parser.format_help()


def timed(call: Callable[[], object], wait: Callable[[], None], clock=time.perf_counter) -> tuple[float, float]:
    """Milliseconds of a call, and those of the host until all is enqueued."""
    wait()
    start = clock()
    for _ in range(UPDATES):
        call()
    host = clock() - start
    wait()
    return 1e3 * (clock() - start) / UPDATES, 1e3 * host / UPDATES


def profiled(call: Callable[[], object], wait: Callable[[], None]) -> dict[str, Any]:
    """The device's milliseconds by kind of kernel, and launches, of one call."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            call()
        wait()
    return by_kind(profile.key_averages())


def by_kind(events) -> dict[str, Any]:
    kinds: dict[str, float] = {}
    launches = 0.0
    for event in events:
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e3 / PROFILED
        launches += event.count / PROFILED
    return {"device_ms": kinds, "launches": launches}


if __name__ == "__main__":
    if sys.argv[1:3] == ["-m", "fairseq_cli.train"]:
        arguments = of_softmax(sys.argv[3:]) if os.environ.get("SOFTMAX") else sys.argv[3:]
        print("\nanswer: " + json.dumps(measured(arguments, bool(os.environ.get("GRAPHS")))))
    else:
        words = sys.argv[2:]
        if len(sys.argv) < 2 or len(words) % 3 or sys.argv[1].startswith("-"):
            sys.exit(__doc__)
        sys.exit(main(Path(sys.argv[1]), list(zip(words[::3], words[1::3], words[2::3]))))
