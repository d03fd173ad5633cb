"""What steps on other machines say of layouts: what bounds each, and what would turn two round.

What bounds a layout is the resource of the machine that takes the largest share of its step. A step
time is a sum of times on the critical path: a rate that grows by a little, or a latency that does,
changes it by the share of the path that this resource takes (Euler's identity). So shares are
differences of step times, and the compiled prices of all layouts serve every machine.

What would have to hold for the runner-up to win is found by exact evaluations of both on machines
of which one number is smaller or larger: between the nearest two that disagree about who is faster,
further ones are tried.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.analysis.uncertainty.sensitivity import POWER, RESOURCES
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.system.parts import FIELDS, number_of
from pipejax.costs.system.system import System
from pipejax.sweep.plan.layouts import Layouts
from pipejax.sweep.plan.pricing import price
from pipejax.sweep.plan.programs import exact_times
from pipejax.sweep.plan.request import PlanRequest
from pipejax.sweep.plan.search import Rows, groups_of, shape_of

STEP = 1e-4  # by which each resource is changed: far above rounding, and few paths change by it
FURTHEST = 8.0  # factor up and down that is looked at
POINTS = 25  # factors on either side, and between two that disagree
ROUNDS = 3  # of trying between two: to 2e-5 of the factor

Factors = Mapping[str, Float[NumpyArray, " rows"]]


@short_repr
class Reversal(NamedTuple):
    """One number of the machine at which the runner-up is no longer behind.

    Attributes:
      number: its name, as in the system's file.
      factor: nearest to 1 at which the runner-up's step is no longer than the best's.
      value: what the number is then, in SI units.
    """

    number: str
    factor: float
    value: float


def scaled_systems(system: System, factors: Factors) -> System:
    """A system for every row (rows), in which each number is multiplied by its factor there."""
    rows = len(next(iter(factors.values())))
    named = {FIELDS[name]: factor for name, factor in factors.items()}

    def scaled(where: Any, leaf: Any) -> Any:
        # the leaves of an efficiency are the entries of its curve: they have no name of their own
        path = tuple(key.name for key in where if hasattr(key, "name"))
        return leaf * named.get(path, np.ones(rows))

    found: System = jax.tree_util.tree_map_with_path(scaled, system)
    return found


def times_on(
    request: PlanRequest, layouts: Layouts, factors: Factors
) -> Float[NumpyArray, " rows"]:
    """Step times (rows) of layouts of one program, each on its own machine [s]."""
    shape, count = shape_of(request, layouts, 0), int(layouts.microbatches[0])
    costs = price(request, shape, layouts, scaled_systems(request.system, factors)).costs
    return exact_times(shape, count, costs, request.links)


def bounds_of_steps(request: PlanRequest, layouts: Layouts, rows: Rows) -> list[str]:
    """Name the resource that bounds each of some layouts, as `sensitivity` does."""
    found = [""] * len(rows)
    some = layouts.take(rows)
    for same in groups_of((*some[:3], some.microbatches)):
        most = resource_shares_of(request, some.take(same)).argmax(axis=0)
        for place, resource in zip(same.tolist(), most.tolist(), strict=True):
            found[place] = RESOURCES[resource]
    return found


def resource_shares_of(
    request: PlanRequest, layouts: Layouts
) -> Float[NumpyArray, "resources layouts"]:
    """Shares (resources, layouts) of the step that each resource takes, for one program."""
    machines = 1 + len(RESOURCES)  # as it is, and with a little more of each
    more = np.where(np.arange(1, machines)[:, None] == np.arange(machines), 1 + STEP, 1.0)
    factors = dict(zip(RESOURCES, np.repeat(more, len(layouts), axis=1), strict=True))
    every = layouts.take(np.tile(np.arange(len(layouts)), machines))
    times = times_on(request, every, factors).reshape(machines, -1)
    power = np.array(list(POWER.values()))
    return power[:, None] * (times[1:] / times[0] - 1) / STEP


def reversals(request: PlanRequest, layouts: Layouts, rows: Rows) -> tuple[Reversal, ...]:
    """Find, for the best layout and the runner-up, which numbers turn them round; nearest first."""
    # None does where the runner-up is not behind.
    pair = layouts.take(rows)
    steps = np.log(np.geomspace(1, FURTHEST, POINTS))
    found = []
    both = _behind(request, pair, np.concatenate([-steps, steps]))
    if both[0, 0] <= 0:
        return ()
    sides = {-1: both[:, :POINTS], 1: both[:, POINTS:]}
    for place, name in enumerate(RESOURCES):
        first = {
            side: int(np.argmax(behind[place] <= 0))
            for side, behind in sides.items()
            if (behind[place] <= 0).any()
        }
        if first:
            side = min(first, key=lambda each: first[each])
            found.append((name, side * steps[first[side] - 1], side * steps[first[side]]))
    told = [(name, _nearest(request, pair, name, *between)) for name, *between in found]
    numbers = [
        Reversal(name, factor, factor * float(number_of(request.system, name)))
        for name, factor in told
    ]
    return tuple(sorted(numbers, key=lambda each: abs(np.log(each.factor))))


def _nearest(request: PlanRequest, pair: Layouts, name: str, out: float, within: float) -> float:
    """Find the factor nearest to 1, between two of which the second turns the layouts round."""
    for _ in range(ROUNDS):
        tried = np.linspace(out, within, POINTS)
        first = int(np.argmax(_behind(request, pair, tried, (name,))[0] <= 0))
        out, within = tried[first - 1], tried[first]
    return float(np.exp(within))


def _behind(
    request: PlanRequest,
    pair: Layouts,
    logarithms: Float[NumpyArray, " factors"],
    names: tuple[str, ...] = RESOURCES,
) -> Float[NumpyArray, "names factors"]:
    """How far the runner-up is behind where each number has each factor (names, factors) [s]."""
    count = len(names) * len(logarithms)
    own = np.repeat(np.arange(len(names)), len(logarithms))
    each = np.tile(np.exp(logarithms), len(names))
    factors = {name: np.where(own == place, each, 1.0) for place, name in enumerate(names)}
    times = [times_on(request, pair.take(np.full(count, row)), factors) for row in range(len(pair))]
    return (times[1] - times[0]).reshape(len(names), -1)
