#!/usr/bin/env bash
# The tests with the oldest versions that pyproject.toml allows (requirements/oldest.txt), in .venv-oldest. Not part of CI: the torch
# that comes without further ado is made for CUDA, 3 GB to download and 6 GB on disk.
#   PYTHON=python3.12 tests/compatibility.sh          arguments go to pytest
#   JOBS=1 tests/compatibility.sh                     on one core
# Smaller with a torch for the CPU: make the environment first, and install that torch of the same version into it.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv-oldest/bin/python
[ -x $python ] || "${PYTHON:-python3}" -m venv .venv-oldest
install=($python -m pip install --quiet --disable-pip-version-check)
"${install[@]}" --require-hashes -r requirements/build.txt
"${install[@]}" -c requirements/oldest.txt --no-build-isolation -e '.[test]'
export OMP_NUM_THREADS=1
exec $python -m pytest --numprocesses "${JOBS:-auto}" --dist loadfile "$@"
