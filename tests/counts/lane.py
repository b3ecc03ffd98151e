"""The path of a warp through machine code: integer instructions, predicates and branches of one of its lanes are executed.

Loaded data, shuffled values and floating-point numbers are unknown, None. The kernels of this project hardly ever branch on them.
Where one does, the branch is not taken, and ``guesses`` counts it. A vote of a block is taken to be true, a division to be easy,
and one of a warp to be false: it asks whether numbers of fp16 leave its range.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from typing import NamedTuple

from .arithmetic import ARITHMETIC, WORD, arithmetic, combine, compare, look_up, pair, signed
from .machine_code import Instruction

LONGEST = 20_000_000  # instructions of a path
UNIFORM_REGISTERS, UNIFORM_PREDICATES = 256, 8  # where the files of uniform ones begin, behind the others
REGISTER, PREDICATE = r"(U?)R(Z|\d+)", r"(U?)P(T|\d)"
CONSTANT = r"c\[0x0\]\[(?:(U?R\w+)\+?)?(-?0x\w+)?\]"
STACK = 0x28  # in the constants, as are the sizes of a block and of the grid
BLOCK_SIZE, GRID_SIZE = 0, 12
WITHOUT_RESULT = "ST|RED|BAR|WARP|NOP|DEPBAR|LDGDEPBAR|BREAK|RET|ENDC|MEMBAR|FENCE|CCTL|YIELD|LDGSTS"
SIZES = {"HMMA": 4, "LDSM": 4, "CS2R": 2}  # registers of a result, where no modifier says it
SIZES_BY_MODIFIER = {"64": 2, "128": 4, "WIDE": 2}
WIDE = {"LDC": "64", "MOV": "64", "IADD": "64", "IADD3": "64", "IMAD": "WIDE"}  # what makes operands of an opcode 64 bits wide


class NotFollowed(RuntimeError):
    """A path that this module cannot follow."""


class Path(NamedTuple):
    """Of a warp: indices of its instructions, ~index where the predicate is off; and by place in the path the 32 bytes of device
    memory that a load is from."""

    steps: list[int]
    sectors: dict[int, int]


class Lane:
    """The first lane of a warp of the first block. ``run`` may be called for one warp after another."""

    def __init__(self, code: list[Instruction], labels: dict[str, int], threads: int, grid, params: bytes, params_at: int):
        self.labels = labels
        self.constants = {STACK: 1 << 20}
        for at, sizes in ((BLOCK_SIZE, (threads,)), (GRID_SIZE, grid)):
            self.constants.update((at + 4 * n, size) for n, size in enumerate((*sizes, 1, 1)[:3]))
        for n in range(0, len(params) - 3, 4):
            self.constants[params_at + n] = int.from_bytes(params[n : n + 4], "little")
        self.guesses = collections.Counter()
        self.guards = [self.operand(i.guard) for i in code]
        self.actions = [self.action(i) for i in code]
        self.addresses = {n: self.address(i.args[-1]) for n, i in enumerate(code) if i.op == "LDG"}

    def run(self, thread: int) -> Path:
        """The path of the warp whose first thread this is."""
        self.registers, self.predicates, self.local, self.meetings = [0] * 512, [False] * 16, {}, {}
        self.predicates[7] = self.predicates[15] = True
        self.thread, self.at, path = thread, 0, Path([], {})
        while self.at >= 0:
            at, self.at = self.at, self.at + 1
            on = self.guards[at]()
            if at in self.addresses and on is not False:
                path.sectors[len(path.steps)] = (self.addresses[at]() or 0) >> 5
            path.steps.append(~at if on is False else at)
            if on is not False and self.actions[at] is not None:
                self.actions[at](on)
            if len(path.steps) > LONGEST:
                raise NotFollowed(f"the path has no end after {LONGEST} instructions")
        return path

    # ---- operands: functions that return a value when the instruction is executed

    def operand(self, text: str, wide: bool = False):
        """Of one operand; 64 bits of it if ``wide``."""
        if m := re.fullmatch(f"(!?){PREDICATE}", text):
            n, yes = number(m[2], m[3], UNIFORM_PREDICATES), not m[1]
            return lambda: None if (x := self.predicates[n]) is None else x is yes
        if m := re.fullmatch(rf"([-~]?){REGISTER}(?:\.\w+)?", text):
            n, flip, more = number(m[2], m[3], UNIFORM_REGISTERS), WORD * bool(m[1]), m[1] == "-"
            if wide and m[3] != "Z":
                return lambda: pair(self.registers[n], self.registers[n + 1])
            return lambda: None if (x := self.registers[n]) is None else (x ^ flip) + more
        if m := re.fullmatch(CONSTANT, text):
            return functools.partial(self.constant, self.operand(m[1] or "RZ"), int(m[2] or "0", 16), wide)
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
            value = int(text, 0) & WORD
        elif text in ("SR_TID.X", "SR_LANEID"):
            return lambda: self.thread % (32 if text == "SR_LANEID" else 1 << 32)
        else:
            value = 0 if re.fullmatch(r"SRZ|SR_(CTAID|TID)\..|SR_CgaCtaId", text) else None
        return lambda: value

    def constant(self, base, offset: int, wide: bool):
        if (at := base()) is None:
            return None
        low = self.constants.get(signed(at) + offset)
        return pair(low, self.constants.get(signed(at) + offset + 4)) if wide else low

    def address(self, text: str):
        """Of the sum in an operand's last brackets."""
        parts = text[text.rindex("[") + 1 : -1].replace(".64", "").split("+")
        terms = [self.operand(part, wide=".64" in text) for part in parts]
        return lambda: None if None in (values := [x() for x in terms]) else sum(values)

    # ---- actions: functions of the guard's value that execute an instruction

    def action(self, i: Instruction):
        """None where there is nothing to do."""
        if i.op in ("BRA", "EXIT", "CALL"):
            conditions = [self.operand(x) for x in i.args if re.fullmatch(f"!?{PREDICATE}", x)]
            target = -1 if i.op == "EXIT" else self.labels.get(i.label)
            return None if "DIV" in i.mods else functools.partial(self.branch, target, conditions)
        if i.op == "BRX":
            return self.no_table
        if i.op == "BSSY":
            return lambda on: self.meetings.__setitem__(i.args[0], self.labels[i.label])
        if i.op == "BSYNC":
            return lambda on: setattr(self, "at", self.meetings[i.args[0]])
        if i.op == "STL":
            address, value = self.address(i.args[0]), self.operand(i.args[1])
            return lambda on: self.local.__setitem__(address(), value())
        if i.op == "R2P":
            return functools.partial(self.unpack, self.operand(i.args[1]), int(i.args[2], 0))
        if re.match(WITHOUT_RESULT, i.op):
            return None
        args, registers = list(i.args), ()
        flags = take_predicates(args, 1 if i.op.startswith("VOTE") else 2)
        if i.base not in ("ISETP", "FSETP", "PLOP3", "FCHK") and args and (m := re.fullmatch(REGISTER, args[0])):
            registers = results(i, number(*m.groups(), UNIFORM_REGISTERS))
            args.pop(0)
            flags += take_predicates(args, len(args)) if i.base in ("IADD3", "LEA", "IMAD", "B2R") else []
        return functools.partial(self.write, self.function(i.base, i.mods, args), registers, flags)

    def branch(self, target, conditions, on):
        for condition in conditions:
            on = combine("AND", on, condition())
        if on is None:
            self.guesses[self.at - 1] += 1
        elif on and target is not None:
            self.at = target

    def no_table(self, on):
        raise NotFollowed("the kernel has a jump table")

    def unpack(self, source, mask: int, on):
        bits = source()
        for n in range(7):
            if mask >> n & 1:
                self.predicates[n] = None if bits is None else bool(bits >> n & 1)

    def write(self, function, registers, flags, on):
        value, truths = function()
        for k, n in enumerate(registers):
            self.registers[n] = None if value is None or on is None else value >> 32 * k & WORD
        for n, truth in zip(flags, itertools.chain(truths, itertools.repeat(None))):
            if n % 8 != 7:
                self.predicates[n] = truth if on else None

    def function(self, op: str, mods: list[str], args: list[str]):
        """A function that returns what an instruction puts into registers, and what into predicates, a tuple."""
        wide = WIDE.get(op) in mods
        get = [self.operand(x, wide and (op != "IMAD" or n == 2)) for n, x in enumerate(args)]
        if op == "ISETP":
            return functools.partial(compare, mods, get)
        if op == "PLOP3":
            return functools.partial(look_up, get)
        if op == "SEL":
            return lambda: (None if (which := get[2]()) is None else get[not which](), ())
        if op == "LDL":
            address, one = self.address(args[0]), "64" not in mods and "128" not in mods
            return lambda: (self.local.get(address()) if one else None, ())
        if op == "P2R":
            return functools.partial(self.pack, get[1], int(args[2], 0))
        if op.startswith("VOTE"):
            return lambda: (0, (False,))
        if op in ("B2R", "FCHK"):
            return lambda: (WORD, (op == "B2R",))
        known = op in ARITHMETIC and ("64" not in mods or wide)
        return functools.partial(arithmetic, op, mods, get) if known else lambda: (None, ())

    def pack(self, source, mask: int):
        bits = sum((self.predicates[n] or 0) << n for n in range(7) if mask >> n & 1)
        return bits | (source() or 0) & ~mask, ()


def number(uniform: str, name: str, size: int) -> int:
    """Where a register or predicate is in its file; the last is the constant one."""
    return size * bool(uniform) + (size - 1 if name in "ZT" else int(name))


def take_predicates(args: list[str], most: int) -> list[int]:
    """Predicates in front of the other operands, which are taken from ``args``."""
    found = []
    while len(found) < most and args and (m := re.fullmatch(PREDICATE, args[0])):
        found.append(number(*m.groups(), UNIFORM_PREDICATES))
        args.pop(0)
    return found


def results(i: Instruction, first: int) -> range:
    """The registers that an instruction writes, from ``first`` on; the constant one is none."""
    size = next((n for mod, n in SIZES_BY_MODIFIER.items() if mod in i.mods), 1)
    constant = first | UNIFORM_REGISTERS - 1
    return range(first, first if first == constant else min(first + SIZES.get(i.op, size), constant))
