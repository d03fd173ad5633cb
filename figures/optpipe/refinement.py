"""Solutions that get better, and what a job wins that trains on them meanwhile."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.rules import describe
from figures.optpipe.cases import BOUND, POLICIES
from pipejax.plots import palette, style

FOUND: Mapping[bool, Mapping[str, Any]] = {  # whether by a search
    False: {"color": palette.GREEN, "marker": "o", "label": "found by a heuristic"},
    True: {"color": palette.VERMILION, "marker": "s", "label": "found by a search"},
}
JOB = 1000  # steps of the job that is looked at
LEAST = 1e-3  # percent: what is shown of more time
SEARCHES = ("search", "neighbourhoods")  # sources that are no heuristics begin so


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the step time against the time of the search, and jobs against their steps."""
    return {"optpipe_anytime": _anytime(data), "optpipe_training": _training(data)}


def _panels(data: xr.Dataset, height: float, *, sharey: bool) -> tuple[Figure, list[Axes]]:
    """One panel per case, two to a row."""
    count = data.sizes["case"]
    columns = min(2, count)
    rows = -(-count // columns)
    figure, panels = plt.subplots(
        rows,
        columns,
        figsize=(style.PAGE, height * rows + 0.7),
        sharex=True,
        sharey=sharey,
        squeeze=False,
    )
    for axes in panels.flat[count:]:
        axes.set_axis_off()
    return figure, list(panels.flat[:count])


def _anytime(data: xr.Dataset) -> Figure:
    figure, panels = _panels(data, 1.9, sharey=False)
    for k, axes in enumerate(panels):
        case = data.isel(case=k)
        news = data.isel(news=np.flatnonzero(data.of_case.values == k))
        end = float(case.ended)
        axes.step(
            [*news.seconds.values, end],
            [*news.makespan.values, news.makespan.values[-1]],
            where="post",
            color=palette.BLACK,
            linewidth=0.9,
        )
        searched = np.array([str(source).startswith(SEARCHES) for source in news.source.values])
        for by_search, look in FOUND.items():
            marked = news.isel(news=np.flatnonzero(searched == by_search))
            axes.plot(marked.seconds, marked.makespan, linestyle="", markersize=3.5, **look)
        axes.axhline(float(case.bound), **BOUND)
        axes.set_xscale("log")
        axes.margins(y=0.16)  # below the bound there is room for words
        axes.set_ylabel("step time [s]")
        axes.set_title(f"{case.case.item()}", loc="left", fontsize=style.LEAST_FONT)
        axes.text(
            0.02,
            float(case.bound),
            _ended(case),
            transform=axes.get_yaxis_transform(),
            va="top",
            fontsize=style.LEAST_FONT,
        )
    panels[-1].set_xlabel("effort of the search [s of one core]")
    panels[-min(2, len(panels))].set_xlabel("effort of the search [s of one core]")
    handles = [
        *(Line2D([], [], linestyle="", **look) for look in FOUND.values()),
        Line2D([], [], label="bound at the end: no schedule is below", **BOUND),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    caption = (
        "Step time of the best schedule by the effort of the search; the axes differ, as the "
        "problems do. Limits are in peaks of 1F1B."
    )
    return describe(figure, caption)


def _ended(case: xr.Dataset) -> str:
    """Say how far from the best the last schedule can be."""
    if str(case.status.item()) == "optimal":
        return "the best there is"
    return f"at most {100 * float(case.gap):.2g} % from the best"


def _training(data: xr.Dataset) -> Figure:
    figure, panels = _panels(data, 1.9, sharey=True)
    for k, axes in enumerate(panels):
        case = data.isel(case=k)
        reference = case.time.sel(policy="refine")
        for policy, look in POLICIES.items():
            extra = 100 * (case.time.sel(policy=policy) / reference - 1)
            axes.plot(case.steps, extra.where(extra > LEAST), **look)
        axes.set(xscale="log", yscale="log", ylabel="more time [%]")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.axvline(JOB, color=palette.GREY, linewidth=0.6)
        axes.set_title(f"{case.case.item()}", loc="left", fontsize=style.LEAST_FONT)
    panels[-1].set_xlabel("steps of the job")
    panels[-min(2, len(panels))].set_xlabel("steps of the job")
    handles = [Line2D([], [], **look) for look in POLICIES.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    caption = (
        "How much longer a job takes that waits until the search ends, or that stays with the best "
        "heuristic, than one that starts on the first schedule and replaces it by every better "
        f"one: {_worth(data)}. Limits in peaks of 1F1B."
    )
    return describe(figure, caption)


def _worth(data: xr.Dataset) -> str:
    """Say what the two other policies cost a job of so many steps."""
    at = data.time.isel(steps=int(np.abs(data.steps.values - JOB).argmin()))
    cost = 100 * (at / at.sel(policy="refine") - 1)
    ends = {
        policy: f"{float(costs.min()):.1f} to {float(costs.max()):.1f} %"
        for policy in ("wait", "stay")
        for costs in [cost.sel(policy=policy)]
    }
    return (
        f"a job of {JOB:,} steps (line) {ends['wait']} more if it waits, {ends['stay']} if it stays"
    )
