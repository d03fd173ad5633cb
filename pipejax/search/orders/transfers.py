"""The order of communication as a design axis: search for a better order of SEND and RECV cells.

Only the order of the transfers is searched; the ops of every row stay as they are. Greedy orders
come first, PyTorch's among them, then tabu search: swaps of neighbours in a queue (`swaps`), and
where these find nothing better, one move that reaches further. Of a batch of such moves, which the
engine runs as one, the best is taken even where it is worse, and its transfer then rests for a
while.

A schedule gets shorter only if its critical path is broken, and the order of transfers can break
it only where transfers follow each other on it. So moves reorder two transfers of such a block;
where there are too few of them, any transfer moves a little.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_local_search, check_types
from pipejax.base.display import short_repr_of
from pipejax.base.progress import OnProgress, telling, to_nobody
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import SOURCE
from pipejax.schedules.cells.ops import ScheduleError
from pipejax.schedules.table.communication_cells import (
    TorchLowering,
    insert_transfers,
    producer_order,
)
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import gap
from pipejax.search.orders.transfer_graph import (
    Order,
    Orders,
    TransferGraph,
    finish_of_orders,
    heads_and_tails,
    legal_range,
    positions_of,
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
PRECISION = 1e-9  # relative: what is closer is rounding
AWAITED = TorchLowering(sharding=False)  # SEND, RECV and waits


@short_repr_of("makespan gap free_bound queue_bound baselines evaluated stopped table order links")
@dataclasses.dataclass(frozen=True)
class TransferOrder:
    """The best order of transfers that a search found. Times are seconds.

    Attributes:
      makespan: makespan of `table` under rendezvous.
      table: the schedule with SEND and RECV cells in that order, and waits that delay nothing.
      order: (transfers) messages in order, as `Program.messages` numbers them.
      links: rendezvous, and what else was said about the links.
      baselines: makespan of known orders: "own" (the cells of the table, or the order that
        rendezvous assumes without cells), "by producer", "by need" (the best greedy order) and
        "pytorch" (cell by cell as PyTorch lowers a schedule); None where the order deadlocks.
      free_bound: makespan if messages used no resource.
      queue_bound: no order is faster: the larger of `free_bound` and what the busiest queue takes.
      evaluated: orders that the engine ran.
      stopped: "optimal" (the bound is reached), "iterations", "time" or "interrupted".

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=0.5)
      >>> found = order(table, costs)
      >>> found.makespan, found.free_bound, found.gap, found.stopped
      (10.0, 10.0, 0.0, 'optimal')
      >>> found.gain
      0.0
    """

    makespan: float
    table: ScheduleTable
    order: Order
    links: Links
    baselines: Mapping[str, float | None]
    free_bound: float
    queue_bound: float
    evaluated: int
    stopped: str

    @property
    def gain(self) -> float | None:
        """What the order saves of the makespan of the table's own; None where that deadlocks."""
        own = self.baselines["own"]
        if own is None:
            return None
        return 1 - self.makespan / own if own else 0.0

    @property
    def gap(self) -> float:
        """What an unknown order could save, at most, as a share of the makespan."""
        return gap(self.makespan, self.queue_bound)

    @property
    def free_gap(self) -> float:
        """What messages that use no resource would save, as a share of the makespan."""
        return gap(self.makespan, self.free_bound)


class _FoundOrder(NamedTuple):
    """An order and its finish times."""

    order: Order
    finish: Float[NumpyArray, " nodes"]

    @property
    def makespan(self) -> float:
        return float(self.finish.max())


def order(
    table: ScheduleTable,
    costs: Costs,
    *,
    link: str | Links = "rendezvous",
    iterations: int = 1000,
    time_limit: float | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> TransferOrder:
    """Search an order of SEND and RECV cells that makes a table faster under rendezvous.

    No order that is tried can deadlock, and the result is never slower than a baseline. The same
    arguments give the same result, unless the time runs out. An interrupt (Ctrl-C) ends the search
    with the best order so far.

    Args:
      table: the schedule; its ops stay in their order, its communication cells give way.
      costs: unbatched costs [s].
      link: "rendezvous", or `Links` with that model.
      iterations: most batches of moves to try.
      time_limit: seconds after which no further batch starts; no limit if None.
      seed: of all random choices.
      on_progress: called after each iteration with its number, `iterations`, and the best makespan
        so far as a text; a bar in notebooks if None.

    Returns:
      The best order, as a table, beside baselines and bounds.

    Raises:
      ValueError: if a cost is negative or not finite or has the wrong number of entries, the
        link model is not rendezvous, or iterations or time_limit is negative.

    Cost:
      Each iteration makes up to 64 swaps, each of which runs what it changes again, and where they
      find nothing better runs up to 64 orders at once, node by node; nothing is compiled.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=1.0)
      >>> found = pj.order(table, costs, iterations=5)
      >>> found.baselines["by producer"], found.makespan, found.free_bound
      (32.0, 31.0, 31.0)
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    search = OrderSearch(table, costs, Links.of(link), seed)
    with telling("order", on_progress) as tell:
        return search.result(search.run(iterations, time_limit, tell))


def _own_order(table: ScheduleTable, links: Links) -> Order | None:
    """The order of the table's own cells, or the default one; None for a deadlock."""
    try:
        return lower(table, link=links, step_end=False).transfer_order
    except ScheduleError:
        return None


class OrderSearch:
    """State of the local search: current and best order, and which transfers rest."""

    def __init__(
        self, table: ScheduleTable, costs: Costs, links: Links, seed: int, *, swaps: int = SWAPS
    ) -> None:
        """Start the clock, and begin with the best of the known orders."""
        costs.check_values()
        if links.model != "rendezvous":
            raise ValueError(f"link must be rendezvous, where order matters, got {links.model!r}")
        links.check_known(("model", "queues", "host_links"), "order")
        self._begun = time.monotonic()
        self._given = table, costs, links
        self.graph = transfer_graph(table, costs, links)
        with np.errstate(over="ignore"):  # no order takes longer than one after the other
            check_finite(self.graph.duration.max() * len(self.graph.duration), costs)
        times = heads_and_tails(self.graph)
        self.free_bound, self.bound = times.makespan, queue_bound(self.graph, times)
        self.evaluated = 0
        self._rng = np.random.default_rng(seed)
        self._batch = max(1, min(BATCH, MAX_BATCH_NODES // self.graph.program.num_nodes))
        self._rests_until = np.zeros(self.graph.num_transfers, int)
        self._stale = 0  # iterations since the best was found
        known = {"own": _own_order(table, links), "by producer": producer_order(table, links)}
        by_need = [priority_order(self.graph, times, urgency) for urgency in URGENCIES]
        starts = [order for order in known.values() if order is not None] + by_need
        makespans = self._begin(np.stack(starts))
        values = iter(makespans)
        self._baselines = {k: None if order is None else next(values) for k, order in known.items()}
        if known["own"] is not None:  # as the table is, with its waits
            self._baselines["own"] = evaluate(table, costs, link=links).makespan
        lowered = insert_transfers(table, link=links, lowering=AWAITED)
        self._baselines["pytorch"] = evaluate(lowered, costs, link=links).makespan
        self._baselines["by need"] = min(makespans[-len(by_need) :])
        self._num_swaps = swaps
        self._swaps = SwapSearch(self.graph, self.best.order, self._rng)

    def _begin(self, orders: Orders) -> list[float]:
        """Start from the best of some orders; return their makespans."""
        parts = range(0, len(orders), self._batch)
        finish = np.concatenate([self._finish(orders[k : k + self._batch]) for k in parts])
        makespans = finish.max(axis=1)
        first = int(makespans.argmin())
        self.best = self.current = _FoundOrder(orders[first], finish[first])
        return makespans.tolist()

    def run(self, iterations: int, time_limit: float | None, tell: OnProgress = to_nobody) -> str:
        """Search; return why it ended. The time runs from the start of the clock."""
        deadline = np.inf if time_limit is None else self._begun + time_limit
        try:
            for iteration in range(1, iterations + 1):
                if self._is_optimal():
                    break
                if time.monotonic() >= deadline:
                    return "time"
                self._step(iteration)
                tell(iteration, iterations, f"best {self.best.makespan:.6g} s")
        except KeyboardInterrupt:
            return "interrupted"
        return "optimal" if self._is_optimal() else "iterations"

    def result(self, stopped: str) -> TransferOrder:
        """Return the best order so far, and what ended the search."""
        table, costs, links = self._given
        found = insert_transfers(table, self.best.order, link=links, lowering=AWAITED)
        return TransferOrder(
            makespan=evaluate(found, costs, link=links).makespan,
            table=found,
            order=self.best.order,
            links=links,
            baselines=self._baselines,
            free_bound=self.free_bound,
            queue_bound=self.bound,
            evaluated=self.evaluated,
            stopped=stopped,
        )

    def _is_optimal(self) -> bool:
        return self.best.makespan <= self.bound * (1 + PRECISION)

    def _finish(self, orders: Orders) -> Float[NumpyArray, "orders nodes"]:
        self.evaluated += len(orders)
        return finish_of_orders(self.graph, orders)

    def _step(self, iteration: int) -> None:
        """Swap for a while; where that finds nothing better, move one transfer further."""
        if self._stale >= PATIENCE:
            self._shake()
            self._swaps.begin(self.current.order)
        self._stale += 1
        self._swap()
        if self._stale:
            self._move(iteration)
            self._swaps.begin(self.current.order)

    def _swap(self) -> None:
        """Make some swaps, and keep the best order on the way."""
        best, found = self.best.makespan, None
        for _ in range(self._num_swaps):
            if not self._swaps.step(best):
                break
            self.evaluated += 1
            if self._swaps.makespan < best:
                best, found = self._swaps.makespan, self._swaps.order
        for order in (self._swaps.order, found):  # the best last
            if order is not None:
                self.current = _FoundOrder(order, finish_of_orders(self.graph, order[None])[0])
        if self.current.makespan < self.best.makespan:
            self.best, self._stale = self.current, 0

    def _move(self, iteration: int) -> None:
        """Take the best move of a batch whose transfer does not rest, or one to a new best."""
        order = by_start(self.graph, *self.current)
        moves = propose(self.graph, order, self.current.finish, self._batch, self._rng)
        orders = moved(order, moves)
        finish = self._finish(orders)
        makespans = finish.max(axis=1)
        rests = self._rests_until[moves.transfer] >= iteration
        rests &= makespans >= self.best.makespan
        # among equals any may be taken: a plateau is crossed at random
        chosen = int(np.lexsort((self._rng.random(len(rests)), makespans, rests))[0])
        self.current = _FoundOrder(orders[chosen], finish[chosen])
        self._rests_until[moves.transfer[chosen]] = iteration + self._rng.integers(*REST)
        if self.current.makespan < self.best.makespan:
            self.best, self._stale = self.current, 0

    def _shake(self) -> None:
        """Continue from the best order, with some transfers moved at random."""
        order = by_start(self.graph, *self.best)
        for _ in range(SHAKES):
            (order,) = moved(order, nearby(self.graph, order, 1, self._rng))
        self.current = _FoundOrder(order, self._finish(order[None])[0])
        self._stale = 0


class Moves(NamedTuple):
    """Transfers and where they go.

    Attributes:
      transfer: (moves) transfer that moves.
      target: (moves) position that it has afterwards.
    """

    transfer: Int[NumpyArray, " moves"]
    target: Int[NumpyArray, " moves"]


def by_start(graph: TransferGraph, order: Order, finish: Float[NumpyArray, " nodes"]) -> Order:
    """Sort an order by start, which changes no queue and leaves moves the most room.

    Returns (transfers) the order that gives the same queues.
    """
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
    transfer_of = {node: transfer for transfer, node in enumerate(carrier.tolist())}
    blocks: list[list[int]] = [[]]
    node = int(finish.argmax())
    while node != SOURCE:
        if node in transfer_of:
            blocks[-1].append(transfer_of[node])
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
    """Propose legal moves: those of the critical blocks, filled up with any."""
    position = positions_of(order[None])[0]
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
    some = rng.permutation(len(transfer))[:count]
    transfer, target = transfer[some], target[some]
    others = nearby(graph, order, count - len(transfer), rng)
    return Moves(np.append(transfer, others.transfer), np.append(target, others.target))


def nearby(graph: TransferGraph, order: Order, count: int, rng: np.random.Generator) -> Moves:
    """Draw legal moves of any transfers, by a few positions."""
    position = positions_of(order[None])[0]
    low, high = legal_range(graph, position)
    transfer = rng.integers(0, graph.num_transfers, count)
    target = position[transfer] + rng.integers(-REACH, REACH + 1, count)
    return Moves(transfer, np.clip(target, low[transfer] + 1, high[transfer] - 1))


def moved(order: Order, moves: Moves) -> Orders:
    """Apply each of some moves to one order: (moves, transfers) an order for every move."""
    at = np.arange(len(order))[None]
    start = positions_of(order[None])[0][moves.transfer][:, None]
    target = moves.target[:, None]
    # those between the old and the new position make room by one
    came_from = at + ((start <= at) & (at < target)) - ((target < at) & (at <= start))
    return order[np.where(at == target, start, came_from)]
