"""A lower bound on the makespan over all placements: some messages have to leave their node.

Take the workers as a graph, with an edge between two that send each other anything. A placement on
K nodes cuts it into K parts. Where the graph holds together, at least K - 1 edges are cut; where no
edge alone holds it together (stages that loop make a ring), two leave each part, so at least K are.
Whatever a placement cuts holds some set of so few edges, and a run in which only these are far is
no slower. So the least makespan of all such sets is a bound; they are one batch.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.costs.topology import PlacedCosts
from pipejax.engine.lowering.program import Program
from pipejax.search.tuning.permutation_search import BATCH, EXHAUSTIVE, batched_makespans

Edges = Int[NumpyArray, "2 edges"]


def cut_bound(placed: PlacedCosts, program: Program) -> float:
    """Lower bound on the makespan of all placements [s]."""
    graph = _Graph.of(placed)
    edges = graph.edges.shape[1]
    cuts = _least_cuts(graph.edges, placed.table.num_workers, int(placed.nodes.max()) + 1)
    while math.comb(edges, cuts) > EXHAUSTIVE:  # fewer are cut too: the bound is lower
        cuts -= 1
    chosen = np.array([*itertools.combinations(range(edges), cuts)], int).reshape(-1, cuts)
    far = np.zeros((len(chosen), edges + 1), np.int32)  # a column more, of what stays on a worker
    np.put_along_axis(far, chosen, 1, axis=1)
    return float(batched_makespans(program, graph.costs_of, far, BATCH).min())


class _Graph(NamedTuple):
    """Workers that send each other messages.

    Attributes:
      placed: costs by place.
      edges: (2, edges) both workers.
      edge: (pipes, boundaries) edge of each stage boundary; the last where none is crossed.
    """

    placed: PlacedCosts
    edges: Edges
    edge: Int[NumpyArray, "pipes boundaries"]

    @classmethod
    def of(cls, placed: PlacedCosts) -> "_Graph":
        placement = placed.table.placement
        ends = np.sort(np.stack([placement[:, :-1], placement[:, 1:]]), axis=0)
        moves = ends[0] != ends[1]
        edges, which = np.unique(ends[:, moves], axis=1, return_inverse=True)
        edge = np.full(moves.shape, edges.shape[1])
        edge[moves] = which.ravel()
        return cls(placed, edges, edge)

    def costs_of(self, far: Int[NumpyArray, "sets edges"]) -> Costs:
        """Costs where only some edges leave a node, for `makespans`."""
        is_far: Bool[NumpyArray, "sets 1 pipes boundaries"] = far[:, None, self.edge] > 0
        fastest = vars(self.placed.fastest)
        costs = {name: time[None] if np.ndim(time) else time for name, time in fastest.items()}
        for name, times in self.placed.messages.items():
            near, apart = times.min(axis=0), times[1:].min(axis=0, initial=np.inf)
            every: NumpyArray = np.where(np.isinf(apart), near, apart)
            where = is_far if near.ndim == is_far.ndim - 1 else is_far[..., None]
            costs[name] = np.where(where, every, near)
        return unchecked_costs(costs)


def _least_cuts(edges: Edges, workers: int, nodes: int) -> int:
    """How many edges any placement cuts, at least."""
    if nodes == 1 or not _holds_together(edges, workers):
        return 0
    all_but_one = (np.delete(edges, k, axis=1) for k in range(edges.shape[1]))
    is_ring = all(_holds_together(others, workers) for others in all_but_one)
    return nodes if is_ring else nodes - 1


def _holds_together(edges: Edges, workers: int) -> bool:
    """Whether all workers are reached from the first."""
    reached = np.arange(workers) == 0
    for _ in range(workers):
        from_reached = edges[:, reached[edges].any(axis=0)]
        reached[from_reached.ravel()] = True
    return bool(reached.all())
