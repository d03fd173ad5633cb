"""Cost of in-order queues where messages are free: asymmetric Chimera, and all schedules."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import palette, style

TWO = 2.0  # published shares 1:2
WAYS: Mapping[str, Mapping[str, Any]] = {
    "worker": {"color": palette.VERMILION, "marker": "^", "label": "queue per worker"},
    "direction": {
        "color": palette.BLUE,
        "marker": "o",
        "markersize": 8,
        "markerfacecolor": "none",
        "label": "queue per direction",
    },
    "pair": {"color": palette.BLACK, "marker": "x", "label": "queue per pair"},
}
LINES: Mapping[str, Mapping[str, Any]] = {
    "queue": {"color": palette.VERMILION, "marker": "^", "label": "queue per worker"},
    "repaired": {"color": palette.GREEN, "marker": "D", "label": "in the order of readiness"},
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw asymmetric Chimera by shares, and the largest loss of each schedule."""
    figure, (shares_axes, schedules_axes) = plt.subplots(
        1, 2, figsize=(style.PAGE, 3.2), gridspec_kw={"width_ratios": (1, 1.2)}
    )
    _shares(shares_axes, data)
    _schedules(schedules_axes, data)
    handles = [
        *shares_axes.get_legend_handles_labels()[0],
        *schedules_axes.get_legend_handles_labels()[0][1:],
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return {"finding_queues": describe(figure, _caption(data))}


def _shares(axes: Axes, data: xr.Dataset) -> None:
    free = data.makespan.sel(run="delay")
    for run, look in LINES.items():
        loss = 100 * (data.makespan.sel(run=run) / free - 1)
        axes.plot(data.share, loss, markevery=3, **look)
    axes.set_xlabel("late stages / early stages")
    axes.set_ylabel("longer than by delay [%]")
    axes.set_title("(a) asymmetric Chimera, 8 x 16", loc="left")


def _schedules(axes: Axes, data: xr.Dataset) -> None:
    """The most that a schedule loses, over sizes, backwards and times of stages."""
    loss = 100 * data.loss.max(("size", "backward", "shape"))
    rows = np.arange(data.sizes["schedule"])
    for queues, look in WAYS.items():
        axes.plot(loss.sel(queues=queues), rows, linestyle="", clip_on=False, **look)
    style.name_rows(axes, [str(name) for name in data.schedule.values])
    axes.grid(axis="x", color=palette.SILVER, linewidth=0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("longer than by delay, at most [%]")
    axes.set_title("(b) all schedules, unequal stages", loc="left")


def _caption(data: xr.Dataset) -> str:
    free, queue, _ = data.makespan.sel(share=TWO, method="nearest").values
    worker = data.loss.sel(queues="worker")
    return (
        f"In-order queues cost time though messages take none; {AXES_DIFFER}. (a) At 1:2 a step of "
        f"{free:.1f} slots takes {queue:.1f}, for the default order of transfers assumes equal "
        "stages; in the order in which they become ready it costs nothing (ops are drawn anew for "
        "each ratio). (b) The largest loss "
        f"of each schedule over {worker[0].size} runs; a queue for each pair of workers never "
        "costs time."
    )
