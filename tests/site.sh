#!/usr/bin/env bash
# Builds the site into FOLDER, in an environment of its own, and fails at a broken link, anchor or name of the printed API.
#   tests/site.sh             into ./site
#   tests/site.sh FOLDER
#   PYTHON=python3.12 REPOSITORY=https://github.com/OWNER/NAME tests/site.sh      with links to source files
set -euo pipefail
folder=$(realpath -m "${1:-site}")
cd "$(dirname "$0")/.."

venv=.venv-site
if ! cmp -s requirements/docs.txt "$venv/installed"; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
    cp requirements/docs.txt "$venv/installed"
fi
export NO_MKDOCS_2_WARNING=1
"$venv/bin/python" -m mkdocs build --strict --clean --site-dir "$folder"
echo "$folder/index.html"
