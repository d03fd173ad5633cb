"""Pictures of points, such as layouts of a plan or points of a sweep, and their Pareto front."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.ties import pareto_front
from pipejax.plots import palette, style

COLOURS = palette.SERIES
MARKERS = "osD^vP"
FRONT: dict[str, Any] = {"where": "post", "color": palette.BLACK, "linewidth": 0.9}
FRONT |= {"label": "front", "zorder": 3}
MAX_FRONT_RATIO = 2.5  # largest drawn value, relative to the worst value on the front
MAX_MARKS = 3000  # if there are more points, only the front of each group is in colour
CELLS = 120  # a picture has CELLS x CELLS cells; of many points, each cell shows only one
MAX_NAMED_POINTS = 8  # points of a front that get a number and a name
LABEL_DISTANCE = 0.08  # least distance of two named points, as a share of the picture
MAX_KNEE_RATIO = 2.0  # largest cost in a picture of a knee, relative to the least cost


class Shown(NamedTuple):
    """Quantity on an axis of a picture, with the value of each point."""

    label: str  # label of the axis, with the unit
    values: NumpyArray  # (points) in the unit of the label
    more_is_better: bool = False  # whether the front has the largest values

    def near_front(self, front: Int[NumpyArray, " front"]) -> Bool[NumpyArray, " points"]:
        """Return a mask of points up to `MAX_FRONT_RATIO` worse than the worst on the front."""
        if not len(front) or not np.all(self.values[front] > 0):
            return np.ones(len(self.values), bool)
        if self.more_is_better:
            return self.values >= self.values[front].min() / MAX_FRONT_RATIO
        return self.values <= self.values[front].max() * MAX_FRONT_RATIO


def draw_results(
    axes: Axes,
    sides: Sequence[Shown],
    groups: Mapping[str, Bool[NumpyArray, " points"]],
    front: Int[NumpyArray, " front"],
    best: Int[NumpyArray, " best"],
    front_names: tuple[str, Sequence[str]] = ("", ()),
) -> None:
    """Draw points by group, their front as a line of steps, and rings around the best points."""
    # `sides` are the quantities of the x axis and of the y axis. `groups` maps names to masks of
    # points; other points are not drawn. `front` and `best` are indices of points; the front
    # begins with its best point in the first quantity. `front_names` is the title of a list below
    # the picture, and the names of the points on the front.
    x, y = (side.values for side in sides)
    is_grouped = np.logical_or.reduce([*groups.values()])
    is_many = is_grouped.sum() > MAX_MARKS
    _draw_groups(axes, sides, groups if len(groups) <= len(COLOURS) else {"points": is_grouped})
    if len(best):
        ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.BLACK}
        axes.plot(x[best], y[best], "o", markersize=7, label="best", zorder=3, **ring)
    _set_limits(axes, sides, is_grouped, front)
    if is_many:
        points = _thin_out(axes, sides, np.flatnonzero(is_grouped))
        dots: dict[str, Any] = {"markersize": 1.5, "markeredgewidth": 0, "rasterized": True}
        axes.plot(x[points], y[points], "s", color=palette.SILVER, zorder=1, **dots)
    if len(front):
        _draw_front(axes, sides, front)
        out = is_grouped & ~(sides[0].near_front(front) & sides[1].near_front(front))
        if out.any():
            axes.set_title(
                f"{out.sum():,} of {is_grouped.sum():,} points lie further out", loc="left"
            )
    axes.set_xlabel(sides[0].label)
    axes.set_ylabel(sides[1].label)
    figure: Any = axes.figure
    style.legend(figure, "upper left", axes.get_legend_handles_labels())
    if front_names[0]:
        _name_front(axes, sides, front, *front_names)


def _draw_groups(
    axes: Axes, sides: Sequence[Shown], groups: Mapping[str, Bool[NumpyArray, " points"]]
) -> None:
    """Draw the points of each group, or only the front of each group if points are too many."""
    x, y = (side.values for side in sides)
    is_many = np.logical_or.reduce([*groups.values()]).sum() > MAX_MARKS
    plain: dict[str, Any] = {"linestyle": "", "markersize": 3, "rasterized": True, "zorder": 2}
    plain |= {"markerfacecolor": "none", "markeredgewidth": 0.6}  # overlapping points stay visible
    looks = [(palette.GREY, "o")] if len(groups) == 1 else zip(COLOURS, MARKERS, strict=True)
    for (name, is_member), (colour, marker) in zip(groups.items(), looks, strict=False):
        if is_many:
            points = _front(sides, np.flatnonzero(is_member))
            axes.step(x[points], y[points], where="post", color=colour, label=name, linewidth=1.2)
        else:
            axes.plot(x[is_member], y[is_member], marker=marker, color=colour, label=name, **plain)


def _front(sides: Sequence[Shown], points: Int[NumpyArray, " points"]) -> NumpyArray:
    """Return indices of points on the Pareto front, the best in the first quantity first."""
    x, y = (side.values[points] * (-1 if side.more_is_better else 1) for side in sides)
    return points[pareto_front(x, y)]


def _thin_out(axes: Axes, sides: Sequence[Shown], points: Int[NumpyArray, " points"]) -> NumpyArray:
    """Select indices of points: at most one point per cell of a grid over the picture."""
    to_axes = axes.transData + axes.transAxes.inverted()
    places = to_axes.transform(np.column_stack([side.values[points] for side in sides]))
    is_inside = np.all((places >= 0) & (places <= 1), axis=1)
    cells = np.floor(places[is_inside] * CELLS).astype(int)
    _, first_rows = np.unique(cells, axis=0, return_index=True)
    thinned: NumpyArray = points[is_inside][first_rows]
    return thinned


def draw_knee(
    axes: Axes,
    along: Shown,
    cost_label: str,
    curves: Mapping[str, Float[NumpyArray, " values"]],
    near: tuple[float, float],
    near_text: str,
) -> None:
    """Draw a curve of the least costs (values) over a quantity for each group."""
    # The range `near` of the quantity (low, high) is shaded; its legend text is `near_text`.
    best = min(float(np.nanmin(curve)) for curve in curves.values())
    axes.axvspan(*near, color=palette.SILVER, alpha=0.5, linewidth=0, label=near_text)
    looks = itertools.cycle(zip(COLOURS, MARKERS, strict=True))
    for (name, curve), (colour, marker) in zip(curves.items(), looks, strict=False):
        marks: dict[str, Any] = {"marker": marker, "markersize": 2.5, "linewidth": 0.9}
        finite = np.where(np.isfinite(curve), curve, np.nan)
        axes.plot(along.values, finite, color=colour, label=name, **marks)
    values = along.values
    if values.min() > 0 and values.max() > style.LOG_RATIO * values.min():
        axes.set_xscale("log")
        style.name_ticks(axes.xaxis)
    if best > 0:
        axes.set_ylim(0.95 * best, min(axes.get_ylim()[1], MAX_KNEE_RATIO * best))
    axes.set_xlabel(along.label)
    axes.set_ylabel(cost_label)
    figure: Any = axes.figure
    style.legend(figure, "upper left", axes.get_legend_handles_labels())


def _set_limits(
    axes: Axes,
    sides: Sequence[Shown],
    is_grouped: Bool[NumpyArray, " points"],
    front: Int[NumpyArray, " front"],
) -> None:
    """Set limits and scales of both axes so that the points near the front fill the picture."""
    for name, side, axis in zip("xy", sides, (axes.xaxis, axes.yaxis), strict=True):
        values = side.values[is_grouped & side.near_front(front)]
        if len(values) and 0 < style.LOG_RATIO * values.min() < values.max():
            getattr(axes, f"set_{name}scale")("log")
        if len(values) < is_grouped.sum():
            low, high = float(values.min()), float(values.max())
            if axis.get_scale() == "log":
                limits = low * (low / high) ** 0.05, high * (high / low) ** 0.05
            else:
                limits = low - 0.05 * (high - low), high + 0.05 * (high - low)
            getattr(axes, f"set_{name}lim")(*limits)
        style.name_ticks(axis)


def _draw_front(axes: Axes, sides: Sequence[Shown], front: Int[NumpyArray, " front"]) -> None:
    """Draw the border of the region that the front dominates, up to the edges of the picture."""
    x, y = (side.values[front] for side in sides)
    limits = axes.get_xlim(), axes.get_ylim()
    pairs = zip(sides, limits, strict=True)
    worst = [low if side.more_is_better else high for side, (low, high) in pairs]
    axes.step([x[0], *x, worst[0]], [worst[1], *y, y[-1]], **FRONT)
    axes.set(xlim=limits[0], ylim=limits[1])


def _name_front(
    axes: Axes,
    sides: Sequence[Shown],
    front: Int[NumpyArray, " front"],
    title: str,
    names: Sequence[str],
) -> None:
    """Number points of the front that are not too close, and list their names below."""
    x, y = (side.values[front] for side in sides)
    # labels stand on the better side of the front, where no points are
    x_sign, y_sign = (1 if side.more_is_better else -1 for side in sides)
    to_axes = axes.transData + axes.transAxes.inverted()
    points = to_axes.transform(np.column_stack([x, y]))  # as shares of the picture
    numbered = [0]
    for k in range(1, len(points)):
        if np.hypot(*(points[k] - points[numbered]).T).min() > LABEL_DISTANCE:
            numbered.append(k)
    if len(numbered) > MAX_NAMED_POINTS:  # evenly chosen
        positions = np.linspace(0, len(numbered) - 1, MAX_NAMED_POINTS).round().astype(int)
        numbered = [numbered[k] for k in positions]
    handles = []
    for number, k in enumerate(numbered, start=1):
        style.write_beside(axes, str(number), (x[k], y[k]), (3 * x_sign, 3 * y_sign))
        look: Any = {"color": palette.BLACK, "linestyle": "", "marker": f"${number}$"}
        handles.append(Line2D([], [], markersize=4, markeredgewidth=0.3, **look))
    texts = [names[k] for k in numbered]
    figure: Any = axes.figure
    style.legend(figure, "lower left", (handles, texts), title=title, columns=1)
