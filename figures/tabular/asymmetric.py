"""Asymmetric Chimera (shares 1:2 and 2:1) against Chimera: step time, memory, balance."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import count_axis, main_setting, setting_words
from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import palette, style

NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "slow_nw_mid_cp": {
        "label": "slow network",
        "color": palette.VERMILION,
        "marker": "v",
        "markersize": 6,
    },
    "mid_nw_mid_cp": {"label": "mid network", "color": palette.BLACK, "marker": "o"},
    "fast_nw_mid_cp": {
        "label": "fast network",
        "color": palette.SKY,
        "marker": "s",
        "linestyle": "--",
        "markersize": 7,
        "markerfacecolor": "none",
    },
}
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "chimera": {
        "label": "equal stages",
        "color": palette.GREY,
        "marker": "s",
        "markersize": 7.5,
        "linewidth": 3.0,
    },
    "chimera-asymmetric": {"label": "stages 1:2", "color": palette.BLUE, "marker": "o"},
    "chimera-asymmetric, 2:1": {"label": "stages 2:1", "color": palette.ORANGE, "marker": "^"},
}
EQUAL, *UNEQUAL = PLACEMENTS


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one column per pipeline depth: step time of both shares, memory of the workers."""
    data = main_setting(data)
    held = data.static_bytes + data.activation_bytes
    relative = held / held.sel(schedule=EQUAL).mean("worker")
    figure, panels = plt.subplots(
        3, data.sizes["workers"], figsize=(style.PAGE, 5.4), sharex=True, sharey="row"
    )
    for column, workers in zip(panels.T, data.workers.values, strict=True):
        for axes, name in zip(column, UNEQUAL, strict=False):
            _time(axes, data.makespan.sel(workers=workers), name)
            label = PLACEMENTS[name]["label"]
            axes.set_title(f"{workers} workers, {label}", loc="left")
        _memory(column[2], relative.sel(workers=workers))
        column[2].set_title(f"{workers} workers", loc="left")
        column[2].set_xlabel("microbatches")
        count_axis(column[2], data.microbatches.values)
    for axes in panels[:2, 0]:
        axes.set_ylabel("step time against\nequal stages [%]")
    panels[2, 0].set_ylabel("memory / mean of the\nworkers, equal stages")
    kinds = [
        Line2D([], [], color=palette.BLACK, label="fullest worker"),
        Line2D([], [], color=palette.BLACK, linestyle=":", label="mean of the workers"),
    ]
    handles = [Line2D([], [], **look) for look in (*NETWORKS.values(), *PLACEMENTS.values())]
    figure.legend(handles=[*handles, *kinds], loc="outside lower center", ncols=4)
    return {"asymmetric": describe(figure, _caption(data))}


def _time(axes: Axes, times: xr.DataArray, name: str) -> None:
    ratio = times.sel(schedule=name) / times.sel(schedule=EQUAL)
    for system, look in NETWORKS.items():
        axes.plot(times.microbatches, 100 * (ratio.sel(system=system) - 1), **look)
    axes.axhline(0, color=palette.BLACK, linewidth=0.6)


def _memory(axes: Axes, held: xr.DataArray) -> None:
    for name, look in PLACEMENTS.items():
        one = held.sel(schedule=name)
        axes.plot(held.microbatches, one.max("worker"), **look)
        axes.plot(held.microbatches, one.mean("worker"), **{**look, "linestyle": ":"})


def _caption(data: xr.Dataset) -> str:
    return (
        "Chimera with unequal stages against equal ones: shares of the first and of the second "
        "half of the stages. Top and middle: change of the step time, mid compute; below 0 unequal "
        f"stages are faster; the vertical {AXES_DIFFER} between the two rows. Bottom: memory of "
        "the fullest worker and mean of the workers; the "
        f"closer they are, the better balanced. {setting_words(data)} The networks differ little: "
        "what matters is how well the order fills the table. Stages 1:2 save time with few "
        "microbatches, but never memory of the fullest worker; early stages hold most "
        "microbatches, so it is 2:1 that balances memory, and it mostly costs time."
    )
