"""Batches that move few costs: their closed form instead of a recurrence for each configuration.

In a sweep over networks, say, op times stay as they are and messages change all alike. The makespan
is then a largest sum of a few terms, exact for floats as they are: one parameter stands for all
costs that stay, and one for each kind that moves.
"""

import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.cone import Cone
from pipejax.analysis.formula.facets import find_facets
from pipejax.analysis.formula.formula import solve
from pipejax.analysis.formula.largest_sum import largest_sum
from pipejax.analysis.formula.parameters import LinearCosts, linear_costs
from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.engine.batched.makespans import makespans
from pipejax.engine.lowering.program import Program

MOST_MOVING = 3  # kinds of costs
MOST_FACETS = 64
CHECKED = 32  # configurations of each batch that the recurrence runs too
ROUNDING = 32  # units in the last place, for each of the sums and the recurrence
STEPS = 1 << 12  # in which ranges are rounded outwards
STAYING = "staying"

Batch = Float[NumpyArray, " batch"]


class _Moving(NamedTuple):
    """Costs of one kind: equal in each configuration, different between them."""

    values: Batch
    weights: dict[str, NumpyArray]  # by field, without the batch axis


def makespans_by_form(program: Program, costs: Costs) -> Batch | None:
    """Makespans (batch) [s] of costs whose arrays all have a batch axis, by their closed form.

    A sample runs through the recurrence as well, every time. None where costs move in more ways
    than pay, or the form has too many facets.

    An `AssertionError` says that the sample differs.
    """
    leaves = {name: np.asarray(leaf) for name, leaf in vars(costs).items() if leaf is not None}
    staying, moving = _split(leaves)
    if not 0 < len(moving) <= MOST_MOVING:
        return None
    directions = {STAYING: unchecked_costs(staying)}
    directions |= {
        f"moving {k}": unchecked_costs({**{name: np.zeros(1) for name in leaves}, **kind.weights})
        for k, kind in enumerate(moving)
    }
    linear = linear_costs(program, directions)
    found = find_facets(
        functools.partial(solve, linear.program, linear.weights),
        _domain(linear, moving),
        len(directions),
        MOST_FACETS,
    )
    if found.gap != 0:
        return None
    units = linear.units.tolist()
    facets = tuple(
        tuple(float(Fraction(count, unit)) for count, unit in zip(facet, units, strict=True))
        for facet in found.facets.tolist()
    )
    dtype = moving[0].values.dtype
    values = np.asarray(largest_sum(facets, [np.ones(1, dtype), *(kind.values for kind in moving)]))
    _check(program, costs, values)
    return values


def _split(leaves: Mapping[str, NumpyArray]) -> tuple[dict[str, NumpyArray], list[_Moving]]:
    """Tell costs that stay from those that move, these by equal values."""
    staying: dict[str, NumpyArray] = {}
    moving: list[_Moving] = []
    for name, leaf in leaves.items():
        if leaf.ndim == 0:
            staying[name] = leaf.astype(float)
            continue
        columns = leaf.reshape(len(leaf), -1)
        stays = (columns == columns[:1]).all(axis=0)
        staying[name] = np.where(stays, columns[0], 0).reshape(leaf.shape[1:]).astype(float)
        for column in np.flatnonzero(~stays).tolist():
            values = columns[:, column]
            same = next((kind for kind in moving if np.array_equal(kind.values, values)), None)
            if same is None:
                if len(moving) > MOST_MOVING:
                    return staying, moving
                moving.append(same := _Moving(values, {}))
            weights = same.weights.setdefault(name, np.zeros(leaf.shape[1:]))
            weights.reshape(-1)[column] = 1.0
    return staying, moving


def _domain(linear: LinearCosts, moving: list[_Moving]) -> Cone:
    """Cone of (staying, moving.., z) that holds the batch: ranges of each kind, made wider."""
    cone, (unit, *units) = Cone.orthant(len(moving) + 2), linear.units.tolist()
    for k, (kind, own) in enumerate(zip(moving, units, strict=True), 1):
        low, high = (Fraction(float(end)) for end in (kind.values.min(), kind.values.max()))
        margin = (high - low) / STEPS
        step = Fraction(2) ** (margin.numerator.bit_length() - margin.denominator.bit_length() - 1)
        ends = (low // step * step, 1), ((high // step + 1) * step, -1)
        for end, sign in ends:
            row = np.zeros(len(moving) + 2, object)
            # own * kind >= end * (unit * staying), in the units of both, times the denominator
            row[k], row[0] = sign * own * end.denominator, -sign * unit * end.numerator
            cone = cone.cut(row) if end > 0 or sign < 0 else cone
    return cone


def _check(program: Program, costs: Costs, values: Batch) -> None:
    """Run a sample through the recurrence: both are to agree but for rounding."""
    count = len(values)
    chosen = np.random.default_rng(0).choice(count, min(CHECKED, count), replace=False)
    chosen = np.union1d(chosen, [values.argmin(), values.argmax()])
    sample: Any = {
        name: np.asarray(leaf)[chosen] if np.ndim(leaf) else leaf
        for name, leaf in vars(costs).items()
        if leaf is not None
    }
    expected = np.asarray(makespans(program, unchecked_costs(sample)))
    within = ROUNDING * np.finfo(values.dtype).eps * np.sqrt(program.num_nodes)
    off = np.abs(values[chosen] / np.where(expected, expected, 1) - (expected != 0)).max()
    if off > within:
        raise AssertionError(f"the closed form of {program.name} is off by {off:g} of a makespan")
