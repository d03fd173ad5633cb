"""The order of communication as a design axis: search for a better order of SEND and RECV cells.

Only the order of the transfers is searched; the ops of every row stay as they are. Greedy orders
come first, from the first op on and from the last one back, and PyTorch's. Then comes tabu search:
swaps of neighbours in a queue (`swaps`), and where these find nothing better, one move that reaches
further. Of a batch of such moves, which the engine runs as one, the best is taken even where it is
worse, and its transfer then rests for a while.

A schedule gets shorter only if its critical path is broken, and the order of transfers can break
it only where transfers follow each other on it. So moves reorder two transfers of such a block;
where there are too few of them, any transfer moves a little.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_local_search, check_types, share, wrong
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite
from pipejax.engine.lowering.program import SOURCE
from pipejax.engine.pricing import lower_and_price
from pipejax.engine.recurrence_host import makespan_on_host
from pipejax.schedules.cells.ops import ScheduleError
from pipejax.schedules.table.communication_cells import (
    producer_order,
    with_transfers,
)
from pipejax.schedules.table.links import LINK_MODELS, Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.search.found import GAP, TIME_LIMIT, Found
from pipejax.search.orders.local_search import LocalSearch
from pipejax.search.orders.permutations import inserted
from pipejax.search.orders.transfer_graph import (
    HeadsTails,
    Order,
    Orders,
    TransferGraph,
    WaitsFor,
    finish_of_orders,
    heads_and_tails,
    invert_orders,
    legal_range,
    priority_order,
    queue_bound,
    queue_preds,
    transfer_graph,
)
from pipejax.search.orders.transfer_swaps import SwapSearch

URGENCIES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)  # greedy orders that the search starts from
BATCH = 64  # moves that the engine runs at once
SWAPS = 64  # swaps of an iteration
MAX_BATCH_NODES = 1 << 22  # nodes of all orders in a batch: fewer moves for a very long table
REST = (8, 20)  # iterations for which a transfer that has moved rests
PATIENCE = 150  # iterations without a better order after which the best one is shaken
SHAKES = 10  # random moves that shake it
REACH = 32  # positions by which a transfer off the critical path moves at most


@short_repr
class TransferOrder(NamedTuple):
    """An order of transfers.

    Attributes:
      order: (transfers) messages in order, as `Program.messages` numbers them.
      table: the schedule with SEND and RECV cells in that order, and waits that delay nothing.
      links: rendezvous, and what else was said about the links.
      free_bound: makespan if messages used no resource [s].
    """

    order: Order
    table: ScheduleTable
    links: Links
    free_bound: float


class _FoundOrder(NamedTuple):
    """An order and its finish times."""

    order: Order
    finish: Float[NumpyArray, " nodes"]

    @property
    def makespan(self) -> float:
        return float(self.finish.max())


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

    No order that is tried can deadlock, and the result is never slower than a baseline. The same
    arguments give the same result, unless the time runs out. An interrupt (Ctrl-C) ends the search
    with the best order so far.

    Args:
      table: the schedule; its ops stay in their order, its communication cells give way.
      costs: unbatched costs [s].
      link: "rendezvous", or `Links` with that model.
      iterations: most batches of moves to try.
      time_limit: when no further batch starts [s]; None for no limit.
      seed: of all random choices.
      gap: the search ends when no order saves more than this share of the makespan; 0 for no end.
      on_progress: called after each iteration with its number, `iterations`, and the best makespan
        so far as a text; a bar in notebooks if None.

    Returns:
      The best order, as a table; the bound is the larger of `free_bound` and what the busiest queue
      takes. Baselines are the table's "own" order (its cells, or what rendezvous assumes without
      cells; None where it deadlocks), "by producer", "pytorch" (cell by cell as PyTorch lowers a
      schedule) and "by need" (the best greedy order).

    Raises:
      ValueError: if a cost is negative or not finite or has the wrong number of entries, the
        link model is not rendezvous, iterations or time_limit is negative, or gap no share.

    Cost:
      Each iteration makes up to 64 swaps, each of which runs what it changes again, and where they
      find nothing better runs up to 64 orders at once, node by node; nothing is compiled.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=1.0)
      >>> found = pj.search.messages(table, costs, iterations=5)
      >>> found.baselines["by producer"], found.value, found.best.free_bound, found.stopped
      (32.0, 31.0, 31.0, 'optimal')
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    share(gap, "gap")
    search = TransferSearch(table, costs, Links.resolve(link), seed)
    with telling("order", on_progress) as tell:
        return search.run(iterations, time_limit, tell, gap)


def _own_order(
    table: ScheduleTable, costs: Costs, links: Links
) -> tuple[Order | None, float | None]:
    """Order of the table's cells, or the default one, and its makespan with its waits [s]."""
    # None for a deadlock.
    try:
        program, vector = lower_and_price(table, costs, links)
    except ScheduleError:
        return None, None
    return program.transfer_order, makespan_on_host(program, vector)


class TransferSearch(LocalSearch[TransferOrder]):
    """State of the local search: current and best order, and which transfers rest."""

    precision = 1e-9  # what is closer is rounding

    def __init__(
        self, table: ScheduleTable, costs: Costs, links: Links, seed: int, *, swaps: int = SWAPS
    ) -> None:
        super().__init__(seed)
        check_usual(table, "the search of SEND and RECV cells")
        costs.check_values()
        if not LINK_MODELS[links.model].is_rendezvous:
            raise wrong("link", f"must be rendezvous, where order matters, got {links.model!r}")
        links.check_known(("model", "queues", "host_links"), "order")
        self._arguments = costs, links
        self.graph = transfer_graph(table, costs, links)
        with np.errstate(over="ignore"):  # no order takes longer than one after the other
            check_finite(self.graph.duration.max() * len(self.graph.duration), costs)
        as_is, table_makespan = _own_order(table, costs, links)
        by_producer = producer_order(self.graph.table, links)
        _, by_pytorch = self._run(None, waits=True)
        times = heads_and_tails(self.graph)
        self.free_bound, self.lower_bound = times.makespan, queue_bound(self.graph, times)
        self._batch = max(1, min(BATCH, MAX_BATCH_NODES // self.graph.program.num_nodes))
        self._rests_until = np.zeros(self.graph.num_transfers, int)
        by_need = [*self._greedy(times)]
        starts = [by_producer, *by_need] if as_is is None else [as_is, by_producer, *by_need]
        makespans = self._begin(np.stack(starts))
        self.baselines = {
            "own": table_makespan,
            "by producer": makespans[-len(by_need) - 1],
            "pytorch": by_pytorch,
            "by need": min(makespans[-len(by_need) :]),
        }
        self._num_swaps = swaps

    @functools.cached_property
    def _swaps(self) -> SwapSearch:
        """The search by swaps, which nothing needs where a start is optimal."""
        return SwapSearch(self.graph, self.best.order, self.rng)

    def _greedy(self, times: HeadsTails) -> Iterator[Order]:
        """Yield greedy orders from either end, until one cannot be better."""
        waits = WaitsFor.from_preds(self.graph.preds)
        for urgency in URGENCIES:
            order, end = priority_order(self.graph, waits, times.tail, urgency)
            yield order
            if end <= self.lower_bound * (1 + self.precision):
                return
            order, end = priority_order(self.graph, waits.turned, times.head, urgency)
            yield order[::-1]
            if end <= self.lower_bound * (1 + self.precision):
                return

    def _begin(self, orders: Orders) -> list[float]:
        """Start from the best of some orders; return their makespans."""
        parts = range(0, len(orders), self._batch)
        finish = np.concatenate([self._finish(orders[k : k + self._batch]) for k in parts])
        makespans = finish.max(axis=1)
        first = int(makespans.argmin())
        self.best = self.current = _FoundOrder(orders[first], finish[first])
        self.value = self.best.makespan
        return makespans.tolist()

    def _keep_if_better(self) -> None:
        makespan = self.current.makespan
        if makespan < self.value:
            self.best, self.value, self.stale = self.current, makespan, 0

    def best_so_far(self) -> tuple[TransferOrder, float]:
        """Return the best order so far, and its makespan [s]."""
        ordered, makespan = self._run(self.best.order, waits=True)
        if makespan > self.value * (1 + self.precision):  # the step's end waits for SENDs, too
            ordered, makespan = self._run(self.best.order, waits=False)
        best = TransferOrder(self.best.order, ordered, self._arguments[1], self.free_bound)
        return best, makespan

    def _run(self, order: Order | None, *, waits: bool) -> tuple[ScheduleTable, float]:
        """The table with its transfers in an order, in PyTorch's if None, and its makespan [s]."""
        costs, links = self._arguments
        ordered = with_transfers(self.graph.table, order, links, waits=waits)
        return ordered, makespan_on_host(*lower_and_price(ordered, costs, links))

    def _finish(self, orders: Orders) -> Float[NumpyArray, "orders nodes"]:
        self.evaluated += len(orders)
        return finish_of_orders(self.graph, orders)

    def step(self, iteration: int) -> None:
        """Swap for a while; where that finds nothing better, move one transfer further."""
        if self.stale >= PATIENCE:
            self._shake()
            self._swaps.begin(self.current.order)
        self.stale += 1
        self._swap()
        if self.stale:
            self._move(iteration)
            self._swaps.begin(self.current.order)

    def _swap(self) -> None:
        """Make some swaps, and keep the best order on the way."""
        best, order = self.value, None
        for _ in range(self._num_swaps):
            if not self._swaps.step(best):
                break
            self.evaluated += 1
            if self._swaps.makespan < best:
                best, order = self._swaps.makespan, self._swaps.order
        if order is None:
            self.current = _FoundOrder(self._swaps.order, self._swaps.finish)
        else:
            self.current = _FoundOrder(order, finish_of_orders(self.graph, order[None])[0])
        self._keep_if_better()

    def _move(self, iteration: int) -> None:
        """Take the best move of a batch that does not rest or beats the best order."""
        order = by_start(self.graph, *self.current)
        moves = propose(self.graph, order, self.current.finish, self._batch, self.rng)
        orders = moved(order, moves)
        finish = self._finish(orders)
        makespans = finish.max(axis=1)
        rests = self._rests_until[moves.transfer] >= iteration
        chosen = self.choose(makespans, rests & (makespans >= self.value))
        self.current = _FoundOrder(orders[chosen], finish[chosen])
        self._rests_until[moves.transfer[chosen]] = iteration + self.rng.integers(*REST)
        self._keep_if_better()

    def _shake(self) -> None:
        """Continue from the best order, with some transfers moved at random."""
        order = by_start(self.graph, *self.best)
        for _ in range(SHAKES):
            (order,) = moved(order, nearby(self.graph, order, 1, self.rng))
        self.current = _FoundOrder(order, self._finish(order[None])[0])
        self.stale = 0


class Moves(NamedTuple):
    """Transfers and where they go."""

    transfer: Int[NumpyArray, " moves"]  # transfer that moves
    target: Int[NumpyArray, " moves"]  # position that it has afterwards


def by_start(graph: TransferGraph, order: Order, finish: Float[NumpyArray, " nodes"]) -> Order:
    """Sort an order by start, which changes no queue and leaves moves the most room."""
    # Returns (transfers) the order that gives the same queues.
    carrier = graph.program.messages.carrier[order]
    return order[np.argsort((finish - graph.duration)[carrier], kind="stable")]


def critical_blocks(
    graph: TransferGraph,
    order: Order,
    finish: Float[NumpyArray, " nodes"],
    rng: np.random.Generator,
) -> list[list[int]]:
    """List the transfers that follow each other on a critical path."""
    carrier = graph.program.messages.carrier
    with_queues = graph.preds.copy()
    with_queues[carrier, 1:3] = queue_preds(graph, order[None])[0]
    preds, ends = with_queues.tolist(), finish.tolist()
    transfer_by_node = {node: transfer for transfer, node in enumerate(carrier.tolist())}
    blocks: list[list[int]] = [[]]
    node = int(finish.argmax())
    while node != SOURCE:
        if node in transfer_by_node:
            blocks[-1].append(transfer_by_node[node])
        elif blocks[-1]:
            blocks.append([])
        last = max(ends[before] for before in preds[node])
        waited_for = [before for before in preds[node] if ends[before] == last]
        node = waited_for[int(rng.integers(len(waited_for)))] if last else SOURCE
    return [block[::-1] for block in blocks if len(block) > 1]


def propose(
    graph: TransferGraph,
    order: Order,
    finish: Float[NumpyArray, " nodes"],
    count: int,
    rng: np.random.Generator,
) -> Moves:
    """Propose legal moves: moves of critical blocks, then random ones."""
    position = invert_orders(order[None])[0]
    low, high = legal_range(graph, position)
    transfers, targets = [np.zeros(0, int)], [np.zeros(0, int)]
    for block in critical_blocks(graph, order, finish, rng):
        first, second = np.array(block)[np.stack(np.triu_indices(len(block), 1))]
        transfers += [second, first]  # the later one goes before the earlier, or the other way
        targets += [position[first], position[second]]
    # each pair once, as one number: long blocks have many, and numbers sort ten times as fast
    pairs = np.unique(np.concatenate(transfers) * len(order) + np.concatenate(targets))
    transfer, target = np.divmod(pairs, max(1, len(order)))
    legal = (low[transfer] < target) & (target < high[transfer])
    transfer, target = transfer[legal], target[legal]
    chosen = rng.permutation(len(transfer))[:count]
    transfer, target = transfer[chosen], target[chosen]
    others = nearby(graph, order, count - len(transfer), rng)
    return Moves(np.append(transfer, others.transfer), np.append(target, others.target))


def nearby(graph: TransferGraph, order: Order, count: int, rng: np.random.Generator) -> Moves:
    """Draw legal moves of any transfers, by a few positions."""
    position = invert_orders(order[None])[0]
    low, high = legal_range(graph, position)
    transfer = rng.integers(0, graph.num_transfers, count)
    target = position[transfer] + rng.integers(-REACH, REACH + 1, count)
    return Moves(transfer, np.clip(target, low[transfer] + 1, high[transfer] - 1))


def moved(order: Order, moves: Moves) -> Orders:
    """Apply each of some moves to one order: (moves, transfers) an order for every move."""
    return inserted(order, invert_orders(order[None])[0][moves.transfer], moves.target)
