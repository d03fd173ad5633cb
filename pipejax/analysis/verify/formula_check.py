"""The checker of closed forms: convexity, cells that cover the domain, and runs of the table.

A makespan T is the largest of many linear functions of the parameters, so it is convex. Let E be
the largest of the facets. Each cell is a simplex of rays.

- The cells cover the domain: none is flat, and each wall of one is on the border of the domain or
  the wall of exactly one other, on its other side. A straight way from inside a cell to any point
  of the domain then never leaves them.
- On each cell one facet is the largest at all rays, so E is linear there, and (1 - gap) T <= E at
  all rays; by convexity, (1 - gap) T <= E on the whole cell.
- Each facet is the count of a path through the table, so E <= T everywhere.

Nothing is rounded: the runs are those of `EventRun`, in whole numbers.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from pipejax.analysis.verify.certificate_file import FormulaContent, Row, box_text
from pipejax.analysis.verify.event_run import Event, EventRun

Problem = tuple[str, Any, Any, str]  # what is claimed, the claim, what was derived, why
Wait = tuple[int, Row]  # the event that is waited for, and the counts of the lag behind it


def formula_claim(content: FormulaContent) -> str:
    """Say what a closed form claims, and where."""
    claim = f"at most {100 * float(content.gap):.2g} % too small" if content.gap else "exact"
    where = box_text(content.names, content.box)
    return f"{claim} for {where}" if where else claim


def formula_problems(content: FormulaContent) -> Iterator[Problem]:
    """Check a closed form and its proof; say what does not hold."""
    yield from _report_problems(content)
    runs = _CountedRun(content)
    if runs.deadlock:
        yield "run", "to the end", f"deadlock: {runs.deadlock}", ""
        return
    yield from _facet_problems(content, runs)
    problems = [*_cover_problems(content)]
    yield from problems
    if not problems:
        yield from _cell_problems(content, runs)


def _report_problems(content: FormulaContent) -> Iterator[Problem]:
    """What stands around the certificate says the same."""
    report, units = content.report, content.units
    derived = {
        "parameters": content.names,
        "facets": [
            [count / unit for count, unit in zip(facet, units, strict=True)]
            for facet in content.facets
        ],
        "exact": content.gap == 0,
        "gap": float(content.gap),
    }
    for key, value in derived.items():
        if key in report and report[key] != value:
            yield f"report: {key}", report[key], value, "by its certificate"


class _CountedRun:
    """Runs of a table in whole numbers, and how often each parameter counts on a longest path."""

    def __init__(self, content: FormulaContent) -> None:
        """Collect what waits for what, and how often each parameter counts in each event."""
        table, links, weights = content.table, content.links, content.weights
        # what waits for what is known once everything costs something
        whole = EventRun(
            table, {key: _sum([of[key] for of in weights]) for key in weights[0]}, links
        )
        self.deadlock = " waits for ".join(map(whole.name, whole.deadlock()))
        order = [*whole.end]
        place = {event: k for k, event in enumerate(order)}
        single = [EventRun(table, of, links) for of in weights]
        self.lasts = [[int(run.lasts.get(event, 0)) for run in single] for event in order]
        self.waits = [
            [(place[other], _lag(single, event, other)) for other, _ in whole.waits[event]]
            for event in order
            if not self.deadlock
        ]

    def ends(self, point: Row) -> list[int]:
        """End of each event at a point."""
        known: dict[tuple[int, ...], int] = {}  # few counts differ

        def at(counts: Row) -> int:
            key = (*counts,)
            if key not in known:
                known[key] = _dot(counts, point)
            return known[key]

        found: list[int] = []
        for lasts, waits in zip(self.lasts, self.waits, strict=True):
            begins = max((found[other] + at(lag) for other, lag in waits), default=0)
            found.append(begins + at(lasts))
        return found

    def counts(self, point: Row) -> Row:
        """Counts of a longest path at a point."""
        ends = self.ends(point)
        event: int | None = max(range(len(ends)), key=ends.__getitem__)
        found = [0] * len(point)
        while event is not None:
            found = [*map(operator.add, found, self.lasts[event])]
            begins = ends[event] - _dot(self.lasts[event], point)
            reached = (w for w in self.waits[event] if ends[w[0]] + _dot(w[1], point) == begins)
            event, lag = next(reached, (None, [0] * len(point)))
            found = [*map(operator.add, found, lag)]
        return found


def _lag(single: Sequence[EventRun], event: Event, other: Event) -> Row:
    """How often each parameter counts between the end of one event and the start of the next."""
    return [int(dict(run.waits.get(event, ())).get(other, 0)) for run in single]


def _sum(values: Sequence[Any]) -> Any:
    """Sum of nested lists of one shape."""
    if isinstance(values[0], list):
        return [_sum(entries) for entries in zip(*values, strict=True)]
    return sum(values)


def _dot(one: Row, other: Row) -> int:
    return sum(map(operator.mul, one, other))


def _facet_problems(content: FormulaContent, runs: _CountedRun) -> Iterator[Problem]:
    """Each facet is the count of a path, and none stands twice."""
    for k, (facet, point) in enumerate(zip(content.facets, content.points, strict=True)):
        counts = runs.counts(point)
        if facet != counts:
            yield f"facet {k}", f"a path of counts {facet}", counts, ""
        if facet in content.facets[:k]:
            yield f"facet {k}", facet, None, f"as facet {content.facets.index(facet)}"


def _cover_problems(content: FormulaContent) -> Iterator[Problem]:
    """The cells cover the domain."""
    rays, cells = content.rays, content.cells
    on_border = []  # borders of the domain that each ray lies on
    for k, ray in enumerate(rays):
        slack = [_dot(row, ray) for row in content.domain]
        on_border.append({border for border, value in enumerate(slack) if value == 0})
        if min(slack) < 0:
            yield f"ray {k}", "in the domain", ray, ""
    wrong = [k for k, cell in enumerate(cells) if not _is_named(cell, content)]
    if wrong or not cells:
        yield "cells", f"{len(cells)} of a facet and rays in rising order", wrong, ""
        return
    walls: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for k, (_, *corners) in enumerate(cells):
        side = _sign([rays[corner] for corner in corners])
        if side == 0:
            yield f"cell {k}", "of full dimension", cells[k], "which is flat"
        for place in range(len(corners)):
            # a corner moves to the front past `place` others, each of which turns the side around
            walls[(*corners[:place], *corners[place + 1 :])].append(side * (-1) ** place)
    for wall, sides in walls.items():
        borders = [on_border[ray] for ray in wall] or [{0}]  # the origin lies on all
        is_outer = len(sides) == 1 and set.intersection(*borders)
        if not is_outer and sorted(sides) != [-1, 1]:
            yield f"wall of rays {[*wall]}", "between two cells or on the border", sides, ""


def _is_named(cell: Row, content: FormulaContent) -> bool:
    """Whether a cell has a facet and rays that there are, in rising order."""
    facet, *corners = cell
    in_order = all(one < other for one, other in pairwise(corners))
    return facet < len(content.facets) and in_order and corners[-1] < len(content.rays)


def _sign(matrix: Sequence[Row]) -> int:
    """Sign of a determinant, by elimination in whole numbers (Bareiss 1968)."""
    rows, sign, before = [*matrix], 1, 1
    for k in range(len(rows)):
        pivot = next((row for row in range(k, len(rows)) if rows[row][k]), None)
        if pivot is None:
            return 0
        if pivot != k:
            rows[k], rows[pivot], sign = rows[pivot], rows[k], -sign
        top, head = rows[k], rows[k][k]
        for below in range(k + 1, len(rows)):
            row, first = rows[below], rows[below][k]
            rows[below] = [
                (value * head - first * above) // before
                for value, above in zip(row, top, strict=True)
            ]
        before = head
    return sign if before > 0 else -sign


def _cell_problems(content: FormulaContent, runs: _CountedRun) -> Iterator[Problem]:
    """On each cell its facet is the largest, and no run is longer by more than the gap."""
    thetas = [ray[: len(content.names)] for ray in content.rays]
    sums = [[_dot(facet, theta) for facet in content.facets] for theta in thetas]
    largest = [max(values) for values in sums]
    for k, (facet, *corners) in enumerate(content.cells):
        if any(sums[ray][facet] != largest[ray] for ray in corners):
            yield f"cell {k}", f"facet {facet} is the largest", False, ""
    for theta, value in zip(thetas, largest, strict=True):
        length = max(runs.ends(theta), default=0)
        if length * (1 - content.gap) > value:
            yield "gap", float(content.gap), float(1 - Fraction(value, length)), f"at {theta}"
    for facet in sorted(set(range(len(content.facets))) - {cell[0] for cell in content.cells}):
        yield f"facet {facet}", content.facets[facet], None, "which is nowhere the largest"
