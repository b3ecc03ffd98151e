"""The compiled scans against the definitions in float64, and what happens where they cannot be compiled."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.definitions import by_definition, by_the_equations

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import Additive, Leap, Sru
from fw_fairseq.ops import native
from fw_fairseq.ops.scans import compiled
from fw_fairseq.ops.scans.pooling import pool
from fw_fairseq.ops.scans.sru import sru

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]
SANITIZER = ("libasan.so", "libstdc++.so.6")
TYPES = {torch.float64: 1e-9, torch.float32: 2e-4}


@pytest.fixture
def calls(monkeypatch):
    """What ran compiled."""
    found = []
    for name in ("pool", "pool_gradients", "sru"):
        form = getattr(compiled, name)
        monkeypatch.setattr(
            compiled, name, lambda *args, form=form, name=name, **options: found.append(name) or form(*args, **options)
        )
    return found


def leaves(dtype, *shapes, layout=None) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64).mul_(2).to(dtype).requires_grad_() for shape in shapes]


def compare(actual, expected, given, tolerance) -> None:
    """Outputs and gradients; the definition computes in float64."""
    wide = [x.detach().double().requires_grad_() for x in given]
    got, want = actual(*given), expected(*wide)
    adjoint = torch.randn(want.shape, dtype=torch.float64)
    pairs = zip([got, *torch.autograd.grad(got, given, adjoint.to(got))], [want, *torch.autograd.grad(want, wide, adjoint)])
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * max(1, theirs.abs().max().item()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("with_masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("window", [0, 1, 7, 30, 60, 200])
def test_pooling(calls, window, with_masks, dtype):
    given = leaves(dtype, (2, 3, 60), (2, 60, 3, 5))
    masks = [torch.rand(2, 60) < 0.1, torch.rand(2, 60) < 0.08] if with_masks else [None, None]
    forms = (
        (lambda a, x: pool(a, x.transpose(1, 2), window, None, *masks)[0]),
        (lambda a, x: by_definition(a, x.transpose(1, 2), window, *masks)),
    )
    compare(*forms, given, TYPES[dtype])
    assert calls == ["pool", "pool_gradients"]


@pytest.mark.parametrize("window", [0, 7])
def test_pooling_of_any_layout(calls, window):
    """Channels that are apart in memory, and a gradient that is one number for all of them."""
    a, x = leaves(torch.float64, (2, 3, 20), (2, 3, 5, 20))
    found, expected = pool(a, x.mT, window)[0], by_definition(a, x.mT, window)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), (a, x)) for y in (found, expected)))
    assert calls == ["pool", "pool_gradients"]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("with_masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("gradients", [True, False], ids=["", "no gradients"])
def test_sru(calls, gradients, with_masks, dtype):
    given = leaves(dtype, (40, 3, 63), (40, 3, 21), (21,), (21,), (3, 21))
    masks = [torch.rand(3, 40) < 0.2, torch.rand(3, 40) < 0.1] if with_masks else [None, None]

    def joined(form):
        return lambda *args: torch.cat([part.flatten() for part in form(*args, *masks, scale=1.3)])

    if gradients:
        compare(joined(sru), joined(by_the_equations), given, TYPES[dtype])
    else:
        before = [x.clone() for x in given]
        with torch.no_grad():
            got, want = joined(sru)(*given), joined(by_the_equations)(*(x.double() for x in given))
        torch.testing.assert_close(got.double(), want, rtol=TYPES[dtype], atol=TYPES[dtype])
        assert all(map(torch.equal, given, before))
    assert calls == ["sru"]


def test_exponents_of_any_size():
    """Gates that are open or closed, and an input that is no number."""
    product = torch.tensor([-1000, -100, -88, -20, -1e-3, 0, 1e-3, 20, 88, 100, 1000, float("nan")])[:, None].expand(-1, 3)
    product, x, zero = product.reshape(1, 1, -1).clone(), torch.ones(1, 1, 12), torch.zeros(12)
    u, forget, reset = (part.double() for part in product.chunk(3, -1))
    h, c = sru(product, x, zero, zero, torch.full((1, 12), 3.0))
    expected = forget.sigmoid() * 3 + (1 - forget.sigmoid()) * u
    torch.testing.assert_close(c.double(), expected[0], rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(h.double(), reset.sigmoid() * expected + (1 - reset.sigmoid()), rtol=2e-6, atol=1e-5, equal_nan=True)


def test_threads_share_the_work(calls, monkeypatch):
    monkeypatch.setattr(native, "MANY", 0)
    given = leaves(torch.float64, (5, 3, 40), (5, 3, 40, 4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    compare(lambda a, x: pool(a, x, 9)[0], lambda a, x: by_definition(a, x, 9), given, 1e-9)


@pytest.mark.parametrize("kind", [Additive, Leap, Sru])
def test_layers_compute_the_same_without_a_compiler(calls, kind, monkeypatch):
    mixer, x = kind(16, 4, FastWeightConfig()), torch.randn(50, 3, 16)
    found = []
    for library in (native.library, lambda: None):
        monkeypatch.setattr(native, "library", library)
        y, state = mixer(x[:30])
        y = torch.cat([y, mixer(x[30:], state)[0]])
        found.append([y, *torch.autograd.grad(y.sin().sum(), list(mixer.parameters()))])
        used, calls[:] = len(calls), []
        assert bool(used) == (len(found) == 1)
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder and no library that was loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_it_is_compiled_once(fresh, monkeypatch):
    """Each source, all sources at the same time, then the library. The compiler has five minutes for each."""
    run, commands = subprocess.run, []
    monkeypatch.setattr(native, "OPTIONS", [*native.OPTIONS, "-O0"])  # which takes a moment
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: commands.append((command, options["timeout"])) or run(command, **options)
    )
    for _ in range(2):
        assert native.library() is not None
        native.library.cache_clear()
    assert len(commands) == len(list(native.FOLDER.glob("*.cpp"))) + 1 and "-shared" in commands[-1][0]
    assert {seconds for _, seconds in commands} == {300}
    assert len(list((fresh / "fw_fairseq").iterdir())) == 1


@pytest.fixture
def loops(fresh, tmp_path, monkeypatch):
    """The file of a library, of one small function, that an earlier process compiled."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(native, "FOLDER", tmp_path / "sources")
    monkeypatch.setattr(native, "POINTERS", {})
    monkeypatch.setattr(native, "GATHERED", {})
    assert native.library() is not None
    native.library.cache_clear()
    [path] = (fresh / "fw_fairseq").iterdir()
    yield path
    native.library.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("owner, loads", [(1007, True), (0, True), (1, False), (1014, False)])
def test_a_library_of_another_user_is_not_loaded(owner, loads, loops, monkeypatch, caplog):
    """But for that of the machine's administrator."""
    monkeypatch.setattr(os, "getuid", lambda: 1007)
    monkeypatch.setattr(os, "fstat", lambda file, stat=os.fstat: owned(stat(file), owner))
    with caplog.at_level(logging.INFO):
        assert (native.library() is not None) == loads
    assert ("belongs to another user" in caplog.text) != loads


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("damage", ["half", "empty", "a bit", "no library", "without its sum"])
def test_a_damaged_library_is_compiled_again(damage, loops, caplog):
    """The system loads half of a library and ends the process by a signal at its first use, and it does not see a flipped bit."""
    whole = loops.read_bytes()
    flipped = bytes([whole[len(whole) // 2] ^ 1])
    content = {
        "half": whole[: len(whole) // 2],
        "empty": b"",
        "a bit": whole[: len(whole) // 2] + flipped + whole[len(whole) // 2 + 1 :],
        "no library": b"hello",
        "without its sum": whole[: -native.SUM],
    }
    loops.unlink()  # this process has it loaded
    loops.write_bytes(content[damage])
    with caplog.at_level(logging.INFO):
        assert native.library() is not None
    assert "it is compiled again" in caplog.text
    assert loops.read_bytes()[: -native.SUM] == whole[: -native.SUM]
    assert hashlib.sha256(whole[: -native.SUM]).digest() == whole[-native.SUM :]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("place, mode", [("file", 0o775), ("file", 0o757), ("folder", 0o775), ("folder", 0o757)])
def test_a_library_that_others_could_write_to_is_compiled_again(place, mode, loops, caplog):
    """In a folder that is closed to them from then on, whatever the mask of new files."""
    before = loops.stat().st_ino
    (loops if place == "file" else loops.parent).chmod(mode)
    umask = os.umask(0o002)
    try:
        with caplog.at_level(logging.INFO):
            assert native.library() is not None
        assert "it is compiled again" in caplog.text and loops.stat().st_ino != before
        native.library.cache_clear()
        caplog.clear()
        assert native.library() is not None
    finally:
        os.umask(umask)
    assert "compiled again" not in caplog.text
    assert not any(path.stat().st_mode & 0o022 for path in (loops, loops.parent))


def test_the_file_that_was_checked_is_the_one_that_is_loaded(loops, monkeypatch):
    """Another one that has taken its path meanwhile is not."""

    def replace(file, opened=native.opened):
        loops.with_name("other").write_bytes(b"hello")
        os.replace(loops.with_name("other"), loops)
        return opened(file)

    monkeypatch.setattr(native, "opened", replace)
    assert native.library() is not None and loops.read_bytes() == b"hello"


def test_operands_of_compiled_loops(in_memory):
    """Plain tensors in memory, all of one type that the loops have."""
    assert all(native.takes(*in_memory(dtype, dtype)) for dtype in (torch.float32, torch.float64))
    assert native.takes(torch.ones(2))
    for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert not native.takes(*in_memory(*dtypes))
    other = torch.ones(2, device="meta")
    for operands in ((torch.ones(2), other), (other, torch.ones(2)), (torch.ones(2), torch.nn.Parameter(torch.ones(2)))):
        assert not native.takes(*operands)


@pytest.fixture
def in_memory(monkeypatch):
    """Makes tensors of these types; there is a library."""
    monkeypatch.setattr(native, "library", object)
    return lambda *dtypes: [torch.ones(2, dtype=dtype) for dtype in dtypes]


def owned(found: os.stat_result, user: int) -> os.stat_result:
    return os.stat_result((*found[:4], user, *found[5:]))


@pytest.mark.parametrize("switch", ["no compiler", "a compiler that fails", "the variable", "a folder that cannot be made"])
def test_pytorch_computes_where_it_cannot_be_compiled(fresh, monkeypatch, switch, caplog):
    if switch == "the variable":
        monkeypatch.setenv("FW_FAIRSEQ_COMPILED", "0")
    elif switch == "a folder that cannot be made":
        (fresh / "fw_fairseq").write_text("a file")
    else:
        monkeypatch.setenv("CXX", "false" if "fails" in switch else "no-such-compiler")
    with caplog.at_level(logging.INFO):
        h, _ = sru(*leaves(torch.float32, (4, 2, 9), (4, 2, 3), (3,), (3,)))
    assert h.isfinite().all() and native.library() is None
    assert ("cannot compile their loops" in caplog.text) == (switch in ("a compiler that fails", "a folder that cannot be made"))


def test_what_a_compiler_says_is_not_shown(fresh, monkeypatch, caplog, capfd):
    """The log has how it ended."""
    compiler = fresh / "c++"
    compiler.write_text("#!/bin/sh\necho no such instruction >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.INFO):
        assert native.library() is None
    assert "returned non-zero exit status 3" in caplog.text
    assert "no such instruction" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_the_loops_stay_inside_their_tensors(tmp_path):
    """The address sanitizer watches every loop, and the tensors that PyTorch allocates for them."""
    found = [Path(subprocess.check_output(["c++", f"-print-file-name={name}"], text=True).strip()) for name in SANITIZER]
    if not all(path.is_absolute() for path in found):
        pytest.skip("the compiler has no address sanitizer")
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ -fsanitize=address "$@" -O1\n')
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path), "LD_PRELOAD": " ".join(map(str, found))}
    environment |= {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "support.generated"], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("13 models\n"), done.stderr[-3000:]


def test_a_compiler_of_several_words(monkeypatch):
    """Such as that of a cache of compilations."""
    monkeypatch.setenv("CXX", "env -u NAME c++")
    assert native.find_compiler() == [shutil.which("env"), "-u", "NAME", "c++"]
    monkeypatch.setenv("CXX", "no-such-program c++")
    assert native.find_compiler() is None
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    for given in ("", "c++"):
        monkeypatch.setenv("CXX", given)
        assert native.find_compiler() == ["/bin/c++"]


LINKER = """#!/bin/sh
for out; do :; done
case "$*" in
  *-shared*)
    mkdir "$TURN/second" 2>/dev/null && sleep 1 || mkdir "$TURN/first"
    rm -f "$out"; exec 3>"$out"; head -c 100000 "$LIB" >&3; sleep 2; tail -c +100001 "$LIB" >&3 ;;
  *) : > "$out" ;;
esac
"""


def test_two_threads_that_need_the_library_first(tmp_path, monkeypatch):
    """Neither sees a part of what the other one writes; so it is with two containers that share a home folder and number processes
    from 1. The compiler removes what is there and then writes, as linkers do."""
    library = native.library()
    if library is None:
        pytest.skip("no compiler")
    (tmp_path / "c++").write_text(LINKER)
    (tmp_path / "c++").chmod(0o755)
    for name, value in (
        ("CXX", tmp_path / "c++"),
        ("XDG_CACHE_HOME", tmp_path),
        ("LIB", os.path.realpath(library._name)),
        ("TURN", tmp_path),
    ):
        monkeypatch.setenv(name, str(value))
    found, size = [], os.path.getsize(library._name)

    def need():
        found.append(native.build(str(tmp_path / "c++")).seek(0, os.SEEK_END))

    threads = [threading.Thread(target=need) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [size + native.SUM] * 2
    assert len(list((tmp_path / "fw_fairseq").iterdir())) == 1


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("gradients", [True, False])
def test_threads_share_the_rows_of_an_sru(calls, gradients, threads, monkeypatch):
    """A row has one thread, which changes its cell in place where nothing is differentiated."""
    monkeypatch.setattr(native, "MANY", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    given = leaves(torch.float64, (40, 5, 63), (40, 5, 21), (21,), (21,), (5, 21))
    with torch.set_grad_enabled(gradients):
        found = sru(*given, scale=1.3)
    torch.testing.assert_close(found, by_the_equations(*given, scale=1.3), rtol=1e-9, atol=1e-9)
    assert calls == ["sru"]


def test_a_gate_has_few_units_in_the_last_place_of_error(calls):
    """fp32; a gate that is almost closed is its exponential."""
    forget = torch.linspace(-87, 17, 30_000)
    product, x, zero = torch.stack([torch.zeros_like(forget), forget, forget], -1).mT.reshape(1, 1, -1), forget * 0, forget * 0
    _, found = sru(product, x[None, None], zero, zero, torch.ones(1, len(forget)))
    expected = forget.double().sigmoid()
    assert ((found[0].double() - expected) / expected).abs().max() < 4 * 2**-24
    assert calls == ["sru"]
