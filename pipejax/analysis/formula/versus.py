"""Exact regions of parameters in which one schedule is at least as fast as another.

A makespan is a maximum of sums of parameters. For each sum of the second schedule there is a cone
of parameters at which all sums of the first schedule are at most this sum. The first schedule is
at least as fast as the second in the union of these cones.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.facets import Cone, Vector, Vectors, Whole, primitive, regions
from pipejax.analysis.formula.form import Formula, ray_scale, smallest
from pipejax.analysis.formula.parameters import comparison_text
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types, wrong
from pipejax.base.display import ResultDict, with_short_repr
from pipejax.base.ties import least_named


@with_short_repr("texts counts rays")
class Region(NamedTuple):
    """A cone of parameters in which one schedule's makespan is at most the other's.

    Attributes:
      texts: inequalities that bound the region within the domain, as "2F + c >= 2B".
      counts: (texts, parameters) coefficients of each inequality, as F: 2, c: 1, B: -2.
      rays: (rays, parameters) extreme rays of the region, in the unit of the parameters.
    """

    texts: tuple[str, ...]
    counts: tuple[tuple[Fraction, ...], ...]
    rays: NumpyArray


@with_short_repr("names verdict parameters one_at_most other_at_most one_slower other_slower")
class Versus(NamedTuple):
    """Parameters for which one schedule is faster than another.

    Attributes:
      names: names of both schedules.
      parameters: names of the parameters.
      verdict: "equal", "one is never slower", "other is never slower" or "it depends".
      one_at_most: regions; in their union the first makespan is at most the second.
      other_at_most: regions; in their union the second makespan is at most the first.
      one_slower: parameters at which the first schedule is slowest compared with the second, and
        the ratio of makespans; the ratio is 1 if the first is never slower. The parameters lie in
        the box. Without a box, or if the ratio is a limit at infinity, they sum to 1.
      other_slower: parameters and ratio at which the second schedule is slowest.
    """

    names: tuple[str, str]
    parameters: tuple[str, ...]
    verdict: str
    one_at_most: tuple[Region, ...]
    other_at_most: tuple[Region, ...]
    one_slower: tuple[Mapping[str, float], float]
    other_slower: tuple[Mapping[str, float], float]

    def as_json(self) -> dict[str, Any]:
        """Return the content that `pipejax formula --versus --json` prints."""
        sides = {"one_at_most": self.one_at_most, "other_at_most": self.other_at_most}
        slower = {"one_slower": self.one_slower, "other_slower": self.other_slower}
        return ResultDict(
            {
                "schedules": list(self.names),
                "verdict": self.verdict,
                **{name: [list(region.texts) for region in side] for name, side in sides.items()},
                **{name: {"at": dict(at), "ratio": ratio} for name, (at, ratio) in slower.items()},
            }
        )


def versus(form: Formula, rival: Formula) -> Versus:
    """Find the exact regions of parameters in which each of two schedules is faster.

    Args:
      form: closed form of a schedule.
      rival: closed form of another schedule, with the same parameters in the same box.

    Returns:
      Regions in which each schedule is faster, and by how much each is slower at most.

    Raises:
      ValueError: if parameters or boxes differ, or a form is not exact.

    Example:
      >>> import pipejax as pj
      >>> size = {"num_workers": 4, "num_microbatches": 4}
      >>> forms = [
      ...     pj.formula(pj.lower(pj.schedules.build(name, **size)), ("F", "B", "c"))
      ...     for name in ("chimera", "1f1b")
      ... ]
      >>> result = pj.analysis.versus(*forms)
      >>> result.verdict, f"1F1B takes up to {result.other_slower[1]:.2f} times as long"
      ('one is never slower', '1F1B takes up to 1.43 times as long')
    """
    check_types(form=(form, Formula), rival=(rival, Formula))
    if form.parameters != rival.parameters or dict(form.box) != dict(rival.box):
        raise ValueError(
            f"forms must have the same parameters and box, got {', '.join(form.parameters)} in "
            f"{form.box or 'none'} and {', '.join(rival.parameters)} in {rival.box or 'none'}"
        )
    inexact = next((checked for checked in (form, rival) if not checked.exact), None)
    if inexact is not None:
        raise ValueError(
            f"the form of {inexact.program.name} is not exact: give fewer parameters, a box or "
            f"more than {len(inexact.facets)} facets"
        )
    # the parameters at which a form is slowest compared with the other form, and the ratio
    form_theta, form_ratio = _largest_ratio(form, rival)
    rival_theta, rival_ratio = _largest_ratio(rival, form)
    if form_ratio <= 1:
        verdict = "equal" if rival_ratio <= 1 else "one is never slower"
    else:
        verdict = "other is never slower" if rival_ratio <= 1 else "it depends"
    return Versus(
        names=(form.program.name, rival.program.name),
        parameters=form.parameters,
        verdict=verdict,
        one_at_most=_at_most(form, rival) if form_ratio > 1 else (_region(_domain(form), form),),
        other_at_most=_at_most(rival, form) if rival_ratio > 1 else (_region(_domain(form), form),),
        one_slower=(form_theta, float(form_ratio)),
        other_slower=(rival_theta, float(rival_ratio)),
    )


def _facet_counts(form: Formula) -> Vectors:
    return np.array(form.facets, object)


def _makespans(form: Formula, theta: Vectors) -> list[int | Fraction]:
    """Return the exact makespan at each row of parameters: the largest facet."""
    makespans: list[int | Fraction] = (theta @ _facet_counts(form).T).max(axis=1).tolist()
    return makespans


def _largest_ratio(first: Formula, second: Formula) -> tuple[dict[str, float], Fraction | float]:
    """Return the parameters at which first / second makespan is largest, and this ratio."""
    # Both makespans are maxima of linear functions. In the region of a facet of the second, the
    # second is linear and the first convex, so the ratio is largest on an extreme ray.
    size = len(first.parameters)
    rays, _ = regions(second.envelope.cone, len(second.counts))
    rays = rays[rays[:, :size].any(axis=1)]
    theta = rays[:, :size].astype(object) * second.units.astype(object)  # exact: integers of Python
    ratios: list[Fraction | float] = []
    for a, b in zip(_makespans(first, theta), _makespans(second, theta), strict=True):
        if b:
            ratios.append(Fraction(a) / Fraction(b))
        else:
            ratios.append(np.inf if a else Fraction(1))
    k = max(range(len(ratios)), key=ratios.__getitem__)
    scale = ray_scale(second, rays[k : k + 1])[0] or sum(theta[k])
    values = [float(Fraction(value) / Fraction(scale)) for value in theta[k]]
    return dict(zip(first.parameters, values, strict=True)), ratios[k]


def _at_most(first: Formula, second: Formula) -> tuple[Region, ...]:
    """Return regions that cover all parameters with the first makespan at most the second."""
    # For each facet of the second, such as 6F + 4B, take the parameters at which no facet of the
    # first is larger.
    cones: list[Cone] = []
    for facet in _facet_counts(second):
        cone = _part_below(_domain(first), _facet_counts(first), facet, first.units)
        if cone is not None and not any(_contains(wider, cone) for wider in cones):
            cones = [*(smaller for smaller in cones if not _contains(cone, smaller)), cone]
    return tuple(_region(cone, first) for cone in cones)


def _domain(form: Formula) -> Cone:
    """Return the cone of the parameters for which a form is valid."""
    # the envelope's cone is of (parameters, z); its inequalities without z bound the parameters
    cone = form.envelope.cone
    domain = Cone.orthant(cone.rays.shape[1] - 1)
    has_z = cone.inequalities[:, -1].astype(bool)
    for row in cone.inequalities[~has_z][:, :-1]:
        domain = domain.cut(row)
    return domain


def _part_below(cone: Cone, facets: Vectors, bound: Vector, units: Whole) -> Cone | None:
    """Return the part of a cone where all facets are at most a bound. Return None if it is flat."""
    # Facets (facets, parameters) and the bound (parameters) are counts of parameters.
    size = len(units)
    for facet in facets:
        # facet . theta <= bound . theta, as an inequality normal . ray >= 0 in whole numbers
        fractions = [Fraction(0)] * cone.rays.shape[1]
        columns = zip(bound, facet, units, strict=True)
        fractions[:size] = [(Fraction(b) - f) * unit for b, f, unit in columns]
        if not any(fractions):
            continue
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * denominator) for fraction in fractions]
        normal = primitive(np.array([whole], object))[0]
        heights = cone.rays.astype(object) @ normal.astype(object)
        if (heights <= 0).all():
            return None
        if (heights < 0).any():
            cone = cone.cut(normal)
    return cone


def _contains(outer: Cone, inner: Cone) -> bool:
    return bool((inner.rays.astype(object) @ outer.inequalities.astype(object).T >= 0).all())


def _region(cone: Cone, form: Formula) -> Region:
    """Describe a cone as a region by its inequalities, without those of the form's domain."""
    domain = {tuple(row) for row in _domain(form).inequalities.tolist()}
    size, units = len(form.parameters), form.units.tolist()
    bounds = []
    for k, row in enumerate(cone.inequalities.tolist()):
        if tuple(row) not in domain and cone.is_facet(k):
            counts = [Fraction(count, unit) for count, unit in zip(row, units, strict=False)]
            bounds.append((*smallest(counts[:size]),))
    texts = (comparison_text(form.parameters, counts) for counts in bounds)
    return Region((*texts,), (*bounds,), (cone.rays[:, :size] * form.units).astype(float))


RANGES = ((0.5, 4.0), (0.0, 2.0))  # ranges of the second and third parameter; the first is 1
SIDE = 200  # number of values of each parameter
CELL_OFFSET = 1 / np.pi  # position of a value in its cell, so that values miss ties at borders


class RegimeMap(NamedTuple):
    """Map of the fastest schedule over two parameters, in units of a third parameter."""

    parameters: tuple[str, str, str]  # names of the unit, of the x axis and of the y axis
    x_values: Float[NumpyArray, " x"]
    y_values: Float[NumpyArray, " y"]
    names: list[str]  # schedules that are fastest somewhere, the largest area first; ties: "a = b"
    codes: Int[NumpyArray, "y x"]  # index in `names` of the fastest schedule
    box: dict[str, tuple[float, float]]  # {parameter: its range on the map}; the unit is 1

    @property
    def shares(self) -> dict[str, float]:
        """Return {schedule: share of the map's area in which it is fastest}."""
        return {name: float(np.mean(self.codes == k)) for k, name in enumerate(self.names)}


def regime_map(forms: Mapping[str, Formula]) -> RegimeMap:
    """Map the fastest schedule over the second and third of the forms' three parameters."""
    first = next(iter(forms.values()))
    if len(first.parameters) != 3:
        names = ", ".join(first.parameters)
        raise wrong("parameters", f"of a map must be three, as F,B,c, got {names}")
    for name, form in forms.items():
        if not form.exact:
            raise ValueError(f"the form of {name} is not exact: give a box or more facets")
    unit, *axes = first.parameters
    box = {unit: (0.0, np.inf), **dict(zip(axes, RANGES, strict=True)), **first.box}
    for name in axes:
        low, high = box[name]
        if not low < high < np.inf:
            raise wrong("box", f"of {name} must be a range to draw a map, got {low:g} to {high:g}")
    if not box[unit][0] <= 1 <= box[unit][1]:
        raise wrong("box", f"{unit} must hold 1: the map shows the others relative to {unit}")
    steps = (np.arange(SIDE) + CELL_OFFSET) / SIDE
    x_values, y_values = (
        float(low) + (float(high) - float(low)) * steps
        for low, high in (box[name] for name in axes)
    )
    theta = np.stack(np.broadcast_arrays(1.0, x_values, y_values[:, None]), axis=-1)
    times = np.stack([form(theta) for form in forms.values()])
    ranges = {unit: (1.0, 1.0)} | {name: box[name] for name in axes}
    schedules, codes = least_named(times, [*forms])
    return RegimeMap(first.parameters, x_values, y_values, schedules, codes, ranges)
