"""One schedule's work on many systems: costs, and each resource's share of the critical path.

A sweep prices thousands of systems for each of a few schedules, once. So compiled functions serve
all schedules, and for few systems quick compilation counts more than quick code.

Stages that cost the same are priced as one. A pipeline has a first stage, a last one, and between
them a few kinds that differ in their layers or in the places of their copies. So the work of nearly
all schedules has one shape, and prices compile once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.analysis.uncertainty.sensitivity import POWER
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.many_numbers import Many, many_values, to_many
from pipejax.costs.costs import MESSAGE_FIELDS, Costs, unchecked_costs
from pipejax.costs.scaling import ON_WORKERS, op_factors
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import StageWork
from pipejax.costs.system.parts import FIELDS, number_dimension
from pipejax.costs.system.system import System
from pipejax.engine.batched.makespans import Makespans, makespans_and_grad
from pipejax.engine.batched.pricing import Rows, in_parts, pulled
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.table import ScheduleTable

HOST_SYSTEMS = 512  # systems up to which the host prices all
TIMED = ("", "s", "B/s", "FLOP/s")  # dimensions of numbers on which times may depend
# no kernel depends on these
NETWORK = ("network", *(FIELDS[n][0] for n in FIELDS if number_dimension(n) not in TIMED))
MIN_STAGES, MIN_BOUNDARIES = 8, 16  # distinct ones are padded to a power of two, at least to these


class Slowed(NamedTuple):
    """Factors by which slow workers lengthen op times, to apply to a batch of costs."""

    factors: Float[NumpyArray, "..."]  # (stages), or (stages, microbatches) where copies differ

    @classmethod
    def from_stragglers(cls, table: ScheduleTable, stragglers: Mapping[int, float]) -> "Slowed":
        """Return the factors of a table's op times, given the factors of its slow workers."""
        factors = op_factors(table, stragglers)
        return cls(factors if stragglers else np.ones(table.num_stages))

    @property
    def differ(self) -> bool:
        """Return whether a stage's copies have different factors, and thus costs by microbatch."""
        return self.factors.ndim == 2

    def costs(self, costs: Costs) -> Costs:
        """Multiply costs (batch, stages) by factors, with an axis of microbatches if needed."""
        return self._map_leaves(
            lambda leaf, factors: (leaf[..., None] if self.differ else leaf) * factors, costs
        )

    def counts(self, counts: Costs) -> Costs:
        """Convert counts of slowed costs to counts (batch, stages) of costs before the factors."""
        return self._map_leaves(
            lambda leaf, factors: (leaf * factors).sum(axis=-1) if self.differ else leaf * factors,
            counts,
        )

    def _map_leaves(self, function: Callable[[Any, Any], Any], costs: Costs) -> Costs:
        """Apply function(cost, factors) to each cost that slow workers change."""
        if np.all(self.factors == 1):
            return costs
        leaves = dict(vars(costs))
        for name in ON_WORKERS:
            if leaves.get(name) is not None:
                leaf = np.asarray(leaves[name])
                leaves[name] = function(leaf, self.factors.astype(leaf.dtype))
        return unchecked_costs(leaves)


class StagePlaces(NamedTuple):
    """Index of every stage among the distinct stages, and of every boundary likewise."""

    stage: Int[NumpyArray, " stages"]
    boundary: Int[NumpyArray, "pipes boundaries"]

    def spread(self, costs: Costs) -> Costs:
        """Copy costs of distinct stages (batch, distinct stages) to all stages (batch, stages)."""
        return _map_leaves(
            costs,
            on_stages=lambda leaf: leaf[:, self.stage],
            on_boundaries=lambda leaf: leaf[:, :, 0, self.boundary],
        )

    def gather(self, counts: Costs) -> Costs:
        """Sum counts (batch, stages) over equal stages; return (batch, distinct stages)."""
        # indices [0 1 1] are the matrix [[1 0] [0 1] [0 1]]: [a b c] @ it = [a, b + c]
        stage_matrix = _one_hot(self.stage, MIN_STAGES)
        boundary_matrix = _one_hot(self.boundary.ravel(), MIN_BOUNDARIES)
        return _map_leaves(
            counts,
            on_stages=lambda leaf: leaf @ stage_matrix,
            on_boundaries=lambda leaf: leaf.reshape(*leaf.shape[:2], 1, -1) @ boundary_matrix,
        )


class PricedSystems(NamedTuple):
    """The costs of one schedule's work on a batch of systems, and data for their slopes."""

    costs: Costs  # with the batch axis first [s]
    systems: System  # the batch
    work: StageWork  # of distinct stages
    places: StagePlaces
    slope_costs: Costs | None  # of distinct stages, with slopes by resource; None if compiled
    quickly: bool  # whether slopes are compiled fast and computed slowly, for few systems in all

    def rows(self, rows: Rows) -> "PricedSystems":
        """Select systems of the batch by their row indices."""

        def select(leaf: Any) -> Any:
            """Select the rows of an array, unless all systems share it (length 1)."""
            if isinstance(leaf, Many):
                slopes = {name: select(slope) for name, slope in leaf.slopes.items()}
                return Many(select(leaf.value), slopes)
            return leaf[rows] if np.ndim(leaf) and len(leaf) > 1 else leaf

        trees = self.costs, self.systems, self.slope_costs
        costs, systems, slope_costs = (jax.tree.map(select, tree) for tree in trees)
        return self._replace(costs=costs, systems=systems, slope_costs=slope_costs)


def price_systems(
    work: StageWork,
    systems: System,
    *,
    dtype: Any = float,
    quickly: bool = False,
    slopes: bool = False,
) -> PricedSystems:
    """Price work on a batch of systems, without compiling anything.

    With `slopes`, the costs of few systems carry their slopes by resource. For many systems,
    `resource_shares` compiles the slopes; `quickly` makes it compile fast and compute slowly.
    """
    distinct, places = distinct_stages(work)
    has_slopes = slopes and prices_faster_on_host(systems)
    many_costs = work_costs(distinct, many_systems(systems, slopes=has_slopes))
    costs = jax.tree.map(many_values, many_costs)
    costs = places.spread(jax.tree.map(lambda leaf: np.asarray(leaf, dtype), costs))
    size = len(np.asarray(systems.gpus_per_node))
    # a value that all share is broadcast: the engine keeps it once
    costs = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (size, *leaf.shape[1:])), costs)
    slope_costs = many_costs if has_slopes else None
    return PricedSystems(costs, systems, distinct, places, slope_costs, quickly)


def _work_costs(work: StageWork, system: System, _: tuple[()]) -> Costs:
    return work_costs(work, system)


def prices_faster_on_host(systems: System) -> bool:
    """Return whether NumPy prices a batch of systems faster than a compiled function."""
    # So it is for few systems, or if only networks differ: each kernel is priced once then.
    if len(np.asarray(systems.gpus_per_node)) <= HOST_SYSTEMS:
        return True
    no_network: dict[str, Any] = dict.fromkeys(NETWORK)
    numbers = jax.tree.leaves(dataclasses.replace(systems, **no_network))
    return not any(isinstance(to_many(number), Many) for number in numbers)


def many_systems(systems: System, *, slopes: bool = False) -> System:
    """Convert the numbers of a batch of systems to `Many`, with slopes by resource if wanted."""
    resources = {FIELDS[name]: name for name in POWER if slopes}

    def to_leaf(path: Any, leaf: NumpyArray) -> Many | Any:
        """Convert a number to `Many`; the number of a resource has a slope of 1 by itself."""
        field = tuple(getattr(key, "name", "") for key in path)
        value = to_many(leaf)
        if field not in resources:
            return value
        return Many(many_values(value), {resources[field]: np.ones((1, 1))})

    batch: System = jax.tree_util.tree_map_with_path(to_leaf, systems)
    return batch


def resource_shares(
    program: Program, priced: PricedSystems, *, slowed: Slowed | None = None
) -> tuple[Makespans, Float[NumpyArray, "batch resources"]]:
    """Return step times (batch) [s], and resources' shares (batch, resources) of the critical path.

    `priced` has the costs with slow workers. Shares are in the order of `POWER` and sum to 1.
    """
    systems = priced.systems
    size = len(np.asarray(systems.gpus_per_node))
    times, counts = makespans_and_grad(program, priced.costs, batch_size=size)
    # no system has the factor of fused pairs; it is in the counts of their ops
    counts = unchecked_costs({**vars(counts), "pair_factor": None})
    work_counts = priced.places.gather(counts if slowed is None else slowed.counts(counts))
    slopes = _slopes_by_resource(priced, work_counts)
    seconds = [power * slopes[name] * _get(systems, FIELDS[name]) for name, power in POWER.items()]
    return times, np.stack(seconds, axis=-1) / np.asarray(times)[:, None]


def _slopes_by_resource(
    priced: PricedSystems, counts: Costs
) -> dict[str, Float[NumpyArray, " batch"]]:
    """Return slopes of step times (batch) by resource, given the counts of critical costs."""
    # a step time is the sum of count * cost, so its slope is the sum of count * slope of the cost
    if priced.slope_costs is None:
        pull = functools.partial(_system_slopes, priced.work, priced.quickly)
        system_slopes = in_parts(pull, (priced.systems, counts))
        return {name: _get(system_slopes, FIELDS[name]) for name in POWER}
    slopes = {name: np.zeros(len(np.asarray(priced.systems.gpus_per_node))) for name in POWER}
    for field, cost in vars(priced.slope_costs).items():
        if not isinstance(cost, Many):
            continue
        count = np.asarray(getattr(counts, field))
        axes = "abcd"[: count.ndim - 1]  # all axes but the batch are summed
        for name, slope in cost.slopes.items():
            slopes[name] += np.einsum(f"n{axes},n{axes}->n", count, slope[:, 0])
    return slopes


def _system_slopes(work: StageWork, quickly: bool, solved: tuple[System, Costs]) -> System:
    """Return slopes of step times by every number of a system, from a compiled function."""
    systems, counts = solved
    slopes: System
    _, slopes = pulled(_work_costs, work, systems, (), counts, quickly=quickly)
    return slopes


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, tree)


def distinct_stages(work: StageWork) -> tuple[StageWork, StagePlaces]:
    """Reduce work to distinct stages and boundaries; return it with each stage's index."""
    # Stages with equal leaves of `unplaced` and of the fields in `names` cost the same; so do
    # boundaries with equal `links`. Of equal stages the first is the example: stages a b b b c have
    # the examples 0 1 4, and the indices 0 1 1 1 2 among these.
    stages = work.stages
    # where a stage is matters only to stages with copies, and to the two ends of the pipeline
    has_no_place = (stages.nearest == stages.farthest) & (stages.first + stages.last == 0)
    unplaced = stages._replace(
        nearest=np.where(has_no_place, 0.0, stages.nearest),
        farthest=np.where(has_no_place, 0.0, stages.farthest),
        senders=np.zeros(()),
        receivers=np.zeros(()),
        before=np.zeros(()),  # the kinds of layers follow from it, and are there
        mtp_before=np.zeros(()),  # the bytes of messages follow from it, and are there
    )
    names = "layers", "recomputed", "again", "heads", "parameters", "offload_bytes"
    leaves, structure = jax.tree.flatten((unplaced, *(getattr(work, name) for name in names)))
    num_stages = len(has_no_place)
    columns = [np.broadcast_to(leaf, num_stages) for leaf in leaves]
    examples, stage = _distinct(columns, MIN_STAGES)
    distinct = [np.asarray(leaf)[examples] if np.ndim(leaf) else leaf for leaf in leaves]
    unplaced, *values = jax.tree.unflatten(structure, distinct)
    is_real = np.arange(len(examples)) <= stage.max()  # padding is no end of the pipeline
    message_bytes = np.broadcast_to(work.message_bytes, stages.senders.shape)
    links = stages.senders.ravel(), stages.receivers.ravel(), message_bytes.ravel()
    examples, boundary = _distinct(links, MIN_BOUNDARIES)
    senders, receivers, message_bytes = (np.append(link, 0.0)[None, examples] for link in links)
    distinct_work = work._replace(
        stages=unplaced._replace(
            first=unplaced.first * is_real,
            last=unplaced.last * is_real,
            senders=senders,
            receivers=receivers,
        ),
        message_bytes=message_bytes,
        **dict(zip(names, values, strict=True)),
    )
    return distinct_work, StagePlaces(stage, boundary.reshape(stages.senders.shape))


def _distinct(
    rows: Any, min_size: int
) -> tuple[Int[NumpyArray, " new"], Int[NumpyArray, " columns"]]:
    """Return the position of each distinct column, and every column's index among these."""
    # Examples are padded to a power of two, by the last one.
    # one row [7 5 7] and size 4: the distinct columns 5, 7 have examples [1 0 0 0], indices [1 0 1]
    _, examples, indices = np.unique(np.stack(rows), axis=1, return_index=True, return_inverse=True)
    padding = _padded_size(len(examples), min_size) - len(examples)
    last = examples[-1] if len(examples) else 0
    return np.append(examples, np.full(padding, last)), indices.ravel()


def _padded_size(count: int, min_size: int) -> int:
    """Round a count up to a power of two, at least `min_size`."""
    return max(min_size, 1 << max(count - 1, 0).bit_length())


def _one_hot(indices: Int[NumpyArray, " columns"], min_size: int) -> Int[NumpyArray, "columns new"]:
    """Encode indices as rows of zeros with a 1 at the index."""
    return np.eye(_padded_size(int(indices.max(initial=0)) + 1, min_size))[indices]


def _map_leaves(
    costs: Costs, *, on_stages: Callable[[Any], Any], on_boundaries: Callable[[Any], Any]
) -> Costs:
    """Apply a function to each cost (batch, ...) by its last axis: stages or boundaries."""
    leaves = dict(vars(costs))
    for name, leaf in leaves.items():
        if leaf is not None and np.ndim(leaf) >= 2:
            function = on_boundaries if name in MESSAGE_FIELDS else on_stages
            leaves[name] = function(np.asarray(leaf))
    return unchecked_costs(leaves)
