"""What depth costs: where each way to train ends after one time, by number of stages."""

from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import count_axis
from figures.kit.rules import describe
from figures.pipedream.cases import (
    QUANTITIES,
    label_of,
    log_axis,
    looks,
    panels,
    plot_seeds,
    range_of_seeds,
    said,
)
from pipejax.plots import palette, style
from sweeps.pipedream.curves import QUANTITY, depths

STORE = "pipedream_scaling"


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the objective at the end against S, as run and as the caption has it."""
    quantity = QUANTITY[STORE]
    settings = list(map(str, data.setting.values))
    figure, drawn = panels(len(settings), style.PAGE, 3.0)
    words = []
    for axes, setting in zip(drawn, settings, strict=True):
        one = data.sel(setting=setting)
        run = depths(one)
        one = one.sel(stages=run)
        for name, look in looks([str(name) for name in one.scheme.values]).items():
            _scheme(axes, one.sel(scheme=name), look)
        count_axis(axes, data.stages.values)
        axes.set_xlim(float(data.stages.min()) / 1.2, float(data.stages.max()) * 1.2)
        until = float(one.time.max())
        axes.set_title(f"setting: {setting}, {until:g} slots", loc="left")
        axes.set_xlabel("stages S")
        for stages in (run[0], run[-1]):
            each = said(one.sel(stages=stages), "time")
            words.append(f"{setting.capitalize()} at S = {stages}: {each}.")
    drawn[0].set_ylabel(f"{QUANTITIES[quantity]} at the end")
    log_axis(drawn[0])
    handles = [*drawn[0].get_legend_handles_labels()[0], range_of_seeds()]
    at_edge = Line2D([], [], color=palette.BLACK, marker="o", markerfacecolor="white", linestyle="")
    at_edge.set_label("open: smallest or largest step size tried")
    figure.legend(handles=[*handles, at_edge], loc="outside lower center", ncols=3)
    caption = (
        f"Logistic regression after one time at the step sizes that end lowest, by number of "
        f"stages: medians and ranges of {data.sizes['seed']} seeds. "
    )
    return {STORE: describe(figure, caption + " ".join(words))}


def _scheme(axes: Axes, best: xr.Dataset, look: dict[str, Any]) -> None:
    end = best.shown.isel(sample=-1)
    plot_seeds(axes, best.stages, end, label_of(str(best.scheme.item())), look, every=1)
    at_edge = end.median("seed").where(best.edge)
    axes.plot(best.stages, at_edge, **look, linestyle="", markersize=3, markerfacecolor="white")
