"""How many times as fast transformers' recurrent models are: python transformers.py REPORT --out FIGURE"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fw_fairseq.tools.bench.recurrent_models import draw
from fw_fairseq.tools.plot.style import save

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--out", type=Path, nargs="+", required=True)
args = parser.parse_args()
save(draw(json.loads(args.report.read_text())), args.out)
