"""Inputs of every tuning method: a model on a system under a family of schedules."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import MismatchError, whole_number
from pipejax.base.compiled import compiled
from pipejax.costs import array_functions as xp
from pipejax.costs.costs import Costs
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import PricingShape, StageLayers, Workload, assign_layers
from pipejax.costs.planning import build_for_run, is_planned
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import check_machine, costs_of_microbatch, costs_of_shape
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.costs.system.system import Number, Numbers, System
from pipejax.engine.batched.makespans import makespans, makespans_and_grad
from pipejax.engine.batched.pricing import Tree, batch_length, filled, priced, priced_on_host
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program, makespan_on_host
from pipejax.engine.pricing import cost_vector, program_for
from pipejax.schedules.registry import check_size
from pipejax.schedules.table.held_activations import HeldCounts, held_counts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

# Step times of batches of variables, with gradients, through costs and makespans in JAX.
#
# A `Relax` turns variables into a model on a system and a microbatch size, all real numbers. At
# fixed costs the makespan is affine in M beyond a few periods, so a few small programs give it
# for every M = N / b; a single program is exact for its own M.
#
# A step time has kinks and, with step curves of efficiency, jumps. So the step size of a descent
# shrinks to 0, and the best point on the way counts, not the last one.

try:
    import optax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tuning needs optax: pip install 'pipejax[tuning]'", name=error.name
    ) from error

Points = Float[Array, "starts ..."] | Float[NumpyArray, "starts ..."]
Values = Float[Array, " starts"] | Float[NumpyArray, " starts"]
ValueAndGrad = Callable[[Points], tuple[Values, Points]]


def descend(
    value_and_grad: ValueAndGrad,
    starts: Points,
    *,
    steps: int = 40,
    rate: float = 0.3,
    lower: Points | float = -jnp.inf,
    upper: Points | float = jnp.inf,
) -> tuple[Float[NumpyArray, "starts ..."], Float[NumpyArray, " starts"]]:
    """Descend with Adam and a cosine schedule; return each start's best point and its value."""
    whole_number(steps, "steps")
    points = jnp.clip(jnp.asarray(starts), lower, upper)
    state = _adam(rate, steps).init(points)
    best = np.array(points)
    values = np.full(len(best), np.inf)
    for step in range(steps + 1):
        value, gradient = value_and_grad(points)
        is_better = np.asarray(value) < values
        values = np.where(is_better, value, values)
        best[is_better] = np.asarray(points)[is_better]
        if step < steps:
            gradient = jnp.asarray(gradient, points.dtype)
            points, state = _move(points, state, gradient, rate, lower, upper, steps=steps)
    return best, values


def _adam(rate: Array | float, steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, steps, alpha=0.01), b1=0.8)


@functools.partial(compiled, static_argnames="steps")
def _move(
    points: Array,
    state: optax.OptState,
    gradient: Array,
    rate: Array | float,
    lower: Array | float,
    upper: Array | float,
    *,
    steps: int,
) -> tuple[Array, optax.OptState]:
    """Take one descent step; all descents of equal shape share a compilation."""
    updates, state = _adam(rate, steps).update(gradient, state, points)
    return jnp.clip(optax.apply_updates(points, updates), lower, upper), state


FEW = 1024  # configurations up to which pricing by NumPy is faster than compilation
FEW_RUNS = 8  # makespans up to which the host is faster than compilation
OVERRUN = 10.0  # relative penalty of memory beyond the limit, per share of the limit
PerConfiguration = Float[NumpyArray, " batch"]


class Pair(NamedTuple):
    """A model on a system, or a batch of such pairs, as plain numbers for `vmap`."""

    model: Model  # the transformer; in a batch every number has a leading axis
    system: System  # the machine, likewise
    assigned: StageLayers  # layers of each stage, and those recomputed
    minibatch: Numbers  # sequences per step and pipeline


class Inputs(NamedTuple):
    """Inputs of the step time of one configuration, without its variables."""

    pair: Pair  # the model on the system
    size: Number  # b, unless the variables determine it [sequences]
    capacity: Numbers  # memory limit, infinite for none [B]


Relax = Callable[[Any, Inputs], tuple[Pair, Number]]


@dataclasses.dataclass(frozen=True)
class _Prices:
    """Function from one configuration to its costs, as the pricer calls it."""

    shape: PricingShape
    relax: Relax

    def __call__(self, _: tuple[()], variables: Tree, inputs: Inputs) -> Costs:
        pair, size = self.relax(variables, inputs)
        return costs_of_shape(self.shape, pair.model, pair.system, pair.assigned, size)


@dataclasses.dataclass(frozen=True)
class _Values:
    """Function from one configuration to its value [s] and memory [B], as the pricer calls it."""

    # `shared` are the microbatches of each program and the activations that its workers hold.
    # `ends` are the makespans of the programs. Both are interpolated at the configuration's M.
    shape: PricingShape
    relax: Relax

    def __call__(
        self,
        shared: tuple[Array, tuple[HeldCounts, ...]],
        variables: Tree,
        inputs: Inputs,
        *ends: Array,
    ) -> tuple[Array, Array]:
        microbatches, held = shared
        pair, size = self.relax(variables, inputs)
        workload = dataclasses.replace(self.shape.workload, model=pair.model)
        memory = stage_bytes(workload, self.shape.table, pair.assigned, size)
        weights = _interpolation_weights(pair.minibatch / size, microbatches)
        peaks = xp.stack([counts.activation_bytes(memory.parts) for counts in held])
        peak = (weights[:, None] * peaks).sum(axis=0)
        need = (held[0].static_bytes(memory.static, memory.version) + peak).max(axis=-1)
        # the penalty leads a descent back to where memory suffices
        overrun = xp.maximum(need / inputs.capacity - 1, 0.0)
        step_time = (weights * xp.stack(list(ends))).sum(axis=0)
        return step_time * (1 + OVERRUN * overrun), need


@dataclasses.dataclass(frozen=True, eq=False)
class StepTimeObjective:
    """Step times of batches of variables, with a penalty if memory is short."""

    counts: tuple[int, ...]  # microbatches of each program, ascending
    programs: tuple[Program, ...]  # lowered schedules
    held: tuple[HeldCounts, ...]  # activations that the workers of each program hold
    shape: PricingShape  # static argument of the compiled prices
    relax: Relax  # from variables to configurations; a function of a module

    def evaluate(
        self, variables: Tree, inputs: Inputs
    ) -> tuple[PerConfiguration, PerConfiguration]:
        """Return each configuration's value [s], and the memory of its fullest worker [B]."""
        size = batch_length(variables)
        if size <= FEW:
            costs, _ = priced_on_host(self._prices, (), variables, inputs)
            solved = [(self._makespans(program, costs, size), None) for program in self.programs]
            results, _ = priced_on_host(self._values, self._shared, variables, inputs, solved)
            return results
        variables, inputs = filled((variables, inputs), size)
        costs = priced(self._prices, (), variables, inputs)
        filled_size = batch_length(variables)
        ends = tuple(
            makespans(program, costs, batch_size=filled_size, unroll=False)
            for program in self.programs
        )
        value, need = priced(self._values, self._shared, variables, inputs, ends)
        return np.asarray(value)[:size], np.asarray(need)[:size]

    def value_and_grad(
        self, variables: Tree, inputs: Inputs
    ) -> tuple[Float[Array, " batch"], Tree]:
        """Return the values of a batch, and their gradients in the shape of the variables."""
        price = functools.partial(priced_on_host, slopes=True)
        costs, cost_slopes = price(self._prices, (), variables, inputs)
        size = batch_length(variables)
        costs = filled(costs, size)
        makespans_and_slopes = [
            jax.tree.map(
                lambda leaf: leaf[:size],
                makespans_and_grad(program, costs, batch_size=batch_length(costs)),
            )
            for program in self.programs
        ]
        value, slopes = price(
            lambda *arguments: self._values(*arguments)[0],
            *(self._shared, variables, inputs, makespans_and_slopes, cost_slopes),
        )
        return value, _like(variables, slopes)

    def _makespans(self, program: Program, costs: Costs, size: int) -> PerConfiguration:
        """Return a batch's makespans [s]; a small batch runs on the host, others compiled."""
        if size > FEW_RUNS:
            costs = filled(costs, size)
            ends = makespans(program, costs, batch_size=batch_length(costs), unroll=False)
            return np.asarray(ends)[:size]
        times = np.empty(size)
        for k in range(size):
            row_costs = jax.tree.map(lambda leaf, k=k: leaf[k], costs)
            row_program = program_for(program, row_costs)
            vector = np.asarray(cost_vector(row_program, row_costs))
            times[k] = makespan_on_host(row_program, vector)
        return times

    @property
    def _prices(self) -> _Prices:
        return _Prices(self.shape, self.relax)

    @property
    def _values(self) -> _Values:
        return _Values(self.shape, self.relax)

    @property
    def _shared(self) -> tuple[Float[NumpyArray, " programs"], tuple[HeldCounts, ...]]:
        return np.array(self.counts, float), self.held


def _like(variables: Tree, slopes: Float[Array, "batch numbers"]) -> Tree:
    """Return slopes in the tree structure of the variables."""
    leaves, structure = jax.tree.flatten(variables)
    ends = np.cumsum([leaf[0].size for leaf in leaves]).tolist()
    parts = (slopes[:, low:high] for low, high in zip([0, *ends], ends, strict=False))
    return jax.tree.unflatten(
        structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    )


def _interpolation_weights(count: Numbers, nodes: Float[Any, " programs"]) -> Any:
    """Return weights of the programs' values for linear interpolation at a microbatch count."""
    # at nodes 1 2 4, the count 3 has weights 0 0.5 0.5, and the count 5 has 0 -0.5 1.5
    if len(nodes) == 1:
        return np.ones(1)
    index = np.arange(len(nodes))
    lower = xp.clip(xp.sum(count >= nodes) - 1, 0, len(nodes) - 2)
    shares = (count - nodes[:-1]) / (nodes[1:] - nodes[:-1])
    share = xp.where(index[:-1] == lower, shares, 0.0).sum(axis=0)
    upper_weight = xp.where(index == lower + 1, share, 0.0)
    return xp.where(index == lower, 1 - share, upper_weight)


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleFamily:
    """Tables of one schedule by number of microbatches, each built once at first use."""

    schedule: str  # name of the schedule
    num_workers: int  # P
    # further options of the schedule, as for `schedules.build`
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    link: str | Links = "delay"  # link model, or `Links`
    # returns the costs of a table, for a schedule that is planned for the run's times
    price: Callable[[ScheduleTable], Costs] | None = None

    @functools.cached_property
    def is_planned(self) -> bool:
        """Return whether the order of the schedule follows from the run's times."""
        return is_planned(schedules.find(self.schedule), self.options)

    @functools.cached_property
    def few_microbatches(self) -> tuple[int, ...]:
        """List microbatch counts at which a relaxation interpolates: 1 or 2, P, 2 P and 4 P."""
        # Counts without a schedule are skipped; a table from a file has its own count alone.
        file_sizes = schedules.find(self.schedule).sizes
        if file_sizes is not None:
            if self.refusal(file_sizes[1]):
                raise ValueError(self.refusal(file_sizes[1]))
            return (file_sizes[1],)
        few = [count for count in (1, 2) if not self.refusal(count)][:1]
        many = [times * self.num_workers for times in (1, 2, 4)]
        if self.refusal(many[-1]):
            raise ValueError(self.refusal(many[-1]))
        return tuple(sorted({*few, *(count for count in many if not self.refusal(count))}))

    @functools.cached_property
    def table(self) -> Callable[[int], ScheduleTable]:
        """Return a cached function from the number of microbatches to the table."""
        return functools.cache(self._build)

    def _build(self, num_microbatches: int) -> ScheduleTable:
        size = {"num_workers": self.num_workers, "num_microbatches": num_microbatches}
        if not self.is_planned:
            return schedules.build(self.schedule, **size, **self.options)
        if self.price is None:
            raise ValueError(f"{self.schedule} is planned for the times of one run")
        return build_for_run(schedules.find(self.schedule), size, self.options, self.price)

    def program(self, num_microbatches: int) -> Program:
        """Return the program for M microbatches, with all-reduce and update."""
        return lower(self.table(num_microbatches), link=self.link, step_end=True)

    @functools.cached_property
    def held(self) -> Callable[[int], HeldCounts]:
        """Return a cached function from M to the counts of activations that workers hold."""

        def make(num_microbatches: int) -> HeldCounts:
            held = held_counts(self.table(num_microbatches))
            moments = held.parts.shape[-1]
            # zeros up to a power of two, so that few shapes are compiled
            fill = 2 ** math.ceil(math.log2(moments)) - moments
            return held._replace(parts=np.pad(held.parts, [*[(0, 0)] * 3, (0, fill)]))

        return functools.cache(make)

    def check_size(self, num_microbatches: int) -> None:
        """Refuse a number of microbatches whose table exceeds the memory of this machine."""
        check_size(
            schedules.find(self.schedule),
            num_workers=self.num_workers,
            num_microbatches=num_microbatches,
            **self.options,
        )

    def refusal(self, num_microbatches: int) -> str:
        """Return why the schedule does not exist for M microbatches; empty if it does."""
        try:
            self.table(num_microbatches)
        except MismatchError as error:
            return str(error)
        return ""


def price(workload: Workload, system: System, table: ScheduleTable) -> Costs:
    """Price a table of M microbatches, where M need not divide the minibatch."""
    size = workload.minibatch / table.num_microbatches
    return costs_of_microbatch(workload.model, system, workload, table, size)


@dataclasses.dataclass(frozen=True, eq=False)
class TuningProblem:
    """A model on a system under a family of schedules, the input of every tuning method."""

    family: ScheduleFamily  # the schedule
    workload: Workload  # model, parallelism and recomputation
    pair: Pair  # numbers of the model and the system, layers and minibatch
    capacity: float  # memory limit, infinite for none [B]

    @classmethod
    def from_workload(
        cls,
        family: ScheduleFamily,
        workload: Workload,
        system: System,
        *,
        memory_limit: bool = True,
    ) -> "TuningProblem":
        """Make a tuning problem with the model and the system as trees of numbers."""
        table = family.table(family.few_microbatches[0])
        check_whole(table, "tuning")
        if workload.stragglers and (table.placement != table.placement[0]).any():
            raise ValueError(
                "stragglers: where pipes place a stage on several workers, slow ones make costs "
                "differ by microbatch, and tuning takes microbatches as alike"
            )
        assigned = StageLayers(*map(np.asarray, assign_layers(workload, table)))
        minibatch = np.array(workload.minibatch, float)
        pair = Pair(_numbers(workload.model), _numbers(system), assigned, minibatch)
        check_machine(workload, system)
        limit = float(pair.system.memory_available) if memory_limit else math.inf
        return cls(family, workload, pair, limit)

    @functools.cached_property
    def shape(self) -> PricingShape:
        """Return the static argument of the compiled prices."""
        return PricingShape.from_workload(
            self.workload, self.family.table(self.family.few_microbatches[-1])
        )

    def objective(self, relax: Relax, *counts: int) -> StepTimeObjective:
        """Return the step time as a function of variables, for these microbatch counts."""
        programs, held = map(self.family.program, counts), map(self.family.held, counts)
        return StepTimeObjective(counts, tuple(programs), tuple(held), self.shape, relax)

    def inputs(self, size: int, num_microbatches: int = 1, *, limited: bool = True) -> Inputs:
        """Return the fixed inputs of the step time for a batch of configurations."""
        total = self.workload.minibatch
        if total % num_microbatches:
            raise ValueError(
                f"{num_microbatches} microbatches do not divide a minibatch of {total}"
            )
        pair = jax.tree.map(lambda leaf: np.repeat(leaf[None], size, axis=0), self.pair)
        capacity = np.full(size, self.capacity if limited else np.inf)
        return Inputs(pair, pair.minibatch / num_microbatches, capacity)

    def evaluate(self, num_microbatches: int, assigned: StageLayers) -> tuple[float, float]:
        """Evaluate layers per stage exactly: return step time [s] and memory need [B]."""
        objective = self.objective(identity_relaxation, num_microbatches)
        layers = StageLayers(*(np.asarray(stages, float)[None] for stages in assigned))
        (step,), (need,) = objective.evaluate(
            layers, self.inputs(1, num_microbatches, limited=False)
        )
        return float(step), float(need)


def identity_relaxation(assigned: StageLayers, inputs: Inputs) -> tuple[Pair, Number]:
    """Return model and system with the variables themselves as the layers of stages."""
    return inputs.pair._replace(assigned=assigned), inputs.size


def _numbers(record: Any) -> Any:
    """Turn a record into a tree of arrays without name, so that no name causes a compilation."""
    record = dataclasses.replace(record, name="", source="")
    return jax.tree.map(lambda leaf: np.array(leaf, float), record)
