#!/usr/bin/env bash
# The test command. First run: makes .venv with pinned packages whose hashes are checked. Then: ruff, mypy and pytest, with one process
# more than there are cores, because many tests wait for commands; arguments go to pytest. Where an environment is active
# that has all packages which the tests need, they run there.
#   tests/run.sh                    everything
#   tests/run.sh -m quick           before every commit: the tests that train nothing and start no command
#   tests/run.sh -m "not long"      what CI runs: all but some 25 that take a core for about half a minute or more
#   tests/run.sh -k chunk -x        some of it
#   JOBS=1 tests/run.sh             in one process
#   PYTHON=python3.12 tests/run.sh  another interpreter for a new .venv
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
stamp=.venv/installed
wanted=$(cat setup.py pyproject.toml constraints.txt requirements/*.txt | sha256sum)
if [ "$folder" != .venv ]; then
    echo "testing in $folder, which has what the tests need"
elif [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null ||
        { echo "$python is not Python 3.11 or 3.12; set PYTHON to one that is" >&2; exit 2; }
    echo "installing into .venv"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv # again, where a call was stopped in it
    install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
    "${install[@]}" --require-hashes -r requirements/build.txt
    requirements/cpu_torch.sh .venv/bin/python
    "${install[@]}" --require-hashes -r requirements/test.txt --no-deps --no-build-isolation
    "${install[@]}" -c constraints.txt --no-build-isolation -e '.[test]' # torch, and what that torch needs
    echo "$wanted" >"$stamp"
fi

"$folder/bin/python" -m ruff check .
"$folder/bin/python" -m ruff format --check .
"$folder/bin/python" -m mypy
export OMP_NUM_THREADS=1 # tensors in tests are too small for more, which would only wait for each other
exec "$folder/bin/python" -m pytest --numprocesses "${JOBS:-$(($(getconf _NPROCESSORS_ONLN) + 1))}" --dist loadfile --no-loadscope-reorder "$@"
