"""The objective: step times of batches of variables, through costs and makespans, in JAX.

A `Relax` says what variables mean: a model on a system, and a microbatch size, all real numbers.
At fixed costs the makespan is affine in M beyond a few periods, so the makespans of a few small
programs give that of every M = N / b; those of one program are exact for its own M.

Compiled functions take all numbers as arguments, so one compilation serves all calls of a shape.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import PricingShape, StageLayers
from pipejax.costs.stage.stage_bytes import stage_bytes
from pipejax.costs.stage.stage_costs import costs_of_shape
from pipejax.costs.system.system import Number, System
from pipejax.engine.batched.makespans import makespans, makespans_and_grad
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.held_activations import HeldCounts
from pipejax.search.tuning.descent import Descent, descend

OVERRUN = 10.0  # relative penalty of memory beyond the limit, per share of the limit
PerConfiguration = Float[NumpyArray, " batch"]
Tree = Any  # a pytree of arrays
# sizes of batches that are compiled for: few while work is little, closer where it counts
BUCKETS = np.concatenate([[64, 512], 4096 * 2 ** np.arange(19)])


class Pair(NamedTuple):
    """A model on a system, or a batch of them: numbers only, so that pairs are mapped over.

    Attributes:
      model: the transformer; every number with a leading pair axis.
      system: the machine, likewise.
      assigned: (pairs, stages) layers of each stage, and those recomputed.
      minibatch: (pairs) sequences per step and pipeline.
    """

    model: Model
    system: System
    assigned: StageLayers
    minibatch: Float[NumpyArray, " pairs"]


class Given(NamedTuple):
    """Inputs of the step time of one configuration besides its variables.

    Attributes:
      pair: the model on the system.
      size: b, where the variables say nothing of it [sequences].
      capacity: memory limit, infinite for none [B].
      bought: what a share of 1 of a budget buys of each part; 0 where nothing is bought.
    """

    pair: Pair
    size: Number
    capacity: Number
    bought: Number = 0.0


Relax = Callable[[Any, Given], tuple[Pair, Number]]


def in_bucket(tree: Tree, size: int) -> Tree:
    """Pad with the last configuration to one of a few sizes, so that few are compiled."""
    index = np.minimum(np.arange(BUCKETS[np.searchsorted(BUCKETS, size)]), size - 1)
    return jax.tree.map(lambda leaf: leaf[index], tree)


@dataclasses.dataclass(frozen=True, eq=False)
class StepTimeObjective:
    """Step times, with a penalty where memory is short, for batches of variables.

    Attributes:
      counts: microbatches of each program, ascending.
      programs: lowered schedules.
      held: what their workers hold.
      shape: what prices are compiled for.
      relax: what the variables mean; a function of a module.
    """

    counts: tuple[int, ...]
    programs: tuple[Program, ...]
    held: tuple[HeldCounts, ...]
    shape: PricingShape
    relax: Relax

    def evaluate(self, variables: Tree, given: Given) -> tuple[PerConfiguration, PerConfiguration]:
        """Evaluate a batch: (batch) values [s], and memory of the fullest worker [B]."""
        size = len(jax.tree.leaves(variables)[0])
        found = self._values(*in_bucket((variables, given), size))
        value, need = (np.asarray(each)[:size] for each in found)
        return value, need

    def value_and_grad(self, variables: Tree, given: Given) -> tuple[Float[Array, " batch"], Tree]:
        """Evaluate a batch, and the derivative with respect to the variables.

        Returns (batch) values, and derivatives like the variables.
        """
        how = {"shape": self.shape, "relax": self.relax}
        costs, moved = _priced_with_slopes(variables, given, **how)
        ends = [makespans_and_grad(program, costs) for program in self.programs]
        nodes = np.array(self.counts, float)
        return _valued_with_slopes(variables, ends, moved, given, nodes, self.held, **how)

    def costs(self, variables: Tree, given: Given) -> Costs:
        """Price a batch: costs whose leaves have (batch, ...) entries [s]."""
        size = len(jax.tree.leaves(variables)[0])
        found = _priced(*in_bucket((variables, given), size), shape=self.shape, relax=self.relax)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:size], found)

    def need_and_grad(self, variables: Tree, given: Given) -> tuple[PerConfiguration, Tree]:
        """Memory of the fullest worker (batch) [B], and its derivatives like the variables."""
        size = len(jax.tree.leaves(variables)[0])
        found = _need_with_slopes(
            *in_bucket((variables, given), size),
            np.array(self.counts, float),
            self.held,
            shape=self.shape,
            relax=self.relax,
        )
        need, slopes = jax.tree.map(lambda leaf: np.asarray(leaf)[:size], found)
        return need, slopes

    def minima(
        self,
        starts: Float[NumpyArray, "starts pairs ..."],
        given: Given,
        *,
        steps: int,
        rate: float,
        lower: Float[NumpyArray, "pairs ..."] | float = -np.inf,
        upper: Float[NumpyArray, "pairs ..."] | float = np.inf,
    ) -> Descent:
        """Descend from several starts of each pair, all at once.

        Returns (starts, pairs, ...) points, and (starts, pairs) their values.
        """
        count, pairs = starts.shape[:2]
        size, owner = count * pairs, np.tile(np.arange(pairs), count)
        flat = starts.reshape(size, *starts.shape[2:])
        low, high = (np.broadcast_to(each, starts.shape[1:])[owner] for each in (lower, upper))
        given = jax.tree.map(lambda leaf: leaf[owner], given)
        flat, low, high, given = in_bucket((flat, low, high, given), size)
        found = descend(
            lambda points: self.value_and_grad(points, given),
            flat,
            steps=steps,
            rate=rate,
            lower=low,
            upper=high,
        )
        return Descent(*(each[:size].reshape(count, pairs, *each.shape[1:]) for each in found))

    def _values(self, variables: Tree, given: Given) -> tuple[Array, Array]:
        how = {"shape": self.shape, "relax": self.relax}
        costs = _priced(variables, given, **how)
        ends = [makespans(program, costs, unroll=False) for program in self.programs]
        return _valued(variables, ends, given, np.array(self.counts, float), self.held, **how)


# Of all configurations, without and with the derivatives along each of their variables. Those are
# taken in forward mode: counts of FLOP and bytes share so many terms that XLA takes five times as
# long to compile their reverse pass.


@functools.partial(jax.jit, static_argnames=("shape", "relax"))
def _priced(variables: Tree, given: Given, **how: Any) -> Costs:
    return jax.vmap(lambda *each: _price(*each, **how))(variables, given)


@functools.partial(jax.jit, static_argnames=("shape", "relax"))
def _priced_with_slopes(variables: Tree, given: Given, **how: Any) -> tuple[Costs, Costs]:
    """Costs (batch, ...), and their slopes (batch, variables, ...)."""

    def of_one(variables: Tree, given: Given) -> tuple[Costs, Costs]:
        flat, put = ravel_pytree(variables)

        def along(direction: Float[Array, " variables"]) -> tuple[Costs, Costs]:
            return jax.jvp(lambda at: _price(put(at), given, **how), (flat,), (direction,))

        return jax.vmap(along, out_axes=(None, 0))(jnp.eye(len(flat)))

    return jax.vmap(of_one)(variables, given)


def _price(variables: Tree, given: Given, *, shape: PricingShape, relax: Relax) -> Costs:
    """Costs of one configuration."""
    pair, size = relax(variables, given)
    return costs_of_shape(shape, pair.model, pair.system, pair.assigned, size)


@functools.partial(jax.jit, static_argnames=("shape", "relax"))
def _valued(
    variables: Tree,
    ends: Sequence[Any],
    given: Given,
    nodes: Float[Array, " programs"],
    held: tuple[HeldCounts, ...],
    **how: Any,
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    def of_one(variables: Tree, ends: Sequence[Array], given: Given) -> tuple[Array, Array]:
        return _value(variables, ends, given, nodes=nodes, held=held, **how)

    return jax.vmap(of_one)(variables, ends, given)


@functools.partial(jax.jit, static_argnames=("shape", "relax"))
def _valued_with_slopes(
    variables: Tree,
    ends: Sequence[tuple[PerConfiguration, Costs]],
    moved: Costs,
    given: Given,
    nodes: Float[Array, " programs"],
    held: tuple[HeldCounts, ...],
    **how: Any,
) -> tuple[Float[Array, " batch"], Tree]:
    """Values, and their derivatives, from step times with their counts and slopes of costs."""

    def of_one(variables: Tree, ends: Any, moved: Costs, given: Given) -> tuple[Array, Tree]:
        flat, put = ravel_pytree(variables)
        times, counts = [time for time, _ in ends], [count for _, count in ends]

        def value(at: Array, times: Sequence[Array]) -> Array:
            return _value(put(at), times, given, nodes=nodes, held=held, **how)[0]

        def along(direction: Float[Array, " variables"], moved: Costs) -> tuple[Array, Array]:
            on_paths = [_sum_along(count, moved) for count in counts]
            return jax.jvp(value, (flat, times), (direction, on_paths))

        found, slopes = jax.vmap(along, out_axes=(None, 0))(jnp.eye(len(flat)), moved)
        return found, put(slopes)

    return jax.vmap(of_one)(variables, ends, moved, given)


@functools.partial(jax.jit, static_argnames=("shape", "relax"))
def _need_with_slopes(
    variables: Tree,
    given: Given,
    nodes: Float[Array, " programs"],
    held: tuple[HeldCounts, ...],
    **how: Any,
) -> tuple[Float[Array, " batch"], Tree]:
    """Memory needs, and their derivatives, which no cost is needed for."""

    def of_one(variables: Tree, given: Given) -> tuple[Array, Tree]:
        def need(at: Tree) -> Array:
            none = [jnp.zeros(())] * len(held)
            return _value(at, none, given, nodes=nodes, held=held, **how)[1]

        return jax.value_and_grad(need)(variables)

    return jax.vmap(of_one)(variables, given)


def _sum_along(counts: Costs, moved: Costs) -> Array:
    """How far the end of a critical path moves [s], if costs so often on it move."""
    parts = jax.tree.map(lambda count, move: (count * move).sum(), counts, moved)
    return sum(jax.tree.leaves(parts), jnp.zeros(()))


def _value(
    variables: Tree,
    ends: Sequence[Array],
    given: Given,
    *,
    nodes: Float[Array, " programs"],
    held: tuple[HeldCounts, ...],
    shape: PricingShape,
    relax: Relax,
) -> tuple[Array, Array]:
    """Value [s] and memory [B] of one configuration."""
    pair, size = relax(variables, given)
    workload = dataclasses.replace(shape.workload, model=pair.model)
    memory = stage_bytes(workload, shape.table, pair.assigned, size)
    weights = _weights(pair.minibatch / size, nodes)
    peaks = jnp.stack([each.activation_bytes(memory.parts) for each in held])
    need = jnp.max(held[0].static_bytes(memory.static, memory.version) + weights @ peaks)
    # a descent is led back to where memory is enough
    overrun = jnp.maximum(need / given.capacity - 1, 0)
    return weights @ jnp.stack(ends) * (1 + OVERRUN * overrun), need


def _weights(count: Number, nodes: Float[Array, " programs"]) -> Float[Array, " programs"]:
    """Weights (programs) of linear interpolation, extrapolating from the last two."""
    if len(nodes) == 1:
        return jnp.ones(1)
    left = jnp.clip(jnp.sum(count >= nodes) - 1, 0, len(nodes) - 2)
    share = (count - nodes[left]) / (nodes[1:] - nodes[:-1])[left]
    place = jnp.arange(len(nodes))
    return jnp.where(place == left, 1 - share, jnp.where(place == left + 1, share, 0.0))
