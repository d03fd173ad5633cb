"""Sensitivity: by how many percent the step time changes if a parameter changes by 1 %.

An elasticity is d log(step time) / d log(parameter). The step time is a sum of times on the
critical path. So the elasticity to a latency, or to the seconds per FLOP or byte, is the share of
the path that this resource takes. These shares are not negative and sum to 1 (Euler's identity).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import are_positive, check_types
from pipejax.base.display import with_short_repr
from pipejax.costs import array_functions as xp
from pipejax.costs.costs import Costs
from pipejax.costs.model.model import Model, check_shape
from pipejax.costs.model.workload import PricingShape, StageLayers, Workload, assign_layers
from pipejax.costs.precision import check_finite
from pipejax.costs.scaling import scaled_costs
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import check_machine, costs_of_shape
from pipejax.costs.system.parts import FIELDS, POWER, RESOURCES
from pipejax.costs.system.system import Number, System
from pipejax.engine.batched.makespans import makespans, makespans_and_grad
from pipejax.engine.batched.pricing import path_slopes, priced_on_host, programs_of_batch
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import NO_WORKER, makespan_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

EFFICIENCIES = tuple(name for name in FIELDS if name.endswith("efficiency"))
# numbers that every model has; other fields are static, or belong to some kinds of layers only
MODEL_PARAMETERS = tuple(part.name for part in dataclasses.fields(Model) if part.type == Number)
PARAMETERS = (
    *RESOURCES,
    *EFFICIENCIES,
    *(f"model.{name}" for name in MODEL_PARAMETERS),
    "microbatch_size",
)


@with_short_repr("step_time bound_by share elasticity")
class Sensitivity(NamedTuple):
    """Relative change of the step time per relative change of each parameter, and its bottleneck.

    Attributes:
      step_time: [s].
      elasticity: {parameter: d log(step time) / d log(parameter)}.
      share: {resource: share of the critical path}; the shares sum to 1.
    """

    step_time: float
    elasticity: Mapping[str, float]
    share: Mapping[str, float]

    @property
    def bound_by(self) -> str:
        """The resource with the largest share of the critical path."""
        return max(self.share, key=lambda name: self.share[name])


def sensitivity(
    table: ScheduleTable, workload: Workload, system: System, *, link: str | Links = "delay"
) -> Sensitivity:
    """Find the elasticity of the step time to every parameter of model and system.

    The number of microbatches and the order of the ops stay fixed. Numbers of the model count as
    continuous; more layers make all stages grow in proportion.

    Args:
      table: the schedule.
      workload: model, minibatch and parallelism.
      system: the machine.
      link: link model, or `Links`.

    Returns:
      Elasticities by parameter, in float64, and shares of the critical path by resource.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, layers are too few, or the link
        model is unknown.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=8)
      >>> result = pj.sensitivity(table, workload, pj.load_system("slow_nw_mid_cp"))
      >>> result.bound_by, round(result.elasticity["network.bandwidth"], 2)
      ('compute.peak', -0.05)
    """
    check_types(table=(table, ScheduleTable), workload=(workload, Workload))
    check_types(system=(system, System))
    with jax.enable_x64(True):
        no_change = np.zeros((1, len(PARAMETERS)))
        costs, cost_slopes = _prices(table, workload, system, no_change, slopes=True)
        # the longest path is no longer than all costs together
        check_finite({"step time": sum(float(leaf.sum()) for leaf in jax.tree.leaves(costs))}, ())
        program = lower(table, link=link, costs=jax.tree.map(lambda leaf: leaf[0], costs))
        times, counts = makespans_and_grad(program, costs, batch_size=1)
    time = float(times.item())
    check_finite({"step time": time}, ())
    with np.errstate(all="ignore"):
        # step time = sum of counts * costs, and slopes have an axis of parameters
        (slopes,) = path_slopes(counts, cost_slopes)
        elasticities = np.asarray(slopes) / time
    check_finite({"elasticity": elasticities}, ())
    elasticity = dict(zip(PARAMETERS, elasticities.tolist(), strict=True))
    # A latency's share is its elasticity. As time = work / rate, a rate's share is minus its
    # elasticity.
    share = {name: power * elasticity[name] for name, power in POWER.items()}
    return Sensitivity(time, elasticity, share)


def swings(
    table: ScheduleTable,
    workload: Workload,
    system: System,
    *,
    factors: tuple[float, float] = (0.5, 2.0),
    link: str | Links = "delay",
) -> dict[str, tuple[float, float]]:
    """Return {parameter: (step time if it is smaller, step time if it is larger)} [s].

    Efficiencies are left out, because they act as their rates do.
    """
    if not are_positive(factors, 2):
        raise ValueError(f"factors must be two numbers above 0, got {factors!r}")
    names = [name for name in PARAMETERS if name not in EFFICIENCIES]
    with jax.enable_x64(True):
        unit_rows = np.eye(len(PARAMETERS))[[PARAMETERS.index(name) for name in names]]
        logs = np.kron(unit_rows, np.log(factors)[:, None])  # two rows (smaller, larger) a name
        costs, _ = _prices(table, workload, system, logs)
        times = np.empty(len(logs))
        for program, rows in programs_of_batch(table, Links.resolve(link), costs):
            index = slice(None) if rows is None else rows
            program_costs = jax.tree.map(lambda leaf, index=index: leaf[index], costs)
            times[index] = makespans(program, program_costs, batch_size=len(times[index]))
    seconds = times.tolist()
    return dict(zip(names, zip(seconds[::2], seconds[1::2], strict=True), strict=True))


def is_possible(model: Model, parameter: str, factor: float) -> bool:
    """Return whether a model is valid after a parameter, such as heads, is multiplied."""
    name = parameter.removeprefix("model.")
    if name == parameter:
        return True
    try:
        check_shape(dataclasses.replace(model, **{name: getattr(model, name) * factor}), name)
    except ValueError:
        return False
    return True


def _prices(
    table: ScheduleTable,
    workload: Workload,
    system: System,
    logs: Float[NumpyArray, "batch parameters"],
    *,
    slopes: bool = False,
) -> tuple[Costs, Any]:
    """Return costs (batch, ...) at parameters times exp(logs), and slopes of the costs by logs."""
    check_machine(workload, system)
    check_whole(table, "sensitivity")
    model, assigned = workload.model, assign_layers(workload, table)
    microbatch_size = workload.microbatch_size(table)

    def price_one(shape: PricingShape, logs: Any, _: tuple[()]) -> Costs:
        """Return the costs if each parameter is multiplied by exp of its entry in `logs`."""
        factor = {name: xp.exp(logs[index]) for index, name in enumerate(PARAMETERS)}
        numbers = {x: getattr(model, x) * factor[f"model.{x}"] for x in MODEL_PARAMETERS}
        factor_by_field = {FIELDS[name]: factor[name] for name in (*RESOURCES, *EFFICIENCIES)}

        def scale(path: Any, leaf: Number) -> Number:
            # an efficiency is a curve, whose entries have no names
            field = tuple(key.name for key in path if hasattr(key, "name"))
            return leaf * factor_by_field.get(field, 1.0)

        return costs_of_shape(
            shape,
            dataclasses.replace(model, **numbers),
            jax.tree_util.tree_map_with_path(scale, system),
            StageLayers(*(part * factor["model.layers"] for part in assigned)),
            microbatch_size * factor["microbatch_size"],
        )

    with np.errstate(all="ignore"):  # the caller refuses results that are not finite
        return priced_on_host(price_one, PricingShape(workload, table), logs, (), slopes=slopes)


TINY = np.finfo(float).tiny  # keeps the shares of pairs that take no time finite


class PlaceSensitivity(NamedTuple):
    """Step times if all compute, or all messages, at a place take less or more time."""

    place: str  # such as "stage2", "worker0" or "boundary1", as in rules of `scaled_costs`
    what: str  # compute or message
    share: float  # share of the critical path at this place: the elasticity of the step time
    step_times: tuple[float, ...]  # step time with each factor [s]

    def rule(self, factor: float) -> str:
        """Return the rule that scales this place by a factor, such as "compute@stage2*1.5"."""
        return f"{self.what}@{self.place}*{factor!r}"


def place_sensitivity(
    evaluation: Evaluation, factors: tuple[float, ...] = (0.5, 2.0)
) -> list[PlaceSensitivity]:
    """Return exact step times with each stage, worker and stage boundary scaled."""
    # The place with the largest share of the critical path comes first.
    check_types(evaluation=(evaluation, Evaluation))
    table, links = evaluation.table, evaluation.links
    results = []
    for place, what, share in _shares(evaluation):
        rules = [f"{what}@{place}*{factor!r}" for factor in factors]
        scaled = [scaled_costs(evaluation.costs, table, rule) for rule in rules]
        runs = (lower_and_price(table, costs, links) for costs in scaled)
        step_times = tuple(makespan_on_host(*run) for run in runs)
        results.append(PlaceSensitivity(place, what, share, step_times))
    return sorted(results, key=lambda result: (-result.share, -result.step_times[-1]))


def _shares(evaluation: Evaluation) -> Iterator[tuple[str, str, float]]:
    """Yield (place, "compute" or "message", share of the critical path) for each place."""
    program, makespan = evaluation.program, evaluation.makespan or 1.0
    workers = np.asarray(program.worker)
    is_critical = evaluation.critical & (workers != NO_WORKER)
    seconds = np.where(is_critical, evaluation.node_duration, 0.0)
    worker_seconds = np.bincount(workers[is_critical], seconds[is_critical], evaluation.workers)
    for scope, values in ("stage", _by_stage(evaluation, seconds)), ("worker", worker_seconds):
        for index, share in enumerate((values / makespan).tolist()):
            yield f"{scope}{index}", "compute", share
    boundary, is_critical = np.asarray(program.messages.boundary), evaluation.message_critical
    seconds = (evaluation.message_finish - evaluation.message_start)[is_critical]
    boundary_seconds = np.bincount(boundary[is_critical], seconds, program.layout.num_boundaries)
    for index in np.unique(boundary).tolist():
        yield f"boundary{index}", "message", float(boundary_seconds[index]) / makespan


def _by_stage(
    evaluation: Evaluation, seconds: Float[NumpyArray, " nodes"]
) -> Float[NumpyArray, " stages"]:
    """Sum node times [s] by stage; a fused pair's time is divided between its two ops."""
    program, count = evaluation.program, evaluation.stages
    is_fused = np.zeros(program.num_nodes, bool)
    is_fused[np.asarray(program.fused)[:, 0]] = True
    is_single = (np.asarray(program.stage) >= 0) & ~is_fused
    stage_seconds = np.bincount(np.asarray(program.stage)[is_single], seconds[is_single], count)
    if not is_fused.any():
        return stage_seconds
    # A pair of 5 s with a forward of 1 s and a backward of 3 s: 1.25 and 3.75 s on their stages.
    _, vector = lower_and_price(evaluation.table, evaluation.costs, evaluation.links)
    pair = np.asarray(program.duration_index)[is_fused] - program.layout.first_pair
    ops = np.asarray(program.pair_index)[pair]  # (pairs, 2) indices in the cost vector
    share = vector[ops] / np.maximum(vector[ops].sum(axis=1, keepdims=True), TINY)
    _, stage = program.layout.op_at(ops)
    op_seconds = share * seconds[is_fused, None]
    return stage_seconds + np.bincount(stage.ravel(), op_seconds.ravel(), count)
