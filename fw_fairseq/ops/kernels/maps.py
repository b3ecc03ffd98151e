"""The feature maps and norms that the kernels compute themselves, by the numbers that ``cuda/row_map.cuh`` knows them by."""

from __future__ import annotations

from ... import Mistake
from ...row_map import AS_IS, RowMap

MAPS = {"identity": 1, "elu": 2, "relu": 3, "dpfp": 4}  # FW_MAP; 0, or no macro at all, for q and k that are features already
NORMS = {"none": 0, "sum": 1, "l2": 2}  # FW_NORM


def why_no_map(row_map: RowMap) -> str | None:
    """A sentence that says why the kernels cannot make these features; None where they can."""
    for kind, name, known in (("feature map", row_map.name, MAPS), ("norm", row_map.norm, NORMS)):
        if name not in known:
            return f"backend='cuda' has no {kind} {name!r} in its kernels, which have: {', '.join(known)}"
    return None


def map_defines(row_map: RowMap, width: int) -> dict[str, int]:
    """The macros of ``cuda/row_map.cuh`` for rows this wide; none for rows that are features already."""
    if row_map == AS_IS:
        return {}
    if reason := why_no_map(row_map):
        raise Mistake(reason)
    return {"FW_MAP": MAPS[row_map.name], "FW_D": width, "FW_NU": row_map.nu, "FW_NORM": NORMS[row_map.norm]}
