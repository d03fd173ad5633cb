"""Peak memory of each worker, and how much of it lasts the whole step."""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures.cases import LOOK, MAIN, main_setting
from pipejax.plots import style

MICROBATCHES = {8: style.SKY, 32: style.BLUE, 256: style.BLACK}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per schedule, at the greater pipeline depth."""
    data = main_setting(data)
    workers = int(data.workers.values[-1])
    static = data.static_bytes.sel(workers=workers) / 1e9
    total = static + data.activation_bytes.sel(workers=workers) / 1e9
    figure, panels = plt.subplots(2, 3, figsize=(style.PAGE, 4.2), sharex=True, sharey=True)
    place = np.arange(workers)
    for axes, name in zip(panels.flat, MAIN, strict=True):
        for k, (count, colour) in enumerate(MICROBATCHES.items()):
            need = total.sel(schedule=name, microbatches=count)
            axes.bar(place + 0.27 * (k - 1), need, 0.25, color=colour)
        lasting = static.sel(schedule=name, microbatches=next(iter(MICROBATCHES)))
        axes.step(place, lasting, where="mid", color=style.VERMILION)
        axes.set_title(LOOK[name]["label"], loc="left")
        axes.set_xticks(place)
        axes.set_yscale("log")
        axes.set_ylim(30, 1e5)
    for axes in panels[-1]:
        axes.set_xlabel("worker")
    for axes in panels[:, 0]:
        axes.set_ylabel("peak memory [GB]")
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=f"{count} microbatches") for count, colour in MICROBATCHES.items()
    ]
    handles.append(
        Line2D([], [], color=style.VERMILION, label="of it parameters, gradients, optimizer")
    )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        title=f"{workers} workers, fixed minibatch, no recomputation",
    )
    return {"memory": figure}
