#!/usr/bin/env bash
# Everything that needs a GPU, in one go: tests on the device, compute-sanitizer where there is one, speed against the peers.
#   Needs     a CUDA device, torch for it, CuPy; pytest for the tests; flash-linear-attention is measured where it is installed
#   Time      under 9 minutes: every step has a limit, and what does not finish is reported as such
#   Result    OUT/report.json: device, versions, every step and every figure; OUT/{ops,model,mixers}.svg; the logs of the steps
#   recipes/gpu_check.sh OUT
#   PYTHON=python3 recipes/gpu_check.sh OUT      with another interpreter than that of .venv
# Ends with 0 if every step went well, 1 if one did not, 3 without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:?usage: recipes/gpu_check.sh OUT}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"
PYTHONPATH=$PWD exec "$python" recipes/gpu_check/run.py "$out"
