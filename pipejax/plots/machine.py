"""Machines: which worker sits where, and what its messages cross."""

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.topology import PlacedCosts, Seats
from pipejax.plots import palette, style

GAP = 0.9  # between groups of a level, in widths of a place
COLOURS = (
    palette.GREY,
    palette.VERMILION,
    palette.VIOLET,
)  # of links by level; further as the last
RISE = 0.3  # of an arc, per width of a place that it spans
ROW = 1.4  # height of a placement [inch]


def machine_picture(placed: PlacedCosts, shown: Mapping[str, Seats]) -> Figure:
    """Draw placements by name, one below the other: workers on nodes, and what messages cross."""
    paper = style.Paper()
    picture = style.Picture(paper, ROW * len(shown) + 0.4)
    with mpl.rc_context(paper.settings()):
        rows = picture.subplots(len(shown), squeeze=False, sharey=True)[:, 0]
        tops = [
            _draw(axes, placed, np.asarray(places), name)
            for axes, (name, places) in zip(rows, shown.items(), strict=True)
        ]
        rows[0].set_ylim(-0.8, max(tops) + 0.15)
        entries = _legend_entries(int(placed.level.max()) + 1)
        picture.legend(handles=entries, loc="outside lower center", ncols=len(entries))
    return picture


def _draw(axes: Axes, placed: PlacedCosts, seats: Int[NumpyArray, " workers"], name: str) -> float:
    """Draw the workers node by node, and an arc for each pair that messages cross.

    An arc is the wider, the more stage boundaries cross there. Returns the height of the highest.
    """
    at, top = _positions(placed.level), 0.5
    for level in range(int(placed.level.max())):
        for group in np.unique((placed.level <= level).argmax(axis=1)).tolist():
            _frame(axes, at[placed.level[group] <= level], level)
    for (one, other), count in _pairs(placed).items():
        left, right = sorted((at[seats[one]], at[seats[other]]))
        rise = 0.25 + RISE * (right - left)
        top = max(top, 0.3 + rise)
        bend = [(left, 0.3), ((left + right) / 2, 0.3 + 2 * rise), (right, 0.3)]
        level = int(placed.level[seats[one], seats[other]])
        arc = PathPatch(
            Path(bend, [Path.MOVETO, Path.CURVE3, Path.CURVE3]),
            fill=False,
            edgecolor=COLOURS[min(level, len(COLOURS) - 1)],
            linewidth=0.6 + 0.3 * min(count, 6),
        )
        axes.add_patch(arc)
    for worker, seat in enumerate(seats.tolist()):
        axes.plot(at[seat], 0, "o", markersize=12, color=palette.WHITE, mec="black", mew=0.6)
        axes.annotate(f"{worker}", (at[seat], 0), ha="center", va="center_baseline")
    axes.set(xlim=(at[0] - 1.2, at[-1] + 1.2), yticks=[], xticks=[])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(name, loc="left")
    return float(top)


def _legend_entries(levels: int) -> list[Line2D]:
    """Return what the colours of links mean."""
    names = ("messages in a node", "between nodes", "between racks")
    return [
        Line2D([], [], color=COLOURS[min(k, len(COLOURS) - 1)], label=names[min(k, len(names) - 1)])
        for k in range(min(levels, len(names)))
    ]


def _positions(level: Int[NumpyArray, "places places"]) -> NumpyArray:
    """Where each place stands: apart by one, and by a gap more for each level between them."""
    return np.append(0.0, np.cumsum(1.0 + GAP * level[np.arange(len(level) - 1), 1:].diagonal()))


def _frame(axes: Axes, at: NumpyArray, level: int) -> None:
    """Draw a box around the places of a node, or of a group of nodes."""
    pad = 0.55 + 0.18 * level
    box = FancyBboxPatch(
        (at.min() - pad, -pad),
        np.ptp(at) + 2 * pad,
        2 * pad,
        boxstyle="round,pad=0,rounding_size=0.3",
        facecolor=palette.SKY if level == 0 else "none",
        alpha=0.35 if level == 0 else 1.0,
        edgecolor=palette.BLUE,
        linewidth=0.6,
        zorder=0,
    )
    axes.add_patch(box)


def _pairs(placed: PlacedCosts) -> Mapping[tuple[int, int], int]:
    """How many stage boundaries lie between two workers, by pair."""
    placement = placed.table.placement
    ends = np.sort(np.stack([placement[:, :-1].ravel(), placement[:, 1:].ravel()]), axis=0)
    pairs, counts = np.unique(ends[:, ends[0] != ends[1]], axis=1, return_counts=True)
    return {(a, b): n for (a, b), n in zip(pairs.T.tolist(), counts.tolist(), strict=True)}
