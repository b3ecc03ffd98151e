"""The package and each of its extras resolve from a package index alone, with the versions that the tests use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.commands import ROOT

tomllib = pytest.importorskip("tomllib")  # Python 3.11
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


@pytest.mark.long
@pytest.mark.parametrize(
    "version, pins, fairseq",
    [
        ("3.9", "requirements/official39.txt", "fairseq"),
        ("3.10", "requirements/official.txt", "fairseq"),
        ("3.11", "constraints.txt", "ve-fairseq"),
        ("3.12", "constraints.txt", "ve-fairseq"),
        ("3.13", "constraints.txt", None),
        ("3.14", "constraints.txt", None),
    ],
    ids=["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"],
)
@pytest.mark.parametrize("extras", [[], EXTRAS], ids=["alone", "all"])  # versions that suit all together suit each
def test_resolves_from_the_index(extras, version, pins, fairseq, uv, tmp_path_factory):
    """Alone it has fairseq where there is a wheel; where fairseq has to be built from 3.11 on, pip is not to do it."""
    extras = [name for name in extras if name != "fairseq" or fairseq]
    fairseq = fairseq if extras or fairseq == "ve-fairseq" else None
    cache = tmp_path_factory.getbasetemp() / "uv-cache"
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate", "--cache-dir", cache]
    command += ["--python-version", version, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", "torch"]
    command += [*(f"--extra={extra}" for extra in extras), "-c", ROOT / pins, ROOT / "pyproject.toml"]
    done = subprocess.run(command, env=PLAIN, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    chosen, pins = versions(done.stdout), versions((ROOT / pins).read_text())
    assert {name: chosen[name] for name in pins.keys() & chosen} == {name: pins[name] for name in pins.keys() & chosen}
    found = {"fairseq", "ve-fairseq", "fairseq-fixed", "hydra-core", "sacrebleu"} & chosen.keys()  # two install over each other
    assert {"torch", "numpy"} <= chosen.keys() and found == ({fairseq, "hydra-core", "sacrebleu"} if fairseq else set())
    assert any(name.startswith("nvidia-") for name in chosen), "a CUDA build of torch brings NVIDIA's libraries"


def versions(text: str) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


@pytest.mark.parametrize(
    "torch, driver, answers, installs, says",
    [
        (False, False, True, True, ""),
        (False, False, False, True, "about 3 GB"),
        (True, False, True, False, ""),
        (False, True, True, False, ""),
    ],
    ids=["cpu", "no-index", "has-torch", "has-driver"],
)
def test_torch_for_cpus(torch, driver, answers, installs, says, tmp_path):
    """It is installed where nothing else is there. An interpreter of this test's own notes what it is asked to do."""
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has an NVIDIA driver")
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exit {int(not torch)}; fi\necho "$*" >>{log}\nexit {int(not answers)}\n')
    commands = [python, *([tmp_path / "nvidia-smi"] if driver else [])]
    commands[-1].touch()
    for command in commands:
        command.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "CPU_TORCH_INDEX": "https://example.org/cpu"}
    command = [ROOT / "requirements" / "cpu_torch.sh", python]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and (says in done.stderr if says else not done.stderr)
    asked = log.read_text() if log.exists() else ""
    [pin] = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (f"--index-url https://example.org/cpu {pin}" in asked) is installs


@pytest.mark.parametrize("environment", [{"PYTHON": "/bin/false"}, {"PATH": "bare"}], ids=["given", "found"])
def test_no_python_that_will_do(environment, tmp_path):
    """One sentence says what would; nothing is made."""
    (tmp_path / "bare").mkdir()
    for name in ("bash", "cat", "dirname", "env", "sha256sum"):
        (tmp_path / "bare" / name).symlink_to(shutil.which(name))
    environment = {name: str(tmp_path / value) if name == "PATH" else value for name, value in environment.items()}
    given = {name: value for name, value in os.environ.items() if name != "PYTHON"} | environment
    command = [ROOT / "requirements" / "install.sh", "plots", tmp_path / "venv"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "will not do: install Python 3.11 or 3.12, or the headers of " in done.stderr
    assert not (tmp_path / "venv").exists()
