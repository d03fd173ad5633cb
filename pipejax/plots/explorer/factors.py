"""Sliders of a page, and closed forms of makespans in the factors of the sliders.

A slider sets a factor for all costs of one kind. With the initial factors, the costs on the page
equal those of `evaluate`. If messages are free, the slider of messages starts at 0, and its factor
1 makes a message as long as the mean forward.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.form import formula
from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import COMPUTE, HOST, KINDS, SHARDING, STEP_END, AnyPhase

MAX_FACTOR, MAX_FREE_FACTOR = 4.0, 1.0  # right end of sliders, and of the slider of free messages
OF_COMPUTE = {phase.name: KINDS[phase].name for phase in COMPUTE}
OF_OTHERS = {
    "pair": "fused pair",
    **{phase.name: KINDS[phase].name for phase in (*HOST, *SHARDING, *STEP_END)},
    "latency": "latency",
    "transmit": "message",
}


class Factor(NamedTuple):
    """A slider, which multiplies all costs of one kind by a factor."""

    key: str  # kind of cost, as in `CostLayout.groups`
    name: str  # label of the slider
    initial: float  # initial factor: 1, or 0 if messages are free
    largest: float  # largest factor of the slider; users can type larger factors


def kinds(run: Evaluation) -> tuple[str, ...]:
    """Return the kind of each cost; "" for sums of other costs, which the page computes."""
    summed = {"message"} | ({"pair"} if run.costs.pair is None else set())
    return tuple("" if kind in summed else kind for kind in run.program.layout.groups)


def list_factors(
    runs: Sequence[Evaluation], other_phases: Collection[AnyPhase] = ()
) -> list[Factor]:
    """List a slider for each kind of cost of the runs and of phases in other tables."""
    used_kinds: set[str] = set()  # kinds with a cost above 0 that a program reads
    for run in runs:
        cost_kinds = np.array(kinds(run))
        program, vector = lower_and_price(run.table, run.costs, run.links)
        has_cost = read_by(program) & (vector > 0) & (cost_kinds != "")
        used_kinds |= {*cost_kinds[has_cost].tolist()}
    for phase in other_phases:
        if phase.kind.time and any(np.any(run.costs.time(phase)) for run in runs):
            used_kinds.add(phase.name)
    custom_phases = (phase for run in runs for phase in run.table.grammar.custom_phases)
    names = {**OF_COMPUTE, **{phase.name: phase.kind.name for phase in custom_phases}, **OF_OTHERS}
    if "latency" in used_kinds:
        names["transmit"] = "transmit time"
    has_free_messages = not used_kinds & {"latency", "transmit"}
    if has_free_messages and any(len(run.program.messages.producer) for run in runs):
        used_kinds.add("transmit")
    factors = {
        key: Factor(key, name, 1.0, MAX_FACTOR) for key, name in names.items() if key in used_kinds
    }
    if has_free_messages and "transmit" in factors:
        factors["transmit"] = Factor("transmit", names["transmit"], 0.0, MAX_FREE_FACTOR)
    return [*factors.values()]


def base_costs(
    run: Evaluation, factors: Sequence[Factor], unit: float
) -> Float[NumpyArray, " costs"]:
    """Return the costs [s] that factors multiply; free messages get the time `unit` [s]."""
    _, vector = lower_and_price(run.table, run.costs, run.links)
    base, cost_kinds = vector.copy(), np.array(kinds(run))
    for factor in factors:
        if factor.initial == 0:
            base[cost_kinds == factor.key] = unit
    return base


def read_by(program: Program) -> Bool[NumpyArray, " costs"]:
    """Return a mask (costs) of the costs that a program reads under at least one link model."""
    groups = np.array(program.layout.groups)
    is_read = np.zeros(len(groups), bool)
    is_read[program.duration_index] = True
    is_read[program.pair_index.ravel()] = True
    return is_read | np.isin(groups, ["latency", "transmit"])


def mean_forward(runs: Sequence[Evaluation]) -> float:
    """Return the mean forward time of all runs [s]; without forwards, the longest makespan."""
    times = (run.costs.forward for run in runs)
    means = [0.0 if time is None else float(np.mean(np.asarray(time))) for time in times]
    return float(np.mean(means)) or max(run.makespan for run in runs) or 1.0


MAX_FACETS = 12  # largest number of sums in a formula on the page
MAX_NODES = 200_000  # nodes of all programs that are searched, which takes a few seconds


class FormSearch:
    """Search for closed forms of programs, with a limit on the total number of nodes."""

    def __init__(self) -> None:
        self.nodes_left = MAX_NODES

    def form(
        self,
        program: Program,
        run: Evaluation,
        factors: Sequence[Factor],
        base: Float[NumpyArray, " costs"],
    ) -> dict[str, Any] | None:
        """Return the closed form as JSON; None if there is none, or the program is too large."""
        overlaps = run.costs.pair_factor is not None and program.layout.num_pairs
        if overlaps or program.num_nodes > self.nodes_left:
            return None
        self.nodes_left -= program.num_nodes
        cost_kinds = np.array(kinds(run))
        parameters: dict[str, Any] = {}
        units: list[float] = []
        is_time: list[bool] = []
        fields = {phase.name: phase.kind.time for phase in run.table.grammar.timed}
        for factor in factors:
            costs = base[cost_kinds == factor.key]
            if costs.size and costs.max() > 0:
                # equal costs give a parameter in seconds; unequal costs give a factor for all
                is_uniform = bool(costs.min() == costs.max())
                field = fields.get(factor.key, factor.key)
                parameters[factor.key] = 1.0 if is_uniform else getattr(run.costs, field)
                units.append(float(costs[0]) if is_uniform else 1.0)
                is_time.append(is_uniform)
        weights = _weights(run.costs, parameters, fields)
        try:
            closed_form = formula(program, weights, max_facets=MAX_FACETS)
        except ValueError:  # the form would have too many sums
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
    """Return {parameter: costs in which the fields of all other parameters are 0}."""
    # `fields` maps letters of phases to fields of `Costs`
    parameter_fields = {key: fields.get(key, key) for key in parameters}
    set_fields = {field for field, value in vars(costs).items() if value is not None}
    zeros = dict.fromkeys(set_fields - {*parameter_fields.values()}, 0.0)
    return {
        key: unchecked_costs(zeros | {parameter_fields[key]: value})
        for key, value in parameters.items()
    }
