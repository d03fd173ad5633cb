"""Search for a better order of SEND and RECV cells; the ops of every row keep their order.

The search starts from greedy orders, forwards and backwards, and PyTorch's. Then tabu search swaps
neighbours in a queue (`transfer_swaps`). If no swap helps, it evaluates a batch of larger moves and
makes the best one, even if it is worse; the moved transfer then rests for some iterations.

A schedule gets shorter only if its critical path is broken, and the order of transfers breaks it
only where transfers follow each other on it. So moves reorder two transfers of such a block; if
there are too few blocks, random transfers move a little.
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
from pipejax.schedules.table.communication_cells import producer_order, with_transfers
from pipejax.schedules.table.links import LINK_MODELS, Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.search.found import GAP, TIME_LIMIT, Found
from pipejax.search.orders.local_search import LocalSearch
from pipejax.search.orders.permutations import insertions
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

URGENCIES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)  # weights of tails in greedy orders
BATCH = 64  # moves that the engine runs at once
NUM_SWAPS = 64  # swaps of an iteration
MAX_BATCH_NODES = 1 << 22  # nodes of all orders in a batch: fewer moves for a very long table
REST = (8, 20)  # range of iterations for which a moved transfer rests
PATIENCE = 150  # iterations without a better order before a restart
SHAKES = 10  # random moves of a restart
MAX_STEP = 32  # positions by which a transfer off the critical path moves at most


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


class _OrderRun(NamedTuple):
    """An order of transfers and the finish times under it [s]."""

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

    No candidate can deadlock, and the result is never slower than a baseline. It is deterministic
    unless the time runs out. An interrupt (Ctrl-C) ends the search with the best order so far.

    Args:
      table: the schedule; its ops keep their order, its communication cells are replaced.
      costs: unbatched costs [s].
      link: "rendezvous", or `Links` with that model.
      iterations: largest number of batches of moves.
      time_limit: time after which no further batch starts [s]; None for no limit.
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

    Cost:
      An iteration makes up to 64 swaps, each with an incremental run. If none helps, it runs up to
      64 orders at once; nothing is compiled.

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
    search = TransferSearch(table, costs, Links.of(link), seed)
    with telling("order", on_progress) as tell:
        return search.run(iterations, time_limit, tell, gap)


def _table_order(
    table: ScheduleTable, costs: Costs, links: Links
) -> tuple[Order | None, float | None]:
    """Return the order of the table's cells, or the default, and its makespan [s]."""
    # Both are None for a deadlock.
    try:
        program, vector = lower_and_price(table, costs, links)
    except ScheduleError:
        return None, None
    return program.transfer_order, makespan_on_host(program, vector)


class TransferSearch(LocalSearch[TransferOrder]):
    """State of the local search: current and best order, and when transfers stop to rest."""

    precision = 1e-9  # relative rounding of makespans

    def __init__(
        self, table: ScheduleTable, costs: Costs, links: Links, seed: int, *, swaps: int = NUM_SWAPS
    ) -> None:
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
        self._batch = max(1, min(BATCH, MAX_BATCH_NODES // self.graph.program.num_nodes))
        self._rests_until = np.zeros(self.graph.num_transfers, int)
        by_need = [*self._greedy(times)]
        starts = (
            [by_producer, *by_need] if table_order is None else [table_order, by_producer, *by_need]
        )
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
        """Return the search by swaps, made at first use."""
        return SwapSearch(self.graph, self.best.order, self.rng)

    def _greedy(self, times: HeadsTails) -> Iterator[Order]:
        """Yield greedy orders, forwards and backwards, until one reaches the lower bound."""
        waits = WaitsFor.from_preds(self.graph.preds)
        for urgency in URGENCIES:
            order, end = priority_order(self.graph, waits, times.tail, urgency)
            yield order
            if end <= self.lower_bound * (1 + self.precision):
                return
            order, end = priority_order(self.graph, waits.reverse, times.head, urgency)
            yield order[::-1]
            if end <= self.lower_bound * (1 + self.precision):
                return

    def _begin(self, orders: Orders) -> list[float]:
        """Start from the best of some orders; return their makespans."""
        begins = range(0, len(orders), self._batch)
        finish = np.concatenate([self._finish(orders[k : k + self._batch]) for k in begins])
        makespans = finish.max(axis=1)
        row = int(makespans.argmin())
        self.best = self.current = _OrderRun(orders[row], finish[row])
        self.value = self.best.makespan
        return makespans.tolist()

    def _keep_if_better(self) -> None:
        """Make the current order the best so far, if it is faster."""
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
        """Return the table with transfers in an order, default PyTorch's, and its makespan [s]."""
        costs, links = self._arguments
        ordered = with_transfers(self.graph.table, order, links, waits=waits)
        return ordered, makespan_on_host(*lower_and_price(ordered, costs, links))

    def _finish(self, orders: Orders) -> Float[NumpyArray, "orders nodes"]:
        """Return the finish times of a batch of orders [s], and count them."""
        self.evaluated += len(orders)
        return finish_of_orders(self.graph, orders)

    def step(self, iteration: int) -> None:
        """Make a series of swaps; if none helps, make one larger move."""
        if self.stale >= PATIENCE:
            self._shake()
            self._swaps.begin(self.current.order)
        self.stale += 1
        self._swap()
        if self.stale:
            self._move(iteration)
            self._swaps.begin(self.current.order)

    def _swap(self) -> None:
        """Make some swaps; the best order on the way, or else the last one, becomes current."""
        least, best_order = self.value, None
        for _ in range(self._num_swaps):
            if not self._swaps.step(least):
                break
            self.evaluated += 1
            if self._swaps.makespan < least:
                least, best_order = self._swaps.makespan, self._swaps.order
        if best_order is None:
            self.current = _OrderRun(self._swaps.order, self._swaps.finish)
        else:
            self.current = _OrderRun(best_order, finish_of_orders(self.graph, best_order[None])[0])
        self._keep_if_better()

    def _move(self, iteration: int) -> None:
        """Make the best move of a batch whose transfer does not rest, or that beats the best."""
        order = sort_by_start(self.graph, *self.current)
        moves = propose_moves(self.graph, order, self.current.finish, self._batch, self.rng)
        orders = apply_moves(order, moves)
        finish = self._finish(orders)
        makespans = finish.max(axis=1)
        rests = self._rests_until[moves.transfer] >= iteration
        row = self.choose(makespans, rests & (makespans >= self.value))
        self.current = _OrderRun(orders[row], finish[row])
        self._rests_until[moves.transfer[row]] = iteration + self.rng.integers(*REST)
        self._keep_if_better()

    def _shake(self) -> None:
        """Restart from the best order with some random moves."""
        order = sort_by_start(self.graph, *self.best)
        for _ in range(SHAKES):
            (order,) = apply_moves(order, random_moves(self.graph, order, 1, self.rng))
        self.current = _OrderRun(order, self._finish(order[None])[0])
        self.stale = 0


class Moves(NamedTuple):
    """Moves of single transfers in an order."""

    transfer: Int[NumpyArray, " moves"]
    target: Int[NumpyArray, " moves"]  # new position


def sort_by_start(graph: TransferGraph, order: Order, finish: Float[NumpyArray, " nodes"]) -> Order:
    """Sort an order by start times; the queues stay, and moves get the most room."""
    carrier = graph.program.messages.carrier[order]
    return order[np.argsort((finish - graph.duration)[carrier], kind="stable")]


def critical_blocks(
    graph: TransferGraph,
    order: Order,
    finish: Float[NumpyArray, " nodes"],
    rng: np.random.Generator,
) -> list[list[int]]:
    """List the blocks of two or more consecutive transfers on a random critical path."""
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
        latest = max(ends[pred] for pred in preds[node])
        critical = [pred for pred in preds[node] if ends[pred] == latest]
        node = critical[int(rng.integers(len(critical)))] if latest else SOURCE
    return [block[::-1] for block in blocks if len(block) > 1]


def propose_moves(
    graph: TransferGraph,
    order: Order,
    finish: Float[NumpyArray, " nodes"],
    count: int,
    rng: np.random.Generator,
) -> Moves:
    """Propose `count` legal moves: reorderings in critical blocks, filled up with random moves."""
    position = invert_orders(order[None])[0]
    low, high = legal_range(graph, position)
    transfers, targets = [np.zeros(0, int)], [np.zeros(0, int)]
    for block in critical_blocks(graph, order, finish, rng):
        earlier, later = np.array(block)[np.stack(np.triu_indices(len(block), 1))]
        transfers += [later, earlier]  # the later one moves to the place of the earlier, or back
        targets += [position[earlier], position[later]]
    # drop duplicates; pairs as one number sort ten times as fast
    pairs = np.unique(np.concatenate(transfers) * len(order) + np.concatenate(targets))
    transfer, target = np.divmod(pairs, max(1, len(order)))
    is_legal = (low[transfer] < target) & (target < high[transfer])
    transfer, target = transfer[is_legal], target[is_legal]
    sample = rng.permutation(len(transfer))[:count]
    transfer, target = transfer[sample], target[sample]
    random = random_moves(graph, order, count - len(transfer), rng)
    return Moves(np.append(transfer, random.transfer), np.append(target, random.target))


def random_moves(graph: TransferGraph, order: Order, count: int, rng: np.random.Generator) -> Moves:
    """Draw legal moves of random transfers by a few positions."""
    position = invert_orders(order[None])[0]
    low, high = legal_range(graph, position)
    transfer = rng.integers(0, graph.num_transfers, count)
    target = position[transfer] + rng.integers(-MAX_STEP, MAX_STEP + 1, count)
    return Moves(transfer, np.clip(target, low[transfer] + 1, high[transfer] - 1))


def apply_moves(order: Order, moves: Moves) -> Orders:
    """Return an order for every move, applied to the same order (moves, transfers)."""
    return insertions(order, invert_orders(order[None])[0][moves.transfer], moves.target)
