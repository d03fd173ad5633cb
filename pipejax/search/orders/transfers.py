"""Search for a better order of SEND and RECV cells; compute ops keep their order in every row.

The search starts from the table's order, the order of producers, and greedy orders that are built
forwards and backwards. Then it changes priorities of the best greedy orders at random. It keeps a
change that makes the step no longer.

Without queues, a program under rendezvous has only dependencies of ops and transfers. An order of
transfers adds edges: a transfer waits for the previous transfer in the sender's and in the
receiver's queue. The graph has no cycle if each transfer stands after all transfers that its
producer waits for. The head of a transfer is its earliest start, and its tail is the least time
from its end to the makespan, both if messages used no resource. Heads and tails give a lower bound
by the queues, and greedy orders.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_local_search, check_types, share, wrong
from pipejax.base.display import short_repr
from pipejax.base.longest_path import finish_times, run_edges, start_times, times_to_end
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite
from pipejax.engine.lowering.link_models import queue_keys
from pipejax.engine.lowering.program import SOURCE, Program, makespan_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import Phase, ScheduleError
from pipejax.schedules.table.communication_cells import (
    producer_order,
    with_transfers,
    without_transfers,
)
from pipejax.schedules.table.links import LINK_MODELS, Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.search.found import GAP, TIME_LIMIT, Found
from pipejax.search.orders.permutations import LocalSearch

Order = Int[NumpyArray, " transfers"]


@dataclasses.dataclass(frozen=True, eq=False)
class TransferGraph:
    """Dependencies of a table's ops and transfers, without the waits in queues."""

    table: ScheduleTable  # the schedule without communication cells
    program: Program  # the table lowered under rendezvous, for its nodes and messages
    # predecessors; columns 1 and 2 of a transfer are free for transfers in front of it in queues
    preds: Int[NumpyArray, "nodes max_preds"]
    duration: Float[NumpyArray, " nodes"]  # [s]
    queues: Int[NumpyArray, "2 transfers"]  # number of the sender's and of the receiver's queue
    num_queues: int  # number of queues with transfers


def transfer_graph(table: ScheduleTable, costs: Costs, links: Links) -> TransferGraph:
    """Lower and price a table under rendezvous; return its graph, without the waits in queues."""
    ops_table = without_transfers(table)
    program, vector = lower_and_price(ops_table, costs, links)
    messages = program.messages
    # A transfer waits for its producer in column 0. Columns 1 and 2 stay free for its two queues.
    preds = np.pad(program.preds, ((0, 0), (0, max(0, 3 - program.max_preds))))
    preds[messages.carrier] = SOURCE
    preds[messages.carrier, 0] = messages.producer
    is_backward = (messages.phase == Phase.SEND_B).astype(int)
    keys = queue_keys(links.queues, messages.sender, messages.receiver, is_backward)
    queue_names, queues = np.unique(keys, return_inverse=True)
    return TransferGraph(
        table=ops_table,
        program=program,
        preds=preds,
        duration=vector[program.duration_index],
        queues=queues.reshape(keys.shape),
        num_queues=len(queue_names),
    )


def order_preds(graph: TransferGraph, order: Order) -> Int[NumpyArray, "nodes max_preds"]:
    """Return predecessors (nodes, max_preds), including previous transfers in the queues."""
    # If a and c are in queue 0 and b is in queue 1, the order a b c makes a a predecessor of c.
    preds, queues = graph.preds.copy(), graph.queues.T.tolist()
    last_node = [SOURCE] * graph.num_queues  # last transfer so far of each queue
    for transfer in order.tolist():
        node = graph.program.messages.carrier[transfer]
        preds[node, 1:3] = [last_node[queue] for queue in queues[transfer]]
        for queue in queues[transfer]:
            last_node[queue] = node
    return preds


def order_makespan(graph: TransferGraph, order: Order) -> float:
    """Return the makespan of an order of transfers [s]."""
    preds = order_preds(graph, order)
    heads, columns = np.nonzero(preds)  # edges, without edges from the source (node 0)
    _, finish = run_edges(preds[heads, columns], heads, graph.duration)
    return float(finish.max())


class HeadsTails(NamedTuple):
    """Heads and tails of transfers, and the makespan, if messages used no resource."""

    head: Float[NumpyArray, " transfers"]  # earliest end of the transfer's producer [s]
    tail: Float[NumpyArray, " transfers"]  # least time from the transfer's end to the makespan [s]
    makespan: float  # [s]


def heads_and_tails(graph: TransferGraph) -> HeadsTails:
    """Return the heads and tails of transfers without queues."""
    finish = finish_times(graph.preds, graph.duration)
    carrier = graph.program.messages.carrier
    head = start_times(graph.preds, finish)[carrier]
    return HeadsTails(head, times_to_end(graph.preds, graph.duration)[carrier], float(finish.max()))


def queue_bound(graph: TransferGraph, times: HeadsTails) -> float:
    """Return a lower bound on the makespan from the busiest queue of transfers [s]."""
    # Each queue is a one-machine problem: it runs one transfer at a time, not before its head, and
    # the makespan is at least its end plus its tail. If transfers may be interrupted, it is optimal
    # to run the longest tail first (Carlier: The one-machine sequencing problem, 1982).
    length = graph.duration[graph.program.messages.carrier]
    bound = times.makespan
    for queue in range(graph.num_queues):
        members = np.flatnonzero((graph.queues == queue).any(axis=0))
        members = members[np.argsort(times.head[members], kind="stable")]
        columns = (time[members].tolist() for time in (times.head, times.tail, length))
        bound = max(bound, _one_queue_bound([*zip(*columns, strict=True)]))
    return bound


def _one_queue_bound(jobs: list[tuple[float, float, float]]) -> float:
    """Return a makespan bound from one queue [s]; jobs are (head, tail, length), sorted by head."""
    waiting: list[tuple[float, float]] = []  # heap of (-tail, remaining length)
    now = bound = 0.0
    for k, (head, tail, length) in enumerate(jobs):
        now = max(now, head)
        heapq.heappush(waiting, (-tail, length))
        next_head = jobs[k + 1][0] if k + 1 < len(jobs) else np.inf
        while waiting and now < next_head:
            minus_tail, remaining = heapq.heappop(waiting)
            served = min(remaining, next_head - now)
            now += served
            if served < remaining:
                heapq.heappush(waiting, (minus_tail, remaining - served))
            else:
                bound = max(bound, now - minus_tail)
    return bound


class WaitsFor(NamedTuple):
    """Lists of predecessors and successors of each op and transfer, without queues."""

    preds: list[list[int]]  # predecessors of each node, without the source
    successors: list[list[int]]  # successors of each node

    @classmethod
    def from_preds(cls, preds: Int[NumpyArray, "nodes max_preds"]) -> "WaitsFor":
        """Make lists of predecessors and successors from an array of predecessors."""
        preds_by_node: list[list[int]] = [[] for _ in preds]
        successors: list[list[int]] = [[] for _ in preds]
        heads, columns = np.nonzero(preds)
        tails = preds[heads, columns]
        for node, pred in zip(heads.tolist(), tails.tolist(), strict=True):
            preds_by_node[node].append(pred)
            successors[pred].append(node)
        return cls(preds_by_node, successors)


def priority_order(
    graph: TransferGraph, waits: WaitsFor, tail: Float[NumpyArray, " transfers"], urgency: float
) -> tuple[Order, float]:
    """Run the schedule with a greedy order of transfers; return the order and the makespan [s]."""
    # The next transfer is the one with the smallest (earliest start - urgency * tail); at a tie,
    # with the longest tail. For the reverse graph `tail` holds the heads, and the order is reverse.
    duration, carrier = graph.duration.tolist(), graph.program.messages.carrier.tolist()
    transfer_by_node = {node: k for k, node in enumerate(carrier)}
    num_missing = [len(preds) for preds in waits.preds]  # predecessors that have not ended
    ready = [0.0] * len(num_missing)  # last end of each node's predecessors so far [s]
    free = [0.0] * graph.num_queues  # end of the last transfer of each queue so far [s]
    queues, tails = [*zip(*graph.queues.tolist(), strict=True)], tail.tolist()
    # heap of (key, -tail, transfer). Keys only grow as queues fill, so the first entry with an
    # up-to-date key has the smallest key.
    waiting: list[tuple[float, float, int]] = []
    order, ends = list[int](), [0.0]

    def start(transfer: int) -> float:
        sender_queue, receiver_queue = queues[transfer]
        return max(ready[carrier[transfer]], free[sender_queue], free[receiver_queue])

    def priority(transfer: int) -> tuple[float, float, int]:
        return start(transfer) - urgency * tails[transfer], -tails[transfer], transfer

    def run_ready_ops(ready_nodes: list[int]) -> None:
        """Run ops whose inputs are ready, and the ops that they unblock."""
        while ready_nodes:
            node = ready_nodes.pop()
            if node in transfer_by_node:
                heapq.heappush(waiting, priority(transfer_by_node[node]))
            else:
                ready_nodes += finish(node, ready[node] + duration[node])

    def finish(node: int, end: float) -> list[int]:
        """End a node; return its successors that then have all inputs."""
        ready_nodes = []
        for successor in waits.successors[node]:
            if end > ready[successor]:
                ready[successor] = end
            num_missing[successor] -= 1
            if num_missing[successor] == 0:
                ready_nodes.append(successor)
        if not waits.successors[node]:
            ends.append(end)
        return ready_nodes

    run_ready_ops([node for node in range(1, len(num_missing)) if num_missing[node] == 0])
    while waiting:
        entry = heapq.heappop(waiting)
        transfer = entry[-1]
        if entry != (new_entry := priority(transfer)):
            heapq.heappush(waiting, new_entry)
            continue
        sender_queue, receiver_queue = queues[transfer]
        free[sender_queue] = free[receiver_queue] = start(transfer) + duration[carrier[transfer]]
        order.append(transfer)
        run_ready_ops(finish(carrier[transfer], free[sender_queue]))
    return np.array(order, int), max(ends)


URGENCIES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)  # weights of tails in greedy orders
NUM_DRAWS = 8  # number of random orders in an iteration
SHARES = (0.02, 0.1, 0.5)  # choices for the share of the tails that a draw changes
SPREADS = (0.003, 0.01, 0.03, 0.1, 0.3)  # choices for the standard deviation, over the longest tail
NEW_URGENCY = 0.3  # share of the draws that change the urgency, too


@short_repr
class TransferOrder(NamedTuple):
    """An order of transfers.

    Attributes:
      order: (transfers) indices in `Program.messages`, in order of the transfers.
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
      table: the schedule. Its ops keep their order, its communication cells are replaced.
      costs: unbatched costs [s].
      link: "rendezvous", or `Links` with this model.
      iterations: largest number of iterations, each with some random changes.
      time_limit: time after which no further iteration starts [s]; None for no limit.
      seed: seed of all random choices.
      gap: the search ends if no order can save more than this share of the makespan.
      on_progress: called after each iteration with its number, `iterations`, and a text.

    Returns:
      The best order, as a table. The lower bound is the larger of `free_bound` and the bound of the
      busiest queue. Baselines are "own" (the order of the table's cells, or the default order of
      rendezvous; None for a deadlock), "by producer", "pytorch" (as PyTorch lowers a schedule) and
      "by need" (the best greedy order).

    Raises:
      ValueError: if a cost is negative or not finite or has the wrong number of entries, the link
        model is not rendezvous, iterations or time_limit is negative, or gap is not in [0, 1].

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
    """Return a table's order of transfers, and its makespan [s]; both None for a deadlock."""
    # A table without communication cells has the default order of rendezvous.
    try:
        program, vector = lower_and_price(table, costs, links)
    except ScheduleError:
        return None, None
    return program.transfer_order, makespan_on_host(program, vector)


class TransferSearch(LocalSearch[TransferOrder]):
    """State of the search: the best order, and the inputs of greedy orders."""

    precision = 1e-9  # relative rounding of makespans

    def __init__(self, table: ScheduleTable, costs: Costs, links: Links, seed: int) -> None:
        """Measure the baselines, and start from the best of them and of greedy orders."""
        super().__init__(seed)
        check_usual(table, "the search of SEND and RECV cells")
        costs.check_values()
        if not LINK_MODELS[links.model].is_rendezvous:
            raise wrong("link", f"must be rendezvous, where order matters, got {links.model!r}")
        links.check_known(("model", "queues", "host_links"), "order")
        self._costs, self._links = costs, links
        self.graph = transfer_graph(table, costs, links)
        with np.errstate(over="ignore"):  # the sum of all times bounds every makespan
            check_finite(self.graph.duration.max() * len(self.graph.duration), costs)
        table_order, table_makespan = _table_order(table, costs, links)
        by_producer = producer_order(self.graph.table, links)
        _, by_pytorch = self._run_order(None, waits=True)
        times = heads_and_tails(self.graph)
        self.free_bound, self.lower_bound = times.makespan, queue_bound(self.graph, times)
        waits = WaitsFor.from_preds(self.graph.preds)
        reverse = WaitsFor(waits.successors, waits.preds)
        # entry 0 is for orders that are built forwards, entry 1 for orders built backwards:
        # (edges, direction), and (makespan, tails, urgency) of the best order so far
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
        tails = [tail for _, tail, _ in self._best_greedy]  # for orders built forwards, backwards
        for urgency, k in itertools.product(URGENCIES, (0, 1)):
            order, end = self._greedy_order(k, tails[k], urgency)
            yield order
            if end <= self.lower_bound * (1 + self.precision):
                return

    def _greedy_order(
        self, k: int, tail: Float[NumpyArray, " transfers"], urgency: float
    ) -> tuple[Order, float]:
        """Return a greedy order, built forwards (k = 0) or backwards (1), and its makespan [s]."""
        edges, direction = self._directions[k]
        order, end = priority_order(self.graph, edges, tail, urgency)
        if end <= self._best_greedy[k][0]:
            self._best_greedy[k] = end, tail, urgency
        return order[::direction], end

    def best_so_far(self) -> tuple[TransferOrder, float]:
        """Return the best order so far, and its makespan [s]."""
        ordered, makespan = self._run_order(self.best, waits=True)
        if makespan > self.value * (1 + self.precision):  # slower because the end waits for SENDs
            ordered, makespan = self._run_order(self.best, waits=False)
        best = TransferOrder(self.best, ordered, self._links, self.free_bound)
        return best, makespan

    def _run_order(self, order: Order | None, *, waits: bool) -> tuple[ScheduleTable, float]:
        """Return a table in an order of transfers (default: PyTorch's), and its makespan [s]."""
        ordered = with_transfers(self.graph.table, order, self._links, waits=waits)
        return ordered, makespan_on_host(*lower_and_price(ordered, self._costs, self._links))

    def step(self, iteration: int) -> None:
        """Change the best greedy orders at random `NUM_DRAWS` times; keep the best order."""
        for draw in range(NUM_DRAWS):
            _, tail, urgency = self._best_greedy[draw % 2]
            if self.rng.random() < NEW_URGENCY:
                urgency = self.rng.random() ** 2  # small urgencies are more often the best
            is_changed = self.rng.random(len(tail)) < self.rng.choice(SHARES)
            spread = self.rng.choice(SPREADS) * tail.max(initial=0.0)
            change = is_changed * self.rng.normal(0, spread, len(tail))
            new_tail = np.maximum(tail + change, 0)
            order, makespan = self._greedy_order(draw % 2, new_tail, urgency)
            self.evaluated += 1
            if makespan < self.value:
                self.best, self.value = order, makespan
