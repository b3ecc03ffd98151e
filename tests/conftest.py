"""Fixtures of more than one folder of tests, and how the tests are divided among processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from hostcuda import EmulatorLaunch
from support import pretrained as pretraining
from support import streams
from support.commands import preloaded
from support.emulated import emulated
from support.shared import shared_folder

TESTS = Path(__file__).parent
QUICK = (
    "layers/",
    "models/",
    "ops/",
    "patches/test_mistakes.py",
    "tasks/test_lm_tasks.py",
    "tasks/test_streams.py",
    "test_layout.py",
    "test_pages.py",
    "tools/test_tables.py",
)
NOT_QUICK = (
    "layers/test_from_outside.py",
    "models/test_lm_model.py::test_activation_checkpointing",
    "models/test_lm_model.py::test_half_precision",
    "ops/test_fast_weight.py::test_a_graph_of_the_whole_operation",
    "ops/test_fast_weight.py::test_a_long_stream_does_not_drift",
    "ops/test_fuzz.py",
    "ops/test_new_rule.py",
    "ops/test_workers.py",
)
LONG = (
    "kernels/test_cuda_sanitizers.py",
    "kernels/test_cuda_channel_delta.py::test_compiles_without_spills[80",
    "kernels/test_cuda_decay.py::test_compiles_without_spills[80",
    "kernels/test_cuda_delta.py::test_compiles_without_spills[80",
    "kernels/test_hostcuda.py::test_sanitizers_see",
    "layers/test_compiled.py::test_the_loops_stay_inside_their_tensors",
    "ops/test_new_rule.py::test_everything_that_goes_through_the_registries",
    "patches/test_faults.py::test_a_run_that_is_killed_again_and_again_is_the_same_run",
    "recipes/test_convergence.py::test_language_models_and_conversion",
    "recipes/test_encoding.py::test_processes_write_every_document_once",
    "recipes/test_recipes.py::test_conversion_on_wikitext2",
    "recipes/test_recipes.py::test_gpt2",
    "recipes/test_recipes.py::test_table_of_several_seeds",
    "recipes/test_recipes.py::test_wikitext103[delta_schlag",
    "tasks/test_drawn.py::test_probes_by_the_recipe",
    "tasks/test_retrieval.py::test_a_point_is_solved_and_not_run_again",
    "tasks/test_retrieval.py::test_a_sweep_goes_through_its_points",
    "tasks/test_translation_cli.py::test_multi30k_recipe",
    "tools/test_convert_cli.py::test_the_baevski_auli_recipe_at_toy_size",
)
COMMANDS = {"counting_data", "lm_data", "pretrained", "stream_data"}  # fixtures that run fairseq's commands
LONGEST = (
    "recipes/test_recipes.py",
    "patches/test_faults.py",
    "tasks/test_stateful_cli.py",
    "tasks/test_lm_cli.py",
    "kernels/",
    "tasks/test_translation_cli.py",
    "tasks/test_distributed_cli.py",
    "tools/test_convert_cli.py",
    "patches/test_security.py",
    "tasks/test_mixers_cli.py",
    "tools/",
)


def within(name: str, places: tuple[str, ...]) -> int:
    """The first of these places that has the file or test ``name``, by its number; -1 without one."""
    return next((i for i, place in enumerate(places) if name.startswith(place)), -1)


def is_quick(name: str) -> bool:
    return within(name, QUICK) >= 0 and within(name, NOT_QUICK) < 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: trains nothing and starts no command")
    config.addinivalue_line("markers", "long: takes a core for half a minute or more")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m quick`` the other files are not imported, which would take as long as the tests."""
    unwanted = config.option.markexpr == "quick" and collection_path.name.startswith("test_")
    return True if unwanted and not is_quick(collection_path.relative_to(TESTS).as_posix()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, and put the longest files first: a process that gets one at the end is waited for."""
    names = {item: f"{item.path.relative_to(TESTS).as_posix()}::{item.name}" for item in items}
    for item, name in names.items():
        if is_quick(name) and not COMMANDS.intersection(item.fixturenames):
            item.add_marker(pytest.mark.quick)
        if within(name, LONG) >= 0:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: within(names[item], LONGEST) % (len(LONGEST) + 1))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the process that commands are forked from before code under test can start one: a process has only one, and fw-bench's
    has imported fw_fairseq, whose import is part of what commands test.
    """
    if not session.config.option.collectonly and not all(item.get_closest_marker("quick") for item in session.items):
        preloaded()


@pytest.fixture(scope="module")
def one_thread():
    """For tensors this small more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_pytorch(monkeypatch):
    """Pooling, SRU and generation as on a machine without a compiler."""
    from fw_fairseq import native

    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def emulate(one_thread):
    """``emulate(policy, seed, ...)``: from now on kernels run on the emulator, for tensors on the CPU; returns the launcher."""
    with contextlib.ExitStack() as stack:

        def start(*schedule, **options):
            return stack.enter_context(emulated(EmulatorLaunch(*schedule, **options)))

        yield start


@pytest.fixture(scope="session")
def stream_data(tmp_path_factory):
    """A binarised text of random words, for training on streams."""
    return shared_folder(tmp_path_factory, "stream_data", streams.binarise) / "bin"


@pytest.fixture(scope="session")
def counting_data(tmp_path_factory):
    """A binarised text of words that count up, which a few updates learn."""
    return shared_folder(tmp_path_factory, "counting_data", pretraining.binarise) / "bin"


@pytest.fixture(scope="session")
def pretrained(counting_data, tmp_path_factory):
    """A checkpoint of transformer_lm after 40 updates on ``counting_data``."""
    folder = shared_folder(tmp_path_factory, "pretrained", lambda folder: pretraining.pretrain(counting_data, folder))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory):
    """A data folder with nothing but its dictionary, 60 words."""
    folder = tmp_path_factory.mktemp("dictionary")
    (folder / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(60)))
    return folder
