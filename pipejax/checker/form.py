"""Check of closed forms, which claim the makespan at all parameters, in integer arithmetic.

A makespan T is the largest of many linear functions of the parameters, so T is convex. E is the
largest facet. The domain is covered by cells, which are simplices of rays. On each cell, one facet
is the largest at all rays, so E is linear on the cell. If (1 - gap) T <= E holds at the rays, it
then holds between them too. Each facet adds the costs on a path, so E <= T everywhere.
"""

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from pipejax.checker.claims import Discrepancy
from pipejax.checker.prices import MESSAGE, Prices, full_shape, read_links
from pipejax.checker.rules import TIMED
from pipejax.checker.run import DeadlockError, Event, Run
from pipejax.checker.table import Table
from pipejax.checker.values import (
    check_keys,
    check_numbers,
    check_table_of_numbers,
    is_time,
    is_whole,
    require,
)

Row = list[int]


class Form(NamedTuple):
    """A closed form; a point x is in the domain if row . x >= 0 for each row of `domain`."""

    table: Table
    links: Prices
    names: list[str]
    units: list[int]
    weights: list[Prices]
    box: dict[str, Any]
    domain: list[Row]
    facets: list[Row]
    gap: list[int]
    points: list[Row]  # at point k, facet k is the length of a longest path
    rays: list[Row]  # points at which the largest facet is compared with the makespan
    cells: list[Row]  # cones that cover the domain: (index of facet, index of ray, ..)


def read_form(data: Mapping[str, Any], name: str) -> Form:
    """Read the certificate of a closed form, and check the shapes of its parts."""
    costs, claim, proof = data["costs"], data["claim"], data["proof"]
    table = Table(data["table"])
    links = read_links(costs["links"], table, f"{name}: links")
    eager_below = links["eager_below"]
    require(eager_below == 0, f"{name}: eager_below", "0 in a closed form", eager_below)
    names, units, weights = _read_parameters(costs["parameters"], table, name)
    domain = _read_box(costs["box"], names, units, f"{name}: box")
    size, dims = len(names), len(domain[0])
    rows = {"facets": (claim, size), "points": (proof, size), "rays": (proof, dims)}
    for key, (section, width) in (rows | {"cells": (proof, dims + 1)}).items():
        check_table_of_numbers(section[key], width, f"{name}: {key}")
    check_numbers(claim["gap"], (2,), f"{name}: gap", is_whole)
    require(claim["gap"][0] < claim["gap"][1], f"{name}: gap", "a fraction below 1", claim["gap"])
    points, num_facets = proof["points"], len(claim["facets"])
    require(len(points) == num_facets, f"{name}: points", f"{num_facets} rows", points)
    return Form(table, links, names, units, weights, costs["box"], domain, **claim, **proof)


def _read_parameters(
    parameters: Any, table: Table, name: str
) -> tuple[list[str], list[int], list[Prices]]:
    """Return lists of the names, units and weights of all parameters; missing weights are 0."""
    is_valid = isinstance(parameters, list) and len(parameters) > 0
    require(is_valid, f"{name}: parameters", "a list", parameters)
    keys = [*TIMED, *table.rules.kinds, *MESSAGE, "pair"]
    for parameter in parameters:
        check_keys(parameter, ("name", "unit", "weights"), f"{name}: a parameter")
        is_valid = isinstance(parameter["name"], str)
        require(is_valid, f"{name}: name of a parameter", "a text", parameter["name"])
        is_valid = is_whole(parameter["unit"], 1)
        require(is_valid, f"{name}: unit", "a whole number of at least 1", parameter["unit"])
        weights = parameter["weights"]
        is_valid = isinstance(weights, dict) and set(weights) <= set(keys)
        require(is_valid, f"{name}: weights", f"an object of {', '.join(keys)}", weights)
    names, units, weights_list = (
        [parameter[key] for parameter in parameters] for key in ("name", "unit", "weights")
    )
    require(len(set(names)) >= len(names), f"{name}: parameters", "of different names", names)
    if not any("pair" in weights for weights in weights_list):  # a pair takes the sum of both ops
        keys.remove("pair")
    shapes = {key: full_shape(key, table, *(w.get(key) for w in weights_list)) for key in keys}
    for parameter, weights in zip(names, weights_list, strict=True):
        for key, value in weights.items():
            check_numbers(value, shapes[key], f"{name}: {parameter}: {key}", is_whole)
    zeros = {key: _zeros(shape) for key, shape in shapes.items()}
    prices = [{key: weights.get(key, zeros[key]) for key in keys} for weights in weights_list]
    return names, units, prices


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _read_box(box: Any, names: list[str], units: list[int], where: str) -> list[Row]:
    """Return the rows of the domain, in which parameters (in `units`) are >= 0 and in the box."""
    # The domain is a cone: its points x have row . x >= 0 for every row. A last coordinate h > 0
    # makes bounds homogeneous. For example, F from 0.5 to 2 is F - 0.5 h >= 0 and 2 h - F >= 0. If
    # the box fixes a parameter, say B = 4, then h is B / 4 and needs no coordinate.
    is_valid = isinstance(box, dict) and set(box) <= set(names)
    require(is_valid, where, f"an object with bounds of {', '.join(names)}", box)
    for name, bounds in box.items():
        is_valid = isinstance(bounds, list) and len(bounds) == 2
        require(is_valid, f"{where}: {name}", "two numbers", bounds)
        is_valid = all(bound is None or is_time(bound) for bound in bounds)
        require(is_valid, f"{where}: {name}", "numbers of at least 0 or null", bounds)
    fixed = [name for name, (low, high) in box.items() if low is not None and 0 < low == high]
    fixed_axes = [names.index(name) for name in fixed]  # not at 0, which cannot give h
    dims = len(names) + 1 if box and not fixed_axes else len(names)
    scale_axis, scale = dims - 1, Fraction(1)  # h = scale * x[scale_axis]
    if fixed_axes:
        scale_axis = min(fixed_axes)
        scale = units[scale_axis] / Fraction(repr(box[names[scale_axis]][0]))
    rows = [[int(row == column) for column in range(dims)] for row in range(dims)]
    for name, (low, high) in box.items():
        axis = names.index(name)
        gives_scale = bool(fixed_axes) and axis == scale_axis
        for bound, sign in ((low, 1), (high, -1)):
            if bound is not None and not gives_scale:
                row = [Fraction(0)] * dims
                row[axis] = Fraction(sign * units[axis])
                row[scale_axis] -= sign * Fraction(repr(bound)) * scale  # as written: 0.1 is 1/10
                denominator = math.lcm(*(value.denominator for value in row))
                rows.append([int(value * denominator) for value in row])
    return rows


def box_text(names: Collection[str], box: Mapping[str, Any]) -> str:
    """Write the bounds of all parameters that have any, as "F = 1, B from 1 to 3"."""
    texts = []
    for name in names:
        low, high = box.get(name, (None, None))
        low, high = 0 if low is None else low, math.inf if high is None else high
        if low == high:
            texts.append(f"{name} = {low:g}")
        elif high < math.inf:
            texts.append(f"{name} from {low:g} to {high:g}")
        elif low > 0:
            texts.append(f"{name} at least {low:g}")
    return ", ".join(texts)


def form_text(form: Form) -> str:
    """Describe the claim of a closed form, as "exact for F = 1, B from 1 to 3"."""
    numerator, denominator = form.gap
    claim = f"at most {100 * numerator / denominator:.2g} % too small" if numerator else "exact"
    box = box_text(form.names, form.box)
    return f"{claim} for {box}" if box else claim


def check_form(form: Form, report: Mapping[str, Any]) -> Iterator[Discrepancy]:
    """List the wrong claims in the certificate of a closed form and in its report."""
    yield from _check_report(form, report)
    try:
        runs = CountedRuns(form)
    except DeadlockError as error:
        yield Discrepancy("run", "to the end", str(error))
        return
    yield from _check_facets(form, runs)
    problems = [*_check_cover(form)]
    yield from problems
    if not problems:
        yield from _check_gap(form, runs)


def _check_report(form: Form, report: Mapping[str, Any]) -> Iterator[Discrepancy]:
    """List the entries of a report that differ from the certificate."""
    numerator, denominator = form.gap
    derived = {
        "parameters": form.names,
        "facets": [[n / u for n, u in zip(f, form.units, strict=True)] for f in form.facets],
        "exact": numerator == 0,
        "gap": numerator / denominator,
    }
    for key, value in derived.items():
        if key in report and report[key] != value:
            yield Discrepancy(f"report: {key}", report[key], value, "by its certificate")


def _dot(row: Sequence[int], other: Row) -> int:
    return sum(map(operator.mul, row, other))


def _sum(parts: list[Any]) -> Any:
    """Add nested lists of equal shape, entry by entry."""
    if isinstance(parts[0], list):
        return [_sum([*entries]) for entries in zip(*parts, strict=True)]
    return sum(parts)


class CountedRuns:
    """Runs of a table in which each duration is a row of counts, one count per parameter."""

    def __init__(self, form: Form) -> None:
        """Run the table once for each parameter, and once with the sum of all weights."""
        # the run with the sum orders the events; the run of a parameter gives its counts
        total = {key: _sum([w[key] for w in form.weights]) for key in form.weights[0]}
        run = Run(form.table, form.links, total)
        single_runs = [Run(form.table, form.links, weights) for weights in form.weights]
        self.order = [*run.end]
        # the run of a parameter whose A and U take no time has no events A and U
        self.durations = {e: [int(r.durations.get(e, 0)) for r in single_runs] for e in self.order}
        zeros = [0] * len(single_runs)
        self.waits: dict[Event, list[tuple[Event, Row]]] = {event: [] for event in self.order}
        for event in self.order:
            for other, _ in run.waits[event]:
                message = run.messages.get(other)
                has_lag = message is not None and event == message.consumer
                lag = [int(r.messages[other].lag) for r in single_runs] if has_lag else zeros
                self.waits[event].append((other, lag))

    def event_ends(self, point: Row) -> dict[Event, int]:
        """Return {event: end} at a point, which has the value of each parameter."""

        @functools.cache  # many events have the same counts
        def seconds(counts: tuple[int, ...]) -> int:
            """Return the sum of count x value over all parameters."""
            return _dot(counts, point)

        end: dict[Event, int] = {}
        for event in self.order:
            arrivals = (end[other] + seconds((*lag,)) for other, lag in self.waits[event])
            end[event] = max(arrivals, default=0) + seconds((*self.durations[event],))
        return end

    def path_counts(self, point: Row) -> Row:
        """Return how often each parameter is on a longest path at a point."""
        end = self.event_ends(point)
        event = max(end, key=lambda event: end[event])
        counts = self.durations[event]
        while waits := self.waits[event]:  # walk from the last event back to the first
            event, lag = max(waits, key=lambda wait: end[wait[0]] + _dot(wait[1], point))
            counts = [*map(sum, zip(counts, lag, self.durations[event], strict=True))]
        return counts


def _check_facets(form: Form, runs: CountedRuns) -> Iterator[Discrepancy]:
    """Check that each facet counts a longest path at its point, and that all facets differ."""
    for k, (facet, point) in enumerate(zip(form.facets, form.points, strict=True)):
        counts = runs.path_counts(point)
        if facet != counts:
            yield Discrepancy(f"facet {k}", f"a path of counts {facet}", counts)
        if facet in form.facets[:k]:
            yield Discrepancy(f"facet {k}", facet, None, f"as facet {form.facets.index(facet)}")


def _check_cover(form: Form) -> Iterator[Discrepancy]:
    """Check that the cells cover the domain."""
    # A cell is the cone of its rays; a plane cuts it in a triangle. A wall of a cell has all rays
    # of the cell but one; a plane cuts it in an edge. Each wall must lie on the border of the
    # domain, or between two cells on opposite sides. Then a straight line in the domain never
    # leaves the cells.
    rays, cells = form.rays, form.cells
    products = [[_dot(row, ray) for row in form.domain] for ray in rays]
    for k, values in enumerate(products):
        if min(values) < 0:
            yield Discrepancy(f"ray {k}", "in the domain", rays[k])
    wrong = [
        k
        for k, (facet, *corners) in enumerate(cells)
        if facet >= len(form.facets)
        or corners[-1] >= len(rays)
        or any(a >= b for a, b in pairwise(corners))
    ]
    if wrong or not cells:
        yield Discrepancy("cells", f"{len(cells)} of a facet and rays in rising order", wrong)
        return
    walls: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for k, (_, *corners) in enumerate(cells):  # a cell: its facet, then its rays
        side = determinant_sign([rays[ray] for ray in corners])
        if side == 0:
            yield Discrepancy(f"cell {k}", "of full dimension", cells[k], "which is flat")
        for corner in range(len(corners)):
            # The side of the wall on which the cell lies is the sign of the determinant with the
            # removed corner first. Each swap with a neighbour changes the sign, and corner k needs
            # k swaps: 0 1 2 -> 0 2 1 -> 2 0 1.
            walls[(*corners[:corner], *corners[corner + 1 :])].append(side * (-1) ** corner)
    for wall, sides in walls.items():
        borders = range(len(form.domain))
        is_on_border = any(all(products[ray][k] == 0 for ray in wall) for k in borders)
        is_between_two = sorted(sides) == [-1, 1]
        if not is_between_two and (len(sides) != 1 or not is_on_border):
            where = "between two cells or on the border"
            yield Discrepancy(f"wall of rays {[*wall]}", where, sides)


def determinant_sign(matrix: list[Row]) -> int:
    """Return the sign of a determinant (1, 0 or -1), by integer elimination (Bareiss 1968)."""
    # Division by the previous pivot gives whole numbers. For the rows [2 1] and [4 5], the second
    # row becomes (2 [4 5] - 4 [2 1]) / 1 = [0 6], and 6 is the determinant.
    rows, sign, previous_pivot = [*matrix], 1, 1
    for k in range(len(rows)):
        swap = next((row for row in range(k, len(rows)) if rows[row][k]), None)
        if swap is None:
            return 0
        if swap != k:
            rows[k], rows[swap], sign = rows[swap], rows[k], -sign
        top, pivot = rows[k], rows[k][k]
        for below in range(k + 1, len(rows)):
            pairs = zip(rows[below], top, strict=True)
            head = rows[below][k]
            rows[below] = [(low * pivot - head * high) // previous_pivot for low, high in pairs]
        previous_pivot = pivot
    return sign if previous_pivot > 0 else -sign


def _check_gap(form: Form, runs: CountedRuns) -> Iterator[Discrepancy]:
    """Check that each facet is the largest on its cells, and that the gap holds at all rays."""
    points = [ray[: len(form.names)] for ray in form.rays]
    sums = [[_dot(facet, point) for facet in form.facets] for point in points]
    largest = [*map(max, sums)]
    for k, (facet, *corners) in enumerate(form.cells):
        if any(sums[ray][facet] != largest[ray] for ray in corners):
            yield Discrepancy(f"cell {k}", f"facet {facet} is the largest", False)
    gap = Fraction(*form.gap)
    for point, value in zip(points, largest, strict=True):
        length = max(runs.event_ends(point).values())
        if length * (1 - gap) > value:
            derived = float(1 - Fraction(value, length))
            yield Discrepancy("gap", float(gap), derived, f"at {point}")
    for facet in sorted({*range(len(form.facets))} - {cell[0] for cell in form.cells}):
        note = "which is nowhere the largest"
        yield Discrepancy(f"facet {facet}", form.facets[facet], None, note)
