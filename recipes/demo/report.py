"""Writes table.md and demo.png from the logs of recipes/demo.sh.

python report.py FOLDER
"""

import json
import re
import sys
from pathlib import Path

from fw_fairseq.tools.plot.colours import ink, looks
from fw_fairseq.tools.plot.style import SMALL, canvas, log_lengths, log_values, plot, save

MODELS = {"gated_delta": "fast_weight_lm gated_delta", "transformer": "transformer_lm"}
NAMES = {"gated_delta": "fast weights (gated delta rule)", "transformer": "Transformer (softmax attention)"}
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
    for name, label in MODELS.items():
        size = re.findall(r"num\. shared model params: ([\d,]+)", logs[name])[-1]
        cells = [f"{result[0]:.2f} ({result[1]:.0f} tokens/s)" if result else "" for result in tests[name].values()]
        lines.append(f"| {label} | {size} | " + " | ".join(cells) + " |")
    report = json.loads((folder / "generation.json").read_text())
    contexts = report["settings"]["contexts"]
    lines += ["", "| generation | " + " | ".join(f"after {c} tokens" for c in contexts) + " |", "|---|" + "---:|" * len(contexts)]
    for label in MODELS.values():
        rows = {row["context"]: row for row in report["generation"] if row["name"] == label}
        cells = (f"{1e3 * rows[c]['seconds']:.2f} ms, {rows[c]['state_bytes'] / 1e3:.0f} kB" for c in contexts)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += [""] + [f"- {label}: {sample((folder / name / 'sample.log').read_text())}" for name, label in MODELS.items()]
    return "\n".join(lines) + "\n"


def draw(path: Path, logs, tests, report) -> None:
    """Validation perplexity against updates, test perplexity by how a model reads the text, size of its state in generation."""
    figure, (curves, bars, costs) = canvas(3.4, 3, beside=True)
    figure.set_figwidth(8)
    for shift, (name, style) in enumerate(looks(MODELS).items()):
        plot(curves, style, NAMES[name], dict(valid_curve(logs[name])))
        drawn = [(place, result[0]) for place, result in enumerate(tests[name].values()) if result]
        places, heights = zip(*drawn)
        boxes = bars.bar([place + 0.47 * shift - 0.235 for place in places], heights, 0.46, color=style.color)
        bars.bar_label(boxes, fmt="%.1f", fontsize=SMALL, color=ink(style.color), padding=1)
        sizes = {row["context"]: row["state_bytes"] / 1e3 for row in report["generation"] if row["name"] == MODELS[name]}
        plot(costs, style, NAMES[name], sizes)
        costs.annotate(
            f"{sizes[max(sizes)]:,.0f} kB", (max(sizes), sizes[max(sizes)]), (0, 8), textcoords="offset points", ha="right",
            fontsize=SMALL, color=ink(style.color),
        )  # fmt: skip
    curves.set(title="Training", xlabel="updates", ylabel="perplexity of the validation text")
    bars.set(title="Reading the test text", ylabel="perplexity", xlim=(-0.52, len(WAYS) - 0.48))
    bars.set_xticks(range(len(WAYS)), [way.replace(" ", "\n", 1) for way in WAYS.values()])
    bars.grid(visible=False, axis="x")
    costs.set(title="Generating", xlabel="tokens before", ylabel="kB kept of the text")
    log_values(costs)
    costs.yaxis.set_major_formatter("{x:,.0f}")
    log_lengths(costs, report["settings"]["contexts"])
    for axes in (bars, costs):
        axes.margins(y=0.12)
    handles, labels = curves.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, handlelength=2.6, fontsize=SMALL + 1)
    save(figure, [path], dpi=160)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
