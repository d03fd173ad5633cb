"""Places of workers on a machine of nodes, with fast links in nodes and slower links between.

Places decide only which messages leave a node. So costs are computed once per link level, as if all
messages used links of that level. A placement then selects a level for each stage boundary, so
that many placements are one array look-up.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types, whole_number, whole_numbers
from pipejax.base.display import abbreviated, short_repr
from pipejax.base.jax_on_demand import is_array, jnp, mapped
from pipejax.costs.costs import MESSAGE_FIELDS, Costs, Seconds, unchecked_costs
from pipejax.costs.precision import checked_seconds
from pipejax.schedules.table.table import ScheduleTable

Places = Int[NumpyArray, "placements workers"]
Seats = Sequence[int] | Int[NumpyArray, " workers"]
Levels = Int[NumpyArray, "places places"]


@short_repr
@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine of nodes, and the places of a pipeline's workers on it.

    Args:
      workers_per_node: workers of a node; or several numbers: of a node, of a rack of nodes, and so
        on, each a multiple of the one before.
      latency: L of a message: one number, or one per level, which are one more than the numbers of
        workers: inside a node, between nodes of a rack, and so on [s].
      transmit: X, bytes / bandwidth, in the form of latency [s].
      places: (workers) place of each worker, numbered node by node; in order if not given.

    Raises:
      ValueError: if a number of workers is no multiple of the one before, there are not as many
        times as levels, a time is negative or not finite, or a place is named twice.
    """

    workers_per_node: int | Sequence[int]
    latency: Seconds = 0.0
    transmit: Seconds = 0.0
    places: Sequence[int] = ()

    def __post_init__(self) -> None:
        sizes = check_sizes(self.workers_per_node, "workers_per_node")
        object.__setattr__(self, "workers_per_node", sizes)
        for name in MESSAGE_FIELDS:
            value = getattr(self, name)
            is_number = not isinstance(value, Sequence) and np.ndim(value) == 0
            times = [value] * (len(sizes) + 1) if is_number else value  # by level
            if len(times) != len(sizes) + 1:
                raise ValueError(
                    f"{name} must have one time for each of {len(sizes) + 1} levels, got "
                    f"{abbreviated(value)}"
                )
            object.__setattr__(self, name, tuple(checked_seconds(name, time) for time in times))
        object.__setattr__(self, "places", check_places(self.places, "places"))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of workers per node, per rack of nodes, and so on."""
        return check_sizes(self.workers_per_node, "workers_per_node")


def check_sizes(value: Any, where: str) -> tuple[int, ...]:
    """Check the numbers of workers per node, per group of nodes, and so on."""
    sizes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for size in sizes:
        whole_number(size, where)
    for size, next_size in itertools.pairwise(sizes):
        if next_size % size or next_size == size:
            raise ValueError(
                f"{where} must ascend, each a multiple of the one before, got {abbreviated(value)}"
            )
    if not sizes:
        raise ValueError(f"{where} must name at least one size, got {abbreviated(value)}")
    return sizes


def check_places(value: Any, where: str) -> tuple[int, ...]:
    """Check that the places are a permutation of 0 to P - 1."""
    places = tuple(whole_numbers(value, where).tolist()) if len(value) else ()
    if sorted(places) != list(range(len(places))):
        raise ValueError(
            f"{where} must name each place once, 0 to {len(places) - 1}, got {abbreviated(value)}"
        )
    return places


def parse_places(text: str, where: str) -> tuple[int, ...]:
    """Parse the places of workers from text such as 0,4,1,5, which may be empty."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise ValueError(f"{where} must be the place of each worker, as 0,4,1,5, got {text!r}")
    return check_places([int(word) for word in words], where)


def places_on(
    table: ScheduleTable, places: Sequence[int], where: str = "places"
) -> tuple[int, ...]:
    """Return each worker's place; if places are empty, worker k is at place k."""
    if places and len(places) != table.num_workers:
        raise MismatchError(
            f"{where} are of {len(places)} workers, the table has {table.num_workers}", where
        )
    return tuple(places) or tuple(range(table.num_workers))


def place_levels(sizes: Sequence[int], num_places: int) -> Levels:
    """Return the link level of all pairs of places (places, places), which is 0 within a node."""
    # nodes of 2, racks of 4: places 0 and 1 have level 0, places 0 and 2 level 1, 0 and 4 level 2
    levels = np.zeros((num_places, num_places), int)
    for size in sizes:
        group = np.arange(num_places) // size  # number of each place's node or rack
        levels += group[:, None] != group
    return levels


def nodes_from_levels(level: Levels) -> Int[NumpyArray, " places"]:
    """Return the node number of each place, from the link levels of all pairs of places."""
    # first place of each place's node: 0 0 2 2 4 4 -> nodes 0 0 1 1 2 2
    first_places = (level == 0).argmax(axis=1)
    _, nodes = np.unique(first_places, return_inverse=True)
    return nodes


def topology_costs(costs: Costs, table: ScheduleTable, topology: Topology) -> Costs:
    """Set message times from the links that connect the workers on a machine.

    Args:
      costs: unbatched costs [s]; their message times are replaced.
      table: the schedule; it tells which worker holds which stage.
      topology: the machine; JAX may trace its times.

    Returns:
      The costs, with latency and transmit of shape (2, pipes, stages - 1).

    Raises:
      ValueError: if the topology has places for another number of workers.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)
      >>> costs = pj.Costs(forward=0.5, backward=1.0)
      >>> for places in ([0, 1, 2, 3], [0, 2, 1, 3]):
      ...     machine = pj.Topology(2, transmit=(0.0, 0.5), places=places)
      ...     pj.evaluate(table, pj.costing.topology_costs(costs, table, machine)).makespan
      31.5
      35.5
    """
    check_types(costs=(costs, Costs), table=(table, ScheduleTable))
    check_types(topology=(topology, Topology))
    return levels_on(costs, table, topology).at(places_on(table, topology.places))


def levels_on(costs: Costs, table: ScheduleTable, topology: Topology) -> "PlacedCosts":
    """Return a table's costs as a function of its workers' places on a machine."""
    latencies: Any = topology.latency  # a tuple with a time per level: the constructor makes it
    transmits: Any = topology.transmit
    level_costs = [
        unchecked_costs({**vars(costs), "latency": latency, "transmit": transmit})
        for latency, transmit in zip(latencies, transmits, strict=True)
    ]
    return PlacedCosts.from_levels(level_costs, table, topology.sizes)


class PlacedCosts(NamedTuple):
    """Costs of a table as a function of its workers' places on a machine."""

    table: ScheduleTable  # the schedule
    base: Costs  # costs that do not depend on places
    level: Levels  # (places, places) level of the link between two places
    messages: Mapping[str, Any]  # latency and transmit [s]: (levels, 2, pipes, stages - 1)
    # further costs [s], (2, 2, stages): the first index is 1 if copies of a stage share a node, the
    # second index is 1 if the first and the last stage share one
    by_sharing: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def from_levels(
        cls, costs: Sequence[Costs], table: ScheduleTable, sizes: Sequence[int]
    ) -> "PlacedCosts":
        """Combine costs of each link level, which hold if all messages use links of that level."""
        messages = {
            name: _stack_levels([getattr(level_costs, name) for level_costs in costs], table)
            for name in MESSAGE_FIELDS
        }
        return cls(table, costs[0], place_levels(sizes, table.num_workers), messages)

    @property
    def nodes(self) -> Int[NumpyArray, " places"]:
        """Node number of each place (places)."""
        return nodes_from_levels(self.level)

    def choices(self, places: Places) -> Int[NumpyArray, "placements choices"]:
        """Return a row for each placement (placements, choices); equal rows have equal costs."""
        # a row has the levels of the links, and whether copies or ends of the pipeline share a node
        columns = [self._boundary_levels(places)[:, self._changes_worker]]
        if self.by_sharing:
            columns.extend(self._node_sharing(places))
        return np.concatenate(columns, axis=1).astype(np.int8)

    def batch(self, places: Places) -> Costs:
        """Return the costs of several placements, as a batch for `makespans`."""
        levels = self._boundary_levels(places)
        shares_node, ends_share = self._node_sharing(places)
        direction, pipe, boundary = np.ogrid[:2, : levels.shape[1], : levels.shape[2]]
        messages = {
            name: times[levels[:, None], direction, pipe, boundary]
            for name, times in self.messages.items()
        }
        stage = np.arange(self.table.num_stages)
        sharing, base = self.by_sharing.items(), vars(self.base).items()
        copies = {name: times[shares_node, ends_share, stage] for name, times in sharing}
        others = {name: time[None] if np.ndim(time) else time for name, time in base}
        return unchecked_costs(others | messages | copies)

    def at(self, places: Seats) -> Costs:
        """Return the costs of a single placement of the workers."""
        batch = self.batch(np.array([places]))
        return mapped(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch)

    def workers_by_node(self, places: Seats) -> list[Int[NumpyArray, " _"]]:
        """List the workers in each node, sorted by place."""
        worker = np.argsort(places)
        return [worker[self.nodes == node] for node in range(int(self.nodes.max()) + 1)]

    def boundaries_by_level(self, places: Seats) -> Int[NumpyArray, " levels"]:
        """Count, by link level, the stage boundaries whose messages use such links (levels)."""
        (levels,) = self._boundary_levels(np.array([places]))
        return np.bincount(levels[self._changes_worker], minlength=int(self.level.max()) + 1)

    @property
    def fastest(self) -> Costs:
        """Return a lower bound on the costs of all placements: the minimum of each time."""
        messages = {name: times.min(axis=0) for name, times in self.messages.items()}
        stages = {name: times.min(axis=(0, 1)) for name, times in self.by_sharing.items()}
        return unchecked_costs(vars(self.base) | messages | stages)

    @property
    def _changes_worker(self) -> Bool[NumpyArray, "pipes boundaries"]:
        """Return whether a message over each boundary goes to another worker."""
        return self.table.placement[:, 1:] != self.table.placement[:, :-1]

    def _boundary_levels(self, places: Places) -> Int[NumpyArray, "placements pipes boundaries"]:
        """Return the level of the link that each boundary's messages use."""
        stage_places = places[:, self.table.placement]
        return self.level[stage_places[..., :-1], stage_places[..., 1:]]

    def _node_sharing(self, places: Places) -> tuple[NumpyArray, NumpyArray]:
        """Return 1 where copies of a stage share a node (placements, stages), or ends (.., 1)."""
        stage_places = places[:, self.table.placement]
        low, high = stage_places.min(axis=1), stage_places.max(axis=1)
        shares_node = self.level[low, high] == 0
        ends_share = self.level[low[:, 0], low[:, -1]] == 0
        return shares_node.astype(int), ends_share[:, None].astype(int)


def _stack_levels(levels: Sequence[Any], table: ScheduleTable) -> Any:
    """Stack message times by link level: (levels, 2, pipes, stages - 1[, microbatches])."""
    xp: Any = jnp if any(is_array(leaf) for leaf in levels) else np
    shape: tuple[int, ...] = (2, table.num_pipes, table.num_stages - 1)
    if max(map(np.ndim, levels)) == 4:  # times by microbatch; others get an axis of length 1
        shape = (*shape, table.num_microbatches)
        levels = [leaf[..., None] if np.ndim(leaf) in (1, 2, 3) else leaf for leaf in levels]
    return xp.stack([xp.broadcast_to(leaf, shape) for leaf in levels])
