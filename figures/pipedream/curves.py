"""PipeDream against other ways to train: their curves by time, and by block updates."""

from collections.abc import Mapping

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.kit.rules import describe
from figures.pipedream.cases import (
    OBJECTIVES,
    QUANTITIES,
    X_LABELS,
    as_published,
    log_axis,
    looks,
    panels,
    plot_seeds,
    range_of_seeds,
    scheme_label,
    who_ends_lowest,
)
from pipejax.plots import style
from sweeps.pipedream.words import fraction

BY: Mapping[str, tuple[str, ...]] = {"pipedream_quadratic": ("updates",)}  # RPD has no clock
BOTH = ("time", "updates")  # the first has the store's name
SIZES: Mapping[str, str] = {
    "final": "the step size at which it ends lowest (in brackets)",
    "published": "its published step size (in brackets)",
}
NOTES: Mapping[str, str] = {
    "pipedream_logistic": " No log gives its setting, which was searched until this order came out."
}
EDGE = " A star marks a step size that is the smallest or largest of those tried."


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the curves of one store, whose name is the attribute `store`, by each axis."""
    name, published = data.attrs["store"], as_published(data)
    by = BY.get(name, BOTH)
    return {name if x == by[0] else f"{name}_{x}": _figure(published, name, x) for x in by}


def _figure(data: xr.Dataset, name: str, x: str) -> Figure:
    figure, (axes,) = panels(1, style.COLUMN, 3.3)
    _curves(axes, data, x)
    quantity = data.attrs["quantity"]
    axes.set(xlabel=X_LABELS[x], ylabel=QUANTITIES[quantity])
    if quantity != "loss":
        log_axis(axes)
    handles = [*axes.get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    task = OBJECTIVES[name.removeprefix("pipedream_")]
    starred = EDGE if bool((data.edge & ~data.hopeless).any()) else ""
    return describe(
        figure,
        f"{task[0].upper()}{task[1:]}: median (lines) and range (bands) of {data.sizes['seed']} "
        f"seeds, each scheme at {SIZES[data.attrs['rule']]}. "
        f"{who_ends_lowest(data.sel(by=x), data.sizes['seed'])}{starred}"
        f"{NOTES.get(name, '')}",
    )


def _curves(axes: Axes, best: xr.Dataset, x: str) -> None:
    """Draw every scheme; of one that always diverged, the legend says so."""
    for name, look in looks([str(scheme) for scheme in best.scheme.values]).items():
        at = best.sel(scheme=name)
        if at.hopeless:
            axes.plot([], [], label=f"{scheme_label(name)}: diverges", **look)
            continue
        edge = "*" if at.edge else ""
        size = f" ({fraction(float(at.chosen_step_size))}{edge})"
        plot_seeds(axes, at[x], at.shown, scheme_label(name) + size, look)
