"""Idle time of every method against the memory limit, with what no schedule can go below."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.rules import describe
from figures.optpipe.cases import UNIT, UNIT_SAID, draw_methods, entries, link_words, log_axis
from pipejax.plots import style

LINK = 1.0  # time of an offload, in forwards
SHOWN = 16  # microbatches, where they were solved: all kinds of optima are known there


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw a column of panels per pipe: without a host link above, with one below."""
    counts = [int(m) for m in data.microbatches.values]
    count = SHOWN if SHOWN in counts else counts[-1]
    at = data.sel(microbatches=count, sharing="own")
    links = [link for link in (float("inf"), LINK) if link in data.host_link]
    figure, panels = plt.subplots(
        len(links),
        data.sizes["model"],
        figsize=(style.PAGE, 1.9 * len(links) + 1.0),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for row, link in enumerate(links):
        for column in range(data.sizes["model"]):
            axes, panel = panels[row, column], at.sel(host_link=link).isel(model=column)
            draw_methods(axes, panel.limit, panel)
            axes.set_title(f"{panel.model.item()}\n{link_words(link)}", loc="left")
        panels[row, 0].set_ylabel(UNIT)
    log_axis(panels[0, 0])
    for axes in panels[-1]:
        axes.set_xlabel("limit [peaks of 1F1B]")
        ends = (float(data.limit[0]), 1.0, float(data.limit[-1]))
        axes.set_xticks(ends, [f"{limit:g}" for limit in ends])
    figure.legend(handles=entries(), loc="outside lower center", ncols=3)
    caption = (
        f"Idle time by memory limit, {count} microbatches. {UNIT_SAID}. A line begins where its "
        f"schedule fits. {_below(at)} {_alike(at)}"
    )
    return {"optpipe_memory": describe(figure, caption)}


def _below(at: xr.Dataset) -> str:
    """Say at how many problems two stages per worker beat every schedule with one."""
    two = at.makespan.sel(schedule="pipe-offload, interleaved")
    proven = int((two < at.lower_bound).sum())
    return (
        "PipeOffload with two stages per worker fills the pipe in half the time: at "
        f"{proven} of {int((two.notnull() & at.lower_bound.notnull()).sum())} problems it lies "
        "below what is proven for one stage."
    )


def _alike(at: xr.Dataset) -> str:
    """Say at how many problems the greedy start is as good as the best schedule."""
    ratio = at.makespan.sel(schedule="ada-offload") / at.makespan.sel(schedule="optimum")
    return (
        f"AdaOffload is within 1 % of the optimised schedule at {int((ratio <= 1.01).sum())} of "
        f"{int(ratio.notnull().sum())}: its open marks lie around theirs."
    )
