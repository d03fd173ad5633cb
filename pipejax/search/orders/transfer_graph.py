"""Orders of the transfers of a table, as predecessor arrays for the engine.

Without queues, a program under rendezvous has only dependencies of ops and transfers. An order adds
the previous transfer in the sender's and in the receiver's queue. If each transfer stands after
those that its producer waits for, the graph has no cycle, and the order alone numbers its nodes. So
a batch of orders becomes a batch of predecessor arrays without a loop. Heads and tails of the
transfers, as if messages used no resource, give a bound by the queues, and greedy orders.
"""

import dataclasses
import functools
import heapq
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.longest_path import finish_times, finish_times_of_many, start_times, tails
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import queue_keys
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.communication_cells import without_transfers
from pipejax.schedules.table.host_links import tied_rows
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Order = Int[NumpyArray, " transfers"]
Orders = Int[NumpyArray, "orders transfers"]


@dataclasses.dataclass(frozen=True, eq=False)
class TransferGraph:
    """Dependencies of ops and transfers of a table, before any queue."""

    table: ScheduleTable  # the schedule without communication cells
    program: Program  # the table lowered under rendezvous, for its nodes and messages
    # predecessors; columns 1 and 2 of a transfer are for the queues of its sender and receiver
    preds: Int[NumpyArray, "nodes max_preds"]
    duration: Float[NumpyArray, " nodes"]  # [s]
    queues: Int[NumpyArray, "2 transfers"]  # number of the sender's and of the receiver's queue
    received: Int[NumpyArray, " transfers"]  # transfers sorted by receiver, then by consumer
    sent: Int[NumpyArray, " transfers"]  # transfers sorted by sender, then by producer
    # number of `received` up to the last op of a row that a node waits for, 0 without one; the rows
    # are its own and those that share its host link
    latest: Int[NumpyArray, "nodes rows"]
    # number of `sent` before the first op of a row that waits for a transfer's consumer, all
    # without one
    earliest: Int[NumpyArray, "transfers rows"]
    at_end: Int[NumpyArray, " some"]  # all-reduces and updates after all rows

    @property
    def num_transfers(self) -> int:
        """Count the transfers: messages between workers."""
        return len(self.program.messages.producer)


def transfer_graph(table: ScheduleTable, costs: Costs, links: Links) -> TransferGraph:
    """Lower and price a table under rendezvous, and return its graph before any queue."""
    bare = without_transfers(table)
    rows = tied_rows(bare, links)
    program, vector = lower_and_price(bare, costs, links)
    sent = program.messages
    preds = np.pad(program.preds, ((0, 0), (0, max(0, 3 - program.max_preds))))
    preds[sent.carrier] = SOURCE
    preds[sent.carrier, 0] = sent.producer
    between = program.beside_cells if table.updates_within else np.empty(0, np.int64)
    at_end = np.setdiff1d(program.beside_cells, between)
    backward = (sent.phase == Phase.SEND_B).astype(int)
    queues = queue_keys(links.queues, sent.sender, sent.receiver, backward)
    place, row, reach = _reach(program, preds, at_end, rows)
    received = np.lexsort((sent.consumer, sent.receiver))
    sends = np.lexsort((sent.producer, sent.sender))
    # The number worker * nodes + node ascends along `received`, as the nodes of a row ascend. A
    # binary search for an op counts the transfers up to it. The count includes all rows before, so
    # it is set to 0 where the op's row adds nothing.
    size = program.num_nodes
    arrivals = sent.receiver[received].astype(np.int64) * size + sent.consumer[received]
    latest = np.searchsorted(arrivals, rows[row] * size + reach, side="right")
    latest[latest == np.searchsorted(arrivals, rows[row] * size)] = 0
    # Likewise, along `sent` the op that a producer waits for in a row ascends: a search for a
    # consumer gives the first transfer whose producer waits for it.
    earliest = np.empty((len(sends), rows.shape[1]), np.int64)
    for column in range(rows.shape[1]):
        departures = sent.sender[sends] * size + reach[sent.producer[sends], column]
        is_column = place[sent.receiver] == column
        begin = rows[sent.receiver[is_column]] * size
        first = np.searchsorted(departures, begin + sent.consumer[is_column, None])
        first[first == np.searchsorted(departures, begin + size)] = len(sends)
        earliest[is_column] = first
    return TransferGraph(
        table=bare,
        program=program,
        preds=preds,
        duration=vector[program.duration_index],
        queues=np.unique(queues, return_inverse=True)[1].reshape(queues.shape),
        received=received,
        sent=sends,
        latest=latest,
        earliest=earliest,
        at_end=at_end,
    )


def _reach(
    program: Program,
    preds: Int[NumpyArray, "nodes max_preds"],
    at_end: Int[NumpyArray, " some"],
    rows: Int[NumpyArray, "workers rows"],
) -> tuple[Int[NumpyArray, " workers"], Int[NumpyArray, " nodes"], Int[NumpyArray, "nodes rows"]]:
    """Find the last op of each row that a node waits for without transfers, itself included."""
    # `rows` are the workers that share a host link with each worker, and itself. Return the column
    # of each worker's own row in it, the row of each node, and these last ops. A node beside
    # compute belongs to the row that issues it.
    width = rows.shape[1]
    own_column = (rows == np.arange(len(rows))[:, None]).argmax(axis=1)
    row = np.maximum(program.worker, 0).astype(np.int64)
    reach = np.zeros((program.num_nodes, width), np.int64)
    ops = np.flatnonzero(program.worker != NO_WORKER)
    reach[ops, own_column[row[ops]]] = ops
    follows = (program.worker == NO_WORKER) | (width > 1)
    follows[[SOURCE, *program.messages.carrier, *at_end]] = False
    for node in np.flatnonzero(follows).tolist():  # in topological order
        if program.worker[node] == NO_WORKER:
            row[node] = row[preds[node].max()]
        reach[node] = np.maximum(reach[node], reach[preds[node]].max(axis=0))
    return own_column, row, reach


def invert_orders(orders: Orders) -> Orders:
    """Return the position of each transfer in every order."""
    positions = np.empty_like(orders)
    np.put_along_axis(positions, orders, np.arange(orders.shape[1])[None], axis=1)
    return positions


def legal_range(
    graph: TransferGraph, position: Int[NumpyArray, " transfers"]
) -> tuple[Int[NumpyArray, " transfers"], Int[NumpyArray, " transfers"]]:
    """Return the positions strictly between which each transfer may move, all else unchanged."""
    # They are the last position of a transfer that it depends on, and the first of a dependent one.
    messages, size = graph.program.messages, graph.num_transfers
    low = _latest_arrival(graph, position[None])[0][graph.latest[messages.producer]].max(axis=1)
    # a running minimum from the end; the offset makes later rows larger, so it restarts in each row
    offset = messages.sender[graph.sent] * size
    next_dependent = np.minimum.accumulate((position[graph.sent] + offset)[::-1])[::-1] - offset
    return low, np.append(next_dependent, size)[graph.earliest].min(axis=1)


def _latest_arrival(graph: TransferGraph, positions: Orders) -> Int[NumpyArray, "orders prefixes"]:
    """Return the last position among the first k received transfers of a row; -1 for k = 0."""
    # the offset per row exceeds all positions, so one running maximum serves all rows
    offset = graph.program.messages.receiver[graph.received] * positions.shape[1]
    latest = np.maximum.accumulate(positions[:, graph.received] + offset, axis=1) - offset
    return np.pad(latest, ((0, 0), (1, 0)), constant_values=-1)


def queue_preds(graph: TransferGraph, orders: Orders) -> Int[NumpyArray, "orders transfers 2"]:
    """Return the node in front of each transfer in its sender's and its receiver's queue."""
    # The first transfer of a queue gets the source. Every transfer is listed twice, once per queue.
    # A stable sort by queue keeps the order in a queue, so the previous entry is in front if it has
    # the same queue.
    count, size = orders.shape
    users = np.repeat(orders, 2, axis=1)
    side = np.tile([0, 1], size)
    # 16 bits, where they suffice, sort in linear time
    queue = graph.queues[side, users].astype(np.int16 if 2 * size < 1 << 15 else np.int32)
    by_queue = np.argsort(queue, axis=1, kind="stable")
    queue = np.take_along_axis(queue, by_queue, axis=1)
    user = np.take_along_axis(users, by_queue, axis=1)
    front = np.full((count, 2 * size), SOURCE, np.int32)
    follows = queue[:, 1:] == queue[:, :-1]
    front[:, 1:] = np.where(follows, graph.program.messages.carrier[user[:, :-1]], SOURCE)
    preds = np.empty((count, size, 2), np.int32)
    preds[np.arange(count)[:, None], user, side[by_queue]] = front
    return preds


def finish_of_orders(graph: TransferGraph, orders: Orders) -> Float[NumpyArray, "orders nodes"]:
    """Return the finish time of every node under each order [s]."""
    # A key numbers the nodes topologically: a transfer has its position, an op follows the last
    # transfer that its row has received by then, and equal keys keep the order without queues.
    program, carrier = graph.program, graph.program.messages.carrier
    (count, size), nodes = orders.shape, program.num_nodes
    positions = invert_orders(orders)
    sort_key = np.empty((count, nodes), np.int16 if 2 * size + 2 < 1 << 15 else np.int32)
    arrival = _latest_arrival(graph, positions)
    needed = (arrival[:, prefixes] for prefixes in graph.latest.T)
    sort_key[:] = 2 * functools.reduce(np.maximum, needed) + 2
    sort_key[:, graph.at_end] = 2 * size + 2
    sort_key[:, carrier] = 2 * positions + 1
    node = np.argsort(sort_key, axis=1, kind="stable").astype(np.int32)
    number = np.empty_like(node)
    np.put_along_axis(number, node, np.arange(nodes, dtype=np.int32)[None], axis=1)
    batch = np.arange(count, dtype=np.int32)[:, None]
    waits_for = graph.preds.take(node, axis=0)
    waits_for[batch, number[:, carrier], 1:3] = queue_preds(graph, orders)
    waits_for += batch[:, :, None] * nodes  # positions in all numbers, laid out flat
    finish = finish_times_of_many(number.ravel().take(waits_for), graph.duration[node])
    return np.take_along_axis(finish, number, axis=1)


class HeadsTails(NamedTuple):
    """Heads and tails of the transfers, if messages used no resource."""

    head: Float[NumpyArray, " transfers"]  # earliest time at which its producer can have ended [s]
    tail: Float[NumpyArray, " transfers"]  # least time from its end to the end of the schedule [s]
    makespan: float  # makespan if messages used no resource [s]


def heads_and_tails(graph: TransferGraph) -> HeadsTails:
    """Return the head and the tail of every transfer, if messages use no resource."""
    finish = finish_times(graph.preds, graph.duration)
    carrier = graph.program.messages.carrier
    head = start_times(graph.preds, finish)[carrier]
    return HeadsTails(head, tails(graph.preds, graph.duration)[carrier], float(finish.max()))


def queue_bound(graph: TransferGraph, times: HeadsTails) -> float:
    """Bound the makespan from below by the busiest queue [s]."""
    # Each queue is a one-machine problem: one transfer at a time, none before its head, and at
    # least its tail after each. With interruptions allowed, Jackson's rule is optimal: serve the
    # longest tail first (Carlier: The one-machine sequencing problem, 1982).
    length = graph.duration[graph.program.messages.carrier]
    bound = times.makespan
    for queue in range(int(graph.queues.max(initial=-1)) + 1):
        members = np.flatnonzero((graph.queues == queue).any(axis=0))
        members = members[np.argsort(times.head[members], kind="stable")]
        arriving = list(
            zip(*(x[members].tolist() for x in (times.head, times.tail, length)), strict=True)
        )
        bound = max(bound, _one_queue(arriving))
    return bound


def _one_queue(arriving: list[tuple[float, float, float]]) -> float:
    """Return the bound of one queue by Jackson's rule [s]; (head, tail, length) sorted by head."""
    waiting: list[tuple[float, float]] = []  # minus the tail, and the remaining length
    now = end = 0.0
    for k, (head, tail, length) in enumerate(arriving):
        now = max(now, head)
        heapq.heappush(waiting, (-tail, length))
        until = arriving[k + 1][0] if k + 1 < len(arriving) else np.inf
        while waiting and now < until:
            longest, rest = heapq.heappop(waiting)
            served = min(rest, until - now)
            now += served
            if served < rest:
                heapq.heappush(waiting, (longest, rest - served))
            else:
                end = max(end, now - longest)
    return end


class WaitsFor(NamedTuple):
    """Dependencies of ops and transfers before any queue, as lists in both directions."""

    before: list[list[int]]  # predecessors of each node, without the source
    after: list[list[int]]  # successors of each node

    @classmethod
    def from_preds(cls, preds: Int[NumpyArray, "nodes max_preds"]) -> "WaitsFor":
        """Make the lists from the predecessors of a graph."""
        before: list[list[int]] = [[] for _ in preds]
        after: list[list[int]] = [[] for _ in preds]
        heads, columns = np.nonzero(preds)
        waited_for = preds[heads, columns]
        for node, waited in zip(heads.tolist(), waited_for.tolist(), strict=True):
            before[node].append(waited)
            after[waited].append(node)
        return cls(before, after)

    @property
    def reverse(self) -> "WaitsFor":
        """Return the graph with all edges reversed."""
        return WaitsFor(self.after, self.before)


def priority_order(
    graph: TransferGraph, waits: WaitsFor, tail: Float[NumpyArray, " transfers"], urgency: float
) -> tuple[Order, float]:
    """Run the schedule with a greedy order of transfers; return the order and the makespan [s]."""
    # The next transfer has the smallest earliest start minus urgency times tail, at a tie the
    # longest tail. On the reverse graph, tails are heads, and the last transfer comes first.
    duration, carrier = graph.duration.tolist(), graph.program.messages.carrier.tolist()
    transfer_by_node = {node: k for k, node in enumerate(carrier)}
    missing = [len(before) for before in waits.before]
    ready = [0.0] * len(missing)  # the last end so far of a node's predecessors
    free = [0.0] * (int(graph.queues.max(initial=-1)) + 1)
    queues, tails = [*zip(*graph.queues.tolist(), strict=True)], tail.tolist()
    # candidates: key, minus the tail, transfer; keys only grow as queues fill, so the first with an
    # up-to-date key is the least
    waiting: list[tuple[float, float, int]] = []
    order, ends = list[int](), [0.0]

    def start(transfer: int) -> float:
        sender_queue, receiver_queue = queues[transfer]
        return max(ready[carrier[transfer]], free[sender_queue], free[receiver_queue])

    def priority(transfer: int) -> tuple[float, float, int]:
        return start(transfer) - urgency * tails[transfer], -tails[transfer], transfer

    def run(ready_nodes: list[int]) -> None:
        """Run ops whose inputs are ready, and the ops that they unblock."""
        while ready_nodes:
            node = ready_nodes.pop()
            if node in transfer_by_node:
                heapq.heappush(waiting, priority(transfer_by_node[node]))
            else:
                ready_nodes += finish(node, ready[node] + duration[node])

    def finish(node: int, end: float) -> list[int]:
        """End a node; return the nodes that waited for nothing else."""
        ready_nodes = []
        for successor in waits.after[node]:
            if end > ready[successor]:
                ready[successor] = end
            missing[successor] -= 1
            if missing[successor] == 0:
                ready_nodes.append(successor)
        if not waits.after[node]:
            ends.append(end)
        return ready_nodes

    run([node for node in range(1, len(missing)) if missing[node] == 0])
    while waiting:
        entry = heapq.heappop(waiting)
        transfer = entry[-1]
        if entry != (new_entry := priority(transfer)):
            heapq.heappush(waiting, new_entry)
            continue
        sender_queue, receiver_queue = queues[transfer]
        free[sender_queue] = free[receiver_queue] = start(transfer) + duration[carrier[transfer]]
        order.append(transfer)
        run(finish(carrier[transfer], free[sender_queue]))
    return np.array(order, int), max(ends)
