"""Prints a Markdown table of the files that measure.py wrote, a row for each: table.py FILE..."""

import sys
from pathlib import Path

print("| model | tokens | marks | least, MB | most, MB | most / least |")
print("|---|---:|---:|---:|---:|---:|")
for name in map(Path, sys.argv[1:]):
    tokens, resident = zip(*(map(int, line.split()) for line in name.read_text().splitlines()))
    least, most = min(resident), max(resident)
    print(f"| {name.stem} | {tokens[-1]:,} | {len(tokens)} | {least / 1e6:.2f} | {most / 1e6:.2f} | {most / least:.4f} |")
