"""The objective: step times of batches of variables, through costs and makespans, in JAX.

A `Relax` says what variables mean: a model on a system, and a microbatch size, all real numbers.
At fixed costs the makespan is affine in M beyond a few periods, so the makespans of a few small
programs give that of every M = N / b; those of one program are exact for its own M.

Compiled functions take all numbers as arguments, so one compilation serves all calls of a shape.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.costs.model import Model
from pipejax.costs.stage_bytes import stage_bytes
from pipejax.costs.stage_costs import work_costs
from pipejax.costs.stage_work import stage_work
from pipejax.costs.system import Number, System
from pipejax.costs.workload import PricingShape, StageLayers
from pipejax.engine.batched.makespans import makespans
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
        _, put = ravel_pytree(jax.tree.map(operator.itemgetter(0), variables))
        flat = jax.vmap(lambda one: ravel_pytree(one)[0])(variables)

        def along(direction: Float[Array, " variables"]) -> tuple[Array, Array]:
            """Values, and their derivatives along one direction: no value depends on another's."""
            move = jnp.broadcast_to(direction, flat.shape)
            return jax.jvp(lambda at: self._values(jax.vmap(put)(at), given)[0], (flat,), (move,))

        # forward mode compiles in a fifth of the time: counts of FLOP and bytes share many terms
        values, slopes = jax.vmap(along, out_axes=(None, 1))(jnp.eye(flat.shape[1]))
        return values, jax.vmap(put)(slopes)

    def minima(
        self,
        starts: Float[NumpyArray, "starts pairs ..."],
        given: Given,
        *,
        steps: int,
        rate: float,
        lower: float = -np.inf,
        upper: Float[NumpyArray, " pairs"] | float = np.inf,
    ) -> Descent:
        """Descend from several starts of each pair, all at once.

        Returns (starts, pairs, ...) points, and (starts, pairs) their values.
        """
        count, pairs = starts.shape[:2]
        size, owner = count * pairs, np.tile(np.arange(pairs), count)
        flat = starts.reshape(size, *starts.shape[2:])
        limits = np.broadcast_to(upper, pairs)[owner].reshape(size, *(1,) * (flat.ndim - 1))
        given = jax.tree.map(lambda leaf: leaf[owner], given)
        flat, limits, given = in_bucket((flat, limits, given), size)
        found = descend(
            lambda points: self.value_and_grad(points, given),
            flat,
            steps=steps,
            rate=rate,
            lower=lower,
            upper=limits,
        )
        return Descent(*(each[:size].reshape(count, pairs, *each.shape[1:]) for each in found))

    def _values(self, variables: Tree, given: Given) -> tuple[Array, Array]:
        how = {"shape": self.shape, "relax": self.relax}
        costs = _priced(variables, given, **how)
        ends = tuple(makespans(program, costs, unroll=False) for program in self.programs)
        return _valued(variables, ends, given, np.array(self.counts, float), self.held, **how)


@functools.partial(jax.jit, static_argnames=("shape", "relax"))
def _priced(variables: Tree, given: Given, *, shape: PricingShape, relax: Relax) -> Costs:
    def price(variables: Tree, given: Given) -> Costs:
        pair, size = relax(variables, given)
        work = stage_work(
            dataclasses.replace(shape.workload, model=pair.model),
            shape.table,
            assigned=pair.assigned,
            microbatch_size=size,
        )
        return work_costs(work, pair.system)

    return jax.vmap(price)(variables, given)


@functools.partial(jax.jit, static_argnames=("shape", "relax"))
def _valued(
    variables: Tree,
    ends: tuple[Float[Array, " batch"], ...],
    given: Given,
    counts: Float[Array, " programs"],
    held: tuple[HeldCounts, ...],
    *,
    shape: PricingShape,
    relax: Relax,
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    def value(variables: Tree, ends: tuple[Array, ...], given: Given) -> tuple[Array, Array]:
        pair, size = relax(variables, given)
        workload = dataclasses.replace(shape.workload, model=pair.model)
        memory = stage_bytes(workload, shape.table, pair.assigned, size)
        weights = _weights(pair.minibatch / size, counts)
        peaks = jnp.stack([each.activation_bytes(memory.parts) for each in held])
        need = jnp.max(held[0].static_bytes(memory.static, memory.version) + weights @ peaks)
        # a descent is led back to where memory is enough
        overrun = jnp.maximum(need / given.capacity - 1, 0)
        return weights @ jnp.stack(ends) * (1 + OVERRUN * overrun), need

    return jax.vmap(value)(variables, ends, given)


def _weights(count: Number, nodes: Float[Array, " programs"]) -> Float[Array, " programs"]:
    """Weights (programs) of linear interpolation, extrapolating from the last two."""
    if len(nodes) == 1:
        return jnp.ones(1)
    left = jnp.clip(jnp.sum(count >= nodes) - 1, 0, len(nodes) - 2)
    share = (count - nodes[left]) / (nodes[1:] - nodes[:-1])[left]
    place = jnp.arange(len(nodes))
    return jnp.where(place == left, 1 - share, jnp.where(place == left + 1, share, 0.0))
