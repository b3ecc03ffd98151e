"""The package and each of its extras resolve under constraints.txt from a package index alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
from support.commands import ROOT

EXTRAS = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
PLAIN |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # no folder of wheels, no constraints but ours
PLAIN |= {name: os.environ[name] for name in ("PIP_CERT", "PIP_INDEX_URL") if name in os.environ}
PLAIN |= {"SSL_CERT_FILE": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}
PLAIN |= {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    """The command that resolves: pip's rules, for any version of Python, in seconds where pip takes minutes."""
    folder = tmp_path_factory.mktemp("uv")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "0",
        "--timeout",
        "10",
        "--target",
        folder,
        "uv>=0.8",
    ]
    done = subprocess.run(command, env=PLAIN, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "uv"


@pytest.mark.parametrize("version", ["3.11", "3.12"])
@pytest.mark.parametrize("extras", [[], EXTRAS], ids=["alone", "all"])  # versions that suit all together suit each
def test_resolves_from_the_index(extras, version, uv, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "uv-cache"
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate", "--cache-dir", cache]
    command += ["--python-version", version, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", "torch"]
    command += [*(f"--extra={extra}" for extra in extras), "-c", ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    done = subprocess.run(command, env=PLAIN, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    chosen, pins = versions(done.stdout), versions((ROOT / "constraints.txt").read_text())
    assert {name: chosen[name] for name in pins.keys() & chosen} == {name: pins[name] for name in pins.keys() & chosen}
    assert {"torch", "numpy", "ve-fairseq", "hydra-core", "sacrebleu"} <= chosen.keys()
    assert any(name.startswith("nvidia-") for name in chosen), "a CUDA build of torch brings NVIDIA's libraries"


def versions(text: str) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}
