"""What all commands of fw-bench share: clocks, memory, the machine, progress and files."""

from __future__ import annotations

import io
import json
import os
import resource
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import contest


class Terminal(io.StringIO):
    """Standard error of a terminal; it knows what was flushed."""

    flushed = ""

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.flushed = self.getvalue()


def a_terminal(monkeypatch) -> Terminal:
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


@pytest.mark.parametrize(
    "what, before, said",
    [("", 1, ["round 0 of 2", "round 1 of 2", "round 2 of 2"]), ("a", 0, ["a, round 1 of 2", "a, round 2 of 2"])],
)
def test_progress_takes_the_place_of_the_line_before(what, before, said, monkeypatch):
    terminal = a_terminal(monkeypatch)
    contest.take_turns({"a": int}, 2, what, before)
    assert terminal.flushed == "".join(f"\r\033[K{text}" for text in said)
    contest.say("done")
    assert terminal.getvalue().endswith(f"{said[-1]}\r\033[Kdone\n")


def test_nothing_is_in_progress_without_a_terminal(capsys):
    contest.take_turns({"a": int}, 2)
    assert capsys.readouterr().err == ""


def test_a_call_is_repeated_for_its_median(monkeypatch):
    """In microseconds; the first ten are not timed."""
    calls, times = [], iter(range(40))
    monkeypatch.setattr(contest, "timed", lambda call, device: call() or next(times))
    assert contest.repeated(lambda: calls.append(1), SimpleNamespace(device="cpu", rounds=2)) == 19.5e6
    assert len(calls) == 10 + 40


@pytest.mark.parametrize("device, threads, seconds", [("cpu", 1, 3), ("cpu", 2, 20), ("cuda", 1, 20)])
def test_one_thread_is_timed_without_other_processes(device, threads, seconds, monkeypatch):
    """A GPU is waited for before and after the call."""
    happened = []
    own, all_of_them = iter([5, 8]), iter([100, 120])
    monkeypatch.setattr(contest.time, "process_time", lambda: happened.append("clock") or next(own))
    monkeypatch.setattr(contest.time, "perf_counter", lambda: happened.append("clock") or next(all_of_them))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    found = contest.timed(lambda: happened.append("call"), device)
    monkeypatch.undo()
    wait = ["wait"] * (device == "cuda")
    assert found == seconds and happened == [*wait, "clock", "call", *wait, "clock"]


def test_the_processor_has_its_name(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: "processor : 0\nmodel name\t: A: B\nmodel name\t: C\n")
    assert contest.processor() == "A: B"
    monkeypatch.setattr(contest.platform, "processor", lambda: "of the platform")
    monkeypatch.setattr(Path, "read_text", lambda _: "processor : 0\n")
    assert contest.processor() == "of the platform"
    monkeypatch.setattr(Path, "read_text", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    assert contest.processor() == "of the platform"


def test_memory_of_the_process(monkeypatch):
    kilobytes = {"VmHWM": 20, "VmRSS": 12}
    monkeypatch.setattr(
        Path, "read_text", lambda _: "Name:\ta:b:c\n" + "".join(f"{name}:\t  {size} kB\n" for name, size in kilobytes.items())
    )
    assert contest.process_memory("VmRSS") == 12 * 1024
    assert contest.peak_beyond(lambda: kilobytes.update(VmHWM=30), "cpu") == 18 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    assert contest.process_memory("VmRSS") == 7


def test_memory_of_a_gpu(monkeypatch):
    used = {"now": 100, "peak": 900}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: used.update(peak=used["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: used["peak"])
    assert contest.peak_beyond(lambda: used.update(peak=used["peak"] + 30), "cuda") == 30


def test_reports_are_lines(tmp_path):
    contest.write_json(tmp_path / "x.json", {"a": [1]})
    assert (tmp_path / "x.json").read_text() == '{\n "a": [\n  1\n ]\n}\n'


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_a_command_needs_no_option(name):
    parser = bench.build_parser()
    args = parser.parse_args([name])
    bench.check(parser, args)
    bench.check_files(args)
    assert args.rounds == 7 and args.threads == torch.get_num_threads()


def test_a_run_prints_its_table(monkeypatch, capsys, tmp_path):
    """With as many threads as it was told; the progress is wiped away."""
    terminal, threads, report, drawn = a_terminal(monkeypatch), [], {"settings": {}}, []
    module = SimpleNamespace(measure=lambda args: report, table=lambda report: "the table", draw=lambda *given: drawn.append(given))
    monkeypatch.setitem(bench.COMMANDS, "ops", bench.Command(module, "", "", ""))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    bench.run(SimpleNamespace(threads=3, command="ops", json=tmp_path / "x.json", figure=Path("x.svg")))
    assert threads == [3] and terminal.getvalue() == "\r\033[K" and capsys.readouterr().out == "the table\n"
    assert json.loads((tmp_path / "x.json").read_text()) == report and drawn == [(report, Path("x.svg"))]


@pytest.mark.parametrize("content, same", [('{"settings": {}}', True), ('{"other": 1}', False), ("text", False), ("1", False)])
def test_a_report_is_written_over_and_no_other_file(content, same, tmp_path):
    (tmp_path / "x.json").write_text(content)
    assert bench.is_report(tmp_path / "x.json") is same


def test_it_is_a_program(monkeypatch, capsys):
    """With large tensors in huge pages, unless the environment has it otherwise."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")  # so that it is as before in the end, also where it was not set
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    monkeypatch.setattr(sys, "argv", ["fw-bench"])
    monkeypatch.delitem(sys.modules, bench.__name__)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(bench.__name__, run_name="__main__")
    assert exit_.value.code == 2 and "the following arguments are required: command" in capsys.readouterr().err
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
