"""The machine code of a compiled kernel, from NVIDIA's disassembler: its instructions, each with what the compiler wrote into it
about when it may run."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

KINDS = {  # the first whose pattern an opcode begins with
    "MMA": "HMMA|IMMA|HGMMA",
    "LDSM": "LDSM",
    "LDS": "LDS",
    "STS": "STS",
    "LDGSTS": "LDGSTS",
    "CTRL": "BRA|BSSY|BSYNC|BREAK|EXIT|CALL|RET|WARP|NOP|DEPBAR|LDGDEPBAR|ENDCOLL|MEMBAR|FENCE|CCTL|YIELD",
    "LOCAL": "LDL|STL",
    "LDC": "U?LDC",
    "LDG": "LDG?$",
    "STG": "STG?$|RED|ATOM",
    "BAR": "BAR|B2R",
    "MUFU": "MUFU",
    "SHFL": "SHFL",
    "FP32": "FFMA|FADD|FMUL|FSEL|FMNMX|FSETP|FCHK|HADD|HMUL|HFMA",
    "CVT": "F2|I2F|PRMT",
    "INT": "",
}
# The unit that an instruction of a kind keeps busy, and for how many cycles. There is one of each for a scheduler, and one "memory"
# for a multiprocessor.
UNITS = {"MMA": ("tensor", 8), "FP32": ("fma", 1), "INT": ("alu", 2), "CVT": ("alu", 2), "MUFU": ("xu", 8)}
UNITS |= dict.fromkeys(("LDS", "LDSM", "STS", "LDG", "STG", "LDGSTS", "LOCAL", "SHFL"), ("memory", 1))
UNIFORM = "IADD|IADD3|ISETP|PLOP3|SEL|LEA|LOP3|SHF|SGXT|IMAD|PRMT|VIADD"  # the same with a U in front, on uniform registers
OTHER_NAMES = {"S2UR": "S2R", "LDCU": "LDC", "IMNMX": "VIMNMX", "UMOV": "MOV", "ULDC": "LDC"}
LINE = re.compile(r"^(\.L_\w+):|^\s+/\*\w{4,}\*/\s+(.*?)\s*;\s*/\* 0x\w+ \*/\n\s*/\* (0x\w+) \*/", re.M)


class Instruction:
    """One line of a disassembly: ``@guard op.mods args``, and the upper half of its 128 bits.

    It waits for the scoreboards in ``waits``. It sets ``sets`` when its result is there and ``frees`` when its operands have been
    read; 7 stands for none. After it the warp pauses for ``stall`` cycles.
    """

    def __init__(self, text: str, high: int):
        guard, text = re.match(r"(?:@(\S+)\s+)?(.*)", re.sub(r"\s*\(\*.*\*\)", "", text)).groups()
        self.guard = guard or "PT"
        name, _, rest = text.partition(" ")
        self.op, *self.mods = name.split(".")
        self.args = [part.strip().replace(".reuse", "") for part in re.split(r",(?![^\[]*\])", rest) if part.strip()]
        self.stall, self.sets, self.frees = max(high >> 41 & 15, 1), high >> 46 & 7, high >> 49 & 7
        self.waits = [n for n in range(6) if high >> 52 + n & 1]
        self.kind = next(kind for kind, pattern in KINDS.items() if re.match(pattern, self.op))
        self.unit, self.busy = UNITS.get(self.kind, (None, 0))
        if self.op in ("IMAD", "UIMAD"):
            self.unit = "fma"
        elif self.unit == "memory" and self.op != "SHFL":
            self.busy = 4 if "128" in self.mods or "88.4" in name else 2 if "64" in self.mods or "88.2" in name else 1
        label = re.search(r"`\((\.L_\w+)\)", text)
        self.label = label and label[1]
        self.base = self.op[1:] if re.match(rf"U({UNIFORM})", self.op) else OTHER_NAMES.get(self.op, self.op)


@functools.cache
def disassembler() -> str:
    """The program, from the package nvidia-cuda-nvdisasm, or on the PATH."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else ()
    found = [str(path) for folder in folders for path in sorted(Path(folder).glob("*/bin/nvdisasm"))]
    program = found[-1] if found else shutil.which("nvdisasm")
    if program is None:
        raise SystemExit("nvdisasm is neither in this environment nor on the PATH; install nvidia-cuda-nvdisasm")
    return program


@functools.cache
def disassemble(cubin: bytes, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """The kernel's instructions, and the index in them that each label stands for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler(), "-c", "-hex", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return read(re.search(rf"\.text\.{kernel}:\n(.*?)(?=\n//-----|\Z)", text, re.S)[1])


def read(section: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and labels of one section of the disassembler's text."""
    code, labels = [], {}
    for m in LINE.finditer(section):
        if m[1]:
            labels[m[1]] = len(code)
        else:
            code.append(Instruction(m[2], int(m[3], 16)))
    return code, labels
