"""Writes table.md and demo.png from the logs of recipes/demo.sh.

python report.py FOLDER
"""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

MODELS = {"gated_delta": ("fast_weight_lm gated_delta", "o", "-", "0.35"), "transformer": ("transformer_lm", "s", "--", "0.75")}
WAYS = {"segments": "segments of 128", "sliding": "sliding window", "stream": "one stream"}


def valid_curve(log: str) -> list[tuple[int, float]]:
    """Perplexity by update. Where a resumed run measured it again, the last value counts."""
    found = re.findall(r"valid on 'valid' subset .*\| ppl ([\d.]+) .*\| num_updates (\d+)", log)
    return sorted({int(updates): float(perplexity) for perplexity, updates in found}.items())


def test_result(log: Path) -> tuple[float, float] | None:
    """Perplexity and tokens per second."""
    if not log.exists():
        return None
    text = log.read_text()
    return float(re.search(r"Perplexity: ([\d.]+)", text)[1]), float(re.search(r"\(([\d.]+) tokens/s\)", text)[1])


def sample(log: str) -> str:
    return re.search(r"^H-\d+\t\S+\t(.*)$", log, re.MULTILINE)[1]


def main(folder: Path) -> None:
    logs = {name: (folder / name / "train.log").read_text() for name in MODELS}
    tests = {name: {way: test_result(folder / name / f"{way}.log") for way in WAYS} for name in MODELS}
    table = write_table(folder, logs, tests)
    (folder / "table.md").write_text(table, encoding="utf-8")
    draw(folder / "demo.png", logs, tests, json.loads((folder / "generation.json").read_text()))
    print(table, end="")


def write_table(folder: Path, logs, tests) -> str:
    lines = ["| perplexity, test | parameters | " + " | ".join(WAYS.values()) + " |", "|---|---:|" + "---:|" * len(WAYS)]
    for name, (label, *_) in MODELS.items():
        size = re.findall(r"num\. shared model params: ([\d,]+)", logs[name])[-1]
        cells = [f"{result[0]:.2f} ({result[1]:.0f} tokens/s)" if result else "" for result in tests[name].values()]
        lines.append(f"| {label} | {size} | " + " | ".join(cells) + " |")
    report = json.loads((folder / "generation.json").read_text())
    contexts = report["settings"]["contexts"]
    lines += ["", "| generation | " + " | ".join(f"after {c} tokens" for c in contexts) + " |", "|---|" + "---:|" * len(contexts)]
    for label, *_ in MODELS.values():
        rows = {row["context"]: row for row in report["generation"] if row["name"] == label}
        cells = (f"{1e3 * rows[c]['seconds']:.2f} ms, {rows[c]['state_bytes'] / 1e3:.0f} kB" for c in contexts)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += [""] + [f"- {label}: {sample((folder / name / 'sample.log').read_text())}" for name, (label, *_) in MODELS.items()]
    return "\n".join(lines) + "\n"


def draw(path: Path, logs, tests, report) -> None:
    """Validation perplexity against updates, test perplexity by how a model reads the text, size of its state in generation."""
    figure, (curves, bars, costs) = pyplot.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    for shift, (name, (label, marker, dashes, grey)) in enumerate(MODELS.items()):
        line = {"marker": marker, "ls": dashes, "color": grey, "ms": 5, "label": label}
        curves.plot(*zip(*valid_curve(logs[name])), **line)
        drawn = [(place, result[0]) for place, result in enumerate(tests[name].values()) if result]
        places, heights = zip(*drawn)
        boxes = bars.bar([p + 0.4 * shift - 0.2 for p in places], heights, 0.38, color=grey, edgecolor="black")
        bars.bar_label(boxes, fmt="%.1f", fontsize=8)
        rows = [row for row in report["generation"] if row["name"] == label]
        costs.plot([row["context"] for row in rows], [row["state_bytes"] / 1e3 for row in rows], **line)
    curves.set(yscale="log", xlabel="updates", ylabel="perplexity, validation")
    curves.yaxis.set_major_formatter("{x:g}")
    curves.yaxis.set_minor_formatter("{x:g}")
    bars.set(ylabel="perplexity, test")
    bars.set_xticks(range(len(WAYS)), [way.replace(" ", "\n", 1) for way in WAYS.values()], fontsize=8)
    bars.set_xlim(-0.6, len(WAYS) - 0.4)
    bars.margins(y=0.15)
    costs.set(xscale="log", yscale="log", xlabel="tokens before", ylabel="state in generation, kB")
    costs.yaxis.set_major_formatter("{x:g}")
    contexts = report["settings"]["contexts"]
    costs.set_xticks(contexts, [str(context) for context in contexts])
    costs.minorticks_off()
    for axes in (curves, costs):
        axes.grid(alpha=0.3)
    curves.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
