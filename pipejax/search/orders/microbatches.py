"""Search for the order in which unequal microbatches enter the pipeline.

A schedule leaves open which part of the data is microbatch 0. A local search over permutations
chooses the order. Its moves are swaps and insertions; the engine evaluates all neighbours of an
order in one batch.
"""

from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_local_search, check_types
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import leaves, mapped
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs, differs_by_microbatch
from pipejax.costs.stage.microbatches import in_order
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.orders.permutations import (
    BATCH,
    Order,
    Orders,
    PermutationSearch,
    batched_makespans,
    order_bound,
    orders_of_longest,
    with_shortest,
)

MAX_NUMBERS = 1 << 24  # numbers in the costs of a batch


@short_repr
class MicrobatchOrder(NamedTuple):
    """An order of microbatches.

    Attributes:
      order: (microbatches) order[k] is the microbatch that the table runs as its k-th.
      costs: costs of the table in this order.
    """

    order: Order
    costs: Costs


def microbatches(
    table: ScheduleTable,
    costs: Costs,
    *,
    link: str | Links = "delay",
    iterations: int = 200,
    time_limit: float | None = TIME_LIMIT,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Found[MicrobatchOrder]:
    """Search the order of microbatches that makes the step shortest.

    The table does not change; it runs microbatch `order[k]` as its k-th. If there are at most
    50,000 different orders, the search evaluates all. The result is never slower than a baseline,
    and deterministic unless the time runs out. An interrupt (Ctrl-C) ends the search with the best
    order so far.

    Args:
      table: the schedule.
      costs: unbatched costs per microbatch [s].
      link: link model, or `Links`.
      iterations: largest number of batches of orders.
      time_limit: time after which no further batch starts [s]; None for no limit.
      seed: seed of all random choices.
      on_progress: called after each batch with its number, `iterations`, and a text.

    Returns:
      The best order. If all orders were evaluated, the lower bound is its makespan. Baselines are
      the "given" order, "ascending" and "descending" times of microbatches, and the best and the
      mean of random orders ("best of random", "mean of random").

    Raises:
      ValueError: as `evaluate`; or if no cost differs by microbatch, or iterations, seed or
        time_limit is negative.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> lengths = [1.0, 1.0, 1.0, 8.0, 2.0, 1.0, 4.0, 1.0]
      >>> costs = pj.Costs(forward=1.0, backward=2.0)
      >>> costs = pj.costing.scaled_costs(costs, table, microbatches=lengths)
      >>> result = pj.search.microbatches(table, costs)
      >>> result.value, result.baselines["ascending"], result.baselines["descending"]
      (114.0, 121.0, 125.0)
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    search = MicrobatchSearch(table, costs, Links.resolve(link), seed)
    with telling("arrange", on_progress) as tell:
        return search.run(iterations, time_limit, tell)


class MicrobatchSearch(PermutationSearch[MicrobatchOrder]):
    """State of the search for an order of microbatches."""

    def __init__(self, table: ScheduleTable, costs: Costs, links: Links, seed: int) -> None:
        super().__init__(seed)
        check_usual(table, "the search of microbatches")
        costs.check_values()
        self._arguments = table, costs, links
        self._costs = mapped(lambda leaf: np.asarray(leaf, np.float64), costs)
        self.program, _ = lower_and_price(table, costs, links)
        if not costs.per_microbatch():
            raise ValueError(
                "costs do not differ by microbatch, any order is as good: give --lengths FILE or "
                "--costs FILE with a value for each stage and microbatch"
            )
        numbers = sum(np.size(leaf) for leaf in leaves(costs))
        self.batch = max(1, min(BATCH, MAX_NUMBERS // numbers))
        count = table.num_microbatches
        self.kind = _kinds(costs, count)
        descending = np.argsort(-_work(costs, count), kind="stable")
        ascending = descending[::-1]
        named = {"given": np.arange(count), "ascending": ascending, "descending": descending}
        # orders with the longest microbatches in the middle, or at both ends. Alternate members go
        # to the left and, reversed, to the right: 1 2 3 4 becomes 1 3 4 2.
        hills = [np.append(order[::2], order[1::2][::-1]) for order in (ascending, descending)]
        self.start_from(named, *hills, random="random")
        # a lower bound: all microbatches but the longest are artificial (`count`), with least costs
        extended_costs = with_shortest(self._costs)
        makespans = batched_makespans(
            self.program,
            lambda orders: in_order(extended_costs, orders),
            orders_of_longest(int(descending[0]), count, count),
            self.batch,
        )
        self.lower_bound = max(order_bound(table, costs, links), float(makespans.min()))

    def order_costs(self, orders: Orders) -> Costs:
        """Return the costs of a batch of orders."""
        return in_order(self._costs, orders)

    def best_so_far(self) -> tuple[MicrobatchOrder, float]:
        """Return the best order so far, and its makespan [s]."""
        table, costs, links = self._arguments
        ordered = in_order(costs, self.best)
        return MicrobatchOrder(self.best, ordered), evaluate(table, ordered, link=links).makespan


def _work(costs: Costs, count: int) -> Float[NumpyArray, " microbatches"]:
    """Return (microbatches) mean compute times over the stages [s]."""
    times = (np.asarray(time, float) for time in (costs.forward, costs.backward))
    means = (time.mean(axis=0) if time.ndim == 2 else time.mean() for time in times)
    return np.broadcast_to(sum(means), count)


def _kinds(costs: Costs, count: int) -> Order:
    """Return (microbatches) the number of a kind; microbatches of equal costs share a kind."""
    rows = [
        np.asarray(time).reshape(-1, count)
        for name, time in vars(costs).items()
        if differs_by_microbatch(name, time)
    ]
    _, kind = np.unique(np.concatenate(rows), axis=1, return_inverse=True)
    return kind.reshape(count)
