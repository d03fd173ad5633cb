"""The closed form of a makespan: evaluate it, print it, find its regimes, and prove it."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.certificates import new_certificate
from pipejax.analysis.formula.facets import (
    Cone,
    Envelope,
    Vectors,
    Whole,
    cells,
    find_facets,
    largest_sum,
    rank,
    regions,
    run_points,
)
from pipejax.analysis.formula.parameters import (
    LinearCosts,
    Weights,
    as_latex,
    as_text,
    comparison_text,
    fixed_in,
    linear_costs,
    weights_by_key,
)
from pipejax.base import longest_path
from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import as_floats, check_types, unknown, whole_number, wrong
from pipejax.base.data_files import load_json
from pipejax.base.display import ResultDict, ResultList, short_repr, with_short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.checker.form import Form, box_text, read_form
from pipejax.checker.values import IllegalError
from pipejax.checker.verify import read_envelope, split_report
from pipejax.costs.costs import unchecked_costs
from pipejax.costs.precision import checked_seconds, is_traced
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import NO_WORKER, Program, run_on_host
from pipejax.engine.pricing import by_microbatch
from pipejax.schedules.cells.ops import STEP_END, ScheduleError
from pipejax.schedules.table.communication_cells import insert_transfers
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import from_json

HALF = 0.5
PROGRAM_ARRAYS = ("preds", "duration_index", "lag_index")  # equal only in equal programs

Box = Mapping[str, tuple[float, float]]
Values = Float[Array, "..."] | Float[NumpyArray, "..."] | float


@short_repr
class Border(NamedTuple):
    """Border between the regions of two facets; a facet is the largest in its region."""

    facet: int  # number of the facet that is larger on this side of the border
    neighbour: int  # number of the facet that is larger on the other side
    text: str  # inequality that holds on this side, as "2F + c_F >= 2B"


@with_short_repr("text parameters exact gap evaluations")
@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """The makespan as a maximum of facets: sums such as 6F + 4B in a few parameters.

    It is called with the parameters, as `form(F=1.0, B=2.0, c_F=0.1, c_B=0.1)` or as
    `form([1.0, 2.0, 0.1, 0.1])`. The values may be arrays, and jit, vmap, grad and jvp work. The
    derivative is the counts of the largest facet; if several are the largest, of the first.

    Attributes:
      parameters: names of the parameters.
      counts: (facets, parameters) integers: the factors of the parameters, times `units`.
      units: (parameters) common denominator of each parameter's factors.
      exact: whether the form equals the makespan everywhere in the box.
      gap: upper bound on 1 - form / makespan; 0 if the form is exact.
      evaluations: number of runs of the program that found and proved the form.
      box: {parameter: range} of the parameters with a range.
      program: program whose makespan the form is.
      costs: costs as sums of the parameters.
      envelope: facets with the rays that prove them.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
      >>> form = pj.formula(pj.lower(table))
      >>> print(form)
      max(6F + 4B + 4c_F + 3c_B, 4F + 6B + 3c_F + 4c_B)
      >>> form(F=1.0, B=2.0, c_F=0.0, c_B=0.0)
      16.0
      >>> form.exact, form.facets
      (True, [(6, 4, 4, 3), (4, 6, 3, 4)])
    """

    parameters: tuple[str, ...]
    counts: Vectors
    units: Whole
    exact: bool
    gap: float
    evaluations: int
    box: Box
    program: Program
    costs: LinearCosts
    envelope: Envelope

    @property
    def facets(self) -> list[tuple[int | Fraction, ...]]:
        """Counts of each facet; they are fractions if parameters have fractional weights."""
        return ResultList(
            tuple(int(count) if count.denominator == 1 else count for count in facet)
            for facet in self._fractions
        )

    @property
    def text(self) -> str:
        """The form as `max(6F + 4B, 4F + 6B)`."""
        return as_text(self.parameters, self._fractions)

    @property
    def latex(self) -> str:
        r"""The form as `\max\left(6 F + 4 B,\; 4 F + 6 B\right)`."""
        return as_latex(self.parameters, self._fractions)

    def __str__(self) -> str:
        """Write the form, then its box (ranges of parameters) and its gap, if it has them."""
        box = f" for {self.where}" if self.where else ""
        gap = "" if self.exact else f", at most {100 * self.gap:.2g} % too small"
        return self.text + box + gap

    @property
    def where(self) -> str:
        """The box, the range of parameters [s], as `F = 1, B from 1 to 3`; empty without a box."""
        return box_text(self.parameters, self.box)

    @functools.cached_property
    def _fractions(self) -> list[tuple[Fraction, ...]]:
        units = self.units.tolist()
        return [
            tuple(Fraction(count, unit) for count, unit in zip(facet, units, strict=True))
            for facet in self.counts.tolist()
        ]

    @functools.cached_property
    def _floats(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(map(float, facet)) for facet in self._fractions)

    def __call__(self, theta: Any = None, /, **values: Any) -> Values:
        """Return the makespan [s] at the given parameters, by name or as an array."""
        return largest_sum(self._floats, self._check_parameters(theta, values))

    def at(self, *values: Any) -> Values:
        """Return the makespan [s] at parameters in the order of `parameters`."""
        return self(**dict(zip(self.parameters, values, strict=True)))

    def active(self, theta: Any = None, /, **values: Any) -> Int[NumpyArray, "..."]:
        """Return the index of the largest facet at each point (...); at a tie, the first.

        A facet is a sum such as 6F + 4B. The arguments are those of a call of the form.
        """
        parts = np.broadcast_arrays(*self._check_parameters(theta, values))
        sums = np.stack(parts, axis=-1) @ np.array(self._floats).T
        return np.asarray(sums.argmax(axis=-1))

    def _check_parameters(self, theta: Any, values: Mapping[str, Any]) -> list[Any]:
        """Check the values of all parameters, given by name or along the last axis of `theta`."""
        if theta is not None:
            values = {**values, **self._by_name(theta)}
        for name in values:
            if name not in self.parameters:
                raise unknown("parameter", name, self.parameters)
        for name in self.parameters:
            if name not in values:
                raise ValueError(f"{name} has no value: give all of {', '.join(self.parameters)}")
        numbers = [checked_seconds(name, values[name]) for name in self.parameters]
        for name, value in zip(self.parameters, numbers, strict=True):
            low, high = self.box.get(name, (0.0, np.inf))
            if not is_traced(value) and not np.all((low <= value) & (value <= high)):
                raise ValueError(f"{name} must be from {low:g} to {high:g} s, got {value}")
        return numbers

    def _by_name(self, theta: Any) -> dict[str, Any]:
        """Return parameter values by name, given an array whose last axis is parameters."""
        array = theta if hasattr(theta, "dtype") else as_floats(theta, ", ".join(self.parameters))
        if np.ndim(array) == 0 or np.shape(array)[-1] != len(self.parameters):
            raise ValueError(
                f"{', '.join(self.parameters)} must be along the last axis of one array, or each "
                f"by name, got shape {np.shape(array)}"
            )
        return {name: array[..., k] for k, name in enumerate(self.parameters)}

    @functools.cached_property
    def borders(self) -> tuple[Border, ...]:
        """Find all pairs of facets (such as 6F + 4B) whose regions share a wall."""
        # The region in which a facet is the largest is a cone. Two regions share a wall if their
        # common rays span one dimension less.
        cone, count = self.envelope.cone, len(self.counts)
        rays, rays_by_facet = regions(cone, count)
        wall_dims, borders = rays.shape[1] - 1, []
        for first in range(count):
            for second in range(first + 1, count):
                common = np.intersect1d(
                    rays_by_facet[first], rays_by_facet[second], assume_unique=True
                )
                if len(common) < wall_dims or rank(rays[common]) != wall_dims:
                    continue
                pair = zip(self._fractions[first], self._fractions[second], strict=True)
                text = comparison_text(self.parameters, smallest([a - b for a, b in pair]))
                borders.append(Border(first, second, text))
        return tuple(borders)

    @functools.cached_property
    def middles(self) -> Float[NumpyArray, "facets parameters"]:
        """Return a point in the middle of each facet's region, scaled into the box.

        The point is the mean of the region's extreme rays, each scaled to parameters of sum 1.
        """
        rays, rays_by_facet = regions(self.envelope.cone, len(self.counts))
        theta = rays[:, : len(self.parameters)] * self.units
        total = theta.sum(axis=1, keepdims=True)
        is_origin = total[:, 0] == 0  # a box may have this ray, a corner of every region
        divisor = np.where(is_origin[:, None], 1, total)
        shares = (theta / divisor).astype(float)
        scales = (ray_scale(self, rays)[:, None] / divisor).astype(float)
        middles, middle_scales = [], []
        for facet_rays in rays_by_facet:
            facet_rays = facet_rays[~is_origin[facet_rays]]
            middles.append(shares[facet_rays].mean(axis=0))
            middle_scales.append(scales[facet_rays].mean(axis=0))
        scale = np.array(middle_scales)
        middle = np.array(middles) / np.where(scale > 0, scale, 1.0)  # into the box
        fixed = fixed_in(self.parameters, self.box)
        if fixed is not None:  # set the exact value, which divisions may have rounded
            middle[:, self.parameters.index(fixed)] = self.box[fixed][0]
        return middle

    @functools.cached_property
    def bound_by(self) -> tuple[str, ...]:
        """Name the bottleneck of each facet: "messages", "compute", or a worker such as "worker 3".

        It takes over half of the critical path in the middle of the facet's region. "compute" means
        compute that is spread over workers. In a smaller box a region has another middle, and so
        may have another bottleneck.
        """
        return tuple(self._bound(theta) for theta in self.middles)

    def _bound(self, theta: Float[NumpyArray, " parameters"]) -> str:
        """Name the worker or resource that fills over half of the critical path at `theta`."""
        program = self.program
        weights = (self.costs.weights / self.units).astype(float)
        run = run_on_host(program, weights @ theta)
        is_critical, _ = longest_path.critical_path(run.preds, run.finish, run.lag)
        workers = np.asarray(program.worker)
        is_critical_op = is_critical & (workers != NO_WORKER)
        critical = workers[is_critical_op], run.duration[is_critical_op]
        worker_seconds = np.bincount(*critical, minlength=program.num_workers)
        makespan = run.finish.max() or 1.0
        if worker_seconds.max() > HALF * makespan:
            return f"worker {int(worker_seconds.argmax())}"
        return "compute" if worker_seconds.sum() > HALF * makespan else "messages"

    def as_json(self) -> dict[str, Any]:
        """Return the content that `pipejax formula --json` prints, without the certificate."""
        return ResultDict(
            {
                "schedule": self.program.name,
                "link": self.program.links.model,
                "parameters": list(self.parameters),
                "facets": [
                    [count if isinstance(count, int) else float(count) for count in facet]
                    for facet in self.facets
                ],
                "exact": self.exact,
                "gap": self.gap,
                "box": self._box_as_json(),
                "where": self.where,
                "evaluations": self.evaluations,
                "text": self.text,
                "latex": self.latex,
                "bound_by": list(self.bound_by),
                "borders": [
                    dict(zip(("one", "other", "text"), border, strict=True))
                    for border in self.borders
                ],
            }
        )

    def _box_as_json(self) -> dict[str, list[float | None]]:
        """Return {parameter: [low, high]} of the box, with None in place of an infinite bound."""
        names = [name for name in self.parameters if name in self.box]
        return {name: [x if x < np.inf else None for x in self.box[name]] for name in names}

    def certificate(self, table: ScheduleTable) -> dict[str, Any]:
        """Return the form with its proof, which `verify` checks without the engine.

        The proof has three parts:
        1. Cells (simplices, each given by its extreme rays) cover the domain of the parameters.
        2. The form is not too small. On a cell one facet is the largest, and at the cell's rays
           the makespan exceeds this facet by the gap at most. The makespan is convex, so the same
           holds between the rays.
        3. The form is not too large. Each facet has a point at which a longest path has its counts.

        Args:
          table: the schedule that was lowered.

        Raises:
          ValueError: if the form is not the makespan of this table.

        Example:
          >>> import pipejax as pj
          >>> table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
          >>> claimed = pj.formula(pj.lower(table)).certificate(table)
          >>> pj.verify(claimed).ok
          True
          >>> claimed["claim"]["facets"][1][0] = 5
          >>> print(pj.verify(claimed).problems[0])
          facet 1: claimed a path of counts [5, 6, 3, 4], derived [4, 6, 3, 4]
        """
        _check_lowered_from(self.program, table)
        links = self.program.links
        if links.posting == "program" and not table.has_communication:
            # the certificate also states the order in which transfers are posted
            table = insert_transfers(table, link=links)
        cone, units = self.envelope.cone, self.units.tolist()
        rays, _ = regions(cone, len(self.counts))
        parameters = [
            {"name": name, "unit": unit, "weights": weights_by_key(self.program, costs, unit)}
            for name, unit, costs in zip(self.parameters, units, self.costs.costs, strict=True)
        ]
        return new_certificate(
            "formula",
            table,
            links,
            costs={"parameters": parameters, "box": self._box_as_json()},
            claim={
                "facets": self.counts.tolist(),
                "gap": [*Fraction(self.envelope.gap).as_integer_ratio()],
            },
            proof={
                "points": self.envelope.points.tolist(),
                "rays": rays.tolist(),
                "cells": [list(cell) for cell in cells(cone, len(self.counts))],
            },
        )


def ray_scale(form: Formula, rays: Vectors) -> Whole:
    """Return for each ray the divisor that scales its parameters into the ranges of the box."""
    # A ray is a direction. If the box fixes F at 2, the ray F = 6, B = 9 stands for F = 2, B = 3,
    # and its divisor is 3. If the box fixes no parameter, the divisor is the ray's last coordinate;
    # it is 0 if no multiple of the ray lies in the box. Without a box, the divisor is the sum of
    # the parameters.
    size = len(form.parameters)
    fixed = fixed_in(form.parameters, form.box)
    if fixed is not None:
        column, value = form.parameters.index(fixed), Fraction(str(form.box[fixed][0]))
        return rays[:, column].astype(object) * form.units[column] / value
    if form.box:
        return rays[:, size]
    return (rays[:, :size] * form.units).sum(axis=1)


def smallest(counts: list[Fraction]) -> list[Fraction]:
    """Scale counts to the smallest integers in the same proportions: [1/2, 3/2] is [1, 3]."""
    denominator = math.lcm(*(count.denominator for count in counts))
    common = math.gcd(*(int(count * denominator) for count in counts))
    return [count * denominator / common for count in counts]


def _check_lowered_from(program: Program, table: ScheduleTable) -> None:
    """Check that the program was lowered from the table, with or without a step end."""
    for step_end in (True, False):
        other = lower(table, link=program.links, step_end=step_end)
        other = by_microbatch(other) if program.layout.per_microbatch else other
        pairs = ((getattr(program, name), getattr(other, name)) for name in PROGRAM_ARRAYS)
        if all(np.array_equal(first, second) for first, second in pairs):
            return
    raise ValueError("the table is not the one that was lowered for this form")


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
        raise wrong("max_facets", f"= {max_facets} is too few for any bound on the makespan")
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
        shares = {fields.get(key, key): np.array(value) / unit for key, value in weights.items()}
        costs_by_parameter[name] = unchecked_costs(shares)
    costs = linear_costs(program, costs_by_parameter)
    costs = costs._replace(units=np.array(content.units, object))
    facets, gap, box = np.array(content.facets), Fraction(*content.gap), content.box
    points, cone = np.array(content.points, object), _cone(content)
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
        envelope=Envelope(facets, points, cone, lengths={}, gap=gap, evaluations=0),
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
