"""The sliders of a page, and the closed forms that follow them.

A slider is one factor for each kind of cost, which multiplies all costs of the kind.

Where all factors are as they are given, the page's cost vector is the one that `evaluate` prices
with. Where no message takes any time, messages are measured by the mean forward, and the factor is
given as 0.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.formula import formula
from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import COMPUTE, HOST, KINDS, SHARDING, STEP_END, AnyPhase

MOST, MOST_OF_NONE = 4.0, 1.0  # largest factor of a slider, and where messages take no time
OF_COMPUTE = {phase.name: KINDS[phase].name for phase in COMPUTE}
OF_OTHERS = {
    "pair": "fused pair",
    **{phase.name: KINDS[phase].name for phase in (*HOST, *SHARDING, *STEP_END)},
    "latency": "latency",
    "transmit": "message",
}


class Factor(NamedTuple):
    """A slider."""

    key: str  # kind of cost, as in `CostLayout.groups`.
    name: str  # for people
    given: float  # its factor at first: 1, or 0 where messages take no time
    most: float  # largest factor of the slider; a larger one can be typed


def kinds(run: Evaluation) -> tuple[str, ...]:
    """Kind of each position of a cost vector; "" where the page sums up others."""
    summed = {"message"} | ({"pair"} if run.costs.pair is None else set())
    return tuple("" if kind in summed else kind for kind in run.program.layout.groups)


def list_factors(runs: Sequence[Evaluation], also: Collection[AnyPhase] = ()) -> list[Factor]:
    """List the sliders of runs: kinds with a cost, and messages if there are any."""
    costs_anything = {kind for run in runs for kind in _kinds_that_cost(run)}
    costs_anything |= {
        phase.name
        for phase in also
        if phase.kind.time and any(np.any(run.costs.time(phase)) for run in runs)
    }
    own_phases = (phase for run in runs for phase in run.table.grammar.custom_phases)
    names_by_phase = {phase.name: phase.kind.name for phase in own_phases}
    is_free = not costs_anything & {"latency", "transmit"}
    if is_free and any(len(run.program.messages.producer) for run in runs):
        costs_anything.add("transmit")
    names = {**OF_COMPUTE, **names_by_phase, **OF_OTHERS}
    names |= {"transmit": "transmit time"} if "latency" in costs_anything else {}
    return [
        Factor(key, name, 0.0, MOST_OF_NONE)
        if key == "transmit" and is_free
        else Factor(key, name, 1.0, MOST)
        for key, name in names.items()
        if key in costs_anything
    ]


def run_cost_vector(run: Evaluation) -> Float[NumpyArray, " costs"]:
    """The cost vector of a run (costs) [s]."""
    return lower_and_price(run.table, run.costs, run.links)[1]


def base_costs(
    run: Evaluation, factors: Sequence[Factor], unit: float
) -> Float[NumpyArray, " costs"]:
    """Return the costs that the factors multiply [s]; free messages take `unit`."""
    base, kind_of_cost = run_cost_vector(run).copy(), np.array(kinds(run))
    for factor in factors:
        if factor.given == 0:
            base[kind_of_cost == factor.key] = unit
    return base


def _kinds_that_cost(run: Evaluation) -> Iterator[str]:
    """Kinds of which a position that the program reads is above 0."""
    kind_of_cost, is_read = np.array(kinds(run)), read_by(run.program)
    costs = is_read & (run_cost_vector(run) > 0)
    yield from np.unique(kind_of_cost[costs & (kind_of_cost != "")]).tolist()


def read_by(program: Program) -> Bool[NumpyArray, " costs"]:
    """Positions of the cost vector that a program reads under some link model (costs)."""
    groups = np.array(program.layout.groups)
    read = np.zeros(len(groups), bool)
    read[program.duration_index] = True
    read[program.pair_index.ravel()] = True
    return read | np.isin(groups, ["latency", "transmit"])


def mean_forward(runs: Sequence[Evaluation]) -> float:
    """Return the mean time of F, or of the other ops [s]."""
    times = (run.costs.forward for run in runs)
    means = [0.0 if time is None else float(np.mean(np.asarray(time))) for time in times]
    return float(np.mean(means)) or max(run.makespan for run in runs) or 1.0


# Closed forms of a page: of as many programs as are small enough.


MOST_FACETS = 12  # that a person reads
MOST_NODES = 200_000  # of all programs whose form is looked for: a few seconds


class FormSearch:
    """Search for closed forms of programs, up to a total number of nodes."""

    def __init__(self) -> None:
        self.nodes_left = MOST_NODES

    def form(
        self,
        program: Program,
        run: Evaluation,
        factors: Sequence[Factor],
        base: Float[NumpyArray, " costs"],
    ) -> dict[str, Any] | None:
        """Return the closed form of a program, or None if it is too large or pairs overlap."""
        overlaps = run.costs.pair_factor is not None and program.layout.num_pairs
        if overlaps or program.num_nodes > self.nodes_left:
            return None
        self.nodes_left -= program.num_nodes
        kind_of_cost, parameters, units, is_time = np.array(kinds(run)), {}, [], []
        fields = {phase.name: phase.kind.time for phase in run.table.grammar.timed}
        for factor in factors:
            costs = base[kind_of_cost == factor.key]
            if costs.size and costs.max() > 0:
                is_one = costs.min() == costs.max()
                value = 1.0 if is_one else getattr(run.costs, fields.get(factor.key, factor.key))
                parameters[factor.key] = value
                units.append(float(costs[0]) if is_one else 1.0)
                is_time.append(bool(is_one))
        try:
            closed_form = formula(
                program, _weights(run.costs, parameters, fields), max_facets=MOST_FACETS
            )
        except ValueError:  # no few sums bound it
            return None
        return {
            "parameters": [*parameters],
            "units": units,
            "isTime": is_time,
            "facets": [[float(count) for count in facet] for facet in closed_form.facets],
            "exact": closed_form.exact,
            "gap": closed_form.gap,
        }


def _weights(
    costs: Costs, parameters: Mapping[str, Any], fields: Mapping[str, str]
) -> dict[str, Costs]:
    """Return costs with one parameter at 1 and all others at 0."""
    # fields says which cost is that of a phase, by its letters.
    named = {key: fields.get(key, key) for key in parameters}
    set_fields = {field for field, value in vars(costs).items() if value is not None}
    free = dict.fromkeys(set_fields - {*named.values()}, 0.0)
    return {key: unchecked_costs(free | {named[key]: value}) for key, value in parameters.items()}
