#!/usr/bin/env bash
# What the CUDA kernels execute, counted in their machine code, and a model of their time, without a GPU. After tests/run.sh has made
# .venv. A rule takes 10 seconds; docs/kernels.md says how to read the table.
#   tests/counts.sh                                      every rule with keys and values 64 wide in bf16
#   tests/counts.sh --rules delta kda --widths 64 128    some rules, other widths
#   tests/counts.sh --rules sum --kinds                  instructions by kind
#   tests/counts.sh --widths 16 --feature-map elu        with a feature map inside the kernels
#   tests/counts.sh --rules decay --tier split           chunks of channels that forget fast
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=tests
exec .venv/bin/python -m counts "$@"
