"""``pip install -c constraints.txt .`` with every extra, as pip resolves it from a package index alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import ROOT

PLAIN = {name: value for name, value in os.environ.items() if name in ("PIP_CERT", "PIP_INDEX_URL") or not name.startswith("PIP_")}
PLAIN |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # no folder of wheels, no constraints but ours


def interpreter(version: str) -> str:
    """Python of this version: this one, one on the path, or one installed beside this one."""
    if version == f"3.{sys.version_info.minor}":
        return sys.executable
    found = [shutil.which(f"python{version}"), *Path(sys.base_prefix).parent.glob(f"{version}*/bin/python{version}")]
    for python in filter(None, map(str, filter(None, found))):
        if subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return python
    pytest.skip(f"Python {version} is not installed")


@pytest.fixture(scope="module")
def recent_pip(tmp_path_factory):
    """A folder with a pip that reads the requirements of a wheel without downloading it, which for torch would be 3 GB."""
    folder = tmp_path_factory.mktemp("pip")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "0", "--timeout", "10", "--target", folder]
    done = subprocess.run([*command, "pip>=25"], env=PLAIN, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_all_extras_resolve_from_the_index(version, recent_pip, tmp_path):
    """One resolution of all extras together: what satisfies them all satisfies each, and none."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command = [interpreter(version), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", tmp_path / "report.json", "-c", ROOT / "constraints.txt", f"{ROOT}[{','.join(extras)}]"]
    done = subprocess.run(command, env=PLAIN | {"PYTHONPATH": str(recent_pip)}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    chosen = json.loads((tmp_path / "report.json").read_text())["install"]
    versions = {normal(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in chosen}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {normal(name): pin for name, pin in pins.items()}
    assert {name: versions[name] for name in pins if name in versions} == {name: pins[name] for name in pins if name in versions}
    assert {"torch", "numpy", "ve-fairseq", "pytest", "transformers", "matplotlib"} <= versions.keys() & pins.keys()
    sources = {normal(entry["metadata"]["name"]): entry["download_info"]["url"] for entry in chosen}
    assert [name for name, url in sources.items() if not url.startswith("http")] == ["fw-fairseq"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
