"""Fastest scheme by machine: the lowest end at equal time, and curves in seconds."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.kit.cases import system_title
from figures.kit.rules import describe
from figures.pipedream.cases import (
    OBJECTIVES,
    QUANTITIES,
    log_axis,
    looks,
    plot_seeds,
    range_of_seeds,
    scheme_label,
)
from pipejax.plots import palette, style

SPEEDS = ("slow", "mid", "fast")
SYSTEM = "{}_nw_{}_cp"
FILES: Mapping[str, str] = {
    "tridiagonal quadratic": "nesterov",
    "logistic regression": "logistic",
}  # ends of the figures' names
DRAWN = SYSTEM.format("mid", "mid")  # curves on the others look alike, but for their seconds
STRONG = 0.6  # share of a colour in its cell


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw a map of winners and one machine's curves for every objective."""
    return {
        f"pipedream_machines_{FILES[str(name)]}": _figure(data.sel(objective=name), str(name))
        for name in data.objective.values
    }


def _figure(best: xr.Dataset, objective: str) -> Figure:
    figure = plt.figure(figsize=(style.PAGE, 3.4))
    grid = figure.add_gridspec(1, 2, width_ratios=(1.35, 1))
    table, curves = (figure.add_subplot(grid[0, column]) for column in range(2))
    _map(table, best.sel(by="time"))
    _curves(curves, best.sel(system=DRAWN))
    handles = [*curves.get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return describe(
        figure,
        f"Training {OBJECTIVES.get(objective, objective)} on nine machines. (a) Who has the "
        f"least gap with all {best.sizes['seed']} seeds where the first of all schemes ends, and "
        "how many times below the next one by the median; grey where the seeds do not agree. "
        "(b) Medians and ranges of the seeds on one machine.",
    )


def _map(axes: Axes, best: xr.Dataset) -> None:
    """One cell per machine, in the winner's colour where the seeds agree."""
    look = looks([str(name) for name in best.scheme.values])
    seeds = best.sizes["seed"]
    for row, compute in enumerate(SPEEDS):
        for column, network in enumerate(SPEEDS):
            machine = best.sel(system=SYSTEM.format(network, compute))
            first = str(machine["first"].item()) if int(machine.wins) == seeds else ""
            filled = _mixed(look[first]["color"] if first else palette.GREY)
            place: dict[str, Any] = {"edgecolor": "white", "linewidth": 2, "facecolor": filled}
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **place))
            at: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(column, row, _words(machine, seeds), color=palette.ink(filled), **at)
    axes.set(xlim=(-0.5, 2.5), ylim=(-0.5, 2.5), xlabel="network", ylabel="compute")
    axes.set_xticks(range(3), SPEEDS)
    axes.set_yticks(range(3), SPEEDS)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("(a) who ends lowest", loc="left")


def _mixed(colour: str) -> str:
    """Mix a colour with white."""
    red, green, blue = (STRONG * part + 1 - STRONG for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _words(machine: xr.Dataset, seeds: int) -> str:
    first, second = (scheme_label(str(machine[name].item())) for name in ("first", "second"))
    if not first:
        return "all diverge"
    if not second:
        return f"{first}\nall others diverge"
    if int(machine.wins) < seeds:
        return f"{first} or\n{second}:\nseeds disagree"
    return f"{first}\n{float(machine.lead):.3g} times below\n{second}"


def _curves(axes: Axes, best: xr.Dataset) -> None:
    for name, look in looks([str(name) for name in best.scheme.values]).items():
        at = best.sel(scheme=name)
        plot_seeds(axes, at.time, at.shown, scheme_label(name), look)
    line: dict[str, Any] = {"color": palette.GREY, "linewidth": 0.8, "linestyle": ":"}
    first = float(best.time.isel(sample=-1).min())
    axes.axvline(first, label="the first of them ends", **line)
    axes.set(xlabel="time [s]", ylabel=QUANTITIES["gap"])
    log_axis(axes)
    axes.set_title(f"(b) {system_title(str(best.system.item()))}", loc="left")
