"""Randomized PipeDream at the delay of PipeDream: do the two curves match?"""

import xarray as xr
from matplotlib.figure import Figure

from figures.kit.rules import describe
from figures.pipedream.cases import (
    QUANTITIES,
    X_LABELS,
    log_axis,
    looks,
    panels,
    plot_seeds,
    range_of_seeds,
)
from pipejax.plots import style

LABELS = {
    "pipedream": "PipeDream, batches in turn",
    "pipedream, drawn": "PipeDream, batches drawn",
    "rpd": "RPD, batches drawn",
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw RPD, and PipeDream that takes its batches in turn or draws them as RPD does."""
    figure, (axes,) = panels(1, style.COLUMN, 3.0)
    for name, look in looks([str(name) for name in data.scheme.values]).items():
        at = data.sel(scheme=name)
        plot_seeds(axes, at.updates, at.shown, LABELS[name], look)
    axes.set(xlabel=X_LABELS["updates"], ylabel=QUANTITIES["gap"])
    log_axis(axes)
    handles = [*axes.get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=1)
    fixed_order, random_order = (float(data.apart.sel(scheme=name)) for name in list(LABELS)[:2])
    caption = (
        f"PipeDream on eight stages and Randomized PipeDream with its largest delay, "
        f"δ = {int(data.delta.sel(scheme='rpd'))}, on the random quadratic at step size 1/16: "
        f"medians and ranges of {data.sizes['seed']} seeds. The medians are at most "
        f"{fixed_order:.2g} times apart where PipeDream takes its batches in turn, as published, "
        f"and at most {random_order:.2g} times where it draws them as RPD does."
    )
    return {"pipedream_match": describe(figure, caption)}
