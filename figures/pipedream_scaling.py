"""What depth costs: the gap of each way to train at one time, by number of stages."""

from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.cases import count_axis
from figures.pipedream_cases import GAP, OBJECTIVES, label_of, log_gap_axis, looks, plot_gap, tuned
from pipejax.plots import style
from sweeps.pipedream_schemes import geometric_mean

MARKERS = ("o", "s", "^", "D", "v")


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the gap against S; open marks are at the edge of the step sizes that were tried."""
    best = tuned(data)
    figure, axes = plt.subplots(figsize=(style.PAGE, 3.2))
    schemes = [str(name) for name in data.scheme.values]
    for k, (name, look) in enumerate(looks(schemes).items()):
        _scheme(axes, best.sel(scheme=name), {**look, "marker": MARKERS[k % len(MARKERS)]})
    count_axis(axes, data.stages.values)
    axes.set(xlabel="stages S", ylabel=f"{GAP} at the end")
    log_gap_axis(axes)
    ends = sorted({f"{float(end):g}" for end in (data.time.min(), data.time.max())}, key=float)
    axes.set_title(
        f"{OBJECTIVES['logistic']}: gap after {' to '.join(ends)} slots (one forward or backward)\n"
        f"at the best step size, geometric mean and range of {data.sizes['seed']} seeds",
        loc="left",
    )
    if best.edge.where(best.gap.notnull().all("seed"), False).any():
        axes.plot(
            [],
            [],
            marker="o",
            linestyle="",
            color=style.GREY,
            markerfacecolor="white",
            label="open: smallest or largest\nstep size that was tried",
        )
    figure.legend(loc="outside right center")
    return {"pipedream_scaling": figure}


def _scheme(axes: Axes, best: xr.Dataset, look: dict[str, Any]) -> None:
    plot_gap(axes, best.stages, best.gap, label_of(str(best.scheme.item())), look)
    at_edge = geometric_mean(best.gap).where(best.edge)
    axes.plot(best.stages, at_edge, **{**look, "linestyle": ""}, markerfacecolor="white")
