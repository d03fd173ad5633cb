"""Asymmetric Chimera (shares 1:2 and 2:1) against Chimera: step time, memory, balance."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import count_axis, main_setting, setting_words
from figures.kit.rules import describe
from pipejax.plots import palette, style

NETWORKS = ("slow_nw_mid_cp", "fast_nw_mid_cp")
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
SLOW: Mapping[str, Any] = {"linestyle": ":", "markerfacecolor": "none"}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one column per pipeline depth: step time, balance of memory, the fullest worker."""
    data = main_setting(data)
    held = data.static_bytes + data.activation_bytes
    fullest = held.max("worker")
    rows = {
        "fullest worker /\nmean worker": fullest / held.mean("worker"),
        "fullest worker /\nthat of equal stages": fullest / fullest.sel(schedule=EQUAL),
    }
    figure, panels = plt.subplots(
        3, data.sizes["workers"], figsize=(style.PAGE, 4.8), sharex=True, sharey="row"
    )
    for column, workers in zip(panels.T, data.workers.values, strict=True):
        _time(column[0], data.makespan.sel(workers=workers))
        for axes, values in zip(column[1:], rows.values(), strict=True):
            for name, look in PLACEMENTS.items():
                axes.plot(values.microbatches, values.sel(workers=workers, schedule=name), **look)
        column[0].set_title(f"{int(workers)} workers", loc="left")
        column[-1].set_xlabel("microbatches")
        count_axis(column[-1], data.microbatches.values)
    for axes, label in zip(
        panels[:, 0], ("step time against\nequal stages [%]", *rows), strict=True
    ):
        axes.set_ylabel(label)
    kinds = [
        Line2D([], [], color=palette.PURPLE, label="solid, filled: fast network"),
        Line2D([], [], color=palette.PURPLE, linestyle=":", label="dotted, open: slow network"),
    ]
    handles = [Line2D([], [], **look) for look in PLACEMENTS.values()]
    figure.legend(handles=[*handles, *kinds], loc="outside lower center", ncols=5)
    return {"asymmetric": describe(figure, _caption(data))}


def _time(axes: Axes, times: xr.DataArray) -> None:
    ratio = 100 * (times / times.sel(schedule=EQUAL) - 1)
    for name in UNEQUAL:
        for system, more in zip(NETWORKS, (SLOW, {}), strict=True):
            line = ratio.sel(schedule=name, system=system)
            axes.plot(times.microbatches, line, **{**PLACEMENTS[name], **more})
    axes.axhline(0, color=palette.GREY, linewidth=3.0)
    axes.set_yscale("symlog", linthresh=5)
    axes.set_yticks([-10, -5, -2, 0, 2, 5, 10, 30], ["-10", "-5", "-2", "0", "2", "5", "10", "30"])
    axes.minorticks_off()


def _caption(data: xr.Dataset) -> str:
    return (
        "Chimera with unequal stages against equal ones: shares of the first and of the second "
        "half of the stages. Top: step time, mid compute, linear up to 5 %. Below: memory of the "
        f"fullest worker, over the mean one and over that with equal stages. {setting_words(data)} "
        "Stages 1:2 save time with few microbatches, never memory of the fullest worker; 2:1 "
        "balances memory."
    )
