"""How far solves are from a proven optimum, and how long they take."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.rules import describe
from pipejax.plots import palette, style

KINDS: Mapping[bool, tuple[str, str, str]] = {  # whether something may be offloaded
    False: ("o", palette.BLACK, "nothing offloaded"),
    True: ("s", palette.VERMILION, "may offload"),
}
SPREAD = 0.07  # between marks of one limit [peaks of 1F1B]


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the gaps by limit, and how many problems are closed by when."""
    each = data.stack(case=("model", "microbatches", "limit", "host_link", "sharing"))
    each = each.isel(case=np.flatnonzero(each.solved.values))
    closed = each.solve_status == "optimal"
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(style.PAGE, 3.3), width_ratios=(1.25, 1), layout="constrained"
    )
    colour = dict(zip(data.model.values, palette.ORDERED, strict=False))
    _gaps(left, each, colour)
    _times(right, each)
    left.set_title(
        f"{int(closed.sum())} of {each.sizes['case']} problems have a gap of 0", loc="left"
    )
    limit = f"{data.attrs['effort of a solve']:g} s of one core"
    right.set_title(f"best schedule and proof within {limit}", loc="left")
    pipes = [
        Line2D([], [], color=c, marker="o", linestyle="", label=str(name))
        for name, c in colour.items()
    ]
    kinds = [
        Line2D([], [], color=c, marker=marker, label=label) for marker, c, label in KINDS.values()
    ]
    whens = [
        Line2D([], [], color=palette.GREY, linestyle="--", label="best schedule found"),
        Line2D([], [], color=palette.GREY, linestyle="-", label="proven"),
    ]
    figure.legend(handles=[*pipes, *kinds, *whens], loc="outside lower center", ncols=4)
    caption = (
        f"How far solves are from a proof. {int(closed.sum())} of {each.sizes['case']} problems "
        f"are closed; half have a gap of at most {100 * float(each.solve_gap.median()):.2g} %. "
        "Marks of one limit stand side by side, pipes in the order of the legend. Open "
        "gaps are those of tight limits where activations may be offloaded."
    )
    return {"optpipe_gaps": describe(figure, caption)}


def _gaps(axes: Axes, each: xr.Dataset, colour: Mapping[str, str]) -> None:
    """A mark per solve; those of one limit stand beside each other by pipe and kind."""
    places = list(colour)
    middle = (2 * len(places) - 1) / 2
    for k, name in enumerate(places):
        for may, (marker, _, _) in KINDS.items():
            held = (each.model == name) & (np.isfinite(each.host_link) == may)
            mine = each.isel(case=np.flatnonzero(held.values))
            shift = (2 * k + may - middle) * SPREAD / len(places)
            axes.plot(
                mine.limit + shift,
                100 * mine.solve_gap,
                marker,
                color=colour[name],
                markersize=3.2,
                markerfacecolor="white" if may else None,
            )
    limits = np.unique(each.limit)
    axes.set_xticks(limits, [f"{limit:g}" for limit in limits])
    axes.set(xlabel="memory limit [peaks of 1F1B]", ylabel="gap of a solve [%]")
    axes.set_ylim(-0.5)


def _times(axes: Axes, each: xr.Dataset) -> None:
    """Share of problems by time: dashed with their best schedule, solid with its proof."""
    end = float(each.solve_seconds.max())
    for may, (_, shade, _) in KINDS.items():
        mine = each.isel(case=np.flatnonzero((np.isfinite(each.host_link) == may).values))
        proven = mine.solve_seconds.where(mine.solve_status == "optimal")
        for seconds, dashes in ((mine.solve_best_seconds, "--"), (proven, "-")):
            known = np.sort(seconds.dropna("case").values)
            share = 100 * np.arange(1, len(known) + 1) / mine.sizes["case"]
            axes.step(
                [*known, end],
                [*share, share[-1] if len(known) else 0.0],
                where="post",
                color=shade,
                linestyle=dashes,
            )
    axes.set_xscale("log")
    axes.set(xlabel="time [s]", ylabel="problems [%]", ylim=(0, 102))
