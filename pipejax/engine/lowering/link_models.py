"""Link models: what a message between workers does besides arriving later.

Each model is a function that adds the messages to a program under construction, and says which
node carries each and with what delay; all of them end in the same kind of program. What each model
means is in docs/semantics.md.
"""

from collections.abc import Callable, Mapping

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.engine.lowering.cost_layout import ZERO
from pipejax.engine.lowering.program import MessageTable
from pipejax.engine.lowering.program_builder import ProgramBuilder
from pipejax.schedules.cells.dependencies import Dependencies
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.slot_simulation import slot_times


def _delay(builder: ProgramBuilder, found: Dependencies, sent: MessageTable) -> MessageTable:
    """The consumer starts latency + transmit later; the message uses no resource."""
    lag = builder.layout.link("message", found)
    builder.add_edges(sent.producer, sent.consumer, lag)
    return sent._replace(lag_index=lag)


def _transfers(
    builder: ProgramBuilder, found: Dependencies, sent: MessageTable, cost: str
) -> Int[NumpyArray, " messages"]:
    """Add a node for each message, which takes one of its costs: (messages) nodes."""
    nodes = builder.add_nodes(
        duration=builder.layout.link(cost, found),
        phase=sent.phase,
        stage=sent.stage,
        microbatch=sent.microbatch,
        pipe=found.pipe,
        sender=sent.sender,
        receiver=sent.receiver,
    )
    builder.add_edges(sent.producer, nodes, ZERO)
    return nodes


def _queued(builder: ProgramBuilder, found: Dependencies, sent: MessageTable) -> MessageTable:
    """A directed pair of workers transmits one message at a time."""
    nodes, lag = _transfers(builder, found, sent, "transmit"), builder.layout.link("latency", found)
    builder.add_chains(nodes, sent.sender * builder.table.num_workers + sent.receiver)
    builder.add_edges(nodes, sent.consumer, lag)
    return sent._replace(carrier=nodes, lag_index=lag)


def _blocking(builder: ProgramBuilder, found: Dependencies, sent: MessageTable) -> MessageTable:
    """As queued, and the sender's next op waits until its messages are transmitted."""
    sent = _queued(builder, found, sent)
    next_op = builder.next_in_row(sent.producer)
    followed = next_op >= 0
    builder.add_edges(sent.carrier[followed], next_op[followed], ZERO)
    return sent


def _rendezvous(builder: ProgramBuilder, found: Dependencies, sent: MessageTable) -> MessageTable:
    """A SEND and its RECV are one transfer, in order in the queues of both workers."""
    nodes = _transfers(builder, found, sent, "message")
    ranks = _ranks_by_cells if builder.table.has_communication else _ranks_by_end
    order = np.argsort(np.concatenate(ranks(builder, found, sent)), kind="stable")
    queues = builder.links.queues
    key = queue_keys(queues, sent.sender, sent.receiver, found.direction).ravel()
    builder.add_chains(np.tile(nodes, 2)[order], key[order])
    builder.add_edges(nodes, sent.consumer, ZERO)
    return sent._replace(carrier=nodes)


def queue_keys(
    queues: str,
    sender: Int[NumpyArray, " messages"],
    receiver: Int[NumpyArray, " messages"],
    direction: Int[NumpyArray, " messages"],
) -> Int[NumpyArray, "2 messages"]:
    """Number the queues that a transfer occupies: one of its sender, one of its receiver.

    Returns (2, messages) numbers; transfers with one number share a queue.
    """
    ends = np.stack([sender, receiver])
    size = int(ends.max(initial=0)) + 1
    return {"worker": ends, "pair": ends * size + ends[::-1], "direction": ends * 2 + direction}[
        queues
    ]


def _ranks_by_cells(
    builder: ProgramBuilder, found: Dependencies, sent: MessageTable
) -> list[NumpyArray]:
    """Slots of the SEND and of the RECV of each message."""
    table, is_forward = builder.table, sent.phase == Phase.SEND_F
    return [
        np.where(
            is_forward,
            table.where[Phase[f"{side}_F"]][stage, sent.microbatch],
            table.where[Phase[f"{side}_B"]][stage, sent.microbatch],
        )
        % table.num_slots
        for side, stage in (("SEND", sent.stage), ("RECV", found.to_stage))
    ]


def _ranks_by_end(
    builder: ProgramBuilder, found: Dependencies, sent: MessageTable
) -> list[NumpyArray]:
    """Order in which producers end in the message-free run with unit slots."""
    _, finish = slot_times(builder.table, UNIT_SLOTS, shares=False, link=builder.links)
    end = finish.ravel()[found.producer]
    order = np.lexsort((sent.microbatch, sent.stage, sent.sender, end))
    return [np.argsort(order)] * 2


LINK_MODELS: Mapping[str, Callable[[ProgramBuilder, Dependencies, MessageTable], MessageTable]] = {
    "delay": _delay,
    "queued": _queued,
    "blocking": _blocking,
    "rendezvous": _rendezvous,
}
