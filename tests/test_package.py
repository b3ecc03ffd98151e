"""The package as it is imported and installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from support.commands import install_sdist

import fw_fairseq

ROOT = Path(__file__).parents[1]
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def run(*command, cwd=None, **env):
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=300)


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("module", ["fw_fairseq", "fw_fairseq.ops", "fw_fairseq.rules", "fw_fairseq.feature_maps"])
def test_import_is_quiet_and_free_of_fairseq(module):
    """No output, no fairseq, no compiler (PATH is empty; nor torch's, which takes a second), no GPU."""
    unwanted = "{'fairseq', 'cupy', 'triton', 'torch._dynamo'}"
    code = f"import {module}, sys; assert not {unwanted} & set(sys.modules)"
    warnings = ("-W", "error", "-W", "ignore::ResourceWarning")  # torch 2.6 leaves a folder to be cleaned up
    done = run(sys.executable, *warnings, "-c", code, PATH="", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize(
    "first", ["mixers.fast_weight import FastWeight", "ops import fast_weight; find_spec('fairseq')", "ops import fast_weight"]
)
def test_fairseq_after_the_operation(first):
    """Who imports the operation first, or a part that needs fairseq itself, finds everything registered by --user-dir later."""
    code = (
        "from argparse import Namespace; from importlib.util import find_spec; from fw_fairseq.{}; from fairseq import utils;"
        f"utils.import_user_module(Namespace(user_dir={str(ROOT / 'fw_fairseq')!r}));"
        "from fairseq.models import ARCH_MODEL_REGISTRY as models;"
        "from fairseq.tasks import TASK_REGISTRY as tasks; from fairseq.criterions import CRITERION_REGISTRY as criterions;"
        "assert 'fast_weight_lm' in models and 'associative_retrieval' in tasks and 'retrieval_mse' in criterions"
    ).format(first)
    done = run(sys.executable, "-c", code, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_user_dir_from_a_checkout(tmp_path):
    """An interpreter that has fairseq but not this package: --user-dir is enough."""
    code = (
        "import sys; sys.path = [p for p in sys.path if p]; sys.meta_path = [f for f in sys.meta_path"
        " if '__editable__' not in getattr(f, '__module__', '') + getattr(f, '__name__', '')];"
        "from fairseq_cli.train import cli_main; cli_main()"
    )
    done = run(sys.executable, "-c", code, "data", "--user-dir", str(ROOT / "fw_fairseq"), "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--user-dir" in done.stdout, done.stderr


def test_user_dir_finds_an_editable_installation(tmp_path):
    """From any folder, by its name."""
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    done = run(sys.executable, "-c", build, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    fairseq = Path(importlib.util.find_spec("fairseq").origin).parent
    shutil.copytree(fairseq, site / "fairseq", copy_function=os.symlink, ignore=lambda *_: ["examples"])  # it looks beside itself
    code = (
        f"import site, sys; sys.path.insert(0, {str(site)!r}); site.addsitedir({str(site)!r}); from argparse import Namespace;"
        "from fairseq import utils; utils.import_user_module(Namespace(user_dir='fw_fairseq'));"
        "utils.import_user_module(Namespace(user_dir='fw_fairseq'));"  # as every part of a program does
        "from fairseq.models import ARCH_MODEL_REGISTRY as models; from fairseq.tasks import TASK_REGISTRY as tasks;"
        "assert 'fast_weight_lm' in models and 'associative_retrieval' in tasks;"
        "import fw_fairseq; print(fw_fairseq.__file__)"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.split()[-1] == str(ROOT / "fw_fairseq" / "__init__.py"), done.stderr


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("where", ["checkout", "elsewhere"])
def test_editable_install_and_user_dir_find_the_kernels(tmp_path, where):
    """Also with the checkout first on the path, as --user-dir puts it, CuPy's own ``cuda`` packages are found."""
    code = "from fw_fairseq.ops.kernels import compiler; print(compiler.kernel_folder()); import cuda.pathfinder"
    environment = {"PYTHONPATH": str(ROOT)} if where == "checkout" else {}
    done = run(sys.executable, "-c", code, cwd=tmp_path, **environment)
    assert (done.returncode, done.stdout.strip()) == (0, str(ROOT / "cuda")), done.stderr


def test_fairseq_checkpoints_load_safely(tmp_path):
    """torch refuses the Namespace in a fairseq checkpoint; fairseq takes it once it has imported this directory."""
    code = (
        "import argparse, torch, sys; history = {'optimizer_name': 'x', 'lr_scheduler_state': {}, 'num_updates': 1};"
        "state = {'optimizer_history': [history], 'extra_state': {'train_iterator': {}}, 'extra': argparse.Namespace(arch='x')};"
        "torch.save(state, 'a.pt');"
        "from argparse import Namespace; from fairseq import checkpoint_utils, utils;"
        f"utils.import_user_module(Namespace(user_dir={str(ROOT / 'fw_fairseq')!r}));"
        "assert sys.excepthook is sys.__excepthook__;"  # a program of one's own keeps its way to show errors
        "print(checkpoint_utils.load_checkpoint_to_cpu('a.pt')['extra'].arch)"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["x"], done.stderr


@pytest.mark.long
def test_sdist_installs_and_runs(tmp_path):
    """The source distribution has everything, and what pip installs of it into a folder of its own runs from there."""
    site = install_sdist(tmp_path)
    with tarfile.open(*tmp_path.glob("*.tar.gz")) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    files = {str(path.relative_to(tmp_path / "source")) for path in (tmp_path / "source").rglob("*") if path.is_file()}
    assert {name for name in files - packed if not name.startswith(".") and ".egg-info/" not in name} == set()
    code = "import fw_fairseq; print(fw_fairseq.__file__)"
    code += "; from fw_fairseq.ops.kernels import compiler; print(compiler.kernel_folder())"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0 and done.stdout.startswith(str(site)), done.stderr
    kernels = Path(done.stdout.splitlines()[1])
    assert kernels == site / "fw_fairseq" / "cuda"
    assert {path.name for path in kernels.glob("*.cu*")} == {path.name for path in (ROOT / "cuda").iterdir()}
    for ending in ("py", "cpp"):
        own, installed = ({path.relative_to(top) for path in (top / "fw_fairseq").rglob(f"*.{ending}")} for top in (ROOT, site))
        assert own == installed != set()
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert commands.keys() == {path.name for path in (site / "bin").iterdir()}
    assert "usage: fw-bench" in run(site / "bin" / "fw-bench", "--help", cwd=tmp_path, PYTHONPATH=str(site)).stdout


WITHOUT_FAIRSEQ = """
import importlib.util, sys
sys.modules |= dict.fromkeys(["fairseq", "fairseq_cli", "hydra", "omegaconf"])  # an import of one of them fails
import torch
from fw_fairseq.mixers import MIXERS

for name, kind in MIXERS.items():
    layer, x = kind(16, 2), torch.randn(5, 3, 16)
    y, state = layer(x)
    y[-1].sum().backward()
    first, state = layer.eval()(x[:3])
    torch.testing.assert_close(layer(x)[0][3:], layer(x[3:], state)[0], rtol=1e-4, atol=1e-5)
if importlib.util.find_spec("transformers"):
    from fw_fairseq.huggingface import FastWeightForCausalLM, FastWeightHFConfig

    for name in MIXERS:
        config = FastWeightHFConfig(vocab_size=20, hidden_size=16, num_attention_heads=2, mixers=[name])
        model = FastWeightForCausalLM(config).eval()
        assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False).shape == (1, 6)
print("done")
"""


def test_layers_and_models_run_without_fairseq(tmp_path):
    done = run(sys.executable, "-c", WITHOUT_FAIRSEQ, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.endswith("done\n"), done.stderr


WITHOUT_EXTRAS = """
import sys
from argparse import Namespace
sys.modules |= dict.fromkeys(sys.argv[1:])  # an import of one of them fails
from fairseq import models, tasks, utils

utils.import_user_module(Namespace(user_dir="fw_fairseq"))
assert "pretrained_lm" in models.MODEL_REGISTRY and "stateful_language_modeling" in tasks.TASK_REGISTRY
print("done")
"""


def test_the_user_directory_needs_no_extra():
    """fairseq imports every file of tasks/ and models/, so none may ask for a package that recipes/demo.sh does not install."""
    extras = ["accelerate", "cupy", "hypothesis", "matplotlib", "pytest", "sacremoses", "subword_nmt", "tensorboardX"]
    done = run(sys.executable, "-c", WITHOUT_EXTRAS, *extras, "transformers", cwd=ROOT)
    assert done.stdout.endswith("done\n"), done.stderr


@pytest.mark.long
def test_what_needs_no_fairseq_runs_without_it():
    """The tests themselves, with fairseq, Hydra and omegaconf hidden; those that need them are skipped."""
    plugins = ["-p", "support.without_fairseq", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = run(sys.executable, "-m", "pytest", *plugins, "tests", "-m", "quick", cwd=ROOT, PYTHONPATH=str(ROOT / "tests"))
    [passed] = map(int, re.findall(r"(\d+) passed", done.stdout))
    assert done.returncode == 0 and passed > 900, done.stdout[-3000:]


def test_the_citation_is_of_this_version():
    """PyYAML, which fairseq needs, reads it."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (fw_fairseq.__version__, project["license"])
    assert project["name"] in cited["title"]
    assert f"## {fw_fairseq.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_every_pinned_version_has_hashes():
    """All but torch, which is another file for a CPU and for each CUDA; ``requirements/renew.sh`` writes them."""
    sources = [ROOT / "constraints.txt", ROOT / "requirements" / "nvidia.txt"]
    pinned = re.findall(r"^(\S+==\S+)$", "".join(path.read_text() for path in sources), re.MULTILINE)
    entries = [x for name in ("build", "test") for x in re.split(r"\n(?=\w)", (ROOT / "requirements" / f"{name}.txt").read_text())]
    hashed = {entry.split()[0] for entry in entries if re.search(r"--hash=sha256:[0-9a-f]{64}", entry)}
    unhashed = {normal(pin) for pin in pinned} ^ {normal(pin) for pin in hashed}
    assert len(unhashed) == 1 and unhashed.pop().startswith("torch==")


def normal(pin: str) -> str:
    return re.sub(r"[-_.]+(?=.*==)", "-", pin).lower()
