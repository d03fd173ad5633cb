"""Results of a sweep: best points, Pareto fronts, knees of an axis, and regions of schedules.

A measure is a number of each point, such as step_time. A cost is a measure or a numeric axis,
negated if more is better. A candidate is a point that may be chosen.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from pipejax.analysis.step.outputs import MEASURES, MORE_IS_BETTER, TOKENS
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import match_name, resolve_name, unknown, wrong
from pipejax.base.conditions import EQUAL, compare, share_number, si_number, split_condition
from pipejax.base.files import ATTRIBUTES, is_dataset
from pipejax.base.printed import cell, display_scale, four_digits
from pipejax.base.ties import TIE, least_named, pareto_front
from pipejax.sweep.store import CHECKSUM, FEASIBLE, ILLEGAL, NO_RESOURCE, OUT_OF_MEMORY, STATUS

if TYPE_CHECKING:
    import pandas as pd

Points = Int[NumpyArray, " chosen_points"]  # indices of points
_KEYS = {"schedules": "schedule", "models": "model", "systems": "system"}  # {key: axis}


class SweepResults(NamedTuple):
    """All points of a sweep in one flat order, in which the last axis varies fastest."""

    axes: Mapping[str, NumpyArray]  # {axis of several values: labels}
    fixed: Mapping[str, Any]  # {axis of a single value: label}
    units: Mapping[str, str]  # {axis or measure: unit}
    status: Int[NumpyArray, " points"]  # index in `STATUS`
    measures: Mapping[str, Float[NumpyArray, " points"]]  # {measure: values}; NaN if unknown
    bound_by: NumpyArray | None  # (points) resource that bounds the step; None if not computed
    reasons: NumpyArray  # (points) reason why a point is illegal, or ""

    def counts(self) -> dict[str, int]:
        """Return {status: number of points}."""
        counts = np.bincount(self.status, minlength=len(STATUS))
        return dict(zip(STATUS, counts.tolist(), strict=True))

    def point(self, place: int) -> dict[str, Any]:
        """Return the labels and measures of one point."""
        labels = {name: label.item() for name, label in self._labels(place).items()}
        values = {name: float(measure[place]) for name, measure in self.measures.items()}
        bound = {} if self.bound_by is None else {"bound_by": str(self.bound_by[place])}
        fits = {"fits": bool(self.status[place] != OUT_OF_MEMORY)}
        return labels | values | bound | fits

    def frame(self, places: Points) -> "pd.DataFrame":
        """Return points as a data frame with labels, measures in SI units, status and reasons."""
        import pandas as pd  # comes with xarray

        columns: dict[str, Any] = self._labels(places)
        columns |= {name: values[places] for name, values in self.measures.items()}
        columns["status"] = np.array(STATUS)[self.status[places]]
        if self.bound_by is not None:
            columns["bound_by"] = self.bound_by[places]
        return pd.DataFrame(columns | {"reason": self.reasons[places]})

    def _labels(self, places: int | Points) -> dict[str, Any]:
        """Return {axis: label of a point, or labels of several points}."""
        index = np.unravel_index(places, _sizes(self))
        return {name: labels[k] for (name, labels), k in zip(self.axes.items(), index, strict=True)}

    def where(self, conditions: Sequence[str]) -> Bool[NumpyArray, " points"]:
        """Return for each point whether it meets all conditions, such as memory_bytes<80GB."""
        is_selected = np.ones(len(self.status), bool)
        for text in conditions:
            is_selected &= self._is_met(text)
        return is_selected

    def nearest(self, condition: str) -> tuple[str, float, str] | None:
        """Return (name, nearest value, unit) if no number meets a condition."""
        # It is None if a value meets the condition, if values are texts, or for conditions by "!=".
        name, sign, value = self._read_condition(condition)
        labels = self.axes.get(name, np.array([self.fixed.get(name, "")]))
        if name in self.measures:
            labels = self.measures[name][np.isfinite(self.measures[name])]
        if sign == "!=" or labels.dtype.kind not in "iuf" or not labels.size:
            return None
        if _compare(labels, sign, value, condition, printed=name not in self.measures).any():
            return None
        nearest = labels[np.argmin(np.abs(labels - float(value)))]
        return name, float(nearest), self.units.get(name, "")

    def column(self, name: str) -> NumpyArray:
        """Return the values (points) of a measure or of a numeric axis."""
        if name in self.measures:
            return self.measures[name]
        return self._along(name, self.axes[name])

    def numbers(self) -> list[str]:
        """Return the names of all measures and of all axes with numeric labels."""
        axes = [name for name, labels in self.axes.items() if labels.dtype.kind in "iuf"]
        return [*self.measures, *axes]

    def best(self, is_candidate: Bool[NumpyArray, " points"], measure: str, count: int) -> Points:
        """Return the `count` best points by one measure, the best point first."""
        cost = self.costs(measure)
        places = np.flatnonzero(is_candidate & np.isfinite(cost))
        return places[np.argsort(cost[places], kind="stable")[:count]]

    def default_measure(self, is_candidate: Bool[NumpyArray, " points"]) -> str:
        """Return the measure of the best points: step time, unless steps differ in their tokens."""
        if TOKENS not in self.measures:
            return "step_time"
        tokens = self.measures[TOKENS][is_candidate] * self.measures["step_time"][is_candidate]
        tokens = tokens[np.isfinite(tokens)]
        return TOKENS if tokens.size and np.ptp(tokens) > EQUAL * tokens.max() else "step_time"

    def front(self, is_candidate: Bool[NumpyArray, " points"], names: Sequence[str]) -> Points:
        """Return the Pareto front of two objectives; the best in the first objective is first."""
        first_costs, second_costs = map(self.costs, names)
        points = np.flatnonzero(is_candidate & np.isfinite(first_costs) & np.isfinite(second_costs))
        return points[pareto_front(first_costs[points], second_costs[points])]

    def costs(self, name: str) -> Float[NumpyArray, " points"]:
        """Return a measure or numeric axis of all points, negated if more is better."""
        values = np.asarray(self.column(name), float)
        return -values if name in MORE_IS_BETTER else values

    def _along(self, name: str, values: NumpyArray) -> NumpyArray:
        """Return the value of each point's label on an axis, given the values of all labels."""
        shape = [-1 if axis == name else 1 for axis in self.axes]
        return np.broadcast_to(values.reshape(shape), _sizes(self)).ravel()

    def _is_met(self, text: str) -> NumpyArray:
        name, sign, value = self._read_condition(text)
        if name in self.measures:
            return _compare(self.measures[name], sign, value, text)
        if name in self.axes:
            return self._along(name, _compare(self.axes[name], sign, value, text, printed=True))
        return _compare(np.array([self.fixed[name]]), sign, value, text, printed=True)

    def _read_condition(self, text: str) -> tuple[str, str, str]:
        """Read a condition as (name, sign, text of the value in SI units)."""
        condition = split_condition(text)
        if condition is None:
            raise wrong("where", f"must be as system=h100 or memory_bytes<80GB, got {text!r}")
        key, sign, value = condition
        name = match_name(_KEYS.get(key, key), [*self.axes, *self.fixed, *self.measures])
        if name is None:
            valid_names = [*self.axes, *self.measures, *self.fixed]
            raise ValueError(f"where {text}: {unknown('axis', key, valid_names)}")
        unit, where = self.units.get(name, ""), f"where {text}:"
        is_share = name in self.measures and unit == "1"
        number = share_number(value, where) if is_share else si_number(value, unit, where)
        if number is not None and not math.isnan(number):
            value = repr(number)
        return name, sign, value


def _compare(
    values: NumpyArray, sign: str, text: str, condition: str, *, printed: bool = False
) -> NumpyArray:
    """Return whether each value meets a condition, such as sign "<" and text "80"."""
    # Texts compare by name, and numbers by value. With `printed`, the text may be the rounded form
    # in which a value is printed. `condition` is the complete condition, for errors.
    if values.dtype.kind not in "iuf":
        if sign not in ("=", "!="):
            raise ValueError(f"where {condition}: names are compared by = or !=")
        names = [str(value) for value in values]
        valid_names = dict.fromkeys(names)
        parts = [text] if text in valid_names else text.split(",")
        labels = [resolve_name(part.strip(), valid_names, "value") for part in parts]
        is_listed: NumpyArray = np.isin(names, labels)
        return is_listed if sign == "=" else ~is_listed
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"where {condition}: expected a number, got {text!r}") from None
    equal = np.isclose(values, number, rtol=EQUAL, atol=0.0)  # conversion of units rounds
    if printed and values.dtype.kind == "f" and not equal.any():
        printed_values = [float(four_digits(value)) for value in values]
        equal = np.isclose(printed_values, number, rtol=EQUAL, atol=0.0)
        if sign in ("=", "!=") and equal.sum() > 1:
            texts = ", ".join(f"{value!r}" for value in values[equal].tolist())
            raise ValueError(f"where {condition}: {texts} all print so: give more of its digits")
    return compare(values, sign, number, equal)


def read_results(path: str | Path) -> SweepResults:
    """Read the store of a sweep, which may be incomplete."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(2, "no such store; `pipejax sweep run` writes one", str(path))
    if not is_dataset(path):
        raise ValueError(f"{path} is no store that was written here")
    if "grid" not in json.loads((path / ATTRIBUTES).read_bytes()):
        raise ValueError(f"{path} is a store of another command, not of a sweep")
    with xr.open_zarr(path, chunks=None) as data:
        return _flatten_variables(data)


def _flatten_variables(data: xr.Dataset) -> SweepResults:
    """Return the variables of a store as arrays (points), in the order of its axes."""
    status = data["status"]
    dims = [str(dim) for dim in status.dims]
    is_whole = _is_whole(data)
    measures = {
        name: data[name].broadcast_like(status).transpose(*dims).values.ravel()
        for name in MEASURES
        if name in data
    }
    bound = None
    if "bound_by" in data:
        names = np.array([*data["bound_by"].attrs["flag_meanings"].split(), "-"])
        codes = data["bound_by"].values.ravel()
        bound = names[np.where(codes == NO_RESOURCE, len(names) - 1, codes)]
    reasons = data["reason"].broadcast_like(status).transpose(*dims).values.ravel()
    fixed = {str(name): value.item() for name, value in data.coords.items() if value.ndim == 0}
    named = {name: data[name] for name in (*dims, *measures, *fixed)}
    return SweepResults(
        axes={dim: data[dim].values for dim in dims},
        fixed=fixed,
        units={name: variable.attrs.get("units", "") for name, variable in named.items()},
        status=np.where(is_whole, status.values.ravel(), 0).astype(int),
        measures=measures,
        bound_by=bound,
        reasons=np.where(status.values.ravel() == ILLEGAL, reasons, ""),
    )


def _is_whole(data: xr.Dataset) -> Bool[NumpyArray, " points"]:
    """Return for each point whether its block is complete; a block is a chunk of a variable."""
    status = data["status"]
    chunks = status.encoding["chunks"] if status.ndim else ()
    # number of the chunk along each axis: 5 labels in chunks of 2 have the numbers 0 0 1 1 2
    chunk_numbers = [np.arange(n) // chunk for n, chunk in zip(status.shape, chunks, strict=True)]
    counts = [int(numbers[-1]) + 1 for numbers in chunk_numbers]
    blocks = np.ravel_multi_index(np.ix_(*chunk_numbers), counts) if counts else np.array(0)
    return data[CHECKSUM].values[blocks].ravel() != 0


def selectable(results: SweepResults, *, memory_limit: bool) -> Bool[NumpyArray, " points"]:
    """Return whether each point may be chosen: with a memory limit, whether it fits."""
    fits = results.status == FEASIBLE
    return fits if memory_limit else fits | (results.status == OUT_OF_MEMORY)


PointMask = Bool[NumpyArray, " points"]  # whether each point may be chosen


class DistinctPoint(NamedTuple):
    """A point that stands for all points with equal measures."""

    place: int  # index of the first of these points
    same: dict[str, list[Any]]  # {axis on which these points differ: their labels}


def distinct_best(
    results: SweepResults, is_candidate: PointMask, measure: str, count: int
) -> list[DistinctPoint]:
    """Return the `count` best points by one measure, with points of equal measures merged."""
    order = results.best(is_candidate, measure, len(is_candidate))
    return _merge_equal(results, order, [measure], count)


def distinct_front(
    results: SweepResults, is_candidate: PointMask, names: Sequence[str], front: Points
) -> list[DistinctPoint]:
    """Return the points that tie with a point of a front, with points of equal measures merged."""
    costs = np.stack([results.costs(name) for name in names])  # (names, points)
    places: dict[int, None] = {}
    for place in front:
        point_costs = costs[:, [place]]
        is_tied = np.all(np.abs(costs - point_costs) <= TIE * np.abs(point_costs), axis=0)
        places |= dict.fromkeys(np.flatnonzero(is_candidate & is_tied).tolist())
    return _merge_equal(results, np.array([*places], int), names, len(places))


def _merge_equal(
    results: SweepResults, order: Points, names: Sequence[str], count: int
) -> list[DistinctPoint]:
    """Return the first `count` points of an order, with equal points merged."""
    # Points are equal if all their measures, and the axes in `names`, print alike. Equal points
    # merge if they fill a box of the grid. For example, equal points at (zero 0, node 4),
    # (zero 0, node 8), (zero 1, node 4) and (zero 1, node 8) become one result with `same` =
    # {"zero": [0, 1], "node": [4, 8]}.
    sizes = _sizes(results)
    is_free = np.zeros(len(results.status), bool)  # points that are in no result yet
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
        # extend the box of equal points along one axis after the other
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
    prints_alike = [cell(name, number, scale) == text for number in values.ravel().tolist()]
    return np.array(prints_alike, bool).reshape(values.shape)


class Knee(NamedTuple):
    """Range of an axis around the best value, in which the cost is nearly optimal."""

    axis: str | None  # another axis that is fixed; None if all other axes are at their best
    label: Any  # value at which this other axis is fixed
    low: float  # lower end of the range: from here to the best value, all are nearly optimal
    high: float  # upper end of the range
    cost: float  # largest cost from `low` to `high`
    best: float  # least cost along the axis
    best_at: float  # value of the axis with the least cost


def knees(
    results: SweepResults, is_candidate: PointMask, measure: str, axis: str, within: float
) -> Iterator[Knee]:
    """Yield ranges of an axis (knees) whose cost is at most a share `within` above the best."""
    # In the first range, all other axes are at their best values. In the other ranges, one other
    # axis is fixed at one of its values.
    values = results.axes[axis]
    reported_axes = [a for a, labels in results.axes.items() if a != axis and len(labels) > 1]
    for other in (None, *reported_axes):
        for label, curve in least_along(results, is_candidate, measure, axis, other).items():
            best = int(np.argmin(curve))
            if not math.isfinite(curve[best]):
                continue
            is_near = curve <= curve[best] + within * abs(curve[best])
            # extend from the best value to both sides: is_near [F T T T F], best 2: low 1, high 3
            low = best + 1 - int(np.logical_and.accumulate(is_near[best::-1]).sum())
            high = best - 1 + int(np.logical_and.accumulate(is_near[best:]).sum())
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
    results: SweepResults, is_candidate: PointMask, measure: str, axis: str, other: str | None
) -> dict[Any, NumpyArray]:
    """Return {value of axis `other`: least cost at each value of `axis`}."""
    # Without `other`, the only key is None. A cost is infinite if no point can be chosen.
    axes = [*results.axes]
    costs = np.moveaxis(_costs(results, is_candidate, measure), axes.index(axis), -1)
    axes.remove(axis)
    labels = [None]
    if other is not None:
        costs = np.moveaxis(costs, axes.index(other), 0)
        labels = results.axes[other].tolist()
    # (other axis, all remaining axes, axis)
    curves = costs.reshape(len(labels), -1, costs.shape[-1]).min(axis=1)
    return dict(zip(labels, curves, strict=True))


class Regions(NamedTuple):
    """Best schedule at each value of an x axis and a y axis."""

    names: list[str]  # schedules that are best somewhere, the most frequent first; ties: "a = b"
    codes: Int[NumpyArray, "y x"]  # index in `names`; -1 if no point can be chosen
    costs: Float[NumpyArray, "y x"]  # least cost; NaN if no point can be chosen


def regions(
    results: SweepResults, is_candidate: PointMask, measure: str, x_axis: str, y_axis: str
) -> Regions:
    """Find the best schedule at each value of two axes, with all other axes at their best."""
    for axis in (x_axis, y_axis, "schedule"):
        if axis not in results.axes:
            valid_names = ", ".join(results.axes)
            raise wrong("map", f"needs an axis {axis} of several values: there are {valid_names}")
    axis_numbers = [[*results.axes].index(axis) for axis in ("schedule", y_axis, x_axis)]
    costs = np.moveaxis(_costs(results, is_candidate, measure), axis_numbers, (0, 1, 2))
    schedule_costs = costs.min(axis=tuple(range(3, costs.ndim)))  # (schedules, y, x)
    names, codes = least_named(schedule_costs, [str(label) for label in results.axes["schedule"]])
    return Regions(names, codes, np.where(codes < 0, math.nan, schedule_costs.min(axis=0)))


def _sizes(results: SweepResults) -> list[int]:
    return [len(labels) for labels in results.axes.values()]


def _costs(results: SweepResults, is_candidate: PointMask, measure: str) -> NumpyArray:
    """Return costs as a grid, with axes in order; infinite for points that are no candidates."""
    costs = results.costs(measure)
    costs = np.where(is_candidate & np.isfinite(costs), costs, math.inf)
    return costs.reshape(_sizes(results))
