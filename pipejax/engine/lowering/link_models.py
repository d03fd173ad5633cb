"""Link models: what a message between workers does besides arriving later.

Each model is a function that adds the messages to a program under construction; all of them end
in the same kind of program. What each model means is in docs/semantics.md.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.engine.lowering.cost_layout import ZERO, CostLayout
from pipejax.engine.lowering.program import SOURCE
from pipejax.engine.lowering.program_builder import ProgramBuilder
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table import ScheduleTable


class Messages(NamedTuple):
    """Messages between workers, in the order in which their producers stand in their rows.

    Attributes:
      producer: (messages) node after which it can leave.
      consumer: (messages) node that waits for it.
      producer_cell: (messages) cell of the producer in the table.
      sender: (messages) worker of the producer.
      receiver: (messages) worker of the consumer.
      stage: (messages) stage of the producer.
      to_stage: (messages) stage of the consumer.
      microbatch: (messages) microbatch.
      pipe: (messages) pipe.
      direction: (messages) activation or input gradient.
      boundary: (messages) stage boundary that it crosses.
      phase: (messages) SEND_F or SEND_B.
    """

    producer: Int[NumpyArray, " messages"]
    consumer: Int[NumpyArray, " messages"]
    producer_cell: Int[NumpyArray, " messages"]
    sender: Int[NumpyArray, " messages"]
    receiver: Int[NumpyArray, " messages"]
    stage: Int[NumpyArray, " messages"]
    to_stage: Int[NumpyArray, " messages"]
    microbatch: Int[NumpyArray, " messages"]
    pipe: Int[NumpyArray, " messages"]
    direction: Int[NumpyArray, " messages"]
    boundary: Int[NumpyArray, " messages"]
    phase: Int[NumpyArray, " messages"]


class Carried(NamedTuple):
    """How a link model carries the messages.

    Attributes:
      node: (messages) node that transmits the message, the source where there is none.
      lag: (messages) position of the delay of the edge to the consumer.
    """

    node: Int[NumpyArray, " messages"]
    lag: Int[NumpyArray, " messages"]


def _add_nodes(builder: ProgramBuilder, messages: Messages, duration: NumpyArray) -> NumpyArray:
    return builder.add_nodes(
        duration=duration,
        phase=messages.phase,
        stage=messages.stage,
        microbatch=messages.microbatch,
        pipe=messages.pipe,
        sender=messages.sender,
        receiver=messages.receiver,
    )


def _delay(
    builder: ProgramBuilder,
    messages: Messages,
    layout: CostLayout,
    table: ScheduleTable,
    links: Links,
) -> Carried:
    """The consumer starts latency + transmit later; the message uses no resource."""
    del table, links
    lag = layout.message(messages.direction, messages.pipe, messages.boundary)
    builder.add_edges(messages.producer, messages.consumer, lag)
    return Carried(np.full_like(messages.producer, SOURCE), lag)


def _queued(
    builder: ProgramBuilder,
    messages: Messages,
    layout: CostLayout,
    table: ScheduleTable,
    links: Links,
) -> Carried:
    """A directed pair of workers transmits one message at a time."""
    del links
    where = messages.direction, messages.pipe, messages.boundary
    nodes = _add_nodes(builder, messages, layout.transmit(*where))
    builder.add_edges(messages.producer, nodes, ZERO)
    builder.add_chains(nodes, messages.sender * table.num_workers + messages.receiver)
    builder.add_edges(nodes, messages.consumer, layout.latency(*where))
    return Carried(nodes, layout.latency(*where))


def _blocking(
    builder: ProgramBuilder,
    messages: Messages,
    layout: CostLayout,
    table: ScheduleTable,
    links: Links,
) -> Carried:
    """As queued, and the sender's next op waits until its messages are transmitted."""
    carried = _queued(builder, messages, layout, table, links)
    next_op = builder.next_in_row(messages.producer)
    followed = next_op >= 0
    builder.add_edges(carried.node[followed], next_op[followed], ZERO)
    return carried


def _rendezvous(
    builder: ProgramBuilder,
    messages: Messages,
    layout: CostLayout,
    table: ScheduleTable,
    links: Links,
) -> Carried:
    """A SEND and its RECV are one transfer, in order in the queues of both workers."""
    where = messages.direction, messages.pipe, messages.boundary
    nodes = _add_nodes(builder, messages, layout.message(*where))
    builder.add_edges(messages.producer, nodes, ZERO)
    send_rank, receive_rank = (
        _ranks_by_cells(messages, table)
        if table.has_communication
        else _ranks_by_end(messages, table, links)
    )
    key = queue_keys(links.queues, messages.sender, messages.receiver, messages.direction).ravel()
    order = np.argsort(np.concatenate([send_rank, receive_rank]), kind="stable")
    builder.add_chains(np.tile(nodes, 2)[order], key[order])
    builder.add_edges(nodes, messages.consumer, ZERO)
    return Carried(nodes, np.full_like(nodes, ZERO))


def queue_keys(
    queues: str,
    sender: Int[NumpyArray, " messages"],
    receiver: Int[NumpyArray, " messages"],
    direction: Int[NumpyArray, " messages"],
) -> Int[NumpyArray, "2 messages"]:
    """Say which queues a transfer occupies: one of its sender and one of its receiver.

    Returns (2, messages) numbers; transfers with one number share a queue.
    """
    ends = np.stack([sender, receiver])
    size = int(ends.max(initial=0)) + 1
    return {"worker": ends, "pair": ends * size + ends[::-1], "direction": ends * 2 + direction}[
        queues
    ]


def _ranks_by_cells(messages: Messages, table: ScheduleTable) -> tuple[NumpyArray, NumpyArray]:
    """Slots of the SEND and of the RECV of each message."""
    where = table.content.where
    slots = {}
    for side, stage in (("SEND", messages.stage), ("RECV", messages.to_stage)):
        forward, backward = (
            where[Phase[f"{side}_{letter}"]][stage, messages.microbatch] for letter in "FB"
        )
        slots[side] = np.where(messages.phase == Phase.SEND_F, forward, backward) % table.num_slots
    return slots["SEND"], slots["RECV"]


def _ranks_by_end(
    messages: Messages, table: ScheduleTable, links: Links
) -> tuple[NumpyArray, NumpyArray]:
    """Order in which producers end in the message-free run with unit slots."""
    _, finish = slot_times(table, UNIT_SLOTS, shares=False, link=links)
    end = finish.ravel()[messages.producer_cell]
    order = np.lexsort((messages.microbatch, messages.stage, messages.sender, end))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank, rank


LINK_MODELS: Mapping[
    str, Callable[[ProgramBuilder, Messages, CostLayout, ScheduleTable, Links], Carried]
] = {
    "delay": _delay,
    "queued": _queued,
    "blocking": _blocking,
    "rendezvous": _rendezvous,
}
