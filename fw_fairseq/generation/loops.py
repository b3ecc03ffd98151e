"""The compiled loops have these arguments in common (``ops/native/decode.cpp``)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ..feature_maps import NORMS, ROW_MAPS, FeatureMap, RowMap


class View(ctypes.Structure):
    """A tensor (R,H) or (R,H,X)."""

    _fields_ = (("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64))

    def show(self, x: Tensor | None) -> None:
        """Points at x, (R,H,1) or (R,H,1,X)."""
        if x is None:
            self.data = None
        else:
            self.data, self.row, self.head = x.data_ptr(), x.stride(0), x.stride(1)


class Features(ctypes.Structure):
    """How the loop makes features of the rows that it is given.

    maps_rows: whether it maps them; otherwise they are features already.
    of_projection: whether it maps the rows of the projection; otherwise those of the part of the map that has parameters.
    """

    _fields_ = [(name, ctypes.c_int64) for name in ("input", "keys", "map", "nu", "norm")]

    def describe(self, feature_map: FeatureMap, row_map: RowMap | None) -> None:
        """Fills in the numbers for a feature map, and for the part of it that the loop may apply."""
        self.maps_rows = row_map is not None and ROW_MAPS[row_map.name].number is not None
        self.of_projection = self.maps_rows and type(feature_map).linear is FeatureMap.linear
        self.keys = feature_map.out_dim
        self.input = feature_map.head_dim if self.of_projection else self.keys
        if self.maps_rows:
            self.map, self.norm, self.nu = ROW_MAPS[row_map.name].number, NORMS[row_map.norm].number, row_map.nu
