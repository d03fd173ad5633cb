"""PipeDream against other ways to train: the gap of each at its best step size."""

from collections.abc import Mapping
from typing import NamedTuple

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.pipedream_cases import (
    GAP,
    OBJECTIVES,
    label_of,
    log_gap_axis,
    looks,
    plot_gap,
    power_of_two,
    tuned,
)
from pipejax.plots import style
from sweeps.pipedream_schemes import geometric_mean


class View(NamedTuple):
    """How the curves of one store are shown.

    Attributes:
      title: what is trained.
      x: variable along the horizontal axis.
      y_label: what the gap is.
      scale: of the vertical axis.
    """

    title: str
    x: str = "time"
    y_label: str = GAP
    scale: str = "log"


VIEWS: Mapping[str, View] = {
    "pipedream_quadratic": View(OBJECTIVES["quadratic"], x="updates"),
    "pipedream_nesterov": View(OBJECTIVES["nesterov"]),
    "pipedream_logistic": View(OBJECTIVES["logistic"]),
    "pipedream_language": View(
        OBJECTIVES["language"], y_label="loss on held-out text [nats]", scale="linear"
    ),
}
X_LABELS: Mapping[str, str] = {
    "time": "time [slots of one forward or backward]",
    "updates": "block updates",
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the curves of all schemes of one store, whose name is the attribute `store`."""
    name = data.attrs["store"]
    view = VIEWS[name]
    best = tuned(data)
    figure, axes = plt.subplots(figsize=(style.PAGE, 3.2))
    _curves(axes, best, view)
    axes.set(xlabel=X_LABELS[view.x], ylabel=view.y_label)
    if view.scale == "log":
        log_gap_axis(axes)
    axes.set_title(
        f"{view.title}: geometric means (lines) and ranges (bands) of {data.sizes['seed']} seeds.\n"
        + _outcome(best, view),
        loc="left",
    )
    figure.legend(
        loc="outside right center", title="scheme, step size", title_fontsize=7, alignment="left"
    )
    return {name: figure}


def _curves(axes: Axes, best: xr.Dataset, view: View) -> None:
    """Draw every scheme; of one that always diverged, the legend says so."""
    for name, look in looks([str(each) for each in best.scheme.values]).items():
        at = best.sel(scheme=name)
        if at.hopeless:
            axes.plot([], [], label=f"{label_of(name)}: diverges", **{**look, "linestyle": ""})
            continue
        edge = " (edge of the grid)" if at.edge else ""
        label = f"{label_of(name)}, {power_of_two(float(at.step_size))}{edge}"
        plot_gap(axes, at[view.x], at.gap, label, look)


def _outcome(best: xr.Dataset, view: View) -> str:
    """Name the lowest end and the next one, with how far they are apart."""
    end = best.gap.isel(sample=-1)
    order = geometric_mean(end).dropna("scheme").sortby(geometric_mean(end).dropna("scheme"))
    if not order.size:
        return "Every scheme diverges"
    first = str(order.scheme[0].item())
    if order.size == 1:
        return f"Only {label_of(first)} does not diverge"
    second = str(order.scheme[1].item())
    overlap = bool(end.sel(scheme=first).max() > end.sel(scheme=second).min())
    by = (
        f"{float(order[1] / order[0]):.2g} times"
        if view.scale == "log"
        else f"{float(order[1] - order[0]):.2g} nats"
    )
    return f"Lowest at the end: {label_of(first)}, {by} below {label_of(second)}" + (
        "; their ranges overlap" if overlap else ""
    )
