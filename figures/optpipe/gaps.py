"""Gaps of solves to a proven optimum, and their solving time."""

from collections.abc import Mapping
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.rules import describe
from pipejax.plots import palette, style

DASHES: Mapping[bool, Literal["--", "-"]] = {
    False: "--",
    True: "-",
}  # whether something may be offloaded
COLOURS: Mapping[bool, str] = {False: palette.BLACK, True: palette.VERMILION}
WORDS: Mapping[bool, str] = {False: "nothing offloaded", True: "may offload"}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the gaps by limit, and how many problems are closed by when."""
    cases = data.stack(case=("model", "microbatches", "limit", "host_link", "sharing"))
    cases = cases.isel(case=np.flatnonzero(cases.solved.values))
    closed = cases.solve_status == "optimal"
    figure, (gaps_axes, times_axes) = plt.subplots(
        1, 2, figsize=(style.PAGE, 3.3), layout="constrained"
    )
    _gaps(gaps_axes, cases)
    _times(times_axes, cases)
    gaps_axes.set_title(
        f"{int(closed.sum())} of {cases.sizes['case']} problems have a gap of 0", loc="left"
    )
    times_axes.set_title("best schedule found and proven by then", loc="left")
    limits = [
        Line2D([], [], color=c, label=f"limit {limit:g}")
        for limit, c in zip(data.limit.values, palette.ORDERED, strict=False)
    ]
    kinds = [
        Line2D([], [], color=palette.GREY, linestyle=dashes, label=f"left: {WORDS[may]}")
        for may, dashes in DASHES.items()
    ]
    colours = [Line2D([], [], color=c, label=f"right: {WORDS[may]}") for may, c in COLOURS.items()]
    whens = [
        Line2D([], [], color=palette.GREY, linestyle="--", label="right: found"),
        Line2D([], [], color=palette.GREY, linestyle="-", label="right: proven"),
    ]
    figure.legend(handles=[*limits, *kinds, *colours, *whens], loc="outside lower center", ncols=4)
    caption = (
        f"How far solves are from a proof. {int(closed.sum())} of {cases.sizes['case']} problems "
        f"are closed; half have a gap of at most {100 * float(cases.solve_gap.median()):.2g} %. "
        "Limits in peaks of 1F1B. Open gaps are those of tight limits where activations may be "
        "offloaded."
    )
    return {"optpipe_gaps": describe(figure, caption)}


def _gaps(axes: Axes, cases: xr.Dataset) -> None:
    """Share of solves with at most a gap, a line for each limit and kind."""
    widest = 100 * float(cases.solve_gap.max())
    for limit, colour in zip(np.unique(cases.limit), palette.ORDERED, strict=False):
        for may, dashes in DASHES.items():
            held = (cases.limit == limit) & (np.isfinite(cases.host_link) == may)
            gap = np.sort(100 * cases.solve_gap.values[held.values])
            share = 100 * np.arange(len(gap) + 1) / max(1, len(gap))
            axes.step([0, *gap, widest], [*share, 100.0], where="post", color=colour, ls=dashes)
    axes.set(xlabel="gap of a solve [%]", ylabel="problems [%]", ylim=(0, 102))


def _times(axes: Axes, cases: xr.Dataset) -> None:
    """Share of problems by time: dashed with their best schedule, solid with its proof."""
    latest = float(cases.solve_seconds.max())
    for may, shade in COLOURS.items():
        chosen = cases.isel(case=np.flatnonzero((np.isfinite(cases.host_link) == may).values))
        proven = chosen.solve_seconds.where(chosen.solve_status == "optimal")
        for seconds, dashes in ((chosen.solve_best_seconds, "--"), (proven, "-")):
            ends = np.sort(seconds.dropna("case").values)
            share = 100 * np.arange(1, len(ends) + 1) / chosen.sizes["case"]
            axes.step(
                [*ends, latest],
                [*share, share[-1] if len(ends) else 0.0],
                where="post",
                color=shade,
                linestyle=dashes,
            )
    axes.set_xscale("log")
    axes.set(xlabel="effort [s of one core]", ylabel="problems [%]", ylim=(0, 102))
