#!/usr/bin/env bash
# Everything that needs a GPU, in one go: tests on the device, compute-sanitizer where there is one, speed against the peers.
#   Needs     a CUDA device, torch for it, CuPy; pytest for the tests; flash-linear-attention is measured where it is installed;
#             without fairseq the step "model" is skipped, and everything else runs
#   Time      15 minutes at most: every step has a limit, and what does not finish is reported as such; kernels compile in up to
#             12 processes at once, tests too with pytest-xdist. With kernels that are compiled the tests take 40 s on an H100 with 16
#             cores, a sanitizer a minute, the times of the kernels 12 s
#   Result    OUT/report.json, written after every step: device, versions, every step and every figure; OUT/*.svg; the logs of the steps;
#             tests/counts.sh --measured OUT/speed.json puts the kernels' times beside those of a model, on any machine
#   Beside it python recipes/gpu_check/training.py measures updates of the recipes' models, and beside_fla.py the kernels of a peer
#   recipes/gpu_check.sh OUT
#   PYTHON=python3 recipes/gpu_check.sh OUT      with another interpreter than that of .venv
# Ends with 0 if every step went well, 1 if one did not, 3 without a GPU.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then # the comment above
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit 0
fi
out=${1:?usage: recipes/gpu_check.sh OUT}
[ "${out#-}" = "$out" ] || { echo "gpu_check.sh: $out is no option; the argument is OUT, a folder for the report" >&2; exit 2; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$(realpath "$0")")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" recipes/gpu_check/run.py "$out"
