"""Link models: the nodes and edges that represent messages between workers in a program.

Messages below `Links.eager_below` are buffered, larger ones wait in a rendezvous. So a program is
valid for costs with the same set of eager messages, and `check_eager` refuses others.
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
from pipejax.schedules.table.table import ScheduleTable, op_before, phase_cells

Which = Bool[NumpyArray, " messages"]
Nodes = Int[NumpyArray, " messages"]
EagerMask = Bool[NumpyArray, "batch directions pipes boundaries microbatches"]

EAGER_MODEL = "queued"  # link model of buffered messages under rendezvous


def add_messages(builder: ProgramBuilder, order: RunOrder, sent: MessageTable) -> MessageTable:
    """Add messages to a program: as nodes on their links, or as edges with a lag."""
    # `order.messages` are edges between cells, `sent` the same messages between nodes (in helpers
    # too). Return `sent` with the node that carries each message, and the lag of its arrival.
    # The order of these edges matters: at a tie the first edge into a node wins:
    # 1. into a transfer, from the op that makes the message;
    # 2. from the transfer before it in a queue of either worker, or on its shared or own link;
    # 3. from the ops before its cells, if SEND and RECV are posted by program;
    # 4. into the op that consumes the message;
    # 5. into the op that waits for a blocking message, or for a SEND.
    links, num_workers, messages = builder.links, builder.table.num_workers, order.messages
    models = list(LINK_MODELS.values())
    model_index = np.where(sent.eager, list(LINK_MODELS).index(EAGER_MODEL), order.models)
    has_node = np.array([bool(model.occupancy) for model in models])[model_index]
    is_transfer = _is_transfer(model_index)
    blocks = np.array([model.blocks for model in models])[model_index]
    layout = builder.layout
    occupancy = _cost_index(layout, messages, model_index, [model.occupancy for model in models])
    lags = _cost_index(layout, messages, model_index, [model.lag for model in models])
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
    table, cells = _chain_transfers(builder, messages, sent, nodes, is_transfer)
    is_shared = _chain_shared_links(builder, messages, sent, nodes)
    is_alone = has_node & ~is_transfer & ~is_shared  # on the link of its two workers
    builder.add_chains(nodes[is_alone], (sent.sender * num_workers + sent.receiver)[is_alone])
    if links.posting == "program":
        _add_posting(builder, table, cells, nodes[is_transfer])
    builder.add_edges(np.where(has_node, nodes, sent.producer), sent.consumer, lags)
    # under a blocking link the next op waits until the messages of the previous one are transmitted
    next_op = builder.next_in_row(sent.producer[blocks])
    has_next = next_op >= 0
    builder.add_edges(nodes[blocks][has_next], next_op[has_next], ZERO)
    _add_send_waits(builder, sent, nodes, is_transfer)
    return sent._replace(carrier=nodes, lag_index=lags)


def _cost_index(
    layout: CostLayout, messages: Dependencies, model_index: Nodes, cost_by_model: list[str]
) -> Nodes:
    """Return each message's position in the cost vector; `cost_by_model` names the cost."""
    positions = np.full_like(model_index, ZERO)
    for model, cost in enumerate(cost_by_model):
        has_model = model_index == model
        if cost and has_model.any():
            positions[has_model] = layout.link_position(cost, messages.take(has_model))
    return positions


def _chain_transfers(
    builder: ProgramBuilder,
    messages: Dependencies,
    sent: MessageTable,
    nodes: Nodes,
    is_transfer: Which,
) -> tuple[ScheduleTable, Int[NumpyArray, "2 transfers"]]:
    """Order the transfers in both workers' queues: by their cells, or by their producers' ends."""
    # Return the table with communication, and the SEND and RECV cell of each transfer, if any.
    table, links = builder.table, builder.links
    if links.posting == "program" and not table.has_communication:
        table = insert_transfers(table, link=links)
    cells = np.zeros((2, 0), int)
    if table.has_communication:
        cells = _communication_cells(table, messages, sent)[:, is_transfer]
        ranks = cells % table.num_slots
    elif is_transfer.any():
        ranks = _ranks_by_end(builder, messages, sent)[: len(nodes)][is_transfer]
        ranks = np.tile(ranks, (2, 1))  # the same in the queues of sender and receiver
    else:
        return table, cells
    # a transfer is one node in two queues: it comes twice in the flat order
    order = np.argsort(ranks.ravel(), kind="stable")
    key_fields = sent.sender, sent.receiver, messages.direction
    keys = queue_keys(links.queues, *(field[is_transfer] for field in key_fields))
    builder.add_chains(np.tile(nodes[is_transfer], 2)[order], keys.ravel()[order])
    return table, cells


def _add_posting(
    builder: ProgramBuilder,
    table: ScheduleTable,
    cells: Int[NumpyArray, "2 transfers"],
    nodes: Int[NumpyArray, " transfers"],
) -> None:
    """Let each transfer wait for the ops before its SEND and its RECV in the rows of `table`."""
    executed, tables = builder.links.executed_phases, (builder.table, table)
    node_order, op_order = (phase_cells(t, executed(t.grammar)) for t in tables)
    op_nodes = builder.node_of_cell.ravel()[node_order]
    for transfer_cells in cells:
        previous_op = op_before(table, op_order, transfer_cells)
        has_previous = previous_op != NOWHERE
        builder.add_edges(op_nodes[previous_op[has_previous]], nodes[has_previous], ZERO)


def _add_send_waits(
    builder: ProgramBuilder, sent: MessageTable, nodes: Nodes, is_transfer: Which
) -> None:
    """Let each WAIT_SEND cell wait for the transfer of its SEND; other messages delay no row."""
    op_cells = builder.table.op_cells
    for send, wait in zip((Phase.SEND_F, Phase.SEND_B), WAIT_SEND, strict=True):
        cell = op_cells[wait][sent.stage, sent.microbatch]
        has_wait = is_transfer & (sent.phase == send) & (cell != NOWHERE)
        builder.add_edges(nodes[has_wait], builder.node_of_cell.ravel()[cell[has_wait]], ZERO)


def queue_keys(
    queues: str,
    sender: Int[NumpyArray, " messages"],
    receiver: Int[NumpyArray, " messages"],
    direction: Int[NumpyArray, " messages"],
) -> Int[NumpyArray, "2 messages"]:
    """Return the queue number of each transfer at its sender and at its receiver, (2, messages)."""
    # `queues`, "worker", "pair" or "direction", says which messages of a worker share a queue.
    workers = np.stack([sender, receiver])
    size = int(workers.max(initial=0)) + 1
    keys = {
        "worker": workers,
        "pair": workers * size + workers[::-1],  # the other row has the other worker
        "direction": workers * 2 + direction,
    }
    return keys[queues]


def _communication_cells(
    table: ScheduleTable, messages: Dependencies, sent: MessageTable
) -> Int[NumpyArray, "2 messages"]:
    """Return the SEND cell and the RECV cell of each message: (2, messages)."""
    is_forward, cells, microbatch = sent.phase == Phase.SEND_F, table.op_cells, sent.microbatch
    send, receive = (sent.stage, microbatch), (messages.to_stage, microbatch)
    send_cells = np.where(is_forward, cells[Phase.SEND_F][send], cells[Phase.SEND_B][send])
    recv_cells = np.where(is_forward, cells[Phase.RECV_F][receive], cells[Phase.RECV_B][receive])
    return np.stack([send_cells, recv_cells])


def _ranks_by_end(
    builder: ProgramBuilder, messages: Dependencies, sent: MessageTable
) -> Int[NumpyArray, " users"]:
    """Return ranks of messages, then of all-reduces, by the times at which their inputs end."""
    # The ends are those of the message-free run with unit slots; ties go by producing worker, stage
    # and microbatch, all-reduces last. So queues in this order cannot deadlock. argsort of an order
    # is the rank of each entry: order 2 0 1 means that entry 2 comes first, with ranks 1 2 0.
    reductions, count = builder.reductions, len(builder.reductions.node)
    keys = (  # the last key is the first criterion
        np.append(sent.microbatch, np.full(count, -1)),
        np.append(sent.stage, np.arange(count)),
        np.append(sent.sender, np.full(count, builder.table.num_workers)),  # after all workers
        np.append(builder.unit_ends[messages.producer], reductions.end),
    )
    return np.argsort(np.lexsort(keys))


def _chain_shared_links(
    builder: ProgramBuilder, messages: Dependencies, sent: MessageTable, nodes: Nodes
) -> Which:
    """Let each group of shared links carry one message or all-reduce at a time."""
    # Return (messages) whether a group carries the message. A message without a node uses no link.
    is_shared = np.zeros(len(nodes), bool)
    if not builder.links.shared_links:
        return is_shared
    # a user of links is a message or an all-reduce; chains of a group follow the ranks:
    #     group  0 0 0 1 1
    #     user   0 3 4 0 2      ranks 3 < 0 < 4 and 0 < 2: chains 3 - 0 - 4 and 0 - 2
    user_nodes = np.append(nodes, builder.reductions.node)
    uses = _link_uses(builder, sent)
    user, sender, receiver = uses[:, user_nodes[uses[0]] != SOURCE]
    workers = builder.table.num_workers
    shared_use, group = find_shared_links(builder.links, workers, sender, receiver)
    group, user = np.unique(np.stack([group, user[shared_use]]), axis=1)
    is_shared[user[user < len(nodes)]] = True
    rank = _ranks_by_end(builder, messages, sent)
    order = np.argsort(rank[user], kind="stable")
    builder.add_chains(user_nodes[user[order]], group[order])
    return is_shared


def _link_uses(builder: ProgramBuilder, sent: MessageTable) -> Int[NumpyArray, "3 uses"]:
    """List the uses of links (3, uses): message or all-reduce, sending and receiving worker."""
    # an all-reduce uses the links between all pairs of its workers; a copy is a stage on a worker
    copy_reduction, worker = builder.reductions.copy_reduction, builder.reductions.copy_worker
    is_pair = (copy_reduction[:, None] == copy_reduction) & (worker[:, None] != worker)
    sender_copy, receiver_copy = np.nonzero(is_pair)
    num_messages = len(sent.sender)
    message_uses = np.stack([np.arange(num_messages), sent.sender, sent.receiver])
    user = num_messages + copy_reduction[sender_copy]
    reduction_uses = np.stack([user, worker[sender_copy], worker[receiver_copy]])
    return np.concatenate([message_uses, reduction_uses], axis=1)


def eager_mask(table: ScheduleTable, links: Links, costs: Costs | None) -> bytes:
    """Return, as bytes, a mask of messages with a transmit time below `Links.eager_below`."""
    if costs is None:
        raise wrong(
            "eager_below",
            f"= {links.eager_below:g} s needs costs, whose transmit times tell which messages are "
            "eager, got costs=None",
        )
    (is_below,) = below_threshold(costs.transmit, links.eager_below, batch_axes=0)
    mask: bytes = np.broadcast_to(is_below, _mask_shape(table)).tobytes()
    return mask


def eager_messages(table: ScheduleTable, order: RunOrder, mask: bytes) -> Which:
    """Return whether each message (messages) is sent eagerly: a transfer that the mask marks."""
    messages = order.messages
    if not mask:
        return np.zeros(len(messages.producer), bool)
    is_below = np.frombuffer(mask, bool).reshape(_mask_shape(table))
    boundary = messages.boundary(table.grammar.graph)
    index = messages.direction, messages.pipe, boundary, messages.microbatch
    return _is_transfer(order.models) & is_below[index]


def _mask_shape(table: ScheduleTable) -> tuple[int, int, int, int]:
    """Return the lengths of the axes of `EagerMask`, except the batch axis."""
    boundaries = len(table.grammar.edges(table.num_stages))
    return 2, table.num_pipes, boundaries, table.num_microbatches


def _is_transfer(models: Nodes) -> Which:
    return np.array([model.is_rendezvous for model in LINK_MODELS.values()])[models]


def below_threshold(transmit: Any, eager_below: float, batch_axes: int) -> EagerMask:
    """Compare transmit times with a limit [s]; the result has all five axes of `EagerMask`."""
    try:
        is_below = np.asarray(transmit < eager_below)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "transmit is traced, so messages cannot be compared with eager_below: within jit or "
            "vmap, close over transmit times that are numbers, or give makespans the batch"
        ) from error
    # missing axes get length 1: batch in front, microbatches at the end, the others between
    if batch_axes == 0 or is_below.ndim == 0:
        is_below = is_below[None]
    if is_below.ndim < 5:
        is_below = is_below[..., None]
    size, *axes = is_below.shape
    return is_below.reshape(size, *[1] * (4 - len(axes)), *axes)


def check_eager(program: Program, transmit: Any, batch_axes: int = 0) -> None:
    """Raise an error if these transmit times make other messages eager than the program's."""
    sent, links = program.messages, program.links
    is_below = below_threshold(transmit, links.eager_below, batch_axes)
    index = (
        np.asarray(sent.direction),
        np.asarray(program.pipe)[sent.carrier],  # a fused pair that produces it may have two pipes
        np.asarray(sent.boundary),
        np.asarray(sent.microbatch),
    )
    layout = program.layout
    shape = 2, layout.num_pipes, layout.num_boundaries, layout.num_microbatches
    # an eager message of the program must be below the limit in all configurations of the batch,
    # any other message in no configuration
    any_below = np.broadcast_to(is_below.any(0), shape)[index]
    all_below = np.broadcast_to(is_below.all(0), shape)[index]
    models = links.message_models(program.num_workers, sent.sender, sent.receiver)
    is_wrong = _is_transfer(models) & np.where(sent.eager, ~all_below, any_below)
    if is_wrong.any():
        message = int(np.flatnonzero(is_wrong)[0])
        here, there = ("not ", "") if sent.eager[message] else ("", " not")
        send, _ = sent.cells(message)
        raise ValueError(
            f"the transmit time of {send} is {here}below eager_below = {links.eager_below:g} s, "
            f"but the program was lowered for a time that is{there}: lower the table for these "
            "costs (lower(costs=..))"
        )


@cached_method
def without_eager_limit(program: Program) -> Program:
    """Remove the limit `eager_below` from a program whose costs passed `check_eager`."""
    return dataclasses.replace(program, links=dataclasses.replace(program.links, eager_below=0.0))
