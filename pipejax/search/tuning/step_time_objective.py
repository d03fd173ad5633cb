"""Step times of batches of variables, with gradients, through costs and makespans in JAX.

A `Relax` turns variables into a model on a system and a microbatch size, all real numbers. At fixed
costs the makespan is affine in M beyond a few periods, so a few small programs give it for every M
= N / b; a single program is exact for its own M.

A step time has kinks and, with step curves of efficiency, jumps. So the step size of a descent
shrinks to 0, and the best point on the way counts, not the last one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import whole_number
from pipejax.base.compiled import compiled
from pipejax.costs import array_functions as xp
from pipejax.costs.costs import Costs
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import PricingShape, StageLayers
from pipejax.costs.stage.stage_costs import costs_of_shape
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.costs.system.system import Number, Numbers, System
from pipejax.engine.batched.makespans import makespans, makespans_and_grad
from pipejax.engine.batched.pricing import Tree, batch_length, filled, priced, priced_on_host
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import cost_vector, program_for
from pipejax.engine.recurrence_host import makespan_on_host
from pipejax.schedules.table.held_activations import HeldCounts

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
    """Take one step; one compilation serves all descents of a shape."""
    updates, state = _adam(rate, steps).update(gradient, state, points)
    return jnp.clip(optax.apply_updates(points, updates), lower, upper), state


# configurations whose prices NumPy has in less time than a program for them compiles in
FEW = 1024
FEW_RUNS = 8  # that the host has sooner than a program compiles
OVERRUN = 10.0  # relative penalty of memory beyond the limit, per share of the limit
PerConfiguration = Float[NumpyArray, " batch"]


class Pair(NamedTuple):
    """A model on a system, or a batch of them, as numbers only, so that `vmap` applies."""

    model: Model  # the transformer; in a batch every number has a leading axis
    system: System  # the machine, likewise
    assigned: StageLayers  # layers of each stage, and those recomputed
    minibatch: Numbers  # sequences per step and pipeline


class Inputs(NamedTuple):
    """Inputs of the step time of one configuration, without its variables."""

    pair: Pair  # the model on the system
    size: Number  # b, where the variables say nothing of it [sequences]
    capacity: Numbers  # memory limit, infinite for none [B]


Relax = Callable[[Any, Inputs], tuple[Pair, Number]]


@dataclasses.dataclass(frozen=True)
class _Prices:
    """Costs of one configuration, for the pricer."""

    shape: PricingShape
    relax: Relax

    def __call__(self, _: tuple[()], variables: Tree, inputs: Inputs) -> Costs:
        pair, size = self.relax(variables, inputs)
        return costs_of_shape(self.shape, pair.model, pair.system, pair.assigned, size)


@dataclasses.dataclass(frozen=True)
class _Values:
    """Value [s] and memory [B] of one configuration, for the pricer."""

    # What is shared are the microbatches of each program and what its workers hold.

    shape: PricingShape
    relax: Relax

    def __call__(
        self,
        shared: tuple[Array, tuple[HeldCounts, ...]],
        variables: Tree,
        inputs: Inputs,
        *ends: Array,
    ) -> tuple[Array, Array]:
        nodes, held = shared
        pair, size = self.relax(variables, inputs)
        workload = dataclasses.replace(self.shape.workload, model=pair.model)
        memory = stage_bytes(workload, self.shape.table, pair.assigned, size)
        weights = _weights(pair.minibatch / size, nodes)
        peaks = xp.stack([counts.activation_bytes(memory.parts) for counts in held])
        peak = (weights[:, None] * peaks).sum(axis=0)
        need = (held[0].static_bytes(memory.static, memory.version) + peak).max(axis=-1)
        # a descent is led back to where memory is enough
        overrun = xp.maximum(need / inputs.capacity - 1, 0.0)
        return (weights * xp.stack(list(ends))).sum(axis=0) * (1 + OVERRUN * overrun), need


@dataclasses.dataclass(frozen=True, eq=False)
class StepTimeObjective:
    """Step times, with a penalty where memory is short, for batches of variables."""

    counts: tuple[int, ...]  # microbatches of each program, ascending
    programs: tuple[Program, ...]  # lowered schedules
    held: tuple[HeldCounts, ...]  # what their workers hold
    shape: PricingShape  # what prices are compiled for
    relax: Relax  # what the variables mean; a function of a module

    def evaluate(
        self, variables: Tree, inputs: Inputs
    ) -> tuple[PerConfiguration, PerConfiguration]:
        """Evaluate a batch: (batch) values [s], and memory of the fullest worker [B]."""
        size = batch_length(variables)
        if size <= FEW:
            costs, _ = priced_on_host(self._prices, (), variables, inputs)
            solved = [(self._makespans(program, costs, size), None) for program in self.programs]
            results, _ = priced_on_host(self._values, self._shared, variables, inputs, solved)
            return results
        variables, inputs = filled((variables, inputs), size)
        costs = priced(self._prices, (), variables, inputs)
        whole = batch_length(variables)
        ends = tuple(
            makespans(program, costs, batch_size=whole, unroll=False) for program in self.programs
        )
        value, need = priced(self._values, self._shared, variables, inputs, ends)
        return np.asarray(value)[:size], np.asarray(need)[:size]

    def value_and_grad(
        self, variables: Tree, inputs: Inputs
    ) -> tuple[Float[Array, " batch"], Tree]:
        """Return the values of a batch, and their gradients in the shape of the variables."""
        price = functools.partial(priced_on_host, slopes=True)
        costs, moved = price(self._prices, (), variables, inputs)
        size = batch_length(variables)
        costs = filled(costs, size)
        solved = [
            jax.tree.map(
                lambda leaf: leaf[:size],
                makespans_and_grad(program, costs, batch_size=batch_length(costs)),
            )
            for program in self.programs
        ]
        value_alone = lambda *arguments: self._values(*arguments)[0]  # noqa: E731
        value, slopes = price(value_alone, self._shared, variables, inputs, solved, moved)
        return value, _like(variables, slopes)

    def _makespans(self, program: Program, costs: Costs, size: int) -> PerConfiguration:
        """Return makespans (batch) [s]: of few rows on the host, else by compiled code."""
        if size > FEW_RUNS:
            costs = filled(costs, size)
            ends = makespans(program, costs, batch_size=batch_length(costs), unroll=False)
            return np.asarray(ends)[:size]
        rows = (jax.tree.map(lambda leaf, k=k: leaf[k], costs) for k in range(size))
        programs = ((program_for(program, row), row) for row in rows)
        return np.array(
            [
                makespan_on_host(row_program, np.asarray(cost_vector(row_program, row)))
                for row_program, row in programs
            ]
        )

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
    leaves, structure = jax.tree.flatten(variables)
    ends = np.cumsum([leaf[0].size for leaf in leaves]).tolist()
    parts = (slopes[:, low:high] for low, high in zip([0, *ends], ends, strict=False))
    return jax.tree.unflatten(
        structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    )


def _weights(count: Numbers, nodes: Float[Any, " programs"]) -> Any:
    """Return weights (programs) of linear interpolation; beyond the last, extrapolate."""
    if len(nodes) == 1:
        return np.ones(1)
    place = np.arange(len(nodes))
    lower = xp.clip(xp.sum(count >= nodes) - 1, 0, len(nodes) - 2)
    shares = (count - nodes[:-1]) / (nodes[1:] - nodes[:-1])
    share = xp.where(place[:-1] == lower, shares, 0.0).sum(axis=0)
    upper_weight = xp.where(place == lower + 1, share, 0.0)
    return xp.where(place == lower, 1 - share, upper_weight)
