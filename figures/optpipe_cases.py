"""How methods under a memory limit are drawn: label, colour, marker, and what did not fit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from pipejax import style

LOOK: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"label": "1F1B", "color": style.BLACK, "marker": "o", "linestyle": "--"},
    "zb-1p": {"label": "ZB-1p", "color": style.SKY, "marker": "^", "linestyle": "-"},
    "zb-2p": {"label": "ZB-2p", "color": style.BLUE, "marker": "v", "linestyle": "-"},
    "pipe-offload": {
        "label": "PipeOffload", "color": style.ORANGE, "marker": "s", "linestyle": ":"},
    "ada-offload": {
        "label": "AdaOffload", "color": style.GREEN, "marker": "D", "linestyle": "-"},
    "optimum": {"label": "optimised", "color": style.VERMILION, "marker": "*", "linestyle": "-"},
}  # fmt: skip
IN_MEMORY: Mapping[str, Any] = {
    "label": "optimised, nothing offloaded", "color": style.PURPLE, "marker": "P",
    "linestyle": "-"}  # fmt: skip
BOUND: Mapping[str, Any] = {"color": style.GREY, "linewidth": 0.8, "linestyle": "-"}
ROW_HEIGHT = 0.055  # of the rows of crosses, in parts of the axes
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "refine": {"label": "start at once, take what is better", "color": style.VERMILION,
               "linestyle": "-"},
    "wait": {"label": "wait until the search ends", "color": style.BLUE, "linestyle": "--"},
    "stay": {"label": "stay with the best heuristic", "color": style.BLACK, "linestyle": ":"},
}  # fmt: skip


def percent_of(ratio: xr.DataArray) -> xr.DataArray:
    """Turn shares into percent."""
    return 100 * ratio


def draw_method(axes: Axes, x: xr.DataArray, ratio: xr.DataArray, look: Mapping[str, Any]) -> None:
    """Draw the idle share of a method where it fits.

    Args:
      axes: to draw on.
      x: place of each value.
      ratio: idle share; missing where the method does not fit.
      look: of the line; a star is drawn larger.
    """
    size = 6 if look["marker"] == "*" else 3.2
    axes.plot(x, percent_of(ratio), markersize=size, **look)


def mark_misfits(axes: Axes, x: xr.DataArray, misfits: Mapping[str, xr.DataArray]) -> None:
    """Put a cross above the panel for every method and place where memory is too small.

    Args:
      axes: to draw on.
      x: places.
      misfits: by method, whether it runs out of memory at each place; a row for each.
    """
    above = blended_transform_factory(axes.transData, axes.transAxes)
    shown = [name for name, out in misfits.items() if bool(out.any())]
    for row, name in enumerate(shown):
        at = np.asarray(x)[np.asarray(misfits[name], bool)]
        axes.plot(at, np.full(len(at), 1.0 - ROW_HEIGHT * (row + 0.5)), "x", transform=above,
                  color=LOOK[name]["color"], markersize=3.5, clip_on=False, zorder=5)  # fmt: skip


def misfit_entry() -> Line2D:
    """Return the legend's entry of the crosses."""
    return Line2D([], [], color=style.BLACK, marker="x", linestyle="", markersize=4,
                  label="out of memory (colour of the method)")  # fmt: skip


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
