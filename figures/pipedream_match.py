"""Randomized PipeDream at the delay of PipeDream: do the two curves match?"""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.pipedream_cases import (
    GAP,
    label_of,
    log_gap_axis,
    looks,
    plot_gap,
    range_of_seeds,
    tuned,
)
from pipejax.plots import style
from sweeps.pipedream_schemes import geometric_mean

BAND = 10.0  # factor that the band reaches to either side


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw both curves for each number of stages, with an order of magnitude to either side."""
    best = tuned(data)
    figure, panels = plt.subplots(
        1, data.sizes["stages"], figsize=(style.PAGE, 3.0), sharey=True, squeeze=False
    )
    for axes, stages in zip(panels[0], data.stages.values, strict=True):
        _panel(axes, best.sel(stages=stages))
        axes.set_xlabel("block updates")
        log_gap_axis(axes)
    panels[0, 0].set_ylabel(GAP)
    handles = [*panels[0, 0].get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return {"pipedream_match": figure}


def _panel(axes: Axes, best: xr.Dataset) -> None:
    schemes = [str(name) for name in best.scheme.values]
    one = best.sel(scheme="pipedream")
    mean = geometric_mean(one.gap)
    axes.fill_between(
        one.updates,
        mean / BAND,
        mean * BAND,
        color=style.SKY,
        alpha=0.2,
        linewidth=0,
        label=f"PipeDream times 1/{BAND:g} to {BAND:g}",
    )
    for name, look in looks(schemes).items():
        at = best.sel(scheme=name)
        plot_gap(axes, at.updates, at.gap, label_of(name), look)
    title = f"S = {int(best.stages)}, δ = {_delay(int(best.stages))}:\n"
    axes.set_title(title + _verdict(best), loc="left")


def _delay(stages: int) -> int:
    """Largest delay of PipeDream, at which Randomized PipeDream runs."""
    return stages**2 - stages // 2


def _verdict(best: xr.Dataset) -> str:
    """Tell the largest factor between the two curves, at equal updates."""
    one, other = best.sel(scheme="pipedream"), best.sel(scheme="rpd")
    x = one.updates.values[one.updates.values <= float(other.updates.max())]
    logs = [np.interp(x, each.updates, np.log(geometric_mean(each.gap))) for each in (one, other)]
    apart = np.abs(logs[1] - logs[0])
    if np.isnan(apart).any():
        return "one of them diverges"
    return f"at most {np.exp(apart.max()):.2g} times apart"
