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
            axes, one = panels[row, column], at.sel(host_link=link).isel(model=column)
            draw_methods(axes, one.limit, one)
            axes.set_title(f"{one.model.item()}\n{link_words(link)}", loc="left")
        panels[row, 0].set_ylabel(UNIT)
    log_axis(panels[0, 0])
    for axes in panels[-1]:
        axes.set_xlabel("limit [peaks of 1F1B]")
        axes.set_xticks(
            data.limit.values, [f"{limit:g}" for limit in data.limit.values], rotation=90
        )
    figure.legend(handles=entries(), loc="outside lower center", ncols=3)
    caption = (
        f"Idle time by memory limit, {count} microbatches. {UNIT_SAID}; filling takes one at "
        "least. A line begins where its schedule fits. Under a tight limit only schedules that "
        "offload fit, and the optimised ones are the lowest of their kind; two stages per worker "
        "halve the fill."
    )
    return {"optpipe_memory": describe(figure, caption)}
