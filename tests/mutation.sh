#!/usr/bin/env bash
# Small faults in the code, one at a time, in a copy of the repository: which of them does no test notice? After tests/run.sh has
# made .venv. It prints "survived" for a change that no test noticed: write the test, or see that the change changes nothing.
#   tests/mutation.sh --count 60 --seed 2          a sample of fw_fairseq/ and cuda/
#   tests/mutation.sh --only ops/ --lines lines    of some files; "lines" keeps which test runs which line, for the next run
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=tests
exec .venv/bin/python -m mutation "$@"
