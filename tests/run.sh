#!/usr/bin/env bash
# The test command. First run: makes .venv with pinned packages whose hashes are checked. Then: ruff, mypy and pytest, with one process
# more than there are cores, because many tests wait for commands; arguments go to pytest. Where an environment is active
# that has all packages which the tests need, they run there.
#   tests/run.sh                    everything
#   tests/run.sh -m quick           before every commit: the tests that train nothing and start no command
#   tests/run.sh -m "not long"      what CI runs: all but those that take long, and the first cases of those with many
#   tests/run.sh -k chunk -x        some of it
#   JOBS=1 tests/run.sh             in one process
#   PYTHON=python3.13 tests/run.sh  another interpreter for a new .venv
set -euo pipefail
cd "$(dirname "$0")/.."

needed="cupy fairseq hypothesis matplotlib mypy pytest ruff sacremoses subword_nmt torch transformers xdist"
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [ -n "$active" ] && [ "$active" != "$PWD/.venv" ] && "$active/bin/python" - $needed <<'EOF'; then
import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))
EOF
    folder=$active
else
    folder=.venv
fi
if [ "$folder" != .venv ]; then
    echo "testing in $folder, which has what the tests need"
else
    requirements/install.sh test
fi

"$folder/bin/python" -m ruff check .
"$folder/bin/python" -m ruff format --check .
"$folder/bin/python" -m mypy
export OMP_NUM_THREADS=1 # tensors in tests are too small for more, which would only wait for each other
exec "$folder/bin/python" -m pytest --numprocesses "${JOBS:-$(($(getconf _NPROCESSORS_ONLN) + 1))}" --dist loadfile --no-loadscope-reorder "$@"
