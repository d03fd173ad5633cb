"""Topological order of a directed graph, or a cycle where there is none."""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray

EdgeEnds = Int[NumpyArray, " edges"]


class CycleError(ValueError):
    """The graph has no topological order; `cycle` lists nodes, each before the one it blocks."""

    def __init__(self, cycle: list[int]) -> None:
        """Keep the nodes of the cycle."""
        super().__init__(f"cycle through nodes {cycle}")
        self.cycle = cycle


def topological_order(num_nodes: int, tail: EdgeEnds, head: EdgeEnds) -> list[int]:
    """Order the nodes so that every edge points forward (Kahn's algorithm, first in first out)."""
    by_tail = np.argsort(tail, kind="stable")
    successors = head[by_tail].tolist()
    first = np.searchsorted(tail[by_tail], np.arange(num_nodes + 1)).tolist()
    waiting_for = np.bincount(head, minlength=num_nodes).tolist()
    order: list[int] = [node for node in range(num_nodes) if waiting_for[node] == 0]
    for node in order:  # grows while it is read: the queue and the answer are one list
        for successor in successors[first[node] : first[node + 1]]:
            waiting_for[successor] -= 1
            if waiting_for[successor] == 0:
                order.append(successor)
    if len(order) < num_nodes:
        raise CycleError(_find_cycle(waiting_for, tail, head))
    return order


def _find_cycle(waiting_for: list[int], tail: EdgeEnds, head: EdgeEnds) -> list[int]:
    """Walk backwards through nodes that never became ready until one repeats."""
    blocked_by = {
        v: u
        for u, v in zip(tail.tolist(), head.tolist(), strict=True)
        if waiting_for[u] and waiting_for[v]
    }
    node = next(iter(blocked_by))
    walked: dict[int, int] = {}
    while node not in walked:
        walked[node] = len(walked)
        node = blocked_by[node]
    return list(walked)[walked[node] :][::-1]
