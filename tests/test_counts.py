"""Counting machine code: instructions are executed as NVIDIA defines them, a path is followed turn by turn, the model adds up what
is plain to see, and the documentation has the figures that the command prints."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from counts import __main__ as command
from counts.cases import Case, record
from counts.counted import DEVICES, Pass, count
from counts.lane import Lane, NotFollowed
from counts.machine_code import disassemble, read
from counts.model import LATENCY, Multiprocessor, blocking_loads, milliseconds
from counts.tiers import tiers
from hostcuda.nvrtc import compiled
from support.commands import ROOT

from fw_fairseq.feature_maps import ROW_MAPS, RowMap

PARAMS = 0x210
NONE = 7  # no scoreboard


def assembled(program: str):
    """Instructions and labels of lines such as ``@P0 BRA `(.L_x_0) | stall sets frees waits``."""
    lines = []
    for n, line in enumerate(program.strip().splitlines()):
        text, _, timing = line.strip().partition(" | ")
        if text.startswith(".L"):
            lines.append(text)
            continue
        stall, sets, frees, *waits = map(int, timing.split()) if timing else (1, NONE, NONE)
        high = stall << 41 | sets << 46 | frees << 49 | sum(1 << 52 + wait for wait in waits)
        lines += [f"        /*{16 * n:04x}*/    {text} ;    /* 0x0 */", f"        /* {high:#018x} */"]
    return read("\n".join(lines) + "\n")


def lane_of(program: str, params: bytes = b"", threads: int = 32, grid=(1,)) -> Lane:
    return Lane(*assembled(program), threads, grid, params, PARAMS)


def words(*values: int) -> bytes:
    return b"".join((value & 0xFFFFFFFF).to_bytes(4, "little") for value in values)


COUNTDOWN = """
    MOV R0, c[0x0][0x210]
    .L_x_0:
    IADD3 R0, R0, -0x1, RZ
    ISETP.NE.AND P0, PT, R0, RZ, PT
    @P0 BRA `(.L_x_0)
    EXIT
"""


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_a_loop_takes_its_turns(turns):
    steps = lane_of(COUNTDOWN, words(turns)).run(0).steps
    assert steps == [0, *[1, 2, 3] * (turns - 1), 1, 2, ~3, 4]


def test_no_number_of_a_warp_is_unusual():
    """And a branch on it is no guess."""
    lane = lane_of("FSETP.GT.AND P0, PT, R0, R1, PT\n VOTE.ANY P0, P0\n @P0 EXIT\n NOP\n EXIT")
    assert lane.run(0).steps == [0, 1, ~2, 3, 4] and not lane.guesses


def test_warps_part_and_threads_of_a_block_are_known():
    program = """
        S2R R0, SR_TID.X
        ISETP.GE.U32.AND P0, PT, R0, c[0x0][0x0], PT
        ISETP.GT.U32.AND P1, PT, R0, 0x1f, PT
        @P1 EXIT
        NOP
        EXIT
    """
    lane = lane_of(program, threads=64)
    assert lane.run(0).steps == [0, 1, 2, ~3, 4, 5]
    assert lane.run(32).steps == [0, 1, 2, 3]
    assert lane.predicates[0] is False


# Operands are R2 = a, R3 = b, R4 = c; the result is R0, with R1 where it is wide.
A, B, C = 0x80000003, 0xFFFFFFFE, 0x00012345


@pytest.mark.parametrize(
    "text, expected",
    [
        ("IADD3 R0, R2, R3, R4", (A + B + C) % 2**32),
        ("IADD3 R0, R2, -R4, RZ", (A - C) % 2**32),
        ("IADD3 R0, R2, ~R4, RZ", (A + ~C) % 2**32),
        ("IMAD R0, R3, R4, R2", (-2 * C + A) % 2**32),
        ("IMAD.WIDE.U32 R0, R2, R3, RZ", A * B),
        ("IMAD.WIDE R0, R2, R3, RZ", ((A - 2**32) * (B - 2**32)) % 2**64),
        ("IMAD.HI.U32 R0, R2, R3, RZ", A * B >> 32),
        ("LEA R0, R4, R2, 0x4", (C * 16 + A) % 2**32),
        ("LEA.HI R0, R2, R4, RZ, 0x3", ((A << 3 >> 32) + C) % 2**32),
        ("LOP3.LUT R0, R2, R3, R4, 0xc0, !PT", A & B),
        ("LOP3.LUT R0, R2, R3, R4, 0x96, !PT", A ^ B ^ C),
        ("LOP3.LUT R0, R2, R3, R4, 0xf8, !PT", A | B & C),
        ("SHF.L.U32 R0, R4, 0x5, RZ", C << 5),
        ("SHF.R.S32.HI R0, RZ, 0x1f, R2", 0xFFFFFFFF),
        ("SHF.R.U32.HI R0, RZ, 0x1f, R2", 1),
        ("SHF.L.U64.HI R0, R2, 0x4, R4", (C << 32 | A) << 4 >> 32 & 0xFFFFFFFF),
        ("PRMT R0, R2, 0x5410, R4", (A & 0xFFFF) | (C & 0xFFFF) << 16),
        ("SGXT R0, R3, 0x2", 0xFFFFFFFE),
        ("SGXT.U32 R0, R3, 0x2", 2),
        ("VIMNMX R0, R2, R4, PT", A),
        ("VIMNMX.U32 R0, R2, R4, PT", C),
        ("VIADDMNMX R0, R2, 0x1, R4, PT", A + 1),
        ("IABS R0, R3", 2),
        ("SEL R0, R2, R4, PT", A),
        ("SEL R0, R2, R4, !PT", C),
        ("FADD R0, R2, R4", None),
        ("SHFL.BFLY PT, R0, R2, 0x1, 0x1f", None),
    ],
)
def test_arithmetic(text, expected):
    load = "\n".join(f"MOV R{2 + n}, c[0x0][{PARAMS + 4 * n:#x}]" for n in range(3))
    lane = lane_of(f"{load}\nMOV R0, RZ\nMOV R1, RZ\n{text}\nEXIT", words(A, B, C))
    lane.run(0)
    low, high = lane.registers[:2]
    assert (None if low is None else low | high << 32) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("ISETP.LT.AND P0, P1, R2, R4, PT", (True, False)),
        ("ISETP.LT.U32.AND P0, P1, R2, R4, PT", (False, True)),
        ("ISETP.NE.OR P0, PT, R2, R2, !PT", (False, False)),
        ("PLOP3.LUT P0, P1, PT, PT, PT, 0x80, 0x7f", (True, False)),
        ("FSETP.GT.AND P0, P1, R2, R4, PT", (None, None)),
    ],
)
def test_predicates(text, expected):
    lane = lane_of(f"MOV R2, c[0x0][0x210]\nMOV R4, c[0x0][0x214]\n{text}\nEXIT", words(A, C))
    lane.run(0)
    assert (lane.predicates[0], lane.predicates[1]) == expected


def test_a_branch_on_data_is_counted_and_not_taken():
    program = """
        LDG.E R0, desc[UR4][R2.64]
        ISETP.NE.AND P0, PT, R0, RZ, PT
        @P0 BRA `(.L_x_1)
        NOP
        .L_x_1:
        EXIT
    """
    lane = lane_of(program)
    assert lane.run(0).steps == [0, 1, 2, 3, 4] and dict(lane.guesses) == {2: 1}
    with pytest.raises(NotFollowed, match="jump table"):
        lane_of("BRX R2 -0x10\nEXIT").run(0)


def cycles(program: str, warps: int = 1, blocks: int = 1) -> int:
    code, labels = assembled(program)
    lane = Lane(code, labels, 32 * warps, (1,), b"", PARAMS)
    return Multiprocessor(code, [lane.run(32 * n) for n in range(warps)], blocks).cycles()


LOAD = "LDG.E R0, desc[UR4][R2.64] | 2 0 7"


def test_the_model_adds_up():
    assert cycles("NOP | 3 7 7\nNOP | 4 7 7\nEXIT | 5 7 7") == 12
    assert cycles(f"{LOAD}\nFADD R1, R0, R0 | 4 7 7 0\nEXIT | 1 7 7") == LATENCY["LDG"] + 1 + 4 + 1
    products = "\n".join("HMMA.16816.F32.BF16 R0, R4, R6, R8 | 2 7 7" for _ in range(5))
    assert cycles(f"{products}\nEXIT | 1 7 7") == 4 * 8 + 2 + 1  # a product keeps its unit for 8 cycles
    assert cycles(f"{products}\nEXIT | 1 7 7", warps=4) == 4 * 8 + 2 + 1  # four units
    assert cycles(f"{products}\nEXIT | 1 7 7", blocks=5) > 2 * 4 * 8  # the fifth warp shares one


def test_warps_wait_for_the_last_at_a_barrier():
    program = """
        S2R R0, SR_TID.X | 1 7 7
        ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT | 1 7 7
        @!P0 NOP | 1 7 7
        @P0 BRA `(.L_x_1) | 1 7 7
        NOP | 15 7 7
        NOP | 15 7 7
        .L_x_1:
        BAR.SYNC.DEFER_BLOCKING 0x0 | 1 7 7
        EXIT | 1 7 7
    """
    assert cycles(program, warps=2) == 5 + 30 + 1 + LATENCY["BAR"] + 1  # S2R keeps the integer unit for two cycles


def test_loads_that_block():
    code, _ = assembled("\n".join([LOAD, "NOP", "FADD R1, R0, R0 | 1 7 7 0", LOAD, *["NOP"] * 8, "FADD R1, R0, R0 | 1 7 7 0"]))
    assert blocking_loads(code, list(range(len(code)))) == 1


def test_waves_of_blocks():
    """An H100 has 132 multiprocessors at 1.755 GHz; a block by itself takes 1,000 cycles and two together 1,500."""
    for blocks, expected in ((64, 1000), (132, 1000), (133, 1500), (264, 1500), (528, 3000), (265, 2500)):
        assert milliseconds(blocks, 2, 1000, 1500) == pytest.approx(expected / 1.755e6)


def test_blocks_of_a_multiprocessor():
    hopper, ampere = DEVICES["90"], DEVICES["80"]
    assert hopper.fits(128, 255, 1024) == 2  # 65,536 registers
    assert hopper.fits(128, 128, 113 * 1024) == 2 and hopper.fits(128, 128, 114 * 1024) == 1  # 1 KiB of each block is the system's
    assert hopper.fits(1024, 32, 0) == 2 and hopper.fits(32, 16, 0) == 32
    assert ampere.fits(128, 128, 81 * 1024) == 2 and ampere.fits(128, 128, 82 * 1024) == 1


def test_what_is_recorded_and_must_be_moved():
    """bf16, 64 wide, a gate in fp32: bytes of q, k, v, y, the gate, and the memory before and after."""
    recording = record(Case("gated", 64, "bf16"), 128, "90")
    kernels = {name: [launch.kernel for launch in launches] for name, launches in recording.launches.items()}
    assert kernels == {"forward": ["linear_forward"], "forward of training": ["linear_forward"], "backward": ["linear_backward"]}
    rows, gate, memories = 128 * 64 * 2, 128 * 4, 2 * 64 * 64 * 4
    assert recording.moved["forward"] == 4 * rows + gate + memories
    assert recording.moved["backward"] == 7 * rows + 2 * gate + memories


def test_few_sequences_are_recorded_in_parts():
    case = Case("gated", 64, "bf16", processors=2)
    recording = record(case, 1024, "90")
    adjoint, back = recording.launches["backward"]
    assert (adjoint.kernel, back.kernel, back.grid) == ("linear_adjoint", "linear_backward", (1, 1, 4))
    assert str(case).endswith(", 2 processors for each") and recording.launches["forward"][0].grid == (1, 2)


def test_a_feature_map_is_recorded_inside_the_kernels():
    """dpfp makes 32 keys of rows 16 wide; gates per channel of the keys are as wide, and only the rows are moved."""
    case = Case("decay", 16, "bf16", row_map=RowMap("dpfp", 1, "sum"))
    recording = record(case, 128, "90")
    assert str(case) == "decay, K = 32, V = 16, bf16, dpfp with sum norm"
    (launch,) = recording.launches["forward"]
    assert launch.defines["FW_MAP"] == ROW_MAPS["dpfp"].number and launch.defines["FW_K"] == 32 and launch.defines["FW_D"] == 16
    rows, gates, memories = 128 * 16 * 2, 128 * (32 + 16) * 4, 2 * 32 * 16 * 4
    assert recording.moved["forward"] == 4 * rows + gates + memories


def branches_on_data(rule: str, feature_map: str) -> dict[str, int]:
    """Of a warp over 128 tokens, in each pass."""
    found = {}
    for name, launches in record(Case(rule, 16, "bf16", row_map=RowMap(feature_map, 1, "sum")), 128, "90").launches.items():
        (launch,) = launches
        code, labels = disassemble(compiled(launch.source, launch.defines, "90")[0], launch.kernel)
        lane = Lane(code, labels, launch.threads, launch.grid, launch.params, DEVICES["90"].params_at)
        lane.run(0)
        found[name] = lane.guesses.total()
    return found


@pytest.mark.long
@pytest.mark.parametrize("rule", ["sum", "delta"])
def test_elu_takes_no_branch_for_a_number(rule):
    """relu is one instruction for a number, and elu has no branch beyond those around it."""
    assert branches_on_data(rule, "elu") == branches_on_data(rule, "relu")


def compiler() -> tuple[int, int]:
    return pytest.importorskip("cupy.cuda", exc_type=ImportError).nvrtc.getVersion()


def documented(rule: str) -> list[str]:
    """The first row of this rule in docs/kernels.md."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    return re.search(rf"^\| {rule}, K = V = 64, bf16 \| .*$", text, re.M)[0].strip("| ").split(" | ")


@pytest.mark.skipif("compiler() != (13, 5)", reason="docs/kernels.md is for NVRTC 13.5")
def test_the_documentation_has_the_counts(monkeypatch):
    counted = count(Case("sum", 64, "bf16"), "90")
    monkeypatch.setattr(command, "count", lambda *_: counted)
    row = command.row(Case("sum", 64, "bf16"), "90")
    assert documented("sum") == row
    assert row[1] == f"{counted['forward'].kernels[0].instructions:,}"


def test_what_cannot_be_counted_is_a_row_of_the_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["counts.sh", "--rules", "decay", "--attention-norm"])
    assert command.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and "not counted: attention_norm=True is not defined for rule 'decay'" in printed[-1]


@pytest.mark.parametrize("key, value, tier", [(0.9, 0.9, 0), (0.01, 1.0, 0), (0.01, 0.01, 1), (3e-4, 3e-4, 2), (1e-4, 1e-4, 3)])
def test_how_a_chunk_of_decay_runs(key, value, tier):
    """As cuda/gates.cuh says, by products of 8 and of 4 gates; 4 tokens beside values that do not decay take one round."""
    f, z = torch.full((1, 2, 20, 16), key), torch.full((1, 2, 20, 80), value)
    z[..., 64:] = 1.0
    found = tiers(f, z)
    assert found.shape == (2, 1, 2, 2) and (found[0, ..., 0] == tier).all() and (found[1, ..., 1] == 0).all()


def test_by_kind(monkeypatch, capsys):
    """A figure for each kind of instruction, and what they add up to."""
    counts = SimpleNamespace(kernel="k", kinds={"MMA": 3, "INT": 4}, guesses=0.5)
    monkeypatch.setattr(command, "count", lambda case, architecture: {"forward": Pass([counts], (1.0, 1.0))})
    monkeypatch.setattr("sys.argv", ["counts.sh", "--rules", "sum", "--kinds", "--widths", "32"])
    assert command.main() == 0
    head, _, row = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    assert row[:2] == ["sum, K = V = 32, bf16, forward", "k"]
    assert dict(zip(head[1:], row[2:]))["MMA"] == "3" and row[-1] == "0.5"


def test_measured_beside_modelled(monkeypatch, tmp_path, capsys):
    """Training is two passes; what memory needs counts where it is more; parts and rows that are not aligned are left out."""
    given = dict(rule="delta", batch=8, heads=8, tokens=2048, aligned=True, attention_norm=False)
    times = [given | {"pass": "forward", "device_ms": 0.3}, given | {"pass": "forward and backward", "device_ms": 1.2}]
    others = [given | {"batch": 1, "tokens": 65536}, given | {"aligned": False}, given | {"least_gate": 0.0}]
    (tmp_path / "speed.json").write_text(json.dumps(times + [x | {"pass": "forward", "device_ms": 1.0} for x in others]))
    ms = {"forward": (0.1, 0.2), "forward of training": (0.25, 0.2), "backward": (0.35, 0.3)}
    passes = {name: Pass([SimpleNamespace(ms=(modelled,))], (least,)) for name, (modelled, least) in ms.items()}
    monkeypatch.setattr(command, "count", lambda case, architecture, shapes: passes)
    monkeypatch.setattr("sys.argv", ["counts.sh", "--measured", str(tmp_path / "speed.json")])
    assert command.main() == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    what = "delta, 8 x 8 sequences and heads of 2048 tokens"
    assert rows == [
        [what, "forward", "0.300", "0.100", "0.200", "1.50"],
        [what, "forward and backward", "1.200", "0.600", "0.500", "2.00"],
    ]


def test_what_was_measured_is_a_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["counts.sh", "--measured", str(tmp_path)])
    with pytest.raises(SystemExit):
        command.main()
    assert f"--measured is {tmp_path}, which is no file" in capsys.readouterr().err
