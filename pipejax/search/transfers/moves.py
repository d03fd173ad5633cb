"""Moves of local search: one transfer goes to another position in the order of all.

A schedule gets shorter only if its critical path is broken, and the order of transfers can break
it only where transfers follow each other on it. So moves reorder two transfers of such a block;
where there are too few of them, any transfer moves a little.
"""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.engine.lowering.program import SOURCE
from pipejax.search.transfers.graph import TransferGraph, legal_range, positions_of, queue_preds

REACH = 32  # positions by which a transfer off the critical path moves at most

Order = Int[NumpyArray, " transfers"]


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
    pairs = np.unique(np.stack([np.concatenate(transfers), np.concatenate(targets)]), axis=1)
    transfer, target = pairs[:, (low[pairs[0]] < pairs[1]) & (pairs[1] < high[pairs[0]])]
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


def moved(order: Order, moves: Moves) -> Int[NumpyArray, "moves transfers"]:
    """Apply each of some moves to one order: (moves, transfers) an order for every move."""
    at = np.arange(len(order))[None]
    start = positions_of(order[None])[0][moves.transfer][:, None]
    target = moves.target[:, None]
    # those between the old and the new position make room by one
    came_from = at + ((start <= at) & (at < target)) - ((target < at) & (at <= start))
    return order[np.where(at == target, start, came_from)]
