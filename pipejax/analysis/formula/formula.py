"""`formula` finds a program's makespan as an exact closed form; `read_formula` reads a form."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.analysis.formula.facets import Cone, Envelope, Vectors, Whole, find_facets, run_points
from pipejax.analysis.formula.form import Box, Formula
from pipejax.analysis.formula.parameters import LinearCosts, Weights, fixed_in, linear_costs
from pipejax.base.checks import check_types, unknown, whole_number, wrong
from pipejax.base.data_files import load_json
from pipejax.base.progress import OnProgress, telling
from pipejax.checker.form import Form, read_form
from pipejax.checker.values import IllegalError
from pipejax.checker.verify import read_envelope, split_report
from pipejax.costs.costs import unchecked_costs
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.schedules.cells.ops import STEP_END, ScheduleError
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table_files import from_json

MAX_FACETS = 200


def formula(
    program: Program,
    parameters: Sequence[str] | Weights | None = None,
    *,
    box: Box | None = None,
    max_facets: int = MAX_FACETS,
    on_progress: OnProgress | None = None,
) -> Formula:
    """Find the makespan of a program as a maximum of sums such as 6F + 4B in a few parameters.

    The program runs at chosen integers until the form is proved to be exact, as described in
    analysis/formula/facets.py. If more than `max_facets` facets are needed, the form has the most
    prominent facets, and a certified gap.

    The form holds for the order of ops in the program. Schedules that are planned for times (zb-v,
    zero-bubble, v-half, ...) are ordered for the `slots` and `transfer` that they were built with.
    At other times `pipejax evaluate` plans another order, which may be faster.

    Args:
      program: lowered schedule.
      parameters: names, as ("F", "B", "c"). A phase such as F holds for all stages; F_first, F_mid,
        F_last and F_3 hold for some. `c`, `latency` and `transmit` are costs of messages in both
        directions; c_F and c_B hold for one. Or a mapping from name to the `Costs` for which the
        parameter is 1 and the others are 0. Default: F, B or I and W, R, O, c_F and c_B, as far as
        the program has them.
      box: range (low, high) of parameters [s]; default: at least 0. A range with low = high fixes
        its parameter; one parameter may be fixed.
      max_facets: number of facets at which the search ends.
      on_progress: called with the number of runs, None and "runs"; default: a bar in notebooks.

    Returns:
      The form.

    Raises:
      ValueError: if a parameter is unknown, a phase of the program has no cost, a weight is no
        fraction of small integers, a range is empty, two parameters are fixed, a parameter is fixed
        at 0, or `max_facets` is too small for any bound.

    Cost:
      One run for each facet and for each ray at which regimes meet: up to ten milliseconds for
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

        def run_and_report(points: Vectors) -> tuple[Whole, Vectors]:
            nonlocal evaluated
            evaluated += len(points)
            tell(evaluated, None, "runs")
            return run_points(costs.program, costs.weights, points)

        envelope = find_facets(run_and_report, domain, len(costs.names), max_facets)
    if envelope.gap == 1:
        raise wrong(
            "max_facets", f"= {max_facets} is too few: the makespan exceeds them by any factor"
        )
    return Formula(
        parameters=costs.names,
        counts=envelope.facets,
        units=costs.units,
        exact=envelope.gap == 0,
        gap=float(envelope.gap),
        evaluations=envelope.evaluations,
        box=ranges,
        program=costs.program,
        costs=costs,
        envelope=envelope,
    )


def _domain(costs: LinearCosts, box: Box) -> Cone:
    """Return the cone of the allowed (parameters, z), where z is a makespan."""
    # A box adds a coordinate h, which is 1 for points of the box: (parameters, h, z). The cone also
    # has all multiples of these points. So the range of F from 0.5 to 2 becomes the inequalities
    # F >= 0.5 h and F <= 2 h. If the box fixes a parameter, say B = 4, then h = B / 4 replaces the
    # coordinate.
    _check_box(costs.names, box)
    fixed, size = fixed_in(costs.names, box), len(costs.names)
    units = dict(zip(costs.names, costs.units.tolist(), strict=True))
    dims, scale_axis, scale = size + 1, size, Fraction(1)  # h = scale * coordinate scale_axis
    if fixed is not None:
        scale_axis = costs.names.index(fixed)
        scale = units[fixed] / Fraction(str(box[fixed][0]))
    elif box:
        dims = size + 2
    cone = Cone.orthant(dims)
    for name, (low, high) in box.items():
        for bound, sign in ((low, 1), (high, -1)):
            if name == fixed or not 0 < bound < math.inf:
                continue  # 0 and infinity need no inequality in the orthant
            factor = Fraction(str(bound)) * scale  # as it is written: 0.1 is a tenth
            row = np.zeros(dims, object)
            row[costs.names.index(name)] = sign * units[name] * factor.denominator
            row[scale_axis] = -sign * factor.numerator
            cone = cone.cut(row)
    return cone


def _check_box(names: Sequence[str], box: Box) -> None:
    """Check that a box has legal ranges of known parameters, and fixes at most one of them."""
    for name, (low, high) in box.items():
        if name not in names:
            raise unknown("box parameter", name, names)
        if not 0 <= low <= high or low == math.inf:
            raise wrong("box", f"of {name} must have 0 <= low <= high, got {low!r} and {high!r}")
    fixed = [name for name, (low, high) in box.items() if low == high]
    if fixed[1:] or any(box[name][0] == 0 for name in fixed):
        values = ", ".join(f"{name} = {box[name][0]:g}" for name in fixed)
        raise wrong("box", f"may fix one parameter, above 0, got {values}: give ranges to others")


def read_formula(source: str | Path | Mapping[str, Any]) -> Formula:
    """Read a saved closed form. Its proof is not checked; `verify` checks it.

    Args:
      source: file of `pipejax formula --out`, file of a form's certificate, or content of either.

    Returns:
      The form.

    Raises:
      ValueError: if the source holds no closed form.
      ScheduleError: if the table of the form cannot run.
      OSError: if the file cannot be read.

    Example:
      >>> import json, pathlib, tempfile, pipejax as pj
      >>> table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "form.json"
      >>> claimed = pj.formula(pj.lower(table, step_end=False)).certificate(table)
      >>> _ = path.write_text(json.dumps(claimed))
      >>> print(pj.files.read_formula(path))
      max(6F + 4B + 4c_F + 3c_B, 4F + 6B + 3c_F + 4c_B)
    """
    check_types(source=(source, str, Path, Mapping))
    data = source if isinstance(source, Mapping) else load_json(Path(source))
    name = "the form" if isinstance(source, Mapping) else str(source)
    report, certificate = split_report(data)
    if certificate.get("kind") != "formula":
        raise ValueError(f"{name} holds no closed form: `pipejax formula --out` writes one")
    read_envelope(certificate, name)
    try:
        content = read_form(certificate, name)
    except IllegalError as error:
        raise ScheduleError(str(error)) from None
    table, links = from_json(certificate["table"]), Links(**certificate["costs"]["links"])
    ends = [phase.name for phase in STEP_END]
    step_end = any(np.any(weights[phase]) for weights in content.weights for phase in ends)
    program = lower(table, link=links, step_end=step_end)
    fields = {phase.name: phase.kind.time for phase in program.layout.timed}
    costs_by_parameter = {}
    for name, unit, weights in zip(content.names, content.units, content.weights, strict=True):
        costs_by_parameter[name] = unchecked_costs(
            {fields.get(key, key): np.array(value) / unit for key, value in weights.items()}
        )
    costs = linear_costs(program, costs_by_parameter)
    costs = costs._replace(units=np.array(content.units, object))
    facets, gap, box = np.array(content.facets), Fraction(*content.gap), content.box
    return Formula(
        parameters=costs.names,
        counts=facets,
        units=costs.units,
        exact=gap == 0,
        gap=float(gap),
        evaluations=report.get("evaluations", 0),
        box={key: (low, math.inf if high is None else high) for key, (low, high) in box.items()},
        program=costs.program,
        costs=costs,
        envelope=Envelope(facets, np.array(content.points, object), _cone(content), {}, gap, 0),
    )


def _cone(content: Form) -> Cone:
    """Return the cone of (theta, z), with theta in the domain and z above all facets of a form."""
    # The cone has each ray theta of the domain, with its makespan as z, and the upward ray.
    size, dims = len(content.names), len(content.domain[0])
    facets, domain = np.array(content.facets, object), np.array(content.domain, object)
    domain_rays = np.array(content.rays, object)
    makespans = (domain_rays[:, :size] @ facets.T).max(axis=1)
    upwards = np.eye(dims + 1, dtype=int)[-1].astype(object)  # (0, .., 0, 1)
    rays = np.vstack([np.column_stack([domain_rays, makespans]), upwards])
    above_facets: Vectors = np.zeros((len(facets), dims + 1), object)
    above_facets[:, :size], above_facets[:, -1] = -facets, 1  # z - counts . theta >= 0
    in_domain = np.column_stack([domain, np.zeros(len(domain), int)])
    inequalities = np.vstack([in_domain, upwards, above_facets])  # z >= 0 is upwards . x >= 0
    return Cone(rays, inequalities, tight=rays @ inequalities.T == 0)
