"""Peak memory of each worker against what an accelerator has, and how much of it lasts."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import LOOK, MAIN, main_setting
from figures.kit.rules import describe
from pipejax.plots import palette, style

LOOKS: Mapping[int, Mapping[str, Any]] = {  # by microbatches; what is equal stays seen
    8: {"color": palette.SKY, "marker": "s", "markersize": 7, "linewidth": 2.5},
    32: {"color": palette.BLUE, "marker": "o", "markersize": 4.5},
    256: {"color": palette.BLACK, "marker": "^", "markersize": 2.5},
}
STATIC: Mapping[str, Any] = {"color": palette.PURPLE, "marker": "x", "linestyle": ":"}
CAPACITY: Mapping[str, Any] = {"color": palette.VERMILION, "linestyle": "--"}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per schedule, at the greater pipeline depth."""
    data = main_setting(data)
    capacity = float(data.memory_capacity) / 1e9
    at = data.isel(workers=-1)
    static = at.static_bytes / 1e9
    total = static + at.activation_bytes / 1e9
    figure, panels = plt.subplots(2, 3, figsize=(style.PAGE, 4.2), sharex=True, sharey=True)
    place = np.arange(int(at.workers))
    for axes, name in zip(panels.flat, MAIN, strict=True):
        for count, look in LOOKS.items():
            axes.plot(place, total.sel(schedule=name, microbatches=count), **look)
        axes.plot(place, static.sel(schedule=name).isel(microbatches=0), **STATIC)
        axes.axhline(capacity, **CAPACITY)
        axes.set_title(LOOK[name]["label"], loc="left")
        axes.set(xticks=place, yscale="log")
    for axes in panels[-1]:
        axes.set_xlabel("worker")
    for axes in panels[:, 0]:
        axes.set_ylabel("peak memory [GB]")
    handles = [
        *(Line2D([], [], label=f"{count} microbatches", **look) for count, look in LOOKS.items()),
        Line2D([], [], label="parameters, gradients and optimizer state alone", **STATIC),
        Line2D([], [], label=f"capacity of an accelerator, {capacity:g} GB", **CAPACITY),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return {"memory": describe(figure, _caption(data, capacity))}


def _caption(data: xr.Dataset, capacity: float) -> str:
    most = (data.static_bytes + data.activation_bytes).max("worker") / 1e9
    least, largest = float(most.min()), float(most.max())
    fits = int((most <= capacity).sum())
    return (
        f"Peak memory of {int(data.workers[-1])} workers; minibatch {int(data.minibatch)}, the "
        f"more microbatches the smaller each. Of all {most.size} points of the dataset {fits} fit "
        f"into {capacity:g} GB: the fullest worker of a point needs {least:,.0f} to "
        f"{largest:,.0f} GB, as nothing is recomputed and the attention scores of 80 heads are "
        "kept. GPipe holds the whole minibatch at any number of microbatches, 1F1B the least on "
        "its last worker; Chimera and Hanayo spread the load, Chimera at two copies of the "
        "parameters."
    )
