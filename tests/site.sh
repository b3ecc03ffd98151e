#!/usr/bin/env bash
# Builds the site of this version into FOLDER/VERSION, in an environment of its own, and fails at a broken link, anchor or name of the
# printed API. Other versions in FOLDER stay: the site's menu names them all, and FOLDER/index.html leads to the newest.
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
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' fw_fairseq/__init__.py)
export NO_MKDOCS_2_WARNING=1
"$venv/bin/python" -m mkdocs build --strict --clean --site-dir "$folder/${version:?}"
"$venv/bin/python" - "$folder" <<'END'
import json, re, sys
from pathlib import Path

from packaging.version import VERSION_PATTERN, Version

folder = Path(sys.argv[1])
built = [page.parent.name for page in folder.glob("*/index.html")]
versions = sorted((name for name in built if re.fullmatch(VERSION_PATTERN, name, re.VERBOSE | re.IGNORECASE)), key=Version, reverse=True)
listed = [{"version": name, "title": name, "aliases": ["latest"] if name == versions[0] else []} for name in versions]
(folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
(folder / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={versions[0]}/">\n')
END
echo "$folder/$version/index.html"
