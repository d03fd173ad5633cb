"""Link models: what a message between workers does besides arriving later.

Each model is a function that adds the messages to a program under construction, and says which
node carries each and with what delay; all of them end in the same kind of program. What each model
means is in docs/semantics.md.
"""

from collections.abc import Callable, Mapping

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.engine.lowering.cost_layout import ZERO
from pipejax.engine.lowering.program import MessageTable
from pipejax.engine.lowering.program_builder import ProgramBuilder
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.cells.dependencies import Dependencies
from pipejax.schedules.cells.ops import WAIT_SEND, Phase
from pipejax.schedules.table.communication_cells import insert_transfers
from pipejax.schedules.table.shared_links import shared_links_of
from pipejax.schedules.table.table import ScheduleTable, op_before, row_order


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
    alone = ~_share(builder, found, sent, nodes)
    link = sent.sender * builder.table.num_workers + sent.receiver
    builder.add_chains(nodes[alone], link[alone])
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
    nodes, table, links = _transfers(builder, found, sent, "message"), builder.table, builder.links
    if links.posting == "program" and not table.has_communication:
        table = insert_transfers(table, link=links)
    if table.has_communication:
        ends = _cells(table, found, sent)
        ranks = ends % table.num_slots
    else:
        ends = np.zeros((2, 0), int)
        ranks = np.tile(_ranks_by_end(builder, found, sent)[: len(nodes)], (2, 1))
    order = np.argsort(ranks.ravel(), kind="stable")
    key = queue_keys(links.queues, sent.sender, sent.receiver, found.direction).ravel()
    builder.add_chains(np.tile(nodes, 2)[order], key[order])
    _share(builder, found, sent, nodes)
    if links.posting == "program":
        _post(builder, table, ends, nodes)
    builder.add_edges(nodes, sent.consumer, ZERO)
    _hold_rows(builder, sent, nodes)
    return sent._replace(carrier=nodes)


def _post(
    builder: ProgramBuilder,
    table: ScheduleTable,
    ends: Int[NumpyArray, "2 messages"],
    nodes: Int[NumpyArray, " messages"],
) -> None:
    """Let transfers wait until the rows reach their cells, SEND and RECV: then both are posted.

    The cells may be those of another table, with the same ops in its rows.
    """
    own, theirs = (row_order(each, builder.links.executed) for each in (builder.table, table))
    executed = builder.node_of_cell.ravel()[own]
    for cells in ends:
        before = op_before(table, theirs, cells)
        late = before != NOWHERE
        builder.add_edges(executed[before[late]], nodes[late], ZERO)


def _hold_rows(
    builder: ProgramBuilder, sent: MessageTable, nodes: Int[NumpyArray, " messages"]
) -> None:
    """Let waits for a SEND end with its transfer."""
    where = builder.table.where
    for send, wait in zip((Phase.SEND_F, Phase.SEND_B), WAIT_SEND, strict=True):
        cell = where[wait][sent.stage, sent.microbatch]
        held = (sent.phase == send) & (cell != NOWHERE)
        builder.add_edges(nodes[held], builder.node_of_cell.ravel()[cell[held]], ZERO)


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


def _cells(
    table: ScheduleTable, found: Dependencies, sent: MessageTable
) -> Int[NumpyArray, "2 messages"]:
    """Cells (2, messages) of the SEND and of the RECV of each message."""
    is_forward, where = sent.phase == Phase.SEND_F, table.where
    return np.stack(
        [
            np.where(
                is_forward,
                where[Phase[f"{side}_F"]][stage, sent.microbatch],
                where[Phase[f"{side}_B"]][stage, sent.microbatch],
            )
            for side, stage in (("SEND", sent.stage), ("RECV", found.to_stage))
        ]
    )


def _ranks_by_end(
    builder: ProgramBuilder, found: Dependencies, sent: MessageTable
) -> Int[NumpyArray, " users"]:
    """Ranks of all messages, and of the all-reduces behind them, by the end of what makes them.

    The ends are those of the message-free run with unit slots; ties go by producing worker, stage
    and microbatch, all-reduces last. What a message waits for ends no later there, so queues in
    this order cannot deadlock.
    """
    reductions, none = builder.reductions, np.full(len(builder.reductions.node), -1)
    keys = (
        np.append(sent.microbatch, none),
        np.append(sent.stage, np.arange(len(none))),
        np.append(sent.sender, none + 1 + builder.table.num_workers),
        np.append(builder.unit_ends[found.producer], reductions.end),
    )
    return np.argsort(np.lexsort(keys))


def _share(
    builder: ProgramBuilder,
    found: Dependencies,
    sent: MessageTable,
    nodes: Int[NumpyArray, " messages"],
) -> Bool[NumpyArray, " messages"]:
    """Let a group of shared links carry one message or all-reduce at a time.

    Returns (messages) whether a group carries a message.
    """
    is_shared = np.zeros(len(nodes), bool)
    if not builder.links.shared_links:
        return is_shared
    user, sender, receiver = _users(builder, sent)
    which, group = shared_links_of(builder.links, builder.table.num_workers, sender, receiver)
    user = user[which]
    is_shared[user[user < len(nodes)]] = True
    rank = _ranks_by_end(builder, found, sent)
    group, user = np.unique(np.stack([group, user]), axis=1)
    order = np.argsort(rank[user], kind="stable")
    carried = np.append(nodes, builder.reductions.node)
    builder.add_chains(carried[user[order]], group[order])
    return is_shared


def _users(builder: ProgramBuilder, sent: MessageTable) -> Int[NumpyArray, "3 uses"]:
    """List which message or all-reduce uses which link: (3, uses) its number, sender, receiver.

    An all-reduce uses the links between all workers that take part in it.
    """
    reductions = builder.reductions
    of_copy = reductions.of_copy
    # copies of one all-reduce, each with each other
    one, other = np.nonzero(
        (of_copy[:, None] == of_copy) & (reductions.worker[:, None] != reductions.worker)
    )
    return np.concatenate(
        [
            np.stack([np.arange(len(sent.sender)), sent.sender, sent.receiver]),
            np.stack(
                [
                    len(sent.sender) + of_copy[one],
                    reductions.worker[one],
                    reductions.worker[other],
                ]
            ),
        ],
        axis=1,
    )


LINK_MODELS: Mapping[str, Callable[[ProgramBuilder, Dependencies, MessageTable], MessageTable]] = {
    "delay": _delay,
    "queued": _queued,
    "blocking": _blocking,
    "rendezvous": _rendezvous,
}
