"""The four features of DPFP with nu = 1 as surfaces over the plane (Schlag et al. 2021, figure 1): dpfp.py OUT.svg"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fw_fairseq.feature_maps import dpfp
from fw_fairseq.tools.plot.colours import BLUE, ORANGE, SKY, VERMILLION
from fw_fairseq.tools.plot.style import TEXT, canvas, save

POINTS = 17  # along each axis; odd, so that the axes themselves are on the grid


def draw() -> Any:
    """Draws one surface for each feature, over the quarter where it is above 0: at no point are there two."""
    figure, [flat] = canvas(4.2)
    flat.remove()
    axes = figure.add_subplot(projection="3d")
    axis = torch.linspace(-1, 1, POINTS, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    x, y = points.unbind(-1)
    for i, (z, colour) in enumerate(zip(dpfp(points, 1).unbind(-1), (BLUE, VERMILLION, SKY, ORANGE))):
        at = z.flatten().argmax()
        quarter = (x * x.flatten()[at] >= 0) & (y * y.flatten()[at] >= 0)  # with its edges, where the feature is 0
        shown = z.masked_fill(~quarter, torch.nan)
        style = {"color": colour, "rstride": 1, "cstride": 1, "lw": 0.3, "edgecolor": "white"}
        axes.plot_surface(x.numpy(), y.numpy(), shown.numpy(), **style)
        place = (x.flatten()[at].item(), y.flatten()[at].item(), z.max().item() + 0.12)
        axes.text(*place, rf"$\phi_{i + 1}$", fontsize=TEXT, ha="center", bbox={"fc": "white", "lw": 0, "alpha": 0.8, "pad": 0.8})
    axes.set(xlabel="$x_1$", ylabel="$x_2$", zlim=(0, 1.1), xticks=(-1, 0, 1), yticks=(-1, 0, 1), zticks=(0, 0.5, 1))
    axes.view_init(elev=40, azim=-50)
    figure.set_figwidth(5)
    return figure


if __name__ == "__main__":
    save(draw(), [Path(sys.argv[1])])
