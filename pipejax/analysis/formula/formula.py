"""`formula`: the makespan of a program as an exact form in a few parameters."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from pipejax.analysis.formula.cone import Cone, Vectors, Whole, fitting
from pipejax.analysis.formula.facets import find_facets
from pipejax.analysis.formula.form import Box, Formula
from pipejax.analysis.formula.parameters import LinearCosts, Weights, linear_costs
from pipejax.base.checks import check_types, unknown, whole_number
from pipejax.base.progress import OnProgress, telling
from pipejax.engine.lowering.program import Program
from pipejax.engine.recurrence_host import run_many_on_host

MOST_FACETS = 200
RUNS = 2048  # of a program at once, so that its finish times stay in the cache


def formula(
    program: Program,
    parameters: Sequence[str] | Weights | None = None,
    *,
    box: Box | None = None,
    max_facets: int = MOST_FACETS,
    on_progress: OnProgress | None = None,
) -> Formula:
    """Find the makespan of a program as a maximum of linear forms in a few parameters.

    The program runs at chosen whole numbers until the form is proved to be exact: see
    analysis/formula/facets.py. Where it has more facets than `max_facets`, the most prominent are
    kept and the gap is certified.

    Args:
      program: lowered schedule.
      parameters: names, as ("F", "B", "c"): phases, each of all stages or with _first, _mid, _last
        or a stage's number; `c`, `latency` and `transmit` of messages, both ways or with _F, _B.
        Or by name the `Costs` for which a parameter is 1 and the others are 0. If None: F, and B or
        I and W, R and O where the program has them, and c_F and c_B where there are messages.
      box: range (low, high) of parameters [s]; those that are not named are at least 0.
      max_facets: at which the search ends.
      on_progress: called with how many runs were evaluated, None and "runs"; a bar in notebooks if
        None.

    Returns:
      The form.

    Raises:
      ValueError: if a parameter is unknown, a phase of the program has no cost, a weight is no
        fraction of small whole numbers, a range is empty, or too few facets bound nothing.

    Cost:
      One evaluation for each facet and for each ray where regimes meet: up to ten milliseconds for
      a handful of facets at 8 x 32, a second for 200.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=32)
      >>> print(pj.formula(pj.lower(table)))
      39F + 39B + 34c_F + 34c_B
      >>> form = pj.formula(pj.lower(table), ("F", "B_first", "B_mid", "B_last", "c"))
      >>> form.facets[0], form.borders[0].text
      ((39, 25, 12, 2, 28), '7B_first >= 6B_mid + B_last + 14c')

    References:
      Baccelli, Cohen, Olsder, Quadrat: Synchronization and Linearity (1992).
    """
    check_types(program=(program, Program), box=(box, Mapping, type(None)))
    whole_number(max_facets, "max_facets")
    costs = linear_costs(program, parameters)
    ranges = dict(box or {})
    domain = _domain(costs, ranges)
    with telling("formula", on_progress) as tell:
        evaluated = 0

        def run(points: Vectors) -> tuple[Whole, Vectors]:
            nonlocal evaluated
            evaluated += len(points)
            tell(evaluated, None, "runs")
            return solve(costs.program, costs.weights, points)

        found = find_facets(run, domain, len(costs.names), max_facets)
    if found.gap == np.inf:
        raise ValueError(
            f"max_facets = {max_facets} is too few: the makespan exceeds them by any factor"
        )
    return Formula(
        parameters=costs.names,
        counts=found.facets,
        units=costs.units,
        exact=found.gap == 0,
        gap=float(found.gap),
        evaluations=found.evaluations,
        box=ranges,
        program=costs.program,
        costs=costs,
        envelope=found,
    )


def solve(program: Program, weights: Vectors, points: Vectors) -> tuple[Whole, Vectors]:
    """Makespans (points) and the counts (points, parameters) of a longest path at each point.

    Points have a type that holds makespans, and so all that is added up to them.
    """
    runs = [
        run_many_on_host(program, weights @ points[k : k + RUNS].T)
        for k in range(0, len(points), RUNS)
    ]
    lengths, counts = zip(*runs, strict=True)
    on_paths = np.concatenate(counts, axis=1).T
    largest = int(weights.max(initial=0)) * int(on_paths.sum(axis=1).max())
    return np.concatenate(lengths), fitting(on_paths, largest) @ fitting(weights, largest)


def _domain(costs: LinearCosts, box: Box) -> Cone:
    """Cone of (parameters in their units.., z); in a box, (parameters.., 1, z) scaled."""
    size = len(costs.names)
    if not box:
        return Cone.orthant(size + 1)
    cone, units = Cone.orthant(size + 2), dict(zip(costs.names, costs.units.tolist(), strict=True))
    for name, (low, high) in box.items():
        if name not in costs.names:
            raise ValueError(unknown("parameter of the box", name, costs.names))
        if not 0 <= low < high:
            raise ValueError(f"box of {name} must have 0 <= low < high, got {low!r} and {high!r}")
        for bound, sign in ((low, 1), (high, -1)):
            if 0 < bound < math.inf:  # elsewhere the orthant is the bound
                part = Fraction(str(bound))  # as it is written: 0.1 is a tenth
                row = np.zeros(size + 2, object)
                row[costs.names.index(name)] = sign * units[name] * part.denominator
                row[size] = -sign * part.numerator
                cone = cone.cut(row)
    return cone
