"""Who trains fastest on which machine: the least gap at equal time, and curves by seconds."""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.cases import system_title
from figures.pipedream_cases import (
    GAP,
    OBJECTIVES,
    label_of,
    log_gap_axis,
    looks,
    plot_gap,
    range_of_seeds,
    tuned,
)
from pipejax.plots import style

SPEEDS = ("slow", "mid", "fast")
SYSTEM = "{}_nw_{}_cp"
STRONG, PALE = 0.55, 0.2  # opacity where every seed agrees, and where not


class Winner(NamedTuple):
    """Who has the least gap.

    Attributes:
      scheme: which; None if all diverge.
      second: the next one; None if there is none.
      lead: gap of the second over that of the winner, geometric means over seeds.
      seeds: in how many seeds the winner is below the second.
    """

    scheme: str | None
    second: str | None
    lead: float
    seeds: int


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw a map of winners and three machines' curves for every objective."""
    best = tuned(data)
    return {
        f"pipedream_machines_{name}": _figure(best.sel(objective=name), str(name))
        for name in data.objective.values
    }


def deadline(best: xr.Dataset) -> float:
    """Return the earliest end of all schemes [s] on one machine."""
    return float(best.time.isel(sample=-1).min())


def winner(best: xr.Dataset) -> Winner:
    """Compare the schemes on one machine at the earliest end of all.

    Args:
      best: gap (scheme, seed, sample) and time (scheme, sample).

    Returns:
      The winner.
    """
    at = deadline(best)
    logs = {}
    for name in best.scheme.values:
        one = best.sel(scheme=name).transpose("seed", "sample")
        if bool((one.gap > 0).all()):
            logs[str(name)] = np.array(
                [np.interp(at, one.time, np.log(seed)) for seed in one.gap.values]
            )
    order = sorted(logs, key=lambda name: logs[name].mean())
    if len(order) < 2:
        return Winner(order[0] if order else None, None, np.nan, 0)
    first, second = (logs[name] for name in order[:2])
    lead = float(np.exp(second.mean() - first.mean()))
    return Winner(order[0], order[1], lead, int((first < second).sum()))


def _figure(best: xr.Dataset, objective: str) -> Figure:
    figure = plt.figure(figsize=(style.PAGE, 5.4))
    grid = figure.add_gridspec(2, 3, height_ratios=(1.15, 1))
    _map(figure.add_subplot(grid[0, :]), best, objective)
    first = None
    for column, network in enumerate(SPEEDS):
        axes = figure.add_subplot(grid[1, column], sharey=first)
        _curves(axes, best.sel(system=SYSTEM.format(network, "mid")))
        axes.tick_params(which="both", labelleft=first is None)
        first = first or axes
    assert first is not None
    first.set_ylabel(GAP)
    handles = [*first.get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.2
    )
    return figure


def _map(axes: Axes, best: xr.Dataset, objective: str) -> None:
    """One cell per machine, in the winner's colour."""
    look = looks([str(name) for name in best.scheme.values])
    seeds = best.sizes["seed"]
    for row, compute in enumerate(SPEEDS):
        for column, network in enumerate(SPEEDS):
            found = winner(best.sel(system=SYSTEM.format(network, compute)))
            colour = look[found.scheme]["color"] if found.scheme else style.GREY
            opacity = STRONG if found.seeds == seeds else PALE
            axes.add_patch(
                Rectangle(
                    (column - 0.5, row - 0.5),
                    1,
                    1,
                    edgecolor="white",
                    linewidth=2,
                    facecolor=to_rgba(colour, opacity),
                )
            )
            dark = colour == style.BLACK and opacity == STRONG
            axes.text(
                column,
                row,
                _words(found, seeds),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else style.BLACK,
            )
    axes.set(xlim=(-0.5, 2.5), ylim=(-0.5, 2.5), xlabel="network", ylabel="compute")
    axes.set_xticks(range(3), SPEEDS)
    axes.set_yticks(range(3), SPEEDS)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = OBJECTIVES.get(objective, objective)
    axes.set_title(
        f"{title}: least gap at equal time, the earliest end of all "
        "schemes on each machine (pale: not in every seed)",
        loc="left",
    )


def _words(found: Winner, seeds: int) -> str:
    if found.scheme is None:
        return "all diverge"
    if found.second is None:
        return f"{label_of(found.scheme)}\nall others diverge"
    return (
        f"{label_of(found.scheme)}\n{found.lead:.3g} times below {label_of(found.second)}\n"
        f"in {found.seeds} of {seeds} seeds"
    )


def _curves(axes: Axes, best: xr.Dataset) -> None:
    schemes = [str(name) for name in best.scheme.values]
    for name, look in looks(schemes).items():
        at = best.sel(scheme=name)
        plot_gap(axes, at.time, at.gap, label_of(name), look)
    axes.axvline(
        deadline(best),
        color=style.GREY,
        linewidth=0.8,
        linestyle=":",
        label="time of the comparison",
    )
    axes.set_xlabel("time [s]")
    log_gap_axis(axes)
    axes.set_title(system_title(str(best.system.item())), loc="left")
