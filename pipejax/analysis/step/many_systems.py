"""One schedule's work on many systems: costs, and each resource's share of the critical path.

NumPy prices all systems at once. Stages with equal costs are priced once. Distinct stages are the
first, the last, and a few others that differ in their layers or in the places of their copies.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.many_numbers import Many, many_values, to_many
from pipejax.base.ties import row_classes
from pipejax.costs.costs import MESSAGE_FIELDS, Costs, unchecked_costs
from pipejax.costs.scaling import ON_WORKERS, op_factors
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import StageWork
from pipejax.costs.system.parts import FIELDS, POWER
from pipejax.costs.system.system import System
from pipejax.engine.batched.makespans import Makespans, makespans_and_grad
from pipejax.engine.batched.pricing import Rows
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.table import ScheduleTable

PART = 4096  # number of systems whose derivatives are computed at once, which take some 200 MB


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
        """Return whether copies of a stage have different factors, and so costs by microbatch."""
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
    """Index of every stage among the distinct stages, and of every boundary among those."""

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
        # indices [0 1 1] give the matrix m = [[1 0] [0 1] [0 1]], and [a b c] @ m = [a, b + c]
        stage_matrix, boundary_matrix = map(_one_hot, (self.stage, self.boundary.ravel()))
        return _map_leaves(
            counts,
            on_stages=lambda leaf: leaf @ stage_matrix,
            on_boundaries=lambda leaf: leaf.reshape(*leaf.shape[:2], 1, -1) @ boundary_matrix,
        )


class PricedSystems(NamedTuple):
    """Costs of one schedule on a batch of systems, and the inputs of their derivatives."""

    costs: Costs  # with the batch axis first [s]
    systems: System  # the batch
    work: StageWork  # work of the distinct stages
    places: StagePlaces

    def rows(self, rows: Rows) -> "PricedSystems":
        """Select systems of the batch by their row indices."""
        costs, systems = (_select(tree, rows) for tree in (self.costs, self.systems))
        return self._replace(costs=costs, systems=systems)


def _select(tree: Any, rows: Rows | slice) -> Any:
    """Select rows of each array in a tree, unless all systems share the array (length 1)."""
    return jax.tree.map(lambda leaf: leaf[rows] if np.ndim(leaf) and len(leaf) > 1 else leaf, tree)


def price_systems(work: StageWork, systems: System, *, dtype: Any = float) -> PricedSystems:
    """Price work on a batch of systems, without compiling anything."""
    distinct, places = distinct_stages(work)
    costs = jax.tree.map(many_values, work_costs(distinct, many_systems(systems)))
    costs = places.spread(jax.tree.map(lambda leaf: np.asarray(leaf, dtype), costs))
    size = len(np.asarray(systems.gpus_per_node))
    # a value that all systems share is broadcast, so that the engine stores it once
    costs = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (size, *leaf.shape[1:])), costs)
    return PricedSystems(costs, systems, distinct, places)


def many_systems(systems: System, *, slopes: bool = False) -> System:
    """Convert the numbers of a batch of systems to `Many`."""
    # With `slopes`, they carry derivatives by each resource in `POWER`, such as compute.peak.
    resources = {FIELDS[name]: name for name in POWER if slopes}

    def to_leaf(path: Any, leaf: NumpyArray) -> Many | Any:
        """Convert a number to `Many`; a resource's derivative by itself is 1."""
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
    """Return step times (batch) [s], and shares (batch, resources) of the critical path."""
    # The costs of `priced` include slow workers. Shares are in the order of `POWER` and sum to 1.
    systems = priced.systems
    size = len(np.asarray(systems.gpus_per_node))
    times, counts = makespans_and_grad(program, priced.costs, batch_size=size)
    # the counts of ops in fused pairs include the pair factor, which depends on no system
    counts = unchecked_costs({**vars(counts), "pair_factor": None})
    work_counts = priced.places.gather(counts if slowed is None else slowed.counts(counts))
    parts = [slice(start, start + PART) for start in range(0, size, PART)]
    slopes = np.concatenate([_slopes(priced, work_counts, rows) for rows in parts])
    numbers = (operator.attrgetter(".".join(FIELDS[name]))(systems) for name in POWER)
    values = [power * number for number, power in zip(numbers, POWER.values(), strict=True)]
    return times, slopes * np.stack(values, axis=-1) / np.asarray(times)[:, None]


def _slopes(
    priced: PricedSystems, counts: Costs, rows: slice
) -> Float[NumpyArray, "rows resources"]:
    """Return derivatives of step times by each resource, from counts on the critical path."""
    # step time = sum of count * cost, so its derivative is the sum of count * (slope of the cost)
    systems = many_systems(_select(priced.systems, rows), slopes=True)
    size = len(np.asarray(priced.systems.gpus_per_node)[rows])
    slopes = {name: np.zeros(size) for name in POWER}
    for field, cost in vars(work_costs(priced.work, systems)).items():
        if isinstance(cost, Many):
            count = np.asarray(getattr(counts, field))[rows]
            axes = "abcd"[: count.ndim - 1]  # all axes but the batch are summed
            for name, slope in cost.slopes.items():
                slopes[name] += np.einsum(f"n{axes},n{axes}->n", count, slope[:, 0])
    return np.stack([*slopes.values()], axis=-1)


def distinct_stages(work: StageWork) -> tuple[StageWork, StagePlaces]:
    """Reduce work to distinct stages and boundaries; also return the index of each among these."""
    # Stages cost the same if they have equal leaves of `unplaced` and of the fields in `names`.
    # Boundaries cost the same if they have equal `links`. The first of equal stages is the example:
    # stages a b b b c have the examples 0 1 4, and the indices 0 1 1 1 2 among these.
    stages = work.stages
    # the place of a stage matters only if it has copies, or is at an end of the pipeline
    has_no_place = (stages.nearest == stages.farthest) & (stages.first + stages.last == 0)
    unplaced = stages._replace(
        nearest=np.where(has_no_place, 0.0, stages.nearest),
        farthest=np.where(has_no_place, 0.0, stages.farthest),
        senders=np.zeros(()),
        receivers=np.zeros(()),
        before=np.zeros(()),  # matters only for the kinds of layers, which are compared
        mtp_before=np.zeros(()),  # matters only for the bytes of messages, which are compared
    )
    names = "layers", "recomputed", "layers_w_recomputes", "heads", "parameters", "offload_bytes"
    leaves, structure = jax.tree.flatten((unplaced, *(getattr(work, name) for name in names)))
    columns = [np.broadcast_to(leaf, len(has_no_place)) for leaf in leaves]
    examples, stage = row_classes(columns)
    distinct = [np.asarray(leaf)[examples] if np.ndim(leaf) else leaf for leaf in leaves]
    unplaced, *values = jax.tree.unflatten(structure, distinct)
    all_bytes = np.broadcast_to(work.message_bytes, stages.senders.shape)
    links = np.stack([leaf.ravel() for leaf in (stages.senders, stages.receivers, all_bytes)])
    examples, boundary = row_classes(links)
    senders, receivers, message_bytes = links[:, None, examples]
    distinct_work = work._replace(
        stages=unplaced._replace(senders=senders, receivers=receivers),
        message_bytes=message_bytes,
        **dict(zip(names, values, strict=True)),
    )
    return distinct_work, StagePlaces(stage, boundary.reshape(stages.senders.shape))


def _one_hot(indices: Int[NumpyArray, " columns"]) -> Float[NumpyArray, "columns new"]:
    """Encode indices as rows of zeros with a 1 at the index."""
    return np.eye(int(indices.max(initial=-1)) + 1)[indices]


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
