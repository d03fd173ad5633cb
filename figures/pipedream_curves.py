"""PipeDream against other ways to train: their curves by time, and by block updates."""

from collections.abc import Mapping

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.pipedream_cases import (
    OBJECTIVES,
    QUANTITIES,
    X_LABELS,
    label_of,
    log_axis,
    looks,
    panels,
    plot_seeds,
    range_of_seeds,
    said,
)
from figures.rules import describe
from pipejax.plots import style
from sweeps.pipedream_curves import PUBLISHED, QUANTITY, RULE, ends, fraction, tuned

BY: Mapping[str, tuple[str, ...]] = {"pipedream_quadratic": ("updates",)}  # RPD has no clock
BOTH = ("time", "updates")  # the first has the store's name
SIZES: Mapping[str, str] = {
    "final": "the step sizes that end lowest",
    PUBLISHED: "the published step sizes",
}
EQUAL: Mapping[str, str] = {"time": "time", "updates": "number of updates"}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the curves of one store, whose name is the attribute `store`, by each axis."""
    name = data.attrs["store"]
    by = BY.get(name, BOTH)
    return {name if x == by[0] else f"{name}_{x}": _figure(data, name, x) for x in by}


def _figure(data: xr.Dataset, name: str, x: str) -> Figure:
    settings = data.setting.values if "setting" in data.dims else [None]
    width = style.PAGE if len(settings) > 1 else style.COLUMN
    figure, drawn = panels(len(settings), width, 3.3)
    quantity, rule = QUANTITY.get(name, "gap"), RULE.get(name, "final")
    words = []
    for axes, setting in zip(drawn, settings, strict=True):
        one = data if setting is None else data.sel(setting=setting)
        _curves(axes, tuned(one, quantity, rule), x)
        axes.set_xlabel(X_LABELS[x])
        if setting is not None:
            axes.set_title(f"setting: {setting}", loc="left")
        found = ends(one, quantity, x, rule)
        where = "" if setting is None else f" ({setting})"
        words.append(
            f"At equal {EQUAL[x]}{where}, where the first of them ends: "
            + "; ".join(said(scheme, end) for scheme, end in found.items())
            + "."
        )
    drawn[0].set_ylabel(QUANTITIES[quantity])
    if quantity != "loss":
        log_axis(drawn[0])
    handles = [*drawn[0].get_legend_handles_labels()[0], range_of_seeds()]
    columns = 4 if len(settings) > 1 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    task = OBJECTIVES[name.removeprefix("pipedream_")]
    return describe(
        figure,
        f"{task[0].upper()}{task[1:]}: median (lines) and range (bands) of {data.sizes['seed']} "
        f"seeds at {SIZES[rule]}; in brackets the range and the step size. " + " ".join(words),
    )


def _curves(axes: Axes, best: xr.Dataset, x: str) -> None:
    """Draw every scheme; of one that always diverged, the legend says so."""
    for name, look in looks([str(each) for each in best.scheme.values]).items():
        at = best.sel(scheme=name)
        if at.hopeless:
            axes.plot([], [], label=f"{label_of(name)}: diverges", **look)
            continue
        edge = ", edge" if at.edge else ""
        label = f"{label_of(name)} ({fraction(float(at.step_size))}{edge})"
        plot_seeds(axes, at[x], at.shown, label, look)
