"""What integer instructions compute, from the values of their operands and their modifiers. None stands for an unknown value."""

from __future__ import annotations

import functools
import itertools
import operator

WORD = 0xFFFFFFFF
COMPARE = {"LT": operator.lt, "GT": operator.gt, "LE": operator.le, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne}


def signed(x: int) -> int:
    x &= WORD
    return x - (x >> 31 << 32)


def add_shifted(v, mods):
    if "HI" not in mods:
        return (v[0] << v[2]) + v[1]
    wide, rest = (signed(v[0]), v[2:]) if "SX32" in mods else (v[0] | v[2] << 32, v[3:])
    return (wide << rest[0] >> 32 & WORD) + v[1] + sum(rest[1:])


def multiply(v, mods):
    a, b, c, *carry = v
    if "U32" not in mods and ("WIDE" in mods or "HI" in mods):
        a, b = signed(a), signed(b)
    return (a * b >> 32 if "HI" in mods else a * b) + c + sum(carry)


def shift(v, mods):
    a, n, high = v
    wide, n = a | high << 32, min(n, 64)
    if mods[0] == "L":
        return wide << n >> 32 if "HI" in mods else a << n
    if "HI" not in mods and mods[1][1:] == "64":
        return wide >> n
    return (signed(high) if "S32" in mods else high) >> n


def logic(v, mods):
    terms = ((x if n >> 2 - i & 1 else ~x for i, x in enumerate(v[:3])) for n in range(8) if v[3] >> n & 1)
    return functools.reduce(operator.or_, (a & b & c & WORD for a, b, c in terms), 0)


def permute(v, mods):
    result = 0
    for i in range(4):
        byte = (v[0] | v[2] << 32) >> 8 * (v[1] >> 4 * i & 7) & 255
        result |= (255 * (byte >> 7) if v[1] >> 4 * i & 8 else byte) << 8 * i
    return result


def extend(v, mods):
    sign = "U32" not in mods and v[0] >> v[1] - 1 & 1
    return v[0] & (1 << v[1]) - 1 | (WORD << v[1] if sign else 0)


def total(v, mods):
    return sum(v)


ARITHMETIC = {  # opcode: a function of the operands and the modifiers
    **dict.fromkeys(("MOV", "R2UR", "S2R", "CS2R", "LDC"), lambda v, mods: v[0]),
    **dict.fromkeys(("IADD", "IADD3", "VIADD"), total),
    "IABS": lambda v, mods: abs(signed(v[0])),
    "VIMNMX": lambda v, mods: (min if v[2] else max)(v[:2], key=int if "U32" in mods else signed),
    "VIADDMNMX": lambda v, mods: (min if v[3] else max)(v[0] + v[1] & WORD, v[2], key=int if "U32" in mods else signed),
    "IMAD": multiply,
    "LEA": add_shifted,
    "LOP3": logic,
    "PRMT": permute,
    "SGXT": extend,
    "SHF": shift,
}


def combine(how: str, a, b):
    """AND, OR or XOR of truth values, None for unknown."""
    if how != "XOR" and (how == "OR") in (a, b):
        return how == "OR"
    if a is None or b is None:
        return None
    return a != b if how == "XOR" else how == "AND"


def pair(low, high):
    return None if low is None or high is None else low | high << 32


def arithmetic(op: str, mods: list[str], get):
    values = [x() for x in get]
    if None in values:
        return None, ()
    value = ARITHMETIC[op](values, mods)
    return value, (value != 0 or values[-1],) if op == "LOP3" else (value >> 32 >= 1, value >> 32 >= 2)


def compare(mods: list[str], get):
    test, how = COMPARE[mods[0]], next(mod for mod in mods if mod in ("AND", "OR", "XOR"))
    a, b, before, true = get[0](), get[1](), get[2](), None
    if a is not None and b is not None:
        a, b = (x & WORD if "U32" in mods else signed(x) for x in (a, b))
        true = get[3]() if "EX" in mods and a == b else test(a, b)
    return None, (combine(how, true, before), combine(how, None if true is None else not true, before))


def look_up(get):
    """Two truth values from tables of three inputs; unknown where an unknown input matters."""
    inputs = [[False, True] if (x := get[n]()) is None else [x] for n in range(3)]
    found = [{table() >> 4 * a + 2 * b + c & 1 for a, b, c in itertools.product(*inputs)} for table in get[3:5]]
    return None, tuple(bool(*values) if len(values) == 1 else None for values in found)
