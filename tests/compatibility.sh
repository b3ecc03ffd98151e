#!/usr/bin/env bash
# The tests with the oldest versions that pyproject.toml allows (requirements/oldest.txt), in .venv-oldest. Not part of CI: the torch
# that comes without further ado is made for CUDA, 3 GB to download and 6 GB on disk.
#   PYTHON=python3.12 tests/compatibility.sh          arguments go to pytest
#   JOBS=1 tests/compatibility.sh                     on one core
#   tests/compatibility.sh newest [TEST...]           the tests of exports, commands and patches with the newest versions that pyproject.toml
#                                                     allows, in .venv-newest; remove that folder for newer ones. PYTHON: 3.11 or 3.12
#   tests/compatibility.sh 3.13 [TEST...]             all but the slowest tests with python3.13, or another from 3.9 to 3.14, in
#                                                     .venv-3.13. 3.9 and 3.10 have the official fairseq 0.12.2, and run without the tests of
#                                                     kernels, recipes and installing; then checkpoints of that fairseq are read by that of
#                                                     .venv, where there is one, and the other way round
#   tests/compatibility.sh fairseq FOLDER [TEST...]   fairseq's own tests, with this project's changes to fairseq and without them, in
#                                                     .venv; FOLDER: a checkout of facebookresearch/fairseq
#   tests/compatibility.sh transformers FOLDER [TEST...]  transformers' own common tests, on exported models, in .venv; FOLDER: a checkout
#                                                     or a source distribution of transformers; needs the package parameterized
# Smaller with a torch for the CPU: make the environment first, and install that torch of the same version into it.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = fairseq ]; then
    shift
    [ -d "${1:-}/tests" ] || { echo "name the folder of a checkout of fairseq" >&2; exit 2; }
    PYTHONPATH=tests OMP_NUM_THREADS=1 exec .venv/bin/python -m support.fairseq_tests "$@"
fi

if [ "${1:-}" = transformers ]; then
    shift
    [ -f "${1:-}/tests/test_modeling_common.py" ] || { echo "name the folder of a checkout of transformers" >&2; exit 2; }
    FW_TRANSFORMERS=$(realpath "$1")
    export FW_TRANSFORMERS OMP_NUM_THREADS=1
    PYTHONPATH=tests exec .venv/bin/python -m pytest -p no:cacheprovider -c /dev/null --rootdir tests tests/support/transformers_tests.py "${@:2}"
fi

if [ "${1:-}" = newest ]; then
    shift
    python=.venv-newest/bin/python
    [ -x $python ] || "${PYTHON:-python3}" -m venv .venv-newest
    requirements/cpu_torch.sh $python torch
    "$python" -m pip install --quiet --disable-pip-version-check -e '.[test,plots]'
    "$python" -m pip list --format freeze | grep -E '^(torch|transformers|accelerate|numpy|ve-fairseq|hydra-core)=='
    [ $# -gt 0 ] || set -- tests/tools tests/patches tests/models/test_{generation,uses}_in_transformers.py tests/test_first_generation.py
    export OMP_NUM_THREADS=1
    exec $python -m pytest --numprocesses "${JOBS:-auto}" --dist loadfile "$@"
fi

if [[ ${1:-} == 3.* ]]; then
    version=$1 folder=.venv-$1
    shift
    PYTHON=${PYTHON:-python$version} requirements/install.sh test "$folder"
    export OMP_NUM_THREADS=1
    leave=(test_layout.py test_pages.py)
    case $version in 3.9 | 3.10) leave+=(kernels recipes test_install.py) ;; esac
    [ $# -gt 0 ] || set -- tests -m "not long" "${leave[@]/#/--ignore=tests/}"
    "$folder/bin/python" -m pytest --numprocesses "${JOBS:-auto}" --dist loadfile --no-loadscope-reorder "$@"
    case $version in 3.9 | 3.10) ;; *) exit 0 ;; esac
    [ -x .venv/bin/python ] || { echo "no .venv to exchange checkpoints with"; exit 0; }
    FW_OTHER_PYTHON=.venv/bin/python "$folder/bin/python" -m pytest -n 0 tests/test_exchange.py
    FW_OTHER_PYTHON=$folder/bin/python exec .venv/bin/python -m pytest -n 0 tests/test_exchange.py
fi

python=.venv-oldest/bin/python
[ -x $python ] || "${PYTHON:-python3}" -m venv .venv-oldest
install=("$python" -m pip install --quiet --disable-pip-version-check)
"${install[@]}" --require-hashes -r requirements/build.txt
"${install[@]}" -c requirements/oldest.txt --no-build-isolation -e '.[test]'
export OMP_NUM_THREADS=1
exec $python -m pytest --numprocesses "${JOBS:-auto}" --dist loadfile "$@"
