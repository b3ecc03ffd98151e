#!/usr/bin/env bash
# Small faults in the code, one at a time, in a copy of the repository: which of them does no test notice? After tests/run.sh has
# made .venv. It prints "survived" for a change that no test noticed: write the test, or see that the change changes nothing.
#   tests/mutation.sh --count 60 --seed 2               a sample of fw_fairseq/ and cuda/
#   tests/mutation.sh --only ops/ --tests tests/ops     of some files, with some of the tests
#   tests/mutation.sh --jobs 2 --keep found             two at a time; after a stop it goes on, and another sample starts at once
#   tests/mutation.sh --jobs 2 --keep found --again     after you wrote tests: those of the sample that none noticed
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=tests
exec .venv/bin/python -m mutation "$@"
