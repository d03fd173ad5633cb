"""Link models: what a message between workers does besides arriving later.

Each message follows the model of its link, and all of them end in the same kind of program. What
each model means is in docs/semantics.md.

Messages below `Links.eager_below` are buffered where larger ones meet in a rendezvous, so which
messages they are decides about nodes and edges: a program holds for costs with the same ones, and
others are refused by name.
"""

import dataclasses
from typing import Any

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.checks import wrong
from pipejax.base.jax_on_demand import jax
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.program import SOURCE, ZERO, CostLayout, MessageTable, Program
from pipejax.engine.lowering.program_builder import ProgramBuilder
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.cells.dependencies import Dependencies
from pipejax.schedules.cells.ops import WAIT_SEND, Phase
from pipejax.schedules.table.communication_cells import RunOrder, insert_transfers
from pipejax.schedules.table.links import LINK_MODELS, Links, find_shared_links
from pipejax.schedules.table.table import ScheduleTable, op_before, row_order

Which = Bool[NumpyArray, " messages"]
Nodes = Int[NumpyArray, " messages"]
Smaller = Bool[NumpyArray, "batch directions pipes boundaries microbatches"]

EAGER = "queued"  # the model that a buffered message follows where others meet in a rendezvous


def add_messages(builder: ProgramBuilder, order: RunOrder, sent: MessageTable) -> MessageTable:
    """Add messages to a program: as nodes on their links, or as edges with a lag."""
    # Edges are added in one order, for at a tie the first edge into a node wins:
    # 1. into a transfer, from the op that makes the message;
    # 2. from the transfer before it in a queue of either worker, or on its shared or own link;
    # 3. from the ops before its cells, where both ends are posted by program;
    # 4. into the op that consumes the message;
    # 5. into the op that a blocking message, or a wait for a SEND, holds up.
    # Returns the messages with the node that carries each, and the lag of its arrival.
    links, num_workers, messages = builder.links, builder.table.num_workers, order.messages
    models = list(LINK_MODELS.values())
    model_index = np.where(sent.eager, list(LINK_MODELS).index(EAGER), order.models)
    has_node = np.array([bool(model.occupancy) for model in models])[model_index]
    is_transfer = _is_transfer(model_index)
    blocks = np.array([model.blocks for model in models])[model_index]
    occupancy, lags = (
        _positions(builder.layout, messages, model_index, costs)
        for costs in ([model.occupancy for model in models], [model.lag for model in models])
    )
    nodes = np.full_like(sent.producer, SOURCE)
    nodes[has_node] = builder.add_nodes(
        duration=occupancy[has_node],
        phase=sent.phase[has_node],
        stage=sent.stage[has_node],
        microbatch=sent.microbatch[has_node],
        pipe=messages.pipe[has_node],
        sender=sent.sender[has_node],
        receiver=sent.receiver[has_node],
    )
    builder.add_edges(sent.producer[has_node], nodes[has_node], ZERO)
    table, ends = _line_up(builder, messages, sent, nodes, is_transfer)
    is_alone = has_node & ~is_transfer & ~_share(builder, messages, sent, nodes)
    builder.add_chains(nodes[is_alone], (sent.sender * num_workers + sent.receiver)[is_alone])
    if links.posting == "program":
        _post(builder, table, ends, nodes[is_transfer])
    builder.add_edges(np.where(has_node, nodes, sent.producer), sent.consumer, lags)
    _hold_next(builder, sent, nodes, blocks)
    _hold_rows(builder, sent, nodes, is_transfer)
    return sent._replace(carrier=nodes, lag_index=lags)


def _positions(
    layout: CostLayout, messages: Dependencies, model_index: Nodes, costs: list[str]
) -> Nodes:
    """Positions (messages) of a cost of each message; `costs` names it by model, "" for none."""
    positions = np.full_like(model_index, ZERO)
    for model, cost in enumerate(costs):
        which = model_index == model
        if cost and which.any():
            positions[which] = layout.link(cost, messages.take(which))
    return positions


def _line_up(
    builder: ProgramBuilder,
    messages: Dependencies,
    sent: MessageTable,
    nodes: Nodes,
    is_transfer: Which,
) -> tuple[ScheduleTable, Int[NumpyArray, "2 transfers"]]:
    """Let transfers have their turns in the queues of both workers: SEND and RECV are one."""
    table, links = builder.table, builder.links
    if links.posting == "program" and not table.has_communication:
        table = insert_transfers(table, link=links)
    ends = np.zeros((2, 0), int)
    if table.has_communication:
        ends = _cells(table, messages, sent)[:, is_transfer]
        ranks = ends % table.num_slots
    elif is_transfer.any():
        ranks = _ranks_by_end(builder, messages, sent)[: len(nodes)][is_transfer]
        ranks = np.tile(ranks, (2, 1))
    else:
        return table, ends
    order = np.argsort(ranks.ravel(), kind="stable")
    queue_fields = sent.sender, sent.receiver, messages.direction
    key = queue_keys(links.queues, *(field[is_transfer] for field in queue_fields))
    builder.add_chains(np.tile(nodes[is_transfer], 2)[order], key.ravel()[order])
    return table, ends


def _hold_next(builder: ProgramBuilder, sent: MessageTable, nodes: Nodes, blocks: Which) -> None:
    """Let the sender's next op wait until the messages of its previous op are transmitted."""
    next_op = builder.next_in_row(sent.producer[blocks])
    followed = next_op >= 0
    builder.add_edges(nodes[blocks][followed], next_op[followed], ZERO)


def _post(
    builder: ProgramBuilder,
    table: ScheduleTable,
    ends: Int[NumpyArray, "2 transfers"],
    nodes: Int[NumpyArray, " transfers"],
) -> None:
    """Let transfers wait until the rows reach their cells, SEND and RECV: then both are posted."""
    orders = [row_order(t, builder.links.executed(t.grammar)) for t in (builder.table, table)]
    executed = builder.node_of_cell.ravel()[orders[0]]
    for cells in ends:
        before = op_before(table, orders[1], cells)
        late = before != NOWHERE
        builder.add_edges(executed[before[late]], nodes[late], ZERO)


def _hold_rows(
    builder: ProgramBuilder, sent: MessageTable, nodes: Nodes, is_transfer: Which
) -> None:
    """Let waits for a SEND end with its transfer; what is buffered or queued is not waited for."""
    where = builder.table.where
    for send, wait in zip((Phase.SEND_F, Phase.SEND_B), WAIT_SEND, strict=True):
        cell = where[wait][sent.stage, sent.microbatch]
        held = is_transfer & (sent.phase == send) & (cell != NOWHERE)
        builder.add_edges(nodes[held], builder.node_of_cell.ravel()[cell[held]], ZERO)


def queue_keys(
    queues: str,
    sender: Int[NumpyArray, " messages"],
    receiver: Int[NumpyArray, " messages"],
    direction: Int[NumpyArray, " messages"],
) -> Int[NumpyArray, "2 messages"]:
    """Number the queues that a transfer occupies: one of its sender, one of its receiver."""
    ends = np.stack([sender, receiver])
    size = int(ends.max(initial=0)) + 1
    return {"worker": ends, "pair": ends * size + ends[::-1], "direction": ends * 2 + direction}[
        queues
    ]


def _cells(
    table: ScheduleTable, messages: Dependencies, sent: MessageTable
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
            for side, stage in (("SEND", sent.stage), ("RECV", messages.to_stage))
        ]
    )


def _ranks_by_end(
    builder: ProgramBuilder, messages: Dependencies, sent: MessageTable
) -> Int[NumpyArray, " users"]:
    """Rank all messages, then the all-reduces, by the ends of their producers."""
    # The ends are those of the message-free run with unit slots; ties go by producing worker, stage
    # and microbatch, all-reduces last. The inputs of a message end no later there, so queues in
    # this order cannot deadlock. argsort of an order is the rank of each entry: order 2 0 1 means
    # that entry 2 comes first, and gives the ranks 1 2 0.
    reductions, none = builder.reductions, np.full(len(builder.reductions.node), -1)
    keys = (
        np.append(sent.microbatch, none),
        np.append(sent.stage, np.arange(len(none))),
        np.append(sent.sender, none + 1 + builder.table.num_workers),
        np.append(builder.unit_ends[messages.producer], reductions.end),
    )
    return np.argsort(np.lexsort(keys))


def _share(
    builder: ProgramBuilder, messages: Dependencies, sent: MessageTable, nodes: Nodes
) -> Which:
    """Let a group of shared links carry one message or all-reduce at a time."""
    # What has no node, a message under `delay`, uses no link. Returns (messages) whether a group
    # carries a message.
    is_shared = np.zeros(len(nodes), bool)
    if not builder.links.shared_links:
        return is_shared
    # users are numbered messages first, all-reduces behind; a user of several groups has its turn
    # in each, so it comes once for every (group, user). Groups are chained in the order of ranks:
    #
    #     group  0 0 0 1 1
    #     user   0 3 4 0 2      ranks 3 < 0 < 4 and 0 < 2: chains 3 - 0 - 4 and 0 - 2
    carried = np.append(nodes, builder.reductions.node)
    uses = _users(builder, sent)
    user, sender, receiver = uses[:, carried[uses[0]] != SOURCE]
    which, group = find_shared_links(builder.links, builder.table.num_workers, sender, receiver)
    user = user[which]
    is_shared[user[user < len(nodes)]] = True
    rank = _ranks_by_end(builder, messages, sent)
    group, user = np.unique(np.stack([group, user]), axis=1)
    order = np.argsort(rank[user], kind="stable")
    builder.add_chains(carried[user[order]], group[order])
    return is_shared


def _users(builder: ProgramBuilder, sent: MessageTable) -> Int[NumpyArray, "3 uses"]:
    """List the uses of links: (3, uses) number of the message or all-reduce, sender, receiver."""
    # An all-reduce uses the links between all workers that take part in it.
    reduction, worker = builder.reductions.reduction, builder.reductions.worker
    # pairs of copies that take part in one all-reduce on two workers
    is_pair = (reduction[:, None] == reduction) & (worker[:, None] != worker)
    first, second = np.nonzero(is_pair)
    count = len(sent.sender)
    message_uses = np.stack([np.arange(count), sent.sender, sent.receiver])
    reduction_uses = np.stack([count + reduction[first], worker[first], worker[second]])
    return np.concatenate([message_uses, reduction_uses], axis=1)


def smaller_messages(table: ScheduleTable, links: Links, costs: Costs | None) -> bytes:
    """Return which messages are smaller than `Links.eager_below`, as bytes; empty without one."""
    if not links.eager_below:
        return b""
    if costs is None:
        raise wrong(
            "eager_below",
            f"= {links.eager_below:g} s needs known costs: which messages lie below it "
            "follows from their transmit times, got costs=None",
        )
    smaller = below_threshold(costs.transmit, links.eager_below, 0)[0]
    mask: bytes = np.broadcast_to(smaller, _shape_of_messages(table)).tobytes()
    return mask


def eager_messages(table: ScheduleTable, order: RunOrder, smaller: bytes) -> Which:
    """Find the messages (messages) that are buffered: the smaller ones of those that would meet."""
    sent = order.messages
    if not smaller:
        return np.zeros(len(sent.producer), bool)
    is_smaller = np.frombuffer(smaller, bool).reshape(_shape_of_messages(table))
    boundary = sent.boundary(table.grammar.graph)
    place = sent.direction, sent.pipe, boundary, sent.microbatch
    return _is_transfer(order.models) & is_smaller[place]


def _shape_of_messages(table: ScheduleTable) -> tuple[int, int, int, int]:
    boundaries = len(table.grammar.edges(table.num_stages))
    return 2, table.num_pipes, boundaries, table.num_microbatches


def _is_transfer(models: Nodes) -> Which:
    return np.array([model.is_rendezvous for model in LINK_MODELS.values()])[models]


def below_threshold(transmit: Any, eager_below: float, batch_axes: int) -> Smaller:
    """Compare transmit times with a time; axes of one entry stand for all."""
    try:
        smaller = np.asarray(transmit < eager_below)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "transmit is traced: which messages lie below eager_below cannot be seen within jit "
            "or vmap. Close over transmit times that are numbers, or give makespans the batch"
        ) from error
    if not (batch_axes and smaller.ndim):
        smaller = smaller[None]
    per_microbatch = smaller.ndim == 5
    shape = smaller.shape[1:] if per_microbatch else (*smaller.shape[1:], 1)
    return smaller.reshape(len(smaller), *(1,) * (4 - len(shape)), *shape)


def check_eager(program: Program, transmit: Any, batch_axes: int = 0) -> None:
    """Refuse transmit times with which other messages are eager than those of a program."""
    sent, links = program.messages, program.links
    smaller = below_threshold(transmit, links.eager_below, batch_axes)
    place = (
        np.asarray(sent.direction),
        np.asarray(program.pipe)[sent.carrier],  # a fused pair that makes it may be of two pipes
        np.asarray(sent.boundary),
        np.asarray(sent.microbatch),
    )
    layout = program.layout
    shape = 2, layout.num_pipes, layout.num_boundaries, layout.num_microbatches
    # a message that the program buffers must be smaller in every configuration of a batch; one
    # that it does not buffer, in none
    any_below = np.broadcast_to(smaller.any(0), shape)[place]
    all_below = np.broadcast_to(smaller.all(0), shape)[place]
    models = links.message_models(program.num_workers, sent.sender, sent.receiver)
    is_transfer = _is_transfer(models)
    wrong = np.flatnonzero(is_transfer & np.where(sent.eager, ~all_below, any_below))
    if len(wrong):
        send = sent.cells(int(wrong[0]))[0]
        is_eager = sent.eager[wrong[0]]
        raise ValueError(
            f"the transmit time of {send} is {'not ' if is_eager else ''}below eager_below = "
            f"{links.eager_below:g} s, and the program is for one that is"
            f"{' not' if not is_eager else ''}: lower the table for these costs (lower(costs=..))"
        )


@cached_method
def settled(program: Program) -> Program:
    """Return a program whose costs were checked: there is nothing left to check."""
    return dataclasses.replace(program, links=dataclasses.replace(program.links, eager_below=0.0))
