"""Waits of transfers behind other transfers in a worker's queue.

A transfer is ready when its producer has ended. It then waits for the transfers in front of it in
the queues of both workers. While the transfer in front has not started, the wait is head-of-line
blocking.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr, with_short_repr
from pipejax.costs.costs import Costs
from pipejax.schedules.cells.ops import Op, ScheduleError
from pipejax.schedules.table.links import LINK_MODELS, QUEUES, Links
from pipejax.schedules.table.table import ScheduleTable

ROUNDING = 1e-9  # share of the makespan; times that differ by less count as equal


@short_repr
class TransferWait(NamedTuple):
    """Wait of a transfer in the queues of its workers [s], and the cell that it waits for."""

    send: Op  # SEND of the transfer
    sender: int  # worker of the SEND
    receiver: int  # worker of the RECV
    ready: float  # end of the op that produces the data
    start: float  # start of the transfer; equal to `ready` if they differ by rounding only
    worker: int | None = None  # worker in whose queue the transfer waited; None: it did not wait
    cell: Op | None = None  # cell of the transfer in that queue, SEND or RECV
    front: Op | None = None  # cell of the last transfer in front of it in that queue
    blocked: float = 0.0  # head-of-line blocking: the wait until the transfer in front starts

    @property
    def wait(self) -> float:
        """Return the time from ready to start [s]."""
        return self.start - self.ready


@with_short_repr("transfers by_front by_worker")
class TransferWaits(NamedTuple):
    """Waits of all transfers of a run.

    Attributes:
      transfers: every transfer, the longest wait first.
      by_front: {(worker, cell): wait of the transfers directly behind this cell [s]}, the largest
        wait first.
      by_worker: (workers) wait in the queues of each worker [s].
    """

    transfers: tuple[TransferWait, ...]
    by_front: Mapping[tuple[int, Op], float]
    by_worker: Float[NumpyArray, " workers"]


def transfer_waits(evaluation: Evaluation) -> TransferWaits:
    """Report which RECV or SEND keeps which ready transfer waiting, and for how long.

    Args:
      evaluation: a run under rendezvous.

    Returns:
      Every transfer with the transfer in front of it, and sums of the waits.

    Raises:
      ValueError: if the run has another link model, posting by program or shared links.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=3)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.5)
      >>> waits = pj.links.transfer_waits(pj.evaluate(table, costs, link="rendezvous"))
      >>> worst = waits.transfers[0]
      >>> f"{worst.cell} waits {worst.wait} s behind {worst.front}, {worst.blocked} s blocked"
      '0SEND_F2 waits 1.0 s behind 0SEND_F1, 0.0 s blocked'
      >>> waits.by_worker.tolist()
      [1.5, 0.0]
    """
    check_types(evaluation=(evaluation, Evaluation))
    if not LINK_MODELS[evaluation.links.model].is_rendezvous:
        raise ValueError(
            f"transfers wait in queues only under rendezvous, "
            f"the run has link={evaluation.links.model!r}"
        )
    evaluation.links.check_known(("model", "queues", "host_links"), "transfer_waits")
    nodes = evaluation.program.messages.carrier.tolist()
    message_by_node = {node: message for message, node in enumerate(nodes)}
    transfers = [_transfer(evaluation, message, message_by_node) for message in range(len(nodes))]
    transfers.sort(key=lambda transfer: -transfer.wait)  # stable: ties stay in message order
    by_worker = np.zeros(evaluation.workers)
    by_front: dict[tuple[int, Op], float] = {}
    for transfer in transfers:
        if transfer.worker is not None and transfer.front is not None:
            by_worker[transfer.worker] += transfer.wait
            key = transfer.worker, transfer.front
            by_front[key] = by_front.get(key, 0.0) + transfer.wait
    largest = sorted(by_front.items(), key=lambda entry: -entry[1])
    return TransferWaits(tuple(transfers), dict(largest), by_worker)


def _transfer(
    evaluation: Evaluation, message: int, message_by_node: Mapping[int, int]
) -> TransferWait:
    """Return the wait of a message in its queues, and the last message in front of it."""
    program, messages = evaluation.program, evaluation.program.messages
    send, receive = messages.cells(message)
    sender, receiver = int(messages.sender[message]), int(messages.receiver[message])
    ready = float(evaluation.node_finish[messages.producer[message]])
    start = float(evaluation.message_start[message])
    transfer = TransferWait(send, sender, receiver, ready, start)
    rounding = ROUNDING * evaluation.makespan
    if transfer.wait <= rounding:
        return transfer._replace(start=ready)  # no wait
    # a node that carries a message waits for messages in front; if it starts late, there is one
    preds = program.preds[messages.carrier[message]].tolist()
    in_front = [message_by_node[node] for node in preds if node in message_by_node]
    front = max(in_front, key=lambda k: evaluation.message_finish[k])
    front_send, front_receive = messages.cells(front)
    front_cells = {int(messages.sender[front]): front_send}
    front_cells[int(messages.receiver[front])] = front_receive
    worker = sender if sender in front_cells else receiver
    cell = send if worker == sender else receive
    blocked = float(evaluation.message_start[front]) - ready
    blocked = blocked if blocked > rounding else 0.0
    return transfer._replace(worker=worker, cell=cell, front=front_cells[worker], blocked=blocked)


def queue_makespans(
    table: ScheduleTable, costs: Costs, *, link: str | Links = "rendezvous"
) -> dict[str, float | None]:
    """Return {scope of queues, "delay" or "no messages": makespan [s], or None for a deadlock}."""
    links, makespans = Links.resolve(link), dict[str, float | None]()
    for queues in QUEUES:
        try:
            queued_links = dataclasses.replace(links, model="rendezvous", queues=queues)
            makespans[queues] = evaluate(table, costs, link=queued_links).makespan
        except ScheduleError:
            makespans[queues] = None
    delay_links = Links(host_links=links.host_links)  # no message uses a resource
    no_messages = dataclasses.replace(costs, latency=0.0, transmit=0.0)
    makespans["delay"] = evaluate(table, costs, link=delay_links).makespan
    makespans["no messages"] = evaluate(table, no_messages, link=delay_links).makespan
    return makespans
