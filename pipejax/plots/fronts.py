"""Points in two measures, with the front that none beats in both: layouts of a plan, of a sweep."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.plots import palette, style

# Plans: step time against memory of all layouts.

COLOURS = palette.SERIES
MARKERS = "osD^vP"
SLOWEST = 4.0  # times the best step: what takes longer is not drawn
WIDEST = 1.5  # times the capacity: what needs more is not drawn


def draw_plan(
    axes: Axes,
    columns: Mapping[str, Any],
    front: Any,
    *,
    apart: Bool[NumpyArray, " layouts"],
    best: int,
    capacity: float,
) -> None:
    """Draw layouts as points: grey for bounds, coloured by schedule for exact times."""
    memory, exact = np.asarray(columns["memory_bytes"]) / 1e9, np.asarray(columns["step_time"])
    bound, is_known = np.asarray(columns["lower_bound"]), ~np.isnan(exact)
    least = float(np.nanmin(exact))
    near = (memory <= WIDEST * capacity / 1e9) & (bound <= SLOWEST * least)
    rest = near & ~is_known
    axes.plot(
        memory[rest],
        bound[rest],
        ".",
        color=palette.SILVER,
        markersize=1.5,
        markeredgewidth=0,
        rasterized=True,
        zorder=1,
    )
    axes.plot([], [], ".", color=palette.SILVER, markersize=4, label="lower bound")
    _draw_exact(axes, np.asarray(columns["schedule"]), memory, exact, near & is_known, apart)
    order = np.flatnonzero(front)
    order = order[np.argsort(memory[order])]
    axes.step(
        np.append(memory[order], capacity / 1e9),
        np.append(exact[order], least),
        where="post",
        color=palette.BLACK,
        linewidth=0.9,
        label="front",
        zorder=3,
    )
    axes.axvline(capacity / 1e9, color=palette.VERMILION, linewidth=0.8, linestyle="--")
    ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.BLACK}
    axes.plot(memory[best], exact[best], "o", markersize=7, zorder=4, **ring)
    axes.annotate(
        f"best: {_label(columns, best)}",
        (memory[best], exact[best]),
        xytext=(-6, -12),
        textcoords="offset points",
        ha="right",
        fontsize=style.LEAST_FONT,
    )
    axes.annotate(
        "does not fit",
        (capacity / 1e9, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color=palette.VERMILION,
        fontsize=style.LEAST_FONT,
    )
    axes.set_yscale("log")
    style.name_ticks(axes.yaxis)
    axes.set_xlim(0, min(WIDEST * capacity / 1e9, 1.05 * max(capacity / 1e9, memory[near].max())))
    axes.set_ylim(0.85 * least, SLOWEST * least)
    axes.set_xlabel("memory of the fullest accelerator [GB]")
    axes.set_ylabel("step time [s]")
    axes.legend(loc="upper right")


def _draw_exact(
    axes: Axes,
    names: NumpyArray,
    memory: NumpyArray,
    exact: NumpyArray,
    shown: NumpyArray,
    apart: NumpyArray,
) -> None:
    """Draw evaluated layouts by schedule; layouts ranked apart are hollow."""
    for name, colour, marker in zip(dict.fromkeys(names.tolist()), COLOURS, MARKERS, strict=False):
        chosen = shown & (names == name)
        if chosen.any():
            look: dict[str, Any] = {"color": colour, "markersize": 3, "zorder": 2}
            axes.plot(memory[chosen & ~apart], exact[chosen & ~apart], marker, label=name, **look)
            look |= {"markerfacecolor": palette.WHITE, "markeredgewidth": 0.6}
            axes.plot(memory[chosen & apart], exact[chosen & apart], marker, **look)
    if np.any(shown & apart):
        hollow: dict[str, Any] = {"color": palette.BLACK, "markerfacecolor": palette.WHITE}
        axes.plot([], [], "o", markersize=3, label="ranked apart: extrapolated", **hollow)


def _label(columns: Mapping[str, Any], place: int) -> str:
    """Name a layout in short, as t8 p16 v4 d16 b1."""
    letters = {
        "tensor": "t",
        "context": "c",
        "expert": "e",
        "pipeline": "p",
        "stages_per_worker": "v",
        "data": "d",
        "microbatch_size": "b",
    }
    shown = (f"{letter}{int(columns[name][place])}" for name, letter in letters.items())
    return " ".join(part for part in shown if part not in ("c1", "e1", "v1"))


# Points of a sweep in two of their measures.


FAR = 2.5  # times the most of the front: what lies beyond is not drawn, but counted
WIDE = 20.0  # ratio of the largest to the least value from which an axis is logarithmic
MANY = 5000  # points, from which they are small
MOST_NAMED = 8  # points of a front that are named
APART = 0.03  # of the picture, between two points that are named


class Shown(NamedTuple):
    """Values along one side of a picture."""

    label: str  # is written along it, with the unit
    values: NumpyArray  # (points) in that unit
    more_is_better: bool = False  # whether the front has the largest values

    def near(self, front: Int[NumpyArray, " found"]) -> Bool[NumpyArray, " points"]:
        """(points) which are not far worse than all of the front."""
        if not len(front) or not np.all(self.values[front] > 0):
            return np.ones(len(self.values), bool)
        if self.more_is_better:
            return self.values >= self.values[front].min() / FAR
        return self.values <= self.values[front].max() * FAR


def draw_results(
    axes: Axes,
    sides: Sequence[Shown],
    groups: Mapping[str, Bool[NumpyArray, " points"]],
    front: Int[NumpyArray, " found"],
    best: Int[NumpyArray, " found"],
    named: tuple[str, Sequence[str]] = ("", ()),
) -> None:
    """Draw points by group, the front as steps, and the best points ringed."""
    x, y = (side.values for side in sides)
    among = np.logical_or.reduce([*groups.values()])
    size = 3 if len(x) <= MANY else 1
    plain: dict[str, Any] = {"linestyle": "", "markersize": size, "rasterized": True, "zorder": 2}
    plain |= {"markerfacecolor": "none", "markeredgewidth": 0.6}  # those behind are seen through
    if len(groups) > len(COLOURS):
        groups = {"points": among}
    looks = [(palette.GREY, "o")] if len(groups) == 1 else zip(COLOURS, MARKERS, strict=True)
    for (name, is_member), (colour, marker) in zip(groups.items(), looks, strict=False):
        axes.plot(x[is_member], y[is_member], marker=marker, color=colour, label=name, **plain)
    if len(best):
        ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.BLACK}
        axes.plot(x[best], y[best], "o", markersize=7, label="best", zorder=3, **ring)
    _scale(axes, sides, among, front)
    if len(front):
        _draw_front(axes, sides, front)
        out = among & ~(sides[0].near(front) & sides[1].near(front))
        if out.any():
            axes.set_title(f"{out.sum():,} of {among.sum():,} points lie further out", loc="left")
    axes.set_xlabel(sides[0].label)
    axes.set_ylabel(sides[1].label)
    figure: Any = axes.figure
    style.legend(figure, "upper left", axes.get_legend_handles_labels())  # wherever points lie
    if named[0]:
        _name_front(axes, sides, front, *named)


def _scale(
    axes: Axes,
    sides: Sequence[Shown],
    among: Bool[NumpyArray, " points"],
    front: Int[NumpyArray, " found"],
) -> None:
    """Scale both sides to the points that are not far from the front."""
    for name, side, axis in zip("xy", sides, (axes.xaxis, axes.yaxis), strict=True):
        shown = side.values[among & side.near(front)]
        if len(shown) and shown.min() > 0 and shown.max() > WIDE * shown.min():
            getattr(axes, f"set_{name}scale")("log")
        if len(shown) < among.sum():
            getattr(axes, f"set_{name}lim")(*_with_margin(shown, axis.get_scale()))
        style.name_ticks(axis)


def _with_margin(values: NumpyArray, scale: str) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if scale == "log":
        more = (high / low) ** 0.05
        return low / more, high * more
    more = 0.05 * (high - low)
    return low - more, high + more


def _draw_front(axes: Axes, sides: Sequence[Shown], front: Int[NumpyArray, " found"]) -> None:
    """Draw the edge of what the front beats, to where the picture's values are worst."""
    x, y = (side.values[front] for side in sides)
    limits = axes.get_xlim(), axes.get_ylim()
    worst = [
        ends[0] if side.more_is_better else ends[1]
        for side, ends in zip(sides, limits, strict=True)
    ]
    axes.step(
        [x[0], *x, worst[0]],
        [worst[1], *y, y[-1]],
        where="post",
        color=palette.BLACK,
        linewidth=0.9,
        label="front",
        zorder=3,
    )
    axes.set(xlim=limits[0], ylim=limits[1])


def _name_front(
    axes: Axes,
    sides: Sequence[Shown],
    front: Int[NumpyArray, " found"],
    what: str,
    names: Sequence[str],
) -> None:
    """Number some points of a front that lie apart, and name them below the picture."""
    x, y = (side.values[front] for side in sides)
    # where no point can lie: a front beats all on its other side
    right, up = (1 if side.more_is_better else -1 for side in sides)
    to_axes = axes.transData + axes.transAxes.inverted()
    at = to_axes.transform(np.column_stack([x, y]))
    named = [0]
    for k in range(1, len(at)):
        if np.hypot(*(at[k] - at[named[-1]])) > APART:
            named.append(k)
    if len(named) > MOST_NAMED:
        named = [named[k] for k in np.linspace(0, len(named) - 1, MOST_NAMED).round().astype(int)]
    handles = []
    for number, k in enumerate(named, start=1):
        axes.annotate(
            str(number),
            (x[k], y[k]),
            xytext=(3 * right, 3 * up),
            textcoords="offset points",
            ha="left" if right > 0 else "right",
            va="bottom" if up > 0 else "top",
            fontsize=style.LEAST_FONT,
            zorder=4,
        )
        look: Any = {"color": palette.BLACK, "linestyle": "", "marker": f"${number}$"}
        handles.append(Line2D([], [], markersize=4, markeredgewidth=0.3, **look))
    texts = [names[k] for k in named]
    figure: Any = axes.figure
    style.legend(figure, "lower left", (handles, texts), title=what, columns=1)
