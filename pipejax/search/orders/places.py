"""Search for the places of workers on a machine of nodes.

A place is a position of a worker on the machine. Places are numbered node by node.
Workers in order are best for a plain pipeline, but not for looped stages or bidirectional pipes.
Costs depend only on which stage boundaries leave a node. So placements with equal costs run once.

The lower bound uses a graph with an edge between any two workers that exchange messages. A
placement on K nodes divides the graph into K parts. If the graph is connected, the placement cuts
at least K - 1 edges. If the graph has no bridge, like a ring, at least two edges leave each part,
so at least K edges are cut. The bound is the least makespan over all choices of that many slow
edges.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_local_search, check_types, wrong
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import mapped
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.model_topology import model_placements
from pipejax.costs.system.system import System
from pipejax.costs.topology import PlacedCosts, Topology, levels_on, places_on
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.orders.permutations import (
    BATCH,
    EXHAUSTIVE,
    Order,
    Orders,
    PermutationSearch,
    batched_makespans,
)

Edges = Int[NumpyArray, "2 edges"]


@short_repr
class WorkerPlaces(NamedTuple):
    """A placement of workers on a machine.

    Attributes:
      places: (workers) place of each worker, numbered node by node.
      costs: costs of the table in these places.
    """

    places: Order
    costs: Costs


def places(
    table: ScheduleTable,
    costs: Costs | Workload,
    machine: Topology | System,
    *,
    link: str | Links = "delay",
    iterations: int = 200,
    time_limit: float | None = TIME_LIMIT,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Found[WorkerPlaces]:
    """Search the places of the workers on a machine that make the step shortest.

    The table does not change: a worker keeps its row and its stages. If there are at most 50,000
    different placements, the search evaluates all. The result is never slower than a baseline, and
    deterministic unless the time runs out. An interrupt (Ctrl-C) ends the search with the best
    placement so far.

    Args:
      table: the schedule.
      costs: unbatched costs [s], or a workload.
      machine: a topology for costs, or a system for a workload. The search starts from the places
        of the topology or workload.
      link: link model, or `Links`; shared links stay with their workers.
      iterations: largest number of batches of placements.
      time_limit: time after which no further batch starts [s]; None for no limit.
      seed: seed of all random choices.
      on_progress: called after each batch with its number, `iterations`, and a text.

    Returns:
      The best placement. If all placements were evaluated, the lower bound is its makespan.
      Baselines are the "given" places, "in order", "round robin" over the nodes, "folded" (first
      and last worker side by side, and so on), and the best and the mean of random placements
      ("best of scattered", "mean of scattered").

    Raises:
      ValueError: as `evaluate`; or if the number of places is not that of the workers, or
        iterations, seed or time_limit is negative.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("interleaved-1f1b", num_workers=8, num_microbatches=8)
      >>> machine = pj.Topology(2, latency=(0.0, 0.25))
      >>> result = pj.search.places(table, pj.Costs(forward=0.5, backward=1.0), machine)
      >>> result.value <= min(result.baselines.values())
      True
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs, Workload))
    check_types(machine=(machine, System if isinstance(costs, Workload) else Topology))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    if isinstance(costs, Workload) and isinstance(machine, System):
        current_places = places_on(table, costs.worker_places)
        placed = model_placements(costs, machine, table)
    elif isinstance(costs, Costs) and isinstance(machine, Topology):
        costs.check_values()
        current_places, placed = places_on(table, machine.places), levels_on(costs, table, machine)
    search = PlacementSearch(placed, current_places, Links.resolve(link), seed)
    with telling("place", on_progress) as tell:
        return search.run(iterations, time_limit, tell)


class PlacementSearch(PermutationSearch[WorkerPlaces]):
    """State of the search for a placement."""

    def __init__(
        self, placed: PlacedCosts, current: tuple[int, ...], links: Links, seed: int
    ) -> None:
        """Start from the best of regular and random placements; `current` are the given places."""
        super().__init__(seed)
        _check_eager(placed, links)
        exact = mapped(lambda leaf: np.asarray(leaf, np.float64), placed.base)
        self._placed = placed._replace(base=exact)
        self._links, self._times_by_key = links, dict[bytes, float]()
        table = placed.table
        self.program, _ = lower_and_price(table, placed.at(current), links)
        self.batch, self.kind = BATCH, placed.nodes
        in_order = np.arange(table.num_workers)
        named = {"given": np.array(current), "in order": in_order}
        # 0 2 4 5 3 1 puts worker k next to the k-th last worker
        folded = np.append(in_order[::2], in_order[1::2][::-1])
        # round robin puts consecutive workers on consecutive nodes
        place_on_node = in_order - np.searchsorted(self.kind, self.kind)
        named |= {"round robin": np.lexsort((self.kind, place_on_node)), "folded": folded}
        self.start_from(named, random="scattered")
        self.lower_bound = cut_bound(placed, self.program)

    def order_costs(self, orders: Orders) -> Costs:
        """Return the costs of a batch of placements."""
        return self._placed.batch(orders)

    def times(self, orders: Orders) -> Float[NumpyArray, " orders"]:
        """Return the makespan [s] of each placement; placements with equal costs run once."""
        # equal rows of `choices` mean equal costs
        keys = [row.tobytes() for row in self._placed.choices(orders)]
        new_orders = {
            key: order
            for key, order in zip(keys, orders, strict=True)
            if key not in self._times_by_key
        }
        if new_orders:
            unseen = np.stack([*new_orders.values()])
            new_times = batched_makespans(self.program, self.order_costs, unseen, self.batch)
            self._times_by_key.update(zip(new_orders, new_times.tolist(), strict=True))
            self.evaluated += len(new_orders)
        return np.array([self._times_by_key[key] for key in keys])

    def best_so_far(self) -> tuple[WorkerPlaces, float]:
        """Return the best placement so far, and its makespan [s]."""
        best = self.best.copy()
        for workers in self._placed.workers_by_node(best):  # the order within a node is free
            best[np.sort(workers)] = np.sort(best[workers])
        costs = self._placed.at(best)
        run = evaluate(self._placed.table, costs, link=self._links)
        return WorkerPlaces(best, costs), run.makespan


def _check_eager(placed: PlacedCosts, links: Links) -> None:
    is_eager = placed.messages["transmit"] < links.eager_below
    if (is_eager != is_eager[0]).any():
        reason = "some messages are longer between nodes than inside a node: their link model"
        raise wrong("eager_below", f"= {links.eager_below:g} s: {reason} would change with places")


def cut_bound(placed: PlacedCosts, program: Program) -> float:
    """Return a lower bound [s] on the makespan of any placement on several nodes."""
    # An edge joins two workers that exchange messages. It is cut if they are on different nodes.
    graph = _WorkerGraph.from_placed(placed)
    num_edges = graph.edges.shape[1]
    num_nodes = int(placed.nodes.max()) + 1
    num_cuts = _min_num_cuts(graph.edges, placed.table.num_workers, num_nodes)
    # Every placement cuts at least `num_cuts` edges. A message over a cut edge takes at least its
    # fastest time between nodes. So the best choice of cut edges bounds all placements.
    while math.comb(num_edges, num_cuts) > EXHAUSTIVE:  # fewer cuts give a weaker, valid bound
        num_cuts -= 1
    combinations = itertools.combinations(range(num_edges), num_cuts)
    cut_edges = np.array([*combinations], int).reshape(-1, num_cuts)
    # the last column stands for boundaries inside a worker, which are never cut
    is_cut = np.zeros((len(cut_edges), num_edges + 1), np.int32)
    np.put_along_axis(is_cut, cut_edges, 1, axis=1)
    return float(batched_makespans(program, graph.cut_costs, is_cut, BATCH).min())


class _WorkerGraph(NamedTuple):
    """Graph of workers, with an edge between every two workers that exchange messages."""

    placed: PlacedCosts  # costs by place
    edges: Edges  # both workers of each edge
    # edge of each stage boundary; a boundary inside a worker has the number of edges
    boundary_edge: Int[NumpyArray, "pipes boundaries"]

    @classmethod
    def from_placed(cls, placed: PlacedCosts) -> "_WorkerGraph":
        # stages 0 1 2 3 on workers 0 1 0 1 have the edge (0, 1) at all three boundaries
        placement = placed.table.placement  # (pipes, stages)
        ends = np.sort(np.stack([placement[:, :-1], placement[:, 1:]]), axis=0)
        is_crossed = ends[0] != ends[1]
        edges, edge = np.unique(ends[:, is_crossed], axis=1, return_inverse=True)
        boundary_edge = np.full(is_crossed.shape, edges.shape[1])
        boundary_edge[is_crossed] = edge.ravel()
        return cls(placed, edges, boundary_edge)

    def cut_costs(self, is_cut: Int[NumpyArray, "sets edges"]) -> Costs:
        """Return costs for each set of cut edges; only messages over cut edges leave a node."""
        is_far: Bool[NumpyArray, "sets 1 pipes boundaries"] = (
            is_cut[:, None, self.boundary_edge] > 0
        )
        fastest = vars(self.placed.fastest)
        costs = {name: time[None] if np.ndim(time) else time for name, time in fastest.items()}
        for name, times in self.placed.messages.items():  # (levels, ...); level 0: inside a node
            fastest_time = times.min(axis=0)
            far_time = times[1:].min(axis=0) if len(times) > 1 else fastest_time
            has_microbatches = fastest_time.ndim == is_far.ndim
            mask = is_far[..., None] if has_microbatches else is_far
            costs[name] = np.where(mask, far_time, fastest_time)
        return unchecked_costs(costs)


def _min_num_cuts(edges: Edges, workers: int, nodes: int) -> int:
    """Return a lower bound on the number of edges that a placement on these nodes cuts."""
    if nodes == 1 or not _is_connected(edges, workers):
        return 0
    has_bridge = any(
        not _is_connected(np.delete(edges, edge, axis=1), workers) for edge in range(edges.shape[1])
    )
    return nodes - 1 if has_bridge else nodes


def _is_connected(edges: Edges, workers: int) -> bool:
    is_reached = np.arange(workers) == 0
    for _ in range(workers):
        new_edges = edges[:, is_reached[edges].any(axis=0)]
        is_reached[new_edges.ravel()] = True
    return bool(is_reached.all())
