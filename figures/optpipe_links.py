"""Idle share against the speed of the host link: what offloading is worth, and when it is not."""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.optpipe_cases import (
    BOUND,
    LOOK,
    draw_method,
    leave_room,
    mark_misfits,
    misfit_entry,
    misfits,
    percent_of,
)
from pipejax.plots import style


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per pipe and limit, of the problems that were solved at every speed."""
    whole = data.solved.all("host_link")
    counts = [m for m in data.microbatches.values if bool(whole.sel(microbatches=m).any())]
    at = data.sel(microbatches=counts[-1])
    limits = [v for v in data.limit.values if bool(at.solved.all("host_link").sel(limit=v).all())]
    figure, panels = plt.subplots(
        len(limits),
        data.sizes["model"],
        figsize=(style.PAGE, 2.0 * len(limits) + 0.9),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for row, limit in enumerate(limits):
        for column in range(data.sizes["model"]):
            _panel(panels[row, column], at.sel(limit=limit).isel(model=column))
        leave_room(
            panels[row, 0],
            max(
                len(misfits(at.sel(limit=limit).isel(model=column)))
                for column in range(data.sizes["model"])
            ),
        )
        panels[row, 0].set_ylabel("idle share [%]")
    for axes in panels[-1]:
        axes.set_xlabel("time of an offload [F]")
        axes.set_xticks(
            range(data.sizes["host_link"]), [_tick(link) for link in data.host_link.values]
        )
    lines = [Line2D([], [], **look) for look in LOOK.values()]
    bound = Line2D([], [], label="no schedule is below", **BOUND)
    figure.legend(
        handles=[*lines, bound, misfit_entry()],
        loc="outside lower center",
        ncols=4,
        title=f"M={int(at.microbatches)}. To the right the host link is faster; "
        "a load takes as long as an offload.",
        title_fontsize=7,
    )
    return {"optpipe_links": figure}


def _tick(host_link: float) -> str:
    return f"{host_link:g}" if np.isfinite(host_link) else "none"


def _panel(axes: Axes, data: xr.Dataset) -> None:
    place = xr.DataArray(np.arange(data.sizes["host_link"]), dims="host_link")
    axes.plot(place, percent_of(data.bound_bubble_ratio), zorder=1, **BOUND)
    for name, look in LOOK.items():
        draw_method(axes, place, data.bubble_ratio.sel(schedule=name), look)
    mark_misfits(axes, place, misfits(data))
    axes.set_title(f"{data.model.item()}, limit {float(data.limit):g}", loc="left")
