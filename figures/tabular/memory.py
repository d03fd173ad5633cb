"""Peak memory of the fullest worker against what an accelerator has, and what of it lasts."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.cases import LOOK, MAIN, count_axis, main_setting
from figures.kit.rules import describe
from pipejax.plots import palette, style

STATIC: Mapping[str, Any] = {"color": palette.PURPLE, "linestyle": ":", "linewidth": 1.6}
CAPACITY: Mapping[str, Any] = {"color": palette.BLACK, "linestyle": (0, (6, 3)), "linewidth": 0.8}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per pipeline depth."""
    data = main_setting(data)
    capacity = float(data.memory_capacity) / 1e9
    static = data.static_bytes.max("worker") / 1e9
    total = (data.static_bytes + data.activation_bytes).max("worker") / 1e9
    figure, panels = plt.subplots(1, 2, figsize=(style.PAGE, 2.8), sharex=True, sharey=True)
    for axes, workers in zip(panels, data.workers.values, strict=True):
        for name in MAIN:
            held = total.sel(schedule=name, workers=workers)
            axes.plot(data.microbatches, held, **{**LOOK[name], "linestyle": "-"})
        for name, label in (
            ("gpipe", "weights and their states; above: Chimera's"),
            ("chimera", ""),
        ):
            copies = static.sel(schedule=name, workers=workers)
            axes.plot(data.microbatches, copies, **STATIC, label=label)
        axes.axhline(capacity, **CAPACITY, label=f"an accelerator, {capacity:g} GB")
        axes.set(yscale="log", xlabel="microbatches")
        axes.set_title(f"{int(workers)} workers", loc="left")
        count_axis(axes, data.microbatches.values)
    panels[0].set_ylabel("fullest worker [GB]")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return {"memory": describe(figure, _caption(data, capacity))}


def _caption(data: xr.Dataset, capacity: float) -> str:
    peaks = (data.static_bytes + data.activation_bytes).max("worker") / 1e9
    fits = int((peaks <= capacity).sum())
    return (
        f"Peak memory of the fullest worker, minibatch {int(data.minibatch)}. Of all {peaks.size} "
        f"points {fits} fit into {capacity:g} GB: they take {float(peaks.min()):,.0f} "
        f"to {float(peaks.max()):,.0f} GB, for nothing is recomputed and scores of 80 heads are "
        "kept. GPipe holds the whole minibatch; the others hold less the smaller its "
        "microbatches are."
    )
