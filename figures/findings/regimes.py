"""Exact regimes by delay and by blocking links, side by side, with accelerators as points."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.cases import LOOK
from figures.kit.rules import describe
from figures.tabular.regimes import draw_map
from pipejax.plots import palette, style

SIZES = {"chimera": "8 x 32", "hanayo": "8 x 8"}
# where a schedule is the faster, as shares of the panel: its name stands there
WINNERS = {"hanayo": ((0.1, 0.75), (0.8, 0.5)), "chimera": ((0.65, 0.15), (0.1, 0.75))}
LABEL: Mapping[str, Any] = {"facecolor": palette.WHITE, "edgecolor": "none", "pad": 1.5}
POINT: Mapping[str, Any] = {
    "color": palette.YELLOW,
    "markeredgecolor": palette.BLACK,
    "linestyle": "",
    "ms": 7,
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw a row of maps for each pair of schedules."""
    figure, panels = plt.subplots(2, 2, figsize=(style.PAGE, 5.0), sharex=True, sharey=True)
    for row, pair in zip(panels, ("hanayo", "chimera"), strict=True):
        for axes, link in zip(row, data.link.values, strict=True):
            at = data.sel(pair=pair)
            mesh = draw_map(axes, at.sel(link=link))
            axes.plot(at.message_of, at.backward_of, "*", label="accelerators", **POINT)
            names = [LOOK[str(name.values)]["label"] for name in (at.one, at.other)]
            for name, place in zip(names, WINNERS[pair], strict=True):
                axes.text(*place, f"{name}\nis faster", transform=axes.transAxes, bbox=LABEL)
            axes.set_title(f"{' against '.join(names)}, {SIZES[pair]}\n{link} links", loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("message / forward, c / F")
        axes.set_xscale("log")
    for axes in panels[:, 0]:
        axes.set_ylabel("backward / forward, B / F")
    bar = figure.colorbar(mesh, ax=panels, location="right", extend="both", aspect=30)
    bar.set_label("the first is faster by [%]")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return {"finding_regimes": describe(figure, _caption(data))}


def _caption(data: xr.Dataset) -> str:
    border = data.border.sel(waves=2, workers_of_border=8)
    words = ", ".join(f"{float(border.sel(link=n)):.4f} F by {n}" for n in data.link.values)
    return (
        "Exact regimes in F and B of a microbatch on a worker and the message time c: orange where "
        "the first is the faster. At B = 2F Hanayo with two waves is at most as long as Chimera "
        f"exactly where c is at most {words}. The accelerators lie a decade inside of all four: "
        f"{', '.join(str(name).upper() for name in data.system.values)} with the model of the "
        "tabular-schedule paper. Gradient exchanges are not counted."
    )
