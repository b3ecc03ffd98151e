#!/usr/bin/env bash
# After a change of constraints.txt, nvidia.txt or pyproject.toml: the hashes of the versions in the first two, and the oldest versions.
#   Needs     uv
#   requirements/renew.sh
# build.txt   what builds packages, with hashes
# test.txt    everything else in constraints.txt, and nvidia.txt, with hashes; all but torch, which is another file for a CPU and for
#             each CUDA
# official.txt what is installed with fairseq 0.12.2 on Python 3.10; official39.txt: on Python 3.9
# oldest.txt  the least that pyproject.toml allows of what it names, the newest of the rest
set -euo pipefail
cd "$(dirname "$0")/.."

compile() { # OUTPUT ARGUMENT...
    uv pip compile --quiet --no-annotate --no-header "${@:2}" | sed '/^\.$/d; 1i # Written by requirements/renew.sh.' >"$1.part"
    mv "$1.part" "$1"
}

hashed=(--no-deps --universal --python-version 3.11 --generate-hashes)
compile requirements/build.txt "${hashed[@]}" - < <(grep '^setuptools==' constraints.txt)
compile requirements/test.txt "${hashed[@]}" --no-emit-package torch --no-emit-package setuptools constraints.txt requirements/nvidia.txt
compile requirements/oldest.txt --resolution lowest-direct --python-version 3.12 --extra test pyproject.toml
# Without the bound an older torch would do, one for which NVIDIA's newest compiler is no conflict.
compile requirements/official.txt --python-version 3.10 --extra fairseq --extra test --extra plots pyproject.toml --constraint - <<<"torch>=2.14"
compile requirements/official39.txt --python-version 3.9 --extra fairseq --extra test --extra plots pyproject.toml
