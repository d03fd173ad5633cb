"""Idle share of every method against the memory limit, with what no schedule can go below."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.optpipe_cases import (
    BOUND,
    BOUND_IN_MEMORY,
    IN_MEMORY,
    LOOK,
    draw_method,
    leave_room,
    link_words,
    mark_misfits,
    misfit_entry,
    misfits,
    percent_of,
)
from pipejax.plots import style

LINK = 1.0  # time of an offload, in forwards, where something may be offloaded
OFFLOADING = ("pipe-offload", "ada-offload", "optimum")


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per pipe and number of microbatches."""
    rows, columns = data.sizes["model"], data.sizes["microbatches"]
    figure, panels = plt.subplots(
        rows,
        columns,
        figsize=(style.PAGE, 1.75 * rows + 0.9),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for row in range(rows):
        for column in range(columns):
            _panel(panels[row, column], data.isel(model=row, microbatches=column))
        leave_room(
            panels[row, 0],
            max(
                len(misfits(data.isel(model=row, microbatches=column).sel(host_link=LINK)))
                for column in range(columns)
            ),
        )
        panels[row, 0].set_ylabel("idle share [%]")
    for axes in panels[-1]:
        axes.set_xlabel("memory limit [peaks of 1F1B]")
        axes.set_xticks(data.limit.values, [f"{limit:g}" for limit in data.limit.values])
    lines = [Line2D([], [], **look) for look in (*LOOK.values(), IN_MEMORY)]
    bounds = [
        Line2D([], [], label="no schedule is below", **BOUND),
        Line2D([], [], label="the same, nothing offloaded", **BOUND_IN_MEMORY),
    ]
    figure.legend(
        handles=[*lines, *bounds, misfit_entry()],
        loc="outside lower center",
        ncols=4,
        title=f"PipeOffload, AdaOffload and optimised: {link_words(LINK)}, each way. "
        "A better schedule is lower.",
        title_fontsize=7,
    )
    return {"optpipe_memory": figure}


def _panel(axes: Axes, data: xr.Dataset) -> None:
    with_link, without = data.sel(host_link=LINK), data.sel(host_link=float("inf"))
    for at, look in ((with_link, BOUND), (without, BOUND_IN_MEMORY)):
        axes.plot(at.limit, percent_of(at.bound_bubble_ratio), zorder=1, **look)
    draw_method(axes, without.limit, without.bubble_ratio.sel(schedule="optimum"), IN_MEMORY)
    for name, look in LOOK.items():
        at = with_link if name in OFFLOADING else without
        draw_method(axes, at.limit, at.bubble_ratio.sel(schedule=name), look)
    mark_misfits(axes, data.limit, misfits(with_link))
    axes.set_title(f"{data.model.item()}, M={int(data.microbatches)}", loc="left")
