"""The batched pricer: from the numbers of many configurations to costs, makespans and slopes.

    numbers --price--> Costs --solve--> makespans, counts --> slopes

A function `price_one(shared, at, row)` computes the costs of one configuration: it returns a tree
of arrays, such as `Costs`, from inputs that all configurations share, from the numbers to
differentiate by (`at`), and from other inputs of the configuration (`row`).

The counts of the costs on the critical path (`makespans_and_grad`) turn a step time into a plain
sum of costs, whose derivatives (slopes) are those of the step time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.many_numbers import Many, many_values, to_many
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import below_threshold, without_eager_limit
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

# sizes to which batches are padded: few for small batches, closer where padding costs work
SIZES = np.concatenate([[64, 512], 4096 * 2 ** np.arange(19)])
Rows = Int[NumpyArray, " rows"]
Tree = Any  # a pytree of arrays
PriceOne = Callable[..., Tree]


def batch_length(batch: Tree) -> int:
    """Return the number of configurations of a batch."""
    return len(jax.tree.leaves(batch)[0])


def padded(batch: Tree, size: int) -> Tree:
    """Pad a batch to the next of the `SIZES` by repeating its last configuration."""
    rows = np.minimum(np.arange(SIZES[np.searchsorted(SIZES, size)]), size - 1)
    return jax.tree.map(lambda leaf: leaf[rows], batch)


def priced_on_host(
    price_one: PriceOne, shared: Tree, at: Tree, rows: Tree, *, slopes: bool = False
) -> tuple[Tree, Tree]:
    """Return costs of a small batch, and derivatives by the numbers `at`, without compiling."""
    # `price_one(shared, at, row)` prices a configuration; `shared` is the same for all. Costs are
    # (batch, ..), derivatives (batch, numbers of `at`, ..), or None without `slopes`.
    leaves, structure = jax.tree.flatten(at)
    size, ends = batch_length((at, rows)), np.cumsum([0, *(leaf[0].size for leaf in leaves)])
    numbers = []  # forward mode: derivatives of the numbers by themselves are the identity matrix
    for k, leaf in enumerate(leaves):
        identity = np.eye(leaf[0].size).reshape(1, leaf[0].size, *leaf.shape[1:])
        numbers.append(Many(np.asarray(leaf), {str(k): identity} if slopes else {}))
    row = jax.tree.map(to_many, rows)
    prices = price_one(shared, jax.tree.unflatten(structure, numbers), row)

    def for_all(leaf: NumpyArray) -> NumpyArray:
        """Broadcast an array of shape (batch or 1, ..) to the whole batch."""
        return np.broadcast_to(leaf, (size, *leaf.shape[1:]))

    def slopes_for_all(leaf: Any) -> NumpyArray:
        """Return a cost's derivatives (batch, numbers, ..); 0 by numbers that it does not use."""
        all_slopes = np.zeros((size, ends[-1], *np.shape(leaf)))
        for name, slope in leaf.slopes.items() if isinstance(leaf, Many) else ():
            all_slopes[:, ends[int(name)] : ends[int(name) + 1]] = slope
        return all_slopes

    values = jax.tree.map(lambda leaf: for_all(many_values(leaf)), prices)
    return values, jax.tree.map(slopes_for_all, prices) if slopes else None


def path_slopes(counts: Any, slopes: Costs) -> Float[NumpyArray, "batch numbers"]:
    """Return derivatives of step times: for each cost, count on the path times its derivative."""
    sums = np.zeros(())
    for name, slope in vars(slopes).items():  # (batch, numbers, ..)
        if slope is not None:
            count = np.asarray(getattr(counts, name))[:, None]  # (batch, 1, ..)
            sums = sums + (count * slope).reshape(*slope.shape[:2], -1).sum(axis=-1)
    return sums


def programs_of_batch(
    table: ScheduleTable, links: Links, costs: Costs
) -> Iterator[tuple[Program, Rows | None]]:
    """Yield (program, configurations for which it is valid, or None for all) of a table."""
    # There is one program for each set of messages that are below `Links.eager_below`.
    if not links.eager_below:
        yield lower(table, link=links), None
        return
    is_below = below_threshold(costs.transmit, links.eager_below, batch_axes=1)
    rows = is_below.reshape(len(is_below), -1)
    _, first, kind = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    arrays: Costs = jax.tree.map(np.atleast_1d, costs)
    for number, row in enumerate(first.tolist()):
        row_costs = jax.tree.map(lambda leaf, row=row: leaf[min(row, len(leaf) - 1)], arrays)
        program = without_eager_limit(lower(table, link=links, costs=row_costs))
        yield program, None if len(first) == 1 else np.flatnonzero(kind.ravel() == number)
