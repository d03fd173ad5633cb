"""Step time under jitter: its distribution for each schedule."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import LOOK
from figures.kit.rules import describe
from pipejax.plots import palette, style

LEVELS = (0.05, 0.5, 0.95)
QUANTILE: Mapping[str, Any] = {
    "linestyle": "",
    "marker": "|",
    "color": palette.BLACK,
    "markersize": 7,
    "markeredgewidth": 0.8,
}
WITHOUT: Mapping[str, Any] = {
    "linestyle": "",
    "marker": "D",
    "color": palette.BLACK,
    "markersize": 3.5,
    "markerfacecolor": "white",
}
SHOWN = 0.999  # quantile up to which violins are drawn: single samples would press them flat


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the step time of each schedule, and how much longer jitter makes it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 3.4), sharey=True)
    factor, unit = (1e3, "ms") if float(data.makespan.max()) < 1 else (1.0, "s")
    slowdown = data.makespan / data.deterministic
    _violins(left, factor * data.makespan, factor * data.deterministic)
    _violins(right, slowdown, xr.ones_like(data.deterministic))
    names = [LOOK.get(name, {"label": name})["label"] for name in data.schedule.values]
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel(f"step time [{unit}]")
    right.set_xlabel("step time / that without jitter")
    right.tick_params(left=False)
    entries = [
        Line2D([], [], label="5th, 50th and 95th percentile", **QUANTILE),
        Line2D([], [], label="without jitter", **WITHOUT),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=2)
    return {"jitter": describe(figure, _caption(data, slowdown))}


def _caption(data: xr.Dataset, slowdown: xr.DataArray) -> str:
    median = slowdown.median("sample")
    least, most = (str(at.item()) for at in (median.idxmin(), median.idxmax()))
    return (
        f"Step time under jitter: {data.workers} workers, {data.microbatches} microbatches, "
        f"{data.sizes['sample']} samples; violins reach to the 99.9th percentile. A "
        "step waits for the last of many ops, so jitter makes it longer: the median by "
        f"{100 * (float(median.max()) - 1):.1f} % with {LOOK[most]['label']}, by "
        f"{100 * (float(median.min()) - 1):.1f} % with {LOOK[least]['label']}."
    )


def _violins(axes: Axes, values: xr.DataArray, without: xr.DataArray) -> None:
    """One violin per schedule, with quantiles as lines and the deterministic value as a mark."""
    for place, name in enumerate(values.schedule.values):
        samples = values.sel(schedule=name).values
        samples = samples[samples <= float(values.sel(schedule=name).quantile(SHOWN))]
        colour = LOOK.get(name, {"color": palette.GREY})["color"]
        parts: dict[str, Any] = axes.violinplot(
            samples,
            positions=[place],
            orientation="horizontal",
            widths=0.85,
            showextrema=False,
            points=300,
        )
        parts["bodies"][0].set(facecolor=colour, edgecolor=colour, alpha=0.55)
        quantiles = values.sel(schedule=name).quantile(list(LEVELS)).values
        axes.vlines(quantiles, place - 0.2, place + 0.2, color=palette.BLACK, linewidth=0.8)
        axes.plot(float(without.sel(schedule=name)), place, **WITHOUT)
