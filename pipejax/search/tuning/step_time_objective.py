"""What is made small: a number that depends on makespans, and its gradient.

The makespans come from the batched engine, which is no traced function. So the chain is written
out: variables -> costs -> makespans -> value. Going back, the value's derivative with respect to
each makespan weighs the counts of that makespan, and one pull through the pricing turns them into
derivatives of the variables.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.engine.batched.makespans import makespans, makespans_and_grad
from pipejax.engine.lowering.program import Program

Values = Float[Array, " batch"] | Float[NumpyArray, " batch"]
Tree = Any  # a pytree of arrays
# sizes of batches that are compiled for: few while work is little, closer where it counts
BUCKETS = np.concatenate([[64, 512], 4096 * 2 ** np.arange(19)])


def in_bucket(tree: Tree, size: int) -> Tree:
    """Repeat the last configuration up to one of a few sizes, so that few are compiled for."""
    index = np.minimum(np.arange(BUCKETS[np.searchsorted(BUCKETS, size)]), size - 1)
    return jax.tree.map(lambda leaf: leaf[index], tree)


def exact_makespans(program: Program, costs: Costs) -> Values:
    """Makespans of any number of configurations, without a compilation for every number.

    Returns (batch) makespans [s].
    """
    size = max(len(leaf) for leaf in jax.tree.leaves(costs))
    full = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (size, *np.shape(leaf)[1:])), costs)
    return np.asarray(makespans(program, in_bucket(full, size), unroll=False))[:size]


@dataclasses.dataclass(frozen=True, eq=False)
class StepTimeObjective:
    """A value of makespans, for batches of variables.

    Attributes:
      programs: lowered schedules that share one set of costs.
      price: (variables, given) -> costs of one configuration [s]; traceable.
      value: (variables, makespans, given) -> what is made small; traceable.
    """

    programs: tuple[Program, ...]
    price: Callable[[Tree, Tree], Costs]
    value: Callable[[Tree, Float[Array, " programs"], Tree], Float[Array, ""]]

    def costs(self, variables: Tree, given: Tree) -> Costs:
        """Price a batch: Costs with the same axis, as NumPy's arrays [s]."""
        size = len(jax.tree.leaves(variables)[0])
        priced = self._priced(*in_bucket((variables, given), size))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:size], priced)

    def values(self, variables: Tree, given: Tree) -> Values:
        """Evaluate a batch: (batch) values."""
        size = len(jax.tree.leaves(variables)[0])
        variables, given = in_bucket((variables, given), size)
        costs = self._priced(variables, given)
        ends = [makespans(program, costs, unroll=False) for program in self.programs]
        found, _ = self._valued(variables, jnp.stack(ends, axis=1), given)
        return np.asarray(found)[:size]

    def value_and_grad(self, variables: Tree, given: Tree) -> tuple[Values, Tree]:
        """Evaluate a batch, and the derivative with respect to the variables.

        Returns (batch) values, and derivatives like the variables.
        """
        costs = self._priced(variables, given)
        ends, counts = zip(
            *(makespans_and_grad(program, costs) for program in self.programs), strict=True
        )
        found, (direct, weights) = self._valued(variables, jnp.stack(ends, axis=1), given)
        pulled = self._pulled(variables, given, weights, counts)
        return found, jax.tree.map(jnp.add, direct, pulled)

    @functools.cached_property
    def _priced(self) -> Callable[..., Costs]:
        return jax.jit(jax.vmap(self.price))

    @functools.cached_property
    def _valued(self) -> Callable[..., tuple[Array, tuple[Tree, Array]]]:
        return jax.jit(jax.vmap(jax.value_and_grad(self.value, argnums=(0, 1))))

    @functools.cached_property
    def _pulled(self) -> Callable[..., Tree]:
        def one(variables: Tree, given: Tree, weights: Array, counts: tuple[Costs, ...]) -> Tree:
            _, pull = jax.vjp(lambda moved: self.price(moved, given), variables)
            total = jax.tree.map(
                lambda *each: sum(w * count for w, count in zip(weights, each, strict=True)),
                *counts,
            )
            return pull(total)[0]

        return jax.jit(jax.vmap(one))
