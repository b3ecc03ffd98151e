"""Estimates the GPU-hours of the recipes by counting the multiply-adds of the models that they build.

    python recipes/estimate.py              prints a Markdown table of all rows; trains nothing and needs no data
    python recipes/estimate.py wikitext103/train.sh small-delta

Each step of a recipe runs as it is, except that LAUNCH is this file: its options build the model, and this is counted.
- Forward, per token: each weight of a matrix once; for softmax attention scores and values of half of the segment; for attention
  to a memory scores and values of the tokens that one sees in the mean, and scores of their distances in Transformer-XL; for a
  recurrent layer each number of its state twice (write and read), or three times where the rule erases. Rare words of an adaptive
  softmax count by Zipf's law.
  A multiplicative dense layer and its convolutions use their weights once for each module.
- Training costs three times the forward, and four times in reversible layers, which compute it again for the backward; tokens =
  updates x batch x length.
- The GPU reaches 40% of the 312 TFLOP/s of an A100 in bfloat16, also where a recipe trains in fp32.
The count leaves out chunk forms, random features, new projections of a memory, optimizer, validation and data. Real runs take
longer where these matter, or where layers are too small to keep the GPU busy.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOPS, SHARE = 312e12, 0.4  # of an A100 in bfloat16, without sparsity
WMT14_PAIRS, WMT14_TOKENS = 4.5e6, 28  # sentence pairs after filtering and target tokens of one, about
WIKITEXT2_PIECES = 3477138  # of the training text, as additive/prepare.sh cuts it
WORDS = {
    "wikitext103": 267744, "baevski_auli": 267744, "enwik8": 208, "additive": 8000, "gpt2": 50260, "wmt14": 40000,
    "terraformer": 32000,
}  # fmt: skip
STEPS = [f"{name}/{step}" for name in WORDS for step in ("train.sh", "finetune.sh") if (ROOT / "recipes" / name / step).exists()]
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


def main(chosen: list[str]) -> None:
    if chosen[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    if len(chosen) not in (0, 2):
        sys.exit("estimate.py: give a step and its row, such as wikitext103/train.sh small-delta, or nothing for all rows")
    if chosen and chosen[0] not in STEPS:
        sys.exit(f"estimate.py: the step is {chosen[0]}; it must be one of {', '.join(STEPS)}")
    print("| recipe | parameters | multiply-adds per token, forward | tokens | A100-hours in bf16, estimated |")
    print("|---|---:|---:|---:|---:|")
    for step, row in [tuple(chosen)] if chosen else ROWS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"| `{step} {row}` | {counted(step, row, Path(folder))} |", flush=True)


def counted(step: str, row: str, folder: Path) -> str:
    """Runs the step with data that are a dictionary and nothing else, and a start.pt that is empty."""
    name = step.split("/")[0]
    out = Path(f"{folder}_toy" if os.environ.get("TOY") == "1" else folder)
    words = "".join(f"w{i} 1\n" for i in range(WORDS[name] - 4))
    for data in ("bin", "data"):
        for file in ("dict.txt", "dict.en.txt", "dict.de.txt", "train.en-de.en.idx"):
            write(out / data / file, words)
    write(out / row / "start.pt", "")
    write(out / "bin" / "train.bin", "..")
    os.truncate(out / "bin" / "train.bin", 2 * WIKITEXT2_PIECES)  # of which additive/train.sh reads the size alone
    options = ["--source-lang", "en", "--target-lang", "de"] if name == "wmt14" else []
    given = {"OUT": str(folder), "LAUNCH": f"'{sys.executable}' '{__file__}'", "BIN": str(Path(sys.executable).parent)}
    done = subprocess.run([ROOT / "recipes" / step, row, *options], env=os.environ | given, capture_output=True, text=True)
    found = re.search(r"^counted: (.*)$", done.stdout, re.MULTILINE)
    if not found:
        sys.exit(f"estimate.py: {step} {row} built no model: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    return found[1]


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def count(arguments: list[str]) -> None:
    """In place of fairseq_cli.train: the cells of the row."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, arguments)
    config = convert_namespace_to_omegaconf(args)
    if "eval_bleu" in config.task:
        config.task.eval_bleu = False
    model = tasks.setup_task(config.task).build_model(config.model)
    length = config.task.get("tokens_per_sample") or WMT14_TOKENS
    per_token, tokens = forward(model, length), trained_tokens(config, length)
    passes = 4 if getattr(config.model, "reversible", False) else 3  # forward, forward again, and twice that backward
    hours = 2 * passes * per_token * tokens / (FLOPS * SHARE) / 3600  # two operations a multiply-add
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"\ncounted: {size / 1e6:.3g}M | {per_token / 1e6:.3g}M | {tokens / 1e9:.3g}G | {hours:.2g}")


def trained_tokens(config, length: int) -> float:
    if config.dataset.batch_size is None:
        return config.optimization.max_epoch * WMT14_PAIRS * WMT14_TOKENS
    batch = config.dataset.batch_size * config.distributed_training.distributed_world_size * config.optimization.update_freq[0]
    return config.optimization.max_update * batch * length


def forward(model, length: int) -> float:
    """Multiply-adds of one token."""
    from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
    from torch import nn

    total, counted_weights = 0.0, set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, AdaptiveInput, AdaptiveSoftmax)):
            counted_weights |= {id(parameter) for parameter in module.parameters()}  # not here, but below
        if isinstance(module, AdaptiveSoftmax):
            total += adaptive(module)
    total += sum(
        parameter.numel() for parameter in model.parameters() if parameter.dim() > 1 and id(parameter) not in counted_weights
    )
    decoder = model.decoder
    if decoder.adaptive_softmax is None and id(decoder.output_projection.weight) in counted_weights:
        total += decoder.output_projection.weight.numel()  # shared with the embedding
    return total + sum(mixing(module, length) for module in model.modules())


def mixing(module, length: int) -> float:
    """Multiply-adds of a layer that are not those of its weights, each once."""
    from fairseq.modules import MultiheadAttention

    from fw_fairseq.mixers.base import Mixer
    from fw_fairseq.mixers.local_attention import TransformerXl
    from fw_fairseq.mixers.srupp import Srupp
    from fw_fairseq.modules.linear_attention import LinearAttention
    from fw_fairseq.modules.sparse import Multiplicative, RecurrentUnits, SparseAttention
    from fw_fairseq.modules.sparse.projections import Convolutions

    if isinstance(module, (MultiheadAttention, SparseAttention)):
        return length * module.num_heads * module.head_dim  # scores and values of half of the tokens, too few for an encoder
    if isinstance(module, Multiplicative):
        return (module.count - 1) * module.weight.numel()
    if isinstance(module, Convolutions):
        return (module.count - 1) * sum(weight.numel() for weight in module.weights.values() if weight.dim() == 4)
    if isinstance(module, RecurrentUnits):
        return 2 * module.units
    if isinstance(module, LinearAttention):
        return 2 * module.num_heads * module.feature_map.out_dim * module.head_dim
    if hasattr(module, "reach"):
        seen = module.reach.memory + (module.reach.segment + 1) / 2
        width, cell = (module.kv_proj.in_features, 2 * module.embed_dim) if isinstance(module, Srupp) else (module.embed_dim, 0)
        return (3 if isinstance(module, TransformerXl) else 2) * width * seen + cell
    if isinstance(module, Mixer):
        erases = getattr(getattr(module, "rule", None), "erases", False)
        return (3 if erases else 2) * module.state_size()
    return 0.0


def adaptive(softmax) -> float:
    """The words of the head for each token, a rarer word's part as often as Zipf's law has it."""
    ends = [*softmax.cutoff]
    weights = [sum(1 / rank for rank in range(first + 1, last + 1)) for first, last in zip([0, *ends], ends)]
    head, *parts = map(scored, [softmax.head, *softmax.tail])
    return head + sum(part * weight / sum(weights) for part, weight in zip(parts, weights[1:]))


def scored(band) -> int:
    """Multiply-adds of the words of a band, which may be some rows of a table that all bands share."""
    from fw_fairseq.modules.plain_softmax import Band

    if isinstance(band, Band):
        return band.bias.numel() * band.words.shape[1]
    return sum(parameter.numel() for parameter in band.parameters() if parameter.dim() > 1)


if __name__ == "__main__":
    if sys.argv[1:3] == ["-m", "fairseq_cli.train"]:
        count(sys.argv[3:])
    else:
        main(sys.argv[1:])
