"""The colours, dashes and markers of figures, for every eye."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fw_fairseq.tools.plot.colours import COLOURS, FAMILIES, colour_of, ink, look, looks

SIGHTS = {  # what a colour becomes, linear RGB: Machado et al. 2009, severity 1
    "usual": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    """Linear RGB of #RRGGBB."""
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB: L* is the lightness, a distance of about 2 can just be seen."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / to_xyz.sum(1)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
def test_no_two_colours_are_alike(sight):
    """For colour-blind readers either; and in grey their lightness differs."""
    seen = [lab(np.array(SIGHTS[sight]) @ linear(colour)) for colour in COLOURS]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 20
    if sight == "usual":
        assert np.diff(sorted(colour[0] for colour in seen)).min() > 5


def test_a_name_is_readable_on_white():
    """With the contrast that WCAG 2 asks of a text."""
    for colour in COLOURS:
        assert 1.05 / (linear(ink(colour)) @ [0.2126, 0.7152, 0.0722] + 0.05) > 4.5


def test_a_series_has_one_look_in_all_figures():
    few, many = looks(["run 1", "gated_delta", "softmax"]), looks(["transformer_lm", "delta", "fast_weight_lm gated_delta"])
    assert few["gated_delta"] == many["fast_weight_lm gated_delta"] and few["softmax"] == many["transformer_lm"]
    assert colour_of("gated delta, DPFP-1") == few["gated_delta"].color != colour_of("gated") != colour_of("delta:elu")
    assert few["run 1"].color not in (few["gated_delta"].color, few["softmax"].color) and [*few] == [
        "run 1",
        "gated_delta",
        "softmax",
    ]


def test_lines_of_a_figure_differ_in_grey():
    """All known series, several runs of one, and names that nobody knows."""
    names = (
        [name for family in FAMILIES.values() for name in family]
        + [f"delta-{n}" for n in range(8)]
        + [f"run {n}" for n in range(8)]
    )
    found = looks(names)
    assert len({each[1:] for each in found.values()}) == len(names) == len(found)
    assert len({found[name] for name in names[-8:]}) == 8 and {found[f"delta-{n}"].color for n in range(8)} == {colour_of("delta")}
    assert len(looks(map(str, range(200)))) == 200


def test_no_two_lines_are_alike_in_grey():
    assert len({look(i)[1:] for i in range(12)}) == 12
    assert all(look(i).linestyle == "-" or look(i).linestyle[0] == 0 for i in range(12)), "a line begins with a whole dash"
