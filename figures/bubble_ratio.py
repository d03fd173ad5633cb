"""Bubble ratio against microbatches: by published formula and by idealised table."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.cases import LOOK, count_axis, main_setting
from pipejax.plots import style

NAMES = ("gpipe", "1f1b", "chimera", "hanayo, 2 waves", "interleaved-1f1b")
SLOTS = "F=1, B=2"


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw both pipeline depths side by side."""
    data = main_setting(data)
    figure, panels = plt.subplots(1, 2, figsize=(style.PAGE, 2.9), sharey=True)
    for axes, workers in zip(panels, data.workers.values, strict=True):
        at = data.sel(workers=workers)
        for name in NAMES:
            look = LOOK[name]
            table = at.table_bubble_ratio.sel(schedule=name, measured=SLOTS)
            axes.plot(data.microbatches, 100 * table, **{**look, "linestyle": "-"})
            formula = at.formula_bubble_ratio.sel(schedule=name)
            axes.plot(
                data.microbatches,
                100 * formula,
                color=look["color"],
                linestyle=":",
                marker="o",
                markersize=7,
                markerfacecolor="none",
                linewidth=0.8,
            )
        axes.set_title(f"{workers} workers", loc="left")
        axes.set_xlabel("microbatches")
        count_axis(axes, data.microbatches.values)
    panels[0].set_ylabel("bubble ratio [%]")
    panels[0].set_ylim(bottom=0)
    handles, _ = panels[0].get_legend_handles_labels()
    kinds = [
        Line2D([], [], color="black", linestyle="-", label=f"filled, solid: table ({SLOTS} slots)"),
        Line2D(
            [],
            [],
            color="black",
            linestyle=":",
            marker="o",
            markersize=7,
            markerfacecolor="none",
            label="open, dotted: published formula",
        ),
    ]
    figure.legend(handles=[*handles, *kinds], loc="outside lower center", ncols=4)
    return {"bubble_ratio": figure}
