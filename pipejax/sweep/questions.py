"""Questions to a sweep: its best points, knees of an axis, and regions of the best choice.

All of them take the least cost over the other axes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.base.printed import cell, display_scale
from pipejax.base.ties import TIE, least_named
from pipejax.sweep.results import Points, SweepResults

Among = Bool[NumpyArray, " points"]


class DistinctPoint(NamedTuple):
    """A point, and others with equal measures."""

    place: int  # of the first of them
    same: dict[str, list[Any]]  # values by axis, where these do not matter


def distinct_best(
    results: SweepResults, among: Among, name: str, count: int
) -> list[DistinctPoint]:
    """Return the best points by one measure, the best first; equal points are joined."""
    return _distinct(results, results.best(among, name, len(among)), [name], count)


def distinct_front(
    results: SweepResults, among: Among, names: Sequence[str], front: Points
) -> list[DistinctPoint]:
    """Return the points that are as good as those of a front, equal ones joined."""
    costs = np.stack([results.costs(name) for name in names])
    tied = [
        np.flatnonzero(among & np.all(np.abs(costs - at) <= TIE * np.abs(at), axis=0))
        for at in costs[:, front].T[:, :, None]
    ]
    order = np.array([*dict.fromkeys(k for points in tied for k in points.tolist())], int)
    return _distinct(results, order, names, len(order))


def _distinct(
    results: SweepResults, order: Points, names: Sequence[str], count: int
) -> list[DistinctPoint]:
    """Merge points with equal printed measures that fill a grid; return the first `count` rows."""
    # `order` are the points to choose from, the best first.
    sizes = _sizes(results)
    is_free = np.zeros(len(results.status), bool)  # points without a row yet
    is_free[order] = True
    is_free = is_free.reshape(sizes)
    measures = {
        name: np.asarray(results.column(name), float).reshape(sizes)
        for name in dict.fromkeys([*names, *results.measures])
    }
    distinct: list[DistinctPoint] = []
    for place in order.tolist():
        if len(distinct) == count:
            break
        index = tuple(int(k) for k in np.unravel_index(place, sizes))
        if not is_free[index]:
            continue
        # extend the point along one axis after the other by values with equal measures
        ranges = [np.array([k]) for k in index]
        for axis, size in enumerate(sizes):
            grid = np.ix_(*[*ranges[:axis], np.arange(size), *ranges[axis + 1 :]])
            is_equal = is_free[grid].copy()
            for name, values in measures.items():
                is_equal &= _prints_as(results, name, values[grid], values[index])
            other_axes = tuple(k for k in range(len(sizes)) if k != axis)
            ranges[axis] = np.flatnonzero(is_equal.all(axis=other_axes))
        is_free[np.ix_(*ranges)] = False
        labels = zip(results.axes.items(), ranges, strict=True)
        same = {axis: names[rows].tolist() for (axis, names), rows in labels if len(rows) > 1}
        distinct.append(DistinctPoint(place, same))
    return distinct


def _prints_as(results: SweepResults, name: str, values: NumpyArray, value: Any) -> NumpyArray:
    scale = display_scale(results.units, name, [float(value)])
    text = cell(name, float(value), scale)
    near = [cell(name, number, scale) == text for number in values.ravel().tolist()]
    return np.array(near, bool).reshape(values.shape)


class Knee(NamedTuple):
    """Near-optimal values of an axis around its best one."""

    axis: str | None  # another axis that has one value, or None where all others are at their best
    label: Any  # that value
    low: float  # the smallest value of the axis that is near the best, as are all up to that
    high: float  # the largest, likewise
    cost: float  # the largest between these
    best: float  # the least along the axis
    best_at: float  # where that is


def knees(
    results: SweepResults, among: Among, name: str, axis: str, within: float
) -> Iterator[Knee]:
    """Yield the knees of an axis: with other axes at their best, then for each of their values."""
    # a value is near if it costs at most a share `within` more than the best
    values = results.axes[axis]
    reported_axes = [a for a, labels in results.axes.items() if a != axis and len(labels) > 1]
    for other in (None, *reported_axes):
        for label, curve in least_along(results, among, name, axis, other).items():
            best = int(np.argmin(curve))
            if not math.isfinite(curve[best]):
                continue
            near = curve <= curve[best] + within * abs(curve[best])
            # near values around the best without a gap: near [F T T T F], best 2 -> low 1, high 3
            low = best + 1 - int(np.logical_and.accumulate(near[best::-1]).sum())
            high = best - 1 + int(np.logical_and.accumulate(near[best:]).sum())
            yield Knee(
                axis=other,
                label=label,
                low=float(values[low]),
                high=float(values[high]),
                cost=float(curve[low : high + 1].max()),
                best=float(curve[best]),
                best_at=float(values[best]),
            )


def least_along(
    results: SweepResults, among: Among, name: str, axis: str, other: str | None
) -> dict[Any, NumpyArray]:
    """Return the least costs (values) along an axis for each value of another one, or for None."""
    costs = np.moveaxis(_costs(results, among, name), [*results.axes].index(axis), -1)
    others = [axis_name for axis_name in results.axes if axis_name != axis]
    labels = [None] if other is None else results.axes[other].tolist()
    if other is not None:
        costs = np.moveaxis(costs, others.index(other), 0)
    curves = costs.reshape(len(labels), -1, costs.shape[-1]).min(axis=1)
    return dict(zip(labels, curves, strict=True))


class Regions(NamedTuple):
    """Best label of an axis over two others."""

    names: list[str]  # labels that are best somewhere, ties as "a = b", the most frequent first
    codes: Int[NumpyArray, "up across"]  # place in `names`, -1 where no point can be chosen
    costs: Float[NumpyArray, "up across"]  # the least cost, NaN there


def regions(results: SweepResults, among: Among, name: str, across: str, up: str) -> Regions:
    """Find the best schedule at each point of two axes, with all other axes at their best."""
    for axis in (across, up, "schedule"):
        if axis not in results.axes:
            valid_names = ", ".join(results.axes)
            raise wrong("map", f"needs an axis {axis} of several values: there are {valid_names}")
    places = [[*results.axes].index(axis) for axis in ("schedule", up, across)]
    costs = _costs(results, among, name)
    least = costs.min(axis=tuple(k for k in range(costs.ndim) if k not in places))
    order = [sorted(places).index(place) for place in places]
    least = least.transpose(order)
    best = least.min(axis=0)
    names, codes = least_named(least, [str(label) for label in results.axes["schedule"]])
    return Regions(names, codes, np.where(codes < 0, math.nan, best))


def _sizes(results: SweepResults) -> list[int]:
    return [len(labels) for labels in results.axes.values()]


def _costs(results: SweepResults, among: Among, name: str) -> NumpyArray:
    """Return costs on the grid; infinite if a point cannot be chosen."""
    costs = results.costs(name)
    costs = np.where(among & np.isfinite(costs), costs, math.inf)
    return costs.reshape(_sizes(results))
