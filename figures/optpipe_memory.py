"""Idle share of every method against the memory limit, with what no schedule can go below."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.optpipe_cases import (
    BOUND,
    IN_MEMORY,
    LOOK,
    draw_method,
    link_words,
    mark_misfits,
    misfit_entry,
    percent_of,
)
from pipejax import style

LINK = 1.0  # time of an offload, in forwards, where something may be offloaded
OFFLOADING = ("pipe-offload", "ada-offload", "optimum")


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per pipe and number of microbatches."""
    rows, columns = data.sizes["model"], data.sizes["microbatches"]
    figure, panels = plt.subplots(
        rows, columns, figsize=(style.PAGE, 1.75 * rows + 0.9), sharex=True, sharey="row",
        squeeze=False,
    )  # fmt: skip
    for row in range(rows):
        for column in range(columns):
            at = data.isel(model=row, microbatches=column)
            _panel(panels[row, column], at)
        panels[row, 0].set_ylabel("idle share [%]")
    for axes in panels[-1]:
        axes.set_xlabel("memory limit [peaks of 1F1B]")
        axes.set_xticks(data.limit.values, [f"{limit:g}" for limit in data.limit.values])
    bound = Line2D([], [], label="no schedule is below, with and without", **BOUND)
    lines = [Line2D([], [], markersize=6 if look["marker"] == "*" else 3.2, **look)
             for look in (*LOOK.values(), IN_MEMORY)]  # fmt: skip
    figure.legend(
        handles=[*lines, bound, misfit_entry()], loc="outside lower center", ncols=4,
        title=f"PipeOffload, AdaOffload and optimised: {link_words(LINK)}, each way. "
              "A better schedule is lower.",
        title_fontsize=7,
    )  # fmt: skip
    return {"optpipe_memory": figure}


def _panel(axes: Axes, data: xr.Dataset) -> None:
    with_link, without = data.sel(host_link=LINK), data.sel(host_link=float("inf"))
    for at in (with_link, without):
        axes.plot(at.limit, percent_of(at.bound_bubble_ratio), zorder=1, **BOUND)
    draw_method(axes, without.limit, without.bubble_ratio.sel(schedule="optimum"), IN_MEMORY)
    for name, look in LOOK.items():
        at = with_link if name in OFFLOADING else without
        draw_method(axes, at.limit, at.bubble_ratio.sel(schedule=name), look)
    mark_misfits(axes, data.limit, misfits(with_link))
    axes.set_ylim(0)
    axes.set_title(f"{data.model.item()}, M={int(data.microbatches)}", loc="left")


def misfits(data: xr.Dataset) -> Mapping[str, xr.DataArray]:
    """List where each method runs out of memory.

    Args:
      data: out_of_memory by schedule and another axis.

    Returns:
      By schedule; only those that do somewhere.
    """
    found = {name: data.out_of_memory.sel(schedule=name) for name in LOOK}
    return {name: out for name, out in found.items() if bool(out.any())}
