"""Search of the placement of workers on a machine of nodes.

In order, a pipeline crosses from node to node where its workers do. That is best for a plain
pipeline and not for all: stages that loop go from the last worker back to the first, and pipes
that run against each other hold each stage twice. What decides costs is only which boundaries
leave a node, so placements that agree in that are run once.

The bound: some messages have to leave their node. Take the workers as a graph, with an edge between
two that send each other anything. A placement on K nodes cuts it into K parts. Where the graph
holds together, at least K - 1 edges are cut; where no edge alone holds it together (stages that
loop make a ring), two leave each part, so at least K are. Whatever a placement cuts holds some set
of so few edges, and a run in which only these are far is no slower. So the least makespan of all
such sets is a bound; they are one batch.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_local_search, check_types, wrong
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.base.trees import mapped
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

RANDOM = 256  # scattered placements that the result is compared with


@short_repr
class WorkerPlaces(NamedTuple):
    """A placement of workers on a machine.

    Attributes:
      places: (workers) place of each worker, numbered node by node.
      costs: what the table is to be priced with then.
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

    The table stays as it is: a worker takes its row and its stages along. Where there are at most
    50,000 different placements, all are evaluated. The result is never slower than a baseline, and
    the same arguments give the same result, unless the time runs out. An interrupt (Ctrl-C) ends
    the search with the best placement so far.

    Args:
      table: the schedule.
      costs: unbatched costs [s], or what is trained.
      machine: a topology for costs, or a system for what is trained, whose nodes and links count.
        Places that they have are where the search begins.
      link: link model, or `Links`; shared links stay with their workers.
      iterations: most batches of placements to try.
      time_limit: when no further batch starts [s]; None for no limit.
      seed: of all random choices.
      on_progress: called after each batch with its number, `iterations`, and the best makespan so
        far as a text; a bar in notebooks if None.

    Returns:
      The best placement; of those that cost the same, one is evaluated, and where all were tried
      the bound is its makespan. Baselines are the places as "given", "in order", in "round robin"
      over the nodes, "folded" (first and last worker side by side, and so on), and of scattered
      placements the best ("best of scattered") and the mean ("mean of scattered").

    Raises:
      ValueError: as `evaluate`; if places are of another number of workers, or iterations, seed or
        time_limit is negative.

    Cost:
      A batch holds all swaps and insertions of a placement that change which nodes workers are on.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("interleaved-1f1b", num_workers=8, num_microbatches=8)
      >>> machine = pj.Topology(2, latency=(0.0, 0.25))
      >>> found = pj.search.places(table, pj.Costs(forward=0.5, backward=1.0), machine)
      >>> found.value <= min(found.baselines.values())
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
        super().__init__(seed)
        _check_eager(placed, links)
        exact = mapped(lambda leaf: np.asarray(leaf, np.float64), placed.base)
        self._placed = placed._replace(base=exact)
        self._links, self._times_by_key = links, dict[bytes, float]()
        table = placed.table
        self.program, _ = lower_and_price(table, placed.at(current), links)
        self.batch, self.kind = BATCH, placed.nodes
        in_order = np.arange(table.num_workers)
        fixed = np.array([current, in_order, _round_robin(self.kind), _folded(table.num_workers)])
        scattered = self.rng.permuted(np.tile(in_order, (RANDOM, 1)), axis=1)
        times = self.start_from(np.concatenate([fixed, scattered]))
        self.lower_bound = cut_bound(placed, self.program)
        self.baselines = {
            "given": float(times[0]),
            "in order": float(times[1]),
            "round robin": float(times[2]),
            "folded": float(times[3]),
            "best of scattered": float(times[-RANDOM:].min()),
            "mean of scattered": float(times[-RANDOM:].mean()),
        }

    def order_costs(self, orders: Orders) -> Costs:
        """Costs of placements."""
        return self._placed.batch(orders)

    def times(self, orders: Orders) -> Float[NumpyArray, " orders"]:
        """Evaluate placements (orders) [s]; placements with equal costs are evaluated once."""
        rows = self._placed.choices(orders)
        _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        keys = [rows[k].tobytes() for k in first.tolist()]
        new = [k for k, key in enumerate(keys) if key not in self._times_by_key]
        if new:
            new_times = batched_makespans(
                self.program, self.order_costs, orders[first[new]], self.batch
            )
            self._times_by_key.update(zip([keys[k] for k in new], new_times.tolist(), strict=True))
            self.evaluated += len(new)
        return np.array([self._times_by_key[key] for key in keys])[which.ravel()]

    def best_so_far(self) -> tuple[WorkerPlaces, float]:
        """Return the best placement so far, and its makespan [s]."""
        best = self.best.copy()
        for workers in self._placed.seated(best):  # in order within a node, where all are alike
            best[np.sort(workers)] = np.sort(best[workers])
        costs = self._placed.at(best)
        run = evaluate(self._placed.table, costs, link=self._links)
        return WorkerPlaces(best, costs), run.makespan


def _check_eager(placed: PlacedCosts, links: Links) -> None:
    """Refuse messages that are eager at some places and not at others: their programs differ."""
    smaller = placed.messages["transmit"] < links.eager_below
    if (smaller != smaller[0]).any():
        raise wrong(
            "eager_below",
            f"= {links.eager_below:g} s lies between what a message takes in a node "
            "and between nodes: a search of places needs one that both are above or below",
        )


def _round_robin(node: Int[NumpyArray, " places"]) -> Order:
    """Place (workers) one worker on each node in turn."""
    first = np.searchsorted(node, node)  # places go node by node
    return np.lexsort((node, np.arange(len(node)) - first))


def _folded(workers: int) -> Order:
    """Place (workers) the first and the last worker side by side, then the next of both."""
    seats = np.empty(workers, int)
    seats[: (workers + 1) // 2] = np.arange(0, workers, 2)
    seats[(workers + 1) // 2 :] = np.arange(1, workers, 2)[::-1]
    return seats


def cut_bound(placed: PlacedCosts, program: Program) -> float:
    """Return a lower bound on the makespans of all placements [s]."""
    graph = _Graph.from_placed(placed)
    edges = graph.edges.shape[1]
    cuts = _least_cuts(graph.edges, placed.table.num_workers, int(placed.nodes.max()) + 1)
    # Every placement cuts that many edges or more, and a message over a cut edge takes at least its
    # fastest time between nodes. So the best choice of cut edges is a bound for all placements.
    while math.comb(edges, cuts) > EXHAUSTIVE:  # fewer cuts are valid too: the bound is lower
        cuts -= 1
    chosen = np.array([*itertools.combinations(range(edges), cuts)], int).reshape(-1, cuts)
    far = np.zeros((len(chosen), edges + 1), np.int32)  # last: within a worker, never cut
    np.put_along_axis(far, chosen, 1, axis=1)
    return float(batched_makespans(program, graph.order_costs, far, BATCH).min())


class _Graph(NamedTuple):
    """Workers that send each other messages."""

    placed: PlacedCosts  # costs by place
    edges: Edges  # both workers
    # edge of each stage boundary; the last where none is crossed
    edge: Int[NumpyArray, "pipes boundaries"]

    @classmethod
    def from_placed(cls, placed: PlacedCosts) -> "_Graph":
        placement = placed.table.placement
        ends = np.sort(np.stack([placement[:, :-1], placement[:, 1:]]), axis=0)
        moves = ends[0] != ends[1]
        edges, which = np.unique(ends[:, moves], axis=1, return_inverse=True)
        edge = np.full(moves.shape, edges.shape[1])
        edge[moves] = which.ravel()
        return cls(placed, edges, edge)

    def order_costs(self, far: Int[NumpyArray, "sets edges"]) -> Costs:
        """Return costs where only some edges leave a node, for `makespans`."""
        is_far: Bool[NumpyArray, "sets 1 pipes boundaries"] = far[:, None, self.edge] > 0
        fastest = vars(self.placed.fastest)
        costs = {name: time[None] if np.ndim(time) else time for name, time in fastest.items()}
        for name, times in self.placed.messages.items():
            near, apart = times.min(axis=0), times[1:].min(axis=0, initial=np.inf)
            far_times: NumpyArray = np.where(np.isinf(apart), near, apart)
            where = is_far if near.ndim == is_far.ndim - 1 else is_far[..., None]
            costs[name] = np.where(where, far_times, near)
        return unchecked_costs(costs)


def _least_cuts(edges: Edges, workers: int, nodes: int) -> int:
    """Return the least number of edges that any placement cuts."""
    if nodes == 1 or not _holds_together(edges, workers):
        return 0
    all_but_one = (np.delete(edges, k, axis=1) for k in range(edges.shape[1]))
    is_ring = all(_holds_together(others, workers) for others in all_but_one)
    return nodes if is_ring else nodes - 1


def _holds_together(edges: Edges, workers: int) -> bool:
    reached = np.arange(workers) == 0
    for _ in range(workers):
        from_reached = edges[:, reached[edges].any(axis=0)]
        reached[from_reached.ravel()] = True
    return bool(reached.all())
