"""Bubble ratio against microbatches: by published formula and by idealised table."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import LOOK, count_axis, main_setting
from figures.kit.rules import describe
from pipejax.plots import palette, style

NAMES = ("gpipe", "1f1b", "chimera", "hanayo, 2 waves", "interleaved-1f1b")
SLOTS = "F=1, B=2"
FORMULA: Mapping[str, Any] = {
    "linestyle": ":",
    "markerfacecolor": "none",
    "markersize": 7.5,
    "linewidth": 0.8,
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw both pipeline depths side by side."""
    data = main_setting(data)
    figure, panels = plt.subplots(1, 2, figsize=(style.PAGE, 2.7), sharey=True)
    for axes, workers in zip(panels, data.workers.values, strict=True):
        _lines(axes, data.sel(workers=workers))
        axes.set_title(f"{workers} workers", loc="left")
        axes.set_xlabel("microbatches")
        count_axis(axes, data.microbatches.values)
    panels[0].set_ylabel("bubble ratio [%]")
    panels[0].set_ylim(bottom=0)
    handles, _ = panels[0].get_legend_handles_labels()
    kinds = [  # of no schedule's colour or marker
        Line2D([], [], color=palette.PURPLE, label="solid: table"),
        Line2D([], [], color=palette.PURPLE, linestyle=":", label="dotted: published formula"),
    ]
    figure.legend(handles=[*handles, *kinds], loc="outside lower center", ncols=4)
    return {"bubble_ratio": describe(figure, _caption(data))}


def _lines(axes: Axes, at: xr.Dataset) -> None:
    """A filled line per schedule for its table, an open one where a formula is published."""
    for name in NAMES:
        look, schedule = LOOK[name], at.sel(schedule=name)
        table = schedule.table_bubble_ratio.sel(measured=SLOTS)
        axes.plot(at.microbatches, 100 * table, **{**look, "linestyle": "-"})
        formula = {**look, **FORMULA, "label": ""}
        axes.plot(at.microbatches, 100 * schedule.formula_bubble_ratio, **formula)


def _caption(data: xr.Dataset) -> str:
    return (
        "Bubble ratio by published formula, which assumes F = B (open marks), and of the table run "
        f"with {SLOTS} slots and free messages (filled). Orders are {data.attrs['orders']}: a "
        "plateau or a step of Chimera or Hanayo is that of our order. GPipe and 1F1B coincide. "
        "Chimera's formula promises less idling than its table has."
    )
