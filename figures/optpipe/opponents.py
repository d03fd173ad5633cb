"""Gains of optimised schedules over each PipeOffload, beside the published ones."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.rules import describe
from pipejax.plots import palette, style

OPPONENTS: Mapping[str, Mapping[str, Any]] = {
    "pipe-offload": {"color": palette.ORANGE, "linestyle": "-", "label": "split backwards"},
    "pipe-offload, whole": {"color": palette.BLUE, "linestyle": "--", "label": "whole backwards"},
}
TIGHT, AMPLE = slice(None, 0.99), slice(1.5, None)  # limits [peaks of 1F1B]
MORE = "more throughput [%]"
HIDDEN = 1.0  # F: links that PipeOffload is made for


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the share of problems by gain: idle time, then throughput under two kinds of limits."""
    fast = data.isel(host_link=np.flatnonzero(data.host_link.values <= HIDDEN))
    figure, panels = plt.subplots(1, 3, figsize=(style.PAGE, 2.4), sharey=True)
    panels[2].sharex(panels[1])
    parts = (
        ("all limits", data, _idle_saved, "idle time saved [%]", 50.0),
        ("below 1F1B's memory", fast.sel(limit=TIGHT), _throughput, MORE, 20.0),
        ("from 1.5 times 1F1B's", fast.sel(limit=AMPLE), _throughput, MORE, 30.0),
    )
    for axes, (title, part, gain, words, published) in zip(panels, parts, strict=True):
        for name, look in OPPONENTS.items():
            _share(axes, 100 * gain(part, name).where(part.solved), look)
        axes.axvline(published, color=palette.BLACK, linewidth=0.8, linestyle=":")
        axes.set(xlabel=words, ylim=(0, 102))
        axes.set_title(title, loc="left")
    panels[0].set_ylabel("problems with more [%]")
    handles = [Line2D([], [], **look) for look in OPPONENTS.values()]
    handles.append(
        Line2D([], [], color=palette.BLACK, linestyle=":", label="published: reached at best")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    caption = (
        "What optimised schedules gain on PipeOffload at equal memory limits, one stage per "
        "worker: the share of problems with more than a gain. Throughput only where an "
        "offload takes a forward at most. Whether a published figure is reached depends on how "
        "PipeOffload runs its backwards."
    )
    return {"optpipe_opponents": describe(figure, caption)}


def _idle_saved(data: xr.Dataset, opponent: str) -> xr.DataArray:
    idle = data.idle_time
    return 1 - idle.sel(schedule="optimum", drop=True) / idle.sel(schedule=opponent, drop=True)


def _throughput(data: xr.Dataset, opponent: str) -> xr.DataArray:
    time = data.makespan
    return time.sel(schedule=opponent, drop=True) / time.sel(schedule="optimum", drop=True) - 1


def _share(axes: Axes, gain: xr.DataArray, look: Mapping[str, Any]) -> None:
    """Share of problems that gain more, against the gain."""
    gains = np.sort(gain.values[np.isfinite(gain.values)])
    more = 100 * (1 - np.arange(len(gains) + 1) / max(1, len(gains)))
    axes.step([*gains, gains[-1] if len(gains) else 0.0], more, where="pre", **look)
