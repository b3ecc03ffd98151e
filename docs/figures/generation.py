"""Draws the picture of the README out of a report of ``fw-bench model --json``: what one more token costs.

python docs/figures/generation.py docs/results/cost.json >docs/figures/generation.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the colours of this checkout, whatever is installed
from fw_fairseq.tools.plot.colours import colour_of

MODELS = {"transformer_lm": "softmax attention", "fast_weight_lm delta": "fast weights (delta rule)"}
MARKS = {
    "transformer_lm": '<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>',
    "fast_weight_lm delta": '<path d="M{x:.1f} {y:.1f}m0-5.5l5.5 5.5l-5.5 5.5l-5.5-5.5z" fill="{colour}"/>',
}
PANELS = {"seconds": ("ms for one more token", 1e3, 10, 2), "state_bytes": ("MB kept of the text", 1e-6, 100, 25)}
WIDTH, HEIGHT, LEFT, TOP, ACROSS, UP = 760, 300, 50, 52, 300, 195  # of the picture; of a panel: its place and its size
LONGEST = 4096


def panel(rows: list[dict], key: str, left: int) -> list[str]:
    """Lines and marks of each model against the number of tokens before, both axes linear."""
    label, unit, most, step = PANELS[key]
    bottom = TOP + UP
    parts = [f'<text x="{left}" y="{TOP - 24}" font-size="15" font-weight="bold">{label}</text>']
    for value in range(0, most + 1, step):
        y = bottom - UP * value / most
        parts.append(f'<path d="M{left} {y:.1f}h{ACROSS}" stroke="{"#444444" if value == 0 else "#dddddd"}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for tokens in (0, 1024, 2048, 3072, LONGEST):
        parts.append(f'<text x="{left + ACROSS * tokens / LONGEST:.1f}" y="{bottom + 20}" text-anchor="middle">{tokens}</text>')
    parts.append(f'<text x="{left + ACROSS / 2}" y="{bottom + 42}" text-anchor="middle">tokens before it</text>')
    for name, title in MODELS.items():
        colour = colour_of(name)
        points = [
            (left + ACROSS * row["context"] / LONGEST, bottom - UP * row[key] * unit / most) for row in rows if row["name"] == name
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="3"/>')
        parts += [MARKS[name].format(x=x, y=y, colour=colour) for x, y in points]
        x, y = points[-1]
        parts.append(f'<text x="{x - 20:.1f}" y="{y - 12:.1f}" text-anchor="end" font-weight="bold" fill="{colour}">{title}</text>')
    return parts


def picture(report: dict) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
    ]
    for number, key in enumerate(PANELS):
        parts += panel(report["generation"], key, LEFT + number * (WIDTH // 2))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(picture(json.loads(Path(sys.argv[1]).read_text())))
