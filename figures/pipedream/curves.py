"""PipeDream against other ways to train: their curves by time, and by block updates."""

from collections.abc import Mapping

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.kit.rules import AXES_DIFFER, describe
from figures.pipedream.cases import (
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
from pipejax.plots import style
from sweeps.pipedream.curves import PUBLISHED, QUANTITY, fraction, rule_of
from sweeps.pipedream.settings import AS_RUN

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
    """Draw one panel for each setting; where there are two, step sizes are in the caption only."""
    settings = list(map(str, data.setting.values)) if "setting" in data.dims else [AS_RUN]
    is_one = len(settings) == 1
    figure, drawn = panels(len(settings), style.COLUMN if is_one else style.PAGE, 3.3)
    quantity = QUANTITY.get(name, "gap")
    words = []
    for axes, setting in zip(drawn, settings, strict=True):
        rule = rule_of(name, setting)
        one = data if is_one else data.sel(setting=setting)
        _curves(axes, one, x, with_sizes=is_one)
        axes.set_xlabel(X_LABELS[x])
        if not is_one:
            axes.set_title(f"setting: {setting}", loc="left")
        words.append(
            f"{setting.capitalize()}, at {SIZES[rule]} and equal {EQUAL[x]}, where the first of "
            f"them ends: {said(one, x)}."
        )
    drawn[0].set_ylabel(QUANTITIES[quantity])
    if quantity != "loss":
        log_axis(drawn[0])
    handles = [*drawn[0].get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if is_one else 4)
    task = OBJECTIVES[name.removeprefix("pipedream_")]
    differ = f" ({AXES_DIFFER})" if len({axes.get_xlim() for axes in drawn}) > 1 else ""
    return describe(
        figure,
        f"{task[0].upper()}{task[1:]}{differ}: median (lines) and range (bands) of "
        f"{data.sizes['seed']} seeds; in brackets the range and the step size. " + " ".join(words),
    )


def _curves(axes: Axes, best: xr.Dataset, x: str, *, with_sizes: bool) -> None:
    """Draw every scheme; of one that always diverged, the legend says so."""
    for name, look in looks([str(each) for each in best.scheme.values]).items():
        at = best.sel(scheme=name)
        if at.hopeless:
            axes.plot([], [], label=f"{label_of(name)}: diverges", **look)
            continue
        edge = ", edge" if at.edge else ""
        size = f" ({fraction(float(at.chosen_step_size))}{edge})" if with_sizes else ""
        plot_seeds(axes, at[x], at.shown, label_of(name) + size, look)
