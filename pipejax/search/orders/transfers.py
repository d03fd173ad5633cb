"""Search for a better order of SEND and RECV cells; compute ops keep their order in every row.

The search starts from greedy orders, forwards and backwards, and PyTorch's. Then it changes some
priorities of the best greedy orders at random, and keeps a change that makes the step no longer.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_local_search, check_types, share, wrong
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite
from pipejax.engine.lowering.program import makespan_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import ScheduleError
from pipejax.schedules.table.communication_cells import producer_order, with_transfers
from pipejax.schedules.table.links import LINK_MODELS, Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.search.found import GAP, TIME_LIMIT, Found
from pipejax.search.orders.permutations import LocalSearch
from pipejax.search.orders.transfer_graph import (
    Order,
    WaitsFor,
    heads_and_tails,
    order_makespan,
    priority_order,
    queue_bound,
    transfer_graph,
)

URGENCIES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)  # weights of tails in greedy orders
NUM_DRAWS = 8  # orders of an iteration
SHARES = (0.02, 0.1, 0.5)  # choices of the share of tails that a draw changes
SPREADS = (0.003, 0.01, 0.03, 0.1)  # of their standard deviation, in times of the longest tail


@short_repr
class TransferOrder(NamedTuple):
    """An order of transfers.

    Attributes:
      order: (transfers) messages in order, as `Program.messages` numbers them.
      table: the schedule with SEND and RECV cells in this order.
      links: rendezvous links.
      free_bound: makespan if messages used no resource [s].
    """

    order: Order
    table: ScheduleTable
    links: Links
    free_bound: float


def messages(
    table: ScheduleTable,
    costs: Costs,
    *,
    link: str | Links = "rendezvous",
    iterations: int = 1000,
    time_limit: float | None = TIME_LIMIT,
    seed: int = 0,
    gap: float = GAP,
    on_progress: OnProgress | None = None,
) -> Found[TransferOrder]:
    """Search an order of SEND and RECV cells that makes a table faster under rendezvous.

    No candidate can deadlock, and the result is never slower than a baseline. It is deterministic
    unless the time runs out. An interrupt (Ctrl-C) ends the search with the best order so far.

    Args:
      table: the schedule; its ops keep their order, its communication cells are replaced.
      costs: unbatched costs [s].
      link: "rendezvous", or `Links` with that model.
      iterations: largest number of series of random changes.
      time_limit: time after which no further series starts [s]; None for no limit.
      seed: seed of all random choices.
      gap: the search ends when no order can save more than this share of the makespan; 0: never.
      on_progress: called after each iteration with its number, `iterations`, and a text.

    Returns:
      The best order, as a table; the bound is the larger of `free_bound` and the bound of the
      busiest queue. Baselines are the table's "own" order (its cells, or the default of rendezvous;
      None for a deadlock), "by producer", "pytorch" (as PyTorch lowers a schedule) and "by need"
      (the best greedy order).

    Raises:
      ValueError: if a cost is negative or not finite or has the wrong number of entries, the
        link model is not rendezvous, iterations or time_limit is negative, or gap no share.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=1.0)
      >>> result = pj.search.messages(table, costs, iterations=5)
      >>> result.baselines["by producer"], result.value, result.best.free_bound, result.stopped
      (32.0, 31.0, 31.0, 'optimal')
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    share(gap, "gap")
    search = TransferSearch(table, costs, Links.resolve(link), seed)
    with telling("order", on_progress) as tell:
        return search.run(iterations, time_limit, tell, gap)


def _table_order(
    table: ScheduleTable, costs: Costs, links: Links
) -> tuple[Order | None, float | None]:
    """Return a table's order of transfers, by default that of rendezvous, and its makespan [s]."""
    # Both are None for a deadlock.
    try:
        program, vector = lower_and_price(table, costs, links)
    except ScheduleError:
        return None, None
    return program.transfer_order, makespan_on_host(program, vector)


class TransferSearch(LocalSearch[TransferOrder]):
    """State of the search: the best order, and the inputs of greedy orders."""

    precision = 1e-9  # relative rounding of makespans

    def __init__(self, table: ScheduleTable, costs: Costs, links: Links, seed: int) -> None:
        super().__init__(seed)
        check_usual(table, "the search of SEND and RECV cells")
        costs.check_values()
        if not LINK_MODELS[links.model].is_rendezvous:
            raise wrong("link", f"must be rendezvous, where order matters, got {links.model!r}")
        links.check_known(("model", "queues", "host_links"), "order")
        self._arguments = costs, links
        self.graph = transfer_graph(table, costs, links)
        with np.errstate(over="ignore"):  # the sum of all times bounds every makespan
            check_finite(self.graph.duration.max() * len(self.graph.duration), costs)
        table_order, table_makespan = _table_order(table, costs, links)
        by_producer = producer_order(self.graph.table, links)
        _, by_pytorch = self._run(None, waits=True)
        times = heads_and_tails(self.graph)
        self.free_bound, self.lower_bound = times.makespan, queue_bound(self.graph, times)
        waits = WaitsFor.from_preds(self.graph.preds)
        reverse = WaitsFor(waits.successors, waits.preds)
        # of orders that are built forwards and backwards: edges and direction; and of the best so
        # far its makespan, tails and urgency
        self._directions = (waits, 1), (reverse, -1)
        self._best_greedy = [(np.inf, times.tail, 0.0), (np.inf, times.head, 0.0)]
        by_need = [*self._greedy_orders()]
        starts = [*([] if table_order is None else [table_order]), by_producer, *by_need]
        makespans = [order_makespan(self.graph, order) for order in starts]
        self.evaluated += len(starts)
        self.value = min(makespans)
        self.best = starts[makespans.index(self.value)]
        self.baselines = {
            "own": table_makespan,
            "by producer": makespans[-len(by_need) - 1],
            "pytorch": by_pytorch,
            "by need": min(makespans[-len(by_need) :]),
        }

    def _greedy_orders(self) -> Iterator[Order]:
        """Yield greedy orders, built forwards and backwards, until an order reaches the bound."""
        for urgency, (k, (_, tail, _)) in itertools.product(
            URGENCIES, enumerate([*self._best_greedy])
        ):
            order, end = self._greedy_order(k, tail, urgency)
            yield order
            if end <= self.lower_bound * (1 + self.precision):
                return

    def _greedy_order(
        self, k: int, tail: Float[NumpyArray, " transfers"], urgency: float
    ) -> tuple[Order, float]:
        """Return a greedy order, forwards (0) or backwards (1), and its makespan [s]."""
        edges, direction = self._directions[k]
        order, end = priority_order(self.graph, edges, tail, urgency)
        if end <= self._best_greedy[k][0]:
            self._best_greedy[k] = end, tail, urgency
        return order[::direction], end

    def best_so_far(self) -> tuple[TransferOrder, float]:
        """Return the best order so far, and its makespan [s]."""
        ordered, makespan = self._run(self.best, waits=True)
        if makespan > self.value * (1 + self.precision):  # the step's end waits for SENDs, too
            ordered, makespan = self._run(self.best, waits=False)
        best = TransferOrder(self.best, ordered, self._arguments[1], self.free_bound)
        return best, makespan

    def _run(self, order: Order | None, *, waits: bool) -> tuple[ScheduleTable, float]:
        """Return a table in an order of transfers (default: PyTorch's), and its makespan [s]."""
        costs, links = self._arguments
        ordered = with_transfers(self.graph.table, order, links, waits=waits)
        return ordered, makespan_on_host(*lower_and_price(ordered, costs, links))

    def step(self, iteration: int) -> None:
        """Change the best greedy orders at random, some times; keep the best order."""
        for draw in range(NUM_DRAWS):
            _, tail, urgency = self._best_greedy[draw % 2]
            is_changed = self.rng.random(len(tail)) < self.rng.choice(SHARES)
            spread = self.rng.choice(SPREADS) * tail.max(initial=0.0)
            change = is_changed * self.rng.normal(0, spread, len(tail))
            new_tail = np.maximum(tail + change, 0)
            order, makespan = self._greedy_order(draw % 2, new_tail, urgency)
            self.evaluated += 1
            if makespan < self.value:
                self.best, self.value = order, makespan
