"""Orders of a table's transfers, represented as predecessors of nodes in the table's program.

Without queues, a program under rendezvous has only dependencies of ops and transfers. An order adds
the previous transfer in the sender's and in the receiver's queue. If each transfer stands after
those that its producer waits for, the graph has no cycle. Heads and tails of the transfers, as if
messages used no resource, give a bound by the queues, and greedy orders.
"""

import dataclasses
import heapq
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.longest_path import finish_times, run_edges, start_times, tails
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import queue_keys
from pipejax.engine.lowering.program import SOURCE, Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.communication_cells import without_transfers
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Order = Int[NumpyArray, " transfers"]


@dataclasses.dataclass(frozen=True, eq=False)
class TransferGraph:
    """Dependencies of a table's ops and transfers, without the waits of transfers in queues."""

    table: ScheduleTable  # the schedule without communication cells
    program: Program  # the table lowered under rendezvous, for its nodes and messages
    # predecessors; columns 1 and 2 of a transfer are for the queues of its sender and receiver
    preds: Int[NumpyArray, "nodes max_preds"]
    duration: Float[NumpyArray, " nodes"]  # [s]
    queues: Int[NumpyArray, "2 transfers"]  # number of the sender's and of the receiver's queue
    num_queues: int  # queues that have transfers


def transfer_graph(table: ScheduleTable, costs: Costs, links: Links) -> TransferGraph:
    """Lower and price a table under rendezvous, and return its graph without queues."""
    ops_table = without_transfers(table)
    program, vector = lower_and_price(ops_table, costs, links)
    messages = program.messages
    # at least three columns; a transfer waits for its producer, columns 1 and 2 stay free
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
    """Return each node's predecessors; a transfer's include the previous one in each queue."""
    # Order a b c, with a and c in queue 0 and b in queue 1: c has a as an additional predecessor.
    preds, queues = graph.preds.copy(), graph.queues.T.tolist()
    last_node = [SOURCE] * graph.num_queues  # last transfer so far of each queue
    for transfer in order.tolist():
        node = graph.program.messages.carrier[transfer]
        preds[node, 1:3] = [last_node[queue] for queue in queues[transfer]]
        for queue in queues[transfer]:
            last_node[queue] = node
    return preds


def order_makespan(graph: TransferGraph, order: Order) -> float:
    """Return the makespan under an order of transfers [s]."""
    preds = order_preds(graph, order)
    heads, columns = np.nonzero(preds)  # edges; the source, node 0, is no predecessor to wait for
    _, finish = run_edges(preds[heads, columns], heads, graph.duration)
    return float(finish.max())


class HeadsTails(NamedTuple):
    """Earliest start (head) and remaining time (tail) of each transfer, if it used no resource."""

    head: Float[NumpyArray, " transfers"]  # earliest time at which its producer can have ended [s]
    tail: Float[NumpyArray, " transfers"]  # least time from its end to the end of the schedule [s]
    makespan: float  # makespan if messages used no resource [s]


def heads_and_tails(graph: TransferGraph) -> HeadsTails:
    """Return the earliest start (head) and remaining time (tail) of transfers without queues."""
    finish = finish_times(graph.preds, graph.duration)
    carrier = graph.program.messages.carrier
    head = start_times(graph.preds, finish)[carrier]
    return HeadsTails(head, tails(graph.preds, graph.duration)[carrier], float(finish.max()))


def queue_bound(graph: TransferGraph, times: HeadsTails) -> float:
    """Return a lower bound on the makespan from the busiest queue of transfers [s]."""
    # Each queue is a one-machine problem: one transfer at a time, none before its head, and at
    # least its tail after each. With interruptions allowed, Jackson's rule is optimal: serve the
    # longest tail first (Carlier: The one-machine sequencing problem, 1982).
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
    waiting: list[tuple[float, float]] = []  # minus the tail, and the remaining length
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
    """Predecessors and successors of each op and transfer as lists, without queues."""

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
    # The next transfer has the smallest earliest start minus urgency times tail, at a tie the
    # longest tail. On the reverse graph, tails are heads, and the last transfer comes first.
    duration, carrier = graph.duration.tolist(), graph.program.messages.carrier.tolist()
    transfer_by_node = {node: k for k, node in enumerate(carrier)}
    num_missing = [len(preds) for preds in waits.preds]  # predecessors that have not ended
    ready = [0.0] * len(num_missing)  # the last end so far of a node's predecessors [s]
    free = [0.0] * graph.num_queues  # end of the last transfer so far of each queue [s]
    queues, tails = [*zip(*graph.queues.tolist(), strict=True)], tail.tolist()
    # heap of (key, minus the tail, transfer); keys only grow as queues fill, so the first entry
    # with an up-to-date key is the least
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
        """End a node; return all nodes that now wait for nothing."""
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

    run([node for node in range(1, len(num_missing)) if num_missing[node] == 0])
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
