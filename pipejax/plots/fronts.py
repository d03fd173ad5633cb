"""Draw points in two measures with their Pareto front: layouts of a plan, points of a sweep."""

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
FRONT: dict[str, Any] = {"where": "post", "color": palette.BLACK, "linewidth": 0.9}
FRONT |= {"label": "front", "zorder": 3}
MAX_STEP_RATIO = 4.0  # largest drawn step time, relative to the best
MAX_MEMORY_RATIO = 1.5  # largest drawn memory, relative to the capacity


def draw_plan(
    axes: Axes,
    columns: Mapping[str, Any],
    front: Any,
    *,
    apart: Bool[NumpyArray, " layouts"],
    best: int,
    capacity: float,
) -> None:
    """Draw layouts: memory [GB] against exact step time, or grey against its lower bound [s].

    `front` and `apart` select layouts, `best` is a position, `capacity` is in bytes.
    """
    memory, exact = np.asarray(columns["memory_bytes"]) / 1e9, np.asarray(columns["step_time"])
    bound, is_exact = np.asarray(columns["lower_bound"]), ~np.isnan(exact)
    capacity, least = capacity / 1e9, float(np.nanmin(exact))
    is_drawn = (memory <= MAX_MEMORY_RATIO * capacity) & (bound <= MAX_STEP_RATIO * least)
    dots: dict[str, Any] = {"markersize": 1.5, "markeredgewidth": 0, "rasterized": True}
    bounded = is_drawn & ~is_exact
    axes.plot(memory[bounded], bound[bounded], ".", color=palette.SILVER, zorder=1, **dots)
    axes.plot([], [], ".", color=palette.SILVER, markersize=4, label="lower bound")
    _draw_exact(axes, np.asarray(columns["schedule"]), memory, exact, is_drawn & is_exact, apart)
    order = np.flatnonzero(front)
    order = order[np.argsort(memory[order])]
    edge = np.append(memory[order], capacity), np.append(exact[order], least)
    axes.step(*edge, **FRONT)
    axes.axvline(capacity, color=palette.VERMILION, linewidth=0.8, linestyle="--")
    ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.BLACK}
    axes.plot(memory[best], exact[best], "o", markersize=7, zorder=4, **ring)
    note: dict[str, Any] = {"textcoords": "offset points", "fontsize": style.LEAST_FONT}
    label = f"best: {_label(columns, best)}"
    axes.annotate(label, (memory[best], exact[best]), xytext=(-6, -12), ha="right", **note)
    note |= {"xycoords": ("data", "axes fraction"), "color": palette.VERMILION}
    axes.annotate("does not fit", (capacity, 0.02), xytext=(4, 0), **note)
    axes.set_yscale("log")
    style.name_ticks(axes.yaxis)
    axes.set_xlim(0, min(MAX_MEMORY_RATIO * capacity, 1.05 * max(capacity, memory[is_drawn].max())))
    axes.set_ylim(0.85 * least, MAX_STEP_RATIO * least)
    axes.set_xlabel("memory of the fullest accelerator [GB]")
    axes.set_ylabel("step time [s]")
    axes.legend(loc="upper right")


def _draw_exact(
    axes: Axes,
    names: NumpyArray,
    memory: NumpyArray,
    exact: NumpyArray,
    is_drawn: NumpyArray,
    apart: NumpyArray,
) -> None:
    """Draw the step times (layouts) of each schedule; layouts ranked apart are hollow."""
    for name, colour, marker in zip(dict.fromkeys(names.tolist()), COLOURS, MARKERS, strict=False):
        is_member = is_drawn & (names == name)
        if is_member.any():
            look: dict[str, Any] = {"color": colour, "markersize": 3, "zorder": 2}
            ranked = is_member & ~apart
            axes.plot(memory[ranked], exact[ranked], marker, label=name, **look)
            look |= {"markerfacecolor": palette.WHITE, "markeredgewidth": 0.6}
            axes.plot(memory[is_member & apart], exact[is_member & apart], marker, **look)
    if np.any(is_drawn & apart):
        hollow: dict[str, Any] = {"color": palette.BLACK, "markerfacecolor": palette.WHITE}
        axes.plot([], [], "o", markersize=3, label="ranked apart: extrapolated", **hollow)


def _label(columns: Mapping[str, Any], layout: int) -> str:
    """Return a short name of one row of the columns, as t8 p16 v4 d16 b1."""
    letters = {
        "tensor": "t",
        "context": "c",
        "expert": "e",
        "pipeline": "p",
        "stages_per_worker": "v",
        "data": "d",
        "microbatch_size": "b",
    }
    texts = (f"{letter}{int(columns[name][layout])}" for name, letter in letters.items())
    return " ".join(text for text in texts if text not in ("c1", "e1", "v1"))


# Points of a sweep in two of their measures.


MAX_FRONT_RATIO = 2.5  # largest drawn value, relative to the worst of the front
LOG_RATIO = 20.0  # ratio of the largest to the least value from which an axis is logarithmic
SMALL_MARKS_FROM = 5000  # number of points from which marks are small
MAX_NAMED_POINTS = 8  # points of a front with a name
LABEL_DISTANCE = 0.03  # least distance of two named points, as a share of the picture


class Shown(NamedTuple):
    """Values of points along one axis of a picture."""

    label: str  # label of the axis, with the unit
    values: NumpyArray  # (points) in that unit
    more_is_better: bool = False  # whether the front has the largest values

    def near(self, front: Int[NumpyArray, " found"]) -> Bool[NumpyArray, " points"]:
        """Return (points) whether each is within `MAX_FRONT_RATIO` of the worst of the front."""
        if not len(front) or not np.all(self.values[front] > 0):
            return np.ones(len(self.values), bool)
        if self.more_is_better:
            return self.values >= self.values[front].min() / MAX_FRONT_RATIO
        return self.values <= self.values[front].max() * MAX_FRONT_RATIO


def draw_results(
    axes: Axes,
    sides: Sequence[Shown],
    groups: Mapping[str, Bool[NumpyArray, " points"]],
    front: Int[NumpyArray, " found"],
    best: Int[NumpyArray, " found"],
    front_names: tuple[str, Sequence[str]] = ("", ()),
) -> None:
    """Draw points by group, the front as steps, and the best points ringed.

    `front` and `best` are positions of points; `front_names` are a title and names along the front.
    """
    x, y = (side.values for side in sides)
    is_grouped = np.logical_or.reduce([*groups.values()])
    size = 3 if len(x) <= SMALL_MARKS_FROM else 1
    plain: dict[str, Any] = {"linestyle": "", "markersize": size, "rasterized": True, "zorder": 2}
    plain |= {"markerfacecolor": "none", "markeredgewidth": 0.6}  # points behind others are visible
    if len(groups) > len(COLOURS):
        groups = {"points": is_grouped}
    looks = [(palette.GREY, "o")] if len(groups) == 1 else zip(COLOURS, MARKERS, strict=True)
    for (name, is_member), (colour, marker) in zip(groups.items(), looks, strict=False):
        axes.plot(x[is_member], y[is_member], marker=marker, color=colour, label=name, **plain)
    if len(best):
        ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.BLACK}
        axes.plot(x[best], y[best], "o", markersize=7, label="best", zorder=3, **ring)
    _scale(axes, sides, is_grouped, front)
    if len(front):
        _draw_front(axes, sides, front)
        out = is_grouped & ~(sides[0].near(front) & sides[1].near(front))
        if out.any():
            axes.set_title(
                f"{out.sum():,} of {is_grouped.sum():,} points lie further out", loc="left"
            )
    axes.set_xlabel(sides[0].label)
    axes.set_ylabel(sides[1].label)
    figure: Any = axes.figure
    style.legend(figure, "upper left", axes.get_legend_handles_labels())  # wherever points lie
    if front_names[0]:
        _name_front(axes, sides, front, *front_names)


def _scale(
    axes: Axes,
    sides: Sequence[Shown],
    is_grouped: Bool[NumpyArray, " points"],
    front: Int[NumpyArray, " found"],
) -> None:
    """Scale both axes to the points near the front."""
    for name, side, axis in zip("xy", sides, (axes.xaxis, axes.yaxis), strict=True):
        near_values = side.values[is_grouped & side.near(front)]
        if (
            len(near_values)
            and near_values.min() > 0
            and near_values.max() > LOG_RATIO * near_values.min()
        ):
            getattr(axes, f"set_{name}scale")("log")
        if len(near_values) < is_grouped.sum():
            getattr(axes, f"set_{name}lim")(*_with_margin(near_values, axis.get_scale()))
        style.name_ticks(axis)


def _with_margin(values: NumpyArray, scale: str) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if scale == "log":
        more = (high / low) ** 0.05
        return low / more, high * more
    more = 0.05 * (high - low)
    return low - more, high + more


def _draw_front(axes: Axes, sides: Sequence[Shown], front: Int[NumpyArray, " found"]) -> None:
    """Draw the border of the region that the front dominates, to the edges of the picture."""
    x, y = (side.values[front] for side in sides)
    limits = axes.get_xlim(), axes.get_ylim()
    worst = [
        ends[0] if side.more_is_better else ends[1]
        for side, ends in zip(sides, limits, strict=True)
    ]
    axes.step([x[0], *x, worst[0]], [worst[1], *y, y[-1]], **FRONT)
    axes.set(xlim=limits[0], ylim=limits[1])


def _name_front(
    axes: Axes,
    sides: Sequence[Shown],
    front: Int[NumpyArray, " found"],
    title: str,
    names: Sequence[str],
) -> None:
    """Number some points of the front, not too close, and name them below the picture."""
    x, y = (side.values[front] for side in sides)
    # labels stand on the side where the front dominates, so no point lies there
    right, up = (1 if side.more_is_better else -1 for side in sides)
    to_axes = axes.transData + axes.transAxes.inverted()
    points = to_axes.transform(np.column_stack([x, y]))  # as shares of the picture
    named = [0]
    for k in range(1, len(points)):
        if np.hypot(*(points[k] - points[named[-1]])) > LABEL_DISTANCE:
            named.append(k)
    if len(named) > MAX_NAMED_POINTS:  # evenly chosen
        positions = np.linspace(0, len(named) - 1, MAX_NAMED_POINTS).round().astype(int)
        named = [named[k] for k in positions]
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
    style.legend(figure, "lower left", (handles, texts), title=title, columns=1)
