"""How methods under a memory limit are drawn: label, colour, marker, and what did not fit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from pipejax.plots import style

LOOK: Mapping[str, Mapping[str, Any]] = {  # open marks stay visible around those that equal them
    "1f1b": {
        "label": "1F1B",
        "color": style.BLACK,
        "marker": "o",
        "linestyle": "--",
        "markersize": 3,
    },
    "zb-1p": {
        "label": "ZB-1p",
        "color": style.SKY,
        "marker": "^",
        "linestyle": "-",
        "markersize": 3.5,
    },
    "zb-2p": {
        "label": "ZB-2p",
        "color": style.BLUE,
        "marker": "o",
        "linestyle": "-",
        "markersize": 7,
        "markerfacecolor": "none",
    },
    "pipe-offload": {
        "label": "PipeOffload",
        "color": style.ORANGE,
        "marker": "s",
        "linestyle": ":",
        "markersize": 3,
    },
    "ada-offload": {
        "label": "AdaOffload",
        "color": style.GREEN,
        "marker": "D",
        "linestyle": "-",
        "markersize": 5.5,
        "markerfacecolor": "none",
    },
    "optimum": {
        "label": "optimised",
        "color": style.VERMILION,
        "marker": "o",
        "linestyle": "-",
        "markersize": 2.5,
    },
}
IN_MEMORY: Mapping[str, Any] = {
    "label": "optimised, nothing offloaded",
    "color": style.PURPLE,
    "marker": "P",
    "linestyle": "-",
    "markersize": 3.5,
}
BOUND: Mapping[str, Any] = {"color": style.GREY, "linewidth": 0.9, "linestyle": "-"}
BOUND_IN_MEMORY: Mapping[str, Any] = {"color": style.GREY, "linewidth": 0.9, "linestyle": ":"}
ROW_HEIGHT = 0.06  # of the rows of crosses, in parts of the axes
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "wait": {"label": "waits until the search ends", "color": style.BLUE, "linestyle": "--"},
    "stay": {"label": "stays with the best heuristic", "color": style.BLACK, "linestyle": ":"},
}


def percent_of(ratio: xr.DataArray) -> xr.DataArray:
    """Turn shares into percent."""
    return 100 * ratio


def draw_method(axes: Axes, x: xr.DataArray, ratio: xr.DataArray, look: Mapping[str, Any]) -> None:
    """Draw the idle share of a method where it fits.

    Args:
      axes: to draw on.
      x: place of each value.
      ratio: idle share; missing where the method does not fit.
      look: of the line.
    """
    axes.plot(x, percent_of(ratio), **look)


def misfits(data: xr.Dataset) -> Mapping[str, xr.DataArray]:
    """List where each method runs out of memory.

    Args:
      data: out_of_memory by schedule and another axis.

    Returns:
      By schedule; only those that do somewhere.
    """
    found = {name: data.out_of_memory.sel(schedule=name) for name in LOOK}
    return {name: out for name, out in found.items() if bool(out.any())}


def mark_misfits(axes: Axes, x: xr.DataArray, out: Mapping[str, xr.DataArray]) -> None:
    """Put crosses at the top of a panel: a row for each method that needs too much memory.

    Args:
      axes: to draw on; `leave_room` keeps the rows free.
      x: places.
      out: by method, whether it runs out of memory at each place.
    """
    above = blended_transform_factory(axes.transData, axes.transAxes)
    for row, (name, places) in enumerate(out.items()):
        at = np.asarray(x)[np.asarray(places, bool)]
        axes.plot(
            at,
            np.full(len(at), 1.0 - ROW_HEIGHT * (row + 0.5)),
            "x",
            transform=above,
            color=LOOK[name]["color"],
            markersize=3.5,
            zorder=5,
        )


def leave_room(axes: Axes, rows: int) -> None:
    """Begin the vertical axis at 0 and leave rows free at its top.

    Args:
      axes: all is drawn on them and on those that share the axis.
      rows: of crosses, at most.
    """
    high = axes.get_ylim()[1]
    axes.set_ylim(0, high / (1 - ROW_HEIGHT * rows))


def misfit_entry() -> Line2D:
    """Return the legend's entry of the crosses."""
    return Line2D(
        [],
        [],
        color=style.BLACK,
        marker="x",
        linestyle="",
        markersize=4,
        label="out of memory (colour of the method)",
    )


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
