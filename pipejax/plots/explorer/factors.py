"""The sliders of a page: one factor for each kind of cost, which multiplies all costs of the kind.

Where all factors are as they are given, the page's cost vector is the one that `evaluate` prices
with. Where no message takes any time, messages are measured by the mean forward, and the factor is
given as 0.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, lower_and_price
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.engine.lowering.program import Program
from pipejax.schedules.cells.ops import COMPUTE, HOST, KINDS, SHARDING, STEP_END

MOST, MOST_OF_NONE = 4.0, 1.0  # largest factor of a slider, and where messages take no time
NAMES = {
    **{phase.name: KINDS[phase].name for phase in COMPUTE},
    "pair": "fused pair",
    **{phase.name: KINDS[phase].name for phase in (*HOST, *SHARDING, *STEP_END)},
    "latency": "latency",
    "transmit": "message",
}


class Factor(NamedTuple):
    """A slider.

    Attributes:
      key: kind of cost, as in `CostLayout.groups`.
      name: for people.
      given: its factor at first: 1, or 0 where messages take no time.
      most: largest factor of the slider; a larger one can be typed.
    """

    key: str
    name: str
    given: float
    most: float


def kinds(run: Evaluation) -> tuple[str, ...]:
    """Kind of each position of a cost vector; "" where the page sums up others."""
    summed = {"message"} | ({"pair"} if run.costs.pair is None else set())
    return tuple("" if kind in summed else kind for kind in run.program.layout.groups)


def factors_of(runs: Sequence[Evaluation]) -> list[Factor]:
    """List the sliders of some runs: kinds that cost anything, and messages wherever there are."""
    costs_anything = {kind for run in runs for kind in _kinds_that_cost(run)}
    is_free = not costs_anything & {"latency", "transmit"}
    if is_free and any(len(run.program.messages.producer) for run in runs):
        costs_anything.add("transmit")
    names = NAMES | ({"transmit": "transmit time"} if "latency" in costs_anything else {})
    return [
        Factor(key, name, 0.0, MOST_OF_NONE)
        if key == "transmit" and is_free
        else Factor(key, name, 1.0, MOST)
        for key, name in names.items()
        if key in costs_anything
    ]


def vector_of(run: Evaluation) -> Float[NumpyArray, " costs"]:
    """The cost vector of a run (costs) [s]."""
    return lower_and_price(run.table, run.costs, run.links)[1]


def base_of(run: Evaluation, factors: Sequence[Factor], unit: float) -> Float[NumpyArray, " costs"]:
    """What the factors multiply (costs) [s]; messages that take no time are measured by `unit`."""
    base, own = vector_of(run).copy(), np.array(kinds(run))
    for factor in factors:
        if factor.given == 0:
            base[own == factor.key] = unit
    return base


def _kinds_that_cost(run: Evaluation) -> Iterator[str]:
    """Kinds of which a position that the program reads is above 0."""
    own, is_read = np.array(kinds(run)), _read(run.program)
    costs = is_read & (vector_of(run) > 0)
    yield from np.unique(own[costs & (own != "")]).tolist()


def _read(program: Program) -> Bool[NumpyArray, " costs"]:
    """Positions of the cost vector that a program reads under some link model (costs)."""
    groups = np.array(program.layout.groups)
    read = np.zeros(len(groups), bool)
    read[program.duration_index] = True
    read[program.pair_index.ravel()] = True
    return read | np.isin(groups, ["latency", "transmit"])


def mean_forward(runs: Sequence[Evaluation]) -> float:
    """Mean time of F, or what else there is [s]."""
    given = (run.costs.forward for run in runs)
    means = [0.0 if time is None else float(np.mean(np.asarray(time))) for time in given]
    return float(np.mean(means)) or max(run.makespan for run in runs) or 1.0
