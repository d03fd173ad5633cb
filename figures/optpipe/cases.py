"""Look of methods under a memory limit, and the unit of idle time."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from pipejax.plots import palette

OPEN = {"markerfacecolor": "none"}  # stays visible around marks that equal it
LOOK: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"label": "1F1B", "color": palette.BLACK, "marker": "o", "linestyle": "--"},
    "1f1b, interleaved": {
        "label": "1F1B, interleaved",
        "color": palette.GREY,
        "marker": "v",
        "linestyle": "--",
    },
    "zb-1p": {"label": "ZB-1p", "color": palette.SKY, "marker": "^", "linestyle": "-"},
    "zb-2p": {"label": "ZB-2p", "color": palette.BLUE, "marker": "X", "linestyle": "-"},
    "pipe-offload": {
        "label": "PipeOffload",
        "color": palette.ORANGE,
        "marker": "s",
        "linestyle": ":",
    },
    "pipe-offload, interleaved": {
        "label": "PipeOffload, interleaved",
        "color": palette.PURPLE,
        "marker": "P",
        "linestyle": ":",
    },
    "ada-offload": {
        "label": "AdaOffload",
        "color": palette.GREEN,
        "marker": "D",
        "linestyle": "-",
        "markersize": 6,
        **OPEN,
    },
    "pipe-offload, whole": {
        "label": "PipeOffload, whole backwards",
        "color": palette.ORANGE,
        "marker": "s",
        "linestyle": "-",
        **OPEN,
    },
    "optimum": {
        "label": "optimised",
        "color": palette.VERMILION,
        "marker": "o",
        "linestyle": "-",
        "markersize": 3,
    },
    "optimum, interleaved": {
        "label": "optimised, interleaved",
        "color": palette.VERMILION,
        "marker": "o",
        "linestyle": "--",
        "markersize": 5,
        **OPEN,
    },
}
# one stage per worker, and what is below them: in figures of all methods more would lie on these
SHOWN = (
    "1f1b",
    "zb-1p",
    "zb-2p",
    "pipe-offload",
    "pipe-offload, interleaved",
    "ada-offload",
    "optimum",
)
BOUND: Mapping[str, Any] = {"color": palette.BLACK, "linewidth": 0.7, "linestyle": "-"}
BOUND_LABEL = "no schedule with one stage per worker is below"
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "wait": {"label": "waits until the search ends", "color": palette.BLUE, "linestyle": "--"},
    "stay": {"label": "stays with the best heuristic", "color": palette.BLACK, "linestyle": ":"},
}
UNIT = "idle time [fills of the pipe]"
UNIT_SAID = (
    "Idle time is the makespan minus the work of a worker, in times that the first forward takes "
    "to reach the last worker"
)


def in_fills(idle: xr.DataArray, data: xr.Dataset) -> xr.DataArray:
    """Count idle time in fills of the pipe: (P - 1) forwards.

    Args:
      idle: idle time [s].
      data: has workers and forward [s] by model.

    Returns:
      The same, in fills.
    """
    return idle / ((data.workers - 1) * data.forward)


def draw_methods(
    axes: Axes, x: xr.DataArray, data: xr.Dataset, methods: Iterable[str] = SHOWN
) -> None:
    """Draw the idle time of every method where it fits, and the bound.

    Args:
      axes: to draw on.
      x: place of each value.
      data: of one pipe and number of microbatches, along one axis.
      methods: which of `LOOK`.
    """
    axes.plot(x, in_fills(data.bound_idle_time, data), zorder=1, **BOUND)
    for name in methods:
        look, idle = LOOK[name], in_fills(data.idle_time.sel(schedule=name), data)
        if bool(idle.notnull().any()):
            axes.plot(x, idle, **look)


def log_axis(axes: Axes) -> None:
    """Count idle time in doublings: it is never 0.

    Args:
      axes: all that share the axis follow.
    """
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def entries(methods: Iterable[str] = SHOWN) -> list[Line2D]:
    """List what the lines of `draw_methods` mean."""
    lines = [Line2D([], [], **LOOK[name]) for name in methods]
    return [*lines, Line2D([], [], label=BOUND_LABEL, **BOUND)]


def link_words(host_link: float) -> str:
    """Say how fast a host link is.

    Args:
      host_link: time of an offload in forwards; infinite if there is no link.

    Returns:
      The words.

    Example:
      >>> link_words(float("inf")), link_words(1.0), link_words(0.5)
      ('no host link', 'offload in 1 F', 'offload in 0.5 F')
    """
    return f"offload in {host_link:g} F" if np.isfinite(host_link) else "no host link"
