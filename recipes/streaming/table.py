"""What measure.py wrote as a Markdown table, a row for each file: table.py FILE..."""

import sys
from pathlib import Path

print("| model | tokens | memory after the first marks, MB | at the end | largest / smallest from the second mark on |")
print("|---|---:|---:|---:|---:|")
for name in sys.argv[1:]:
    marks = [tuple(map(int, line.split())) for line in Path(name).read_text().splitlines()]
    sizes = [resident for _, resident, _ in marks]
    first, second, last = (f"{size / 1e6:.1f}" for size in (sizes[0], sizes[1], sizes[-1]))
    print(f"| {Path(name).stem} | {marks[-1][0]:,} | {first}, {second} | {last} | {max(sizes[1:]) / min(sizes[1:]):.4f} |")
