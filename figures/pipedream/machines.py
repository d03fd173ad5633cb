"""Who trains fastest on which machine: who ends lowest at equal time, and curves by seconds."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.kit.cases import system_title
from figures.kit.rules import AXES_DIFFER, describe
from figures.pipedream.cases import (
    OBJECTIVES,
    QUANTITIES,
    label_of,
    log_axis,
    looks,
    plot_seeds,
    range_of_seeds,
)
from pipejax.plots import palette, style

SPEEDS = ("slow", "mid", "fast")
SYSTEM = "{}_nw_{}_cp"
FILES: Mapping[str, str] = {
    "tridiagonal quadratic": "nesterov",
    "logistic regression": "logistic",
}  # ends of the figures' names
STRONG, PALE = 0.6, 0.2  # share of the colour where every seed agrees, and where not


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw a map of winners and three machines' curves for every objective."""
    return {
        f"pipedream_machines_{FILES[str(name)]}": _figure(data.sel(objective=name), str(name))
        for name in data.objective.values
    }


def _figure(best: xr.Dataset, objective: str) -> Figure:
    figure = plt.figure(figsize=(style.PAGE, 5.2))
    grid = figure.add_gridspec(2, 3, height_ratios=(1.15, 1))
    _map(figure.add_subplot(grid[0, :]), best)
    first = None
    for column, network in enumerate(SPEEDS):
        axes = figure.add_subplot(grid[1, column], sharey=first)
        _curves(axes, best.sel(system=SYSTEM.format(network, "mid")))
        axes.tick_params(which="both", labelleft=first is None)
        first = first or axes
    assert first is not None
    first.set_ylabel(QUANTITIES["gap"])
    handles = [*first.get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return describe(
        figure,
        f"Training {OBJECTIVES.get(objective, objective)} on nine machines. Above: who has the "
        f"least gap where the first of all schemes ends, strong where it is so with all "
        f"{best.sizes['seed']} seeds. Below: medians and ranges of the seeds on the machines of "
        f"mid compute; {AXES_DIFFER}, for machines differ in speed.",
    )


def _map(axes: Axes, best: xr.Dataset) -> None:
    """One cell per machine, in the winner's colour."""
    look = looks([str(name) for name in best.scheme.values])
    seeds = best.sizes["seed"]
    for row, compute in enumerate(SPEEDS):
        for column, network in enumerate(SPEEDS):
            one = best.sel(system=SYSTEM.format(network, compute))
            first = str(one["first"].item())
            colour = look[first]["color"] if first else palette.GREY
            filled = _mixed(colour, STRONG if int(one.wins) == seeds else PALE)
            place: dict[str, Any] = {"edgecolor": "white", "linewidth": 2, "facecolor": filled}
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **place))
            at: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(column, row, _words(one, seeds), color=palette.ink(filled), **at)
    axes.set(xlim=(-0.5, 2.5), ylim=(-0.5, 2.5), xlabel="network", ylabel="compute")
    axes.set_xticks(range(3), SPEEDS)
    axes.set_yticks(range(3), SPEEDS)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _mixed(colour: str, share: float) -> str:
    """Mix a colour with white."""
    red, green, blue = (share * part + 1 - share for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _words(one: xr.Dataset, seeds: int) -> str:
    first, second = str(one["first"].item()), str(one["second"].item())
    if not first:
        return "all diverge"
    if not second:
        return f"{label_of(first)}\nall others diverge"
    return (
        f"{label_of(first)}\n{float(one.lead):.3g} times below {label_of(second)}\n"
        f"in {int(one.wins)} of {seeds} seeds"
    )


def _curves(axes: Axes, best: xr.Dataset) -> None:
    for name, look in looks([str(name) for name in best.scheme.values]).items():
        at = best.sel(scheme=name)
        plot_seeds(axes, at.time, at.shown, label_of(name), look)
    line: dict[str, Any] = {"color": palette.GREY, "linewidth": 0.8, "linestyle": ":"}
    first = float(best.time.isel(sample=-1).min())
    axes.axvline(first, label="the first of them ends", **line)
    axes.set_xlabel("time [s]")
    log_axis(axes)
    axes.set_title(system_title(str(best.system.item())), loc="left")
