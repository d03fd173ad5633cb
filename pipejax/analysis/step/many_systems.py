"""The work of one schedule on many systems: costs, and shares of the critical path by resource.

A sweep prices thousands of systems for each of a few schedules, once. So what is compiled serves
all schedules, and where few systems are priced in all, quick compilation counts more than quick
code.

Stages that cost the same are priced as one. A pipeline has a first stage, a last one, and between
them a few kinds that differ in their layers or in where their copies lie. With only these, work has
the same shape for nearly all schedules: prices compile once, and not for each number of stages
anew, which takes longer than all else.
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
from pipejax.costs.system.parts import FIELDS
from pipejax.costs.system.system import System
from pipejax.engine.batched.makespans import Found, makespans_and_grad
from pipejax.engine.batched.pricing import Rows, in_parts, priced, pulled
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.table import ScheduleTable

FEW = 512  # systems that are priced on the host whatever differs
NETWORK = ("network", "memory_capacity", "memory_reserve", "price")  # what no kernel depends on
LEAST_STAGES, LEAST_BOUNDARIES = 8, 16  # filled up to a power of two, at least to these


class Slowed(NamedTuple):
    """Slow workers in a batch of costs."""

    # (stages), or (stages, microbatches) where copies of a stage differ
    factors: Float[NumpyArray, "..."]

    @classmethod
    def from_stragglers(cls, table: ScheduleTable, stragglers: Mapping[int, float]) -> "Slowed":
        """Find the factors of a table's ops."""
        factors = op_factors(table, stragglers)
        return cls(factors if stragglers else np.ones(table.num_stages))

    @property
    def differ(self) -> bool:
        """Return whether copies of a stage differ, so that costs are by microbatch."""
        return self.factors.ndim == 2

    def costs(self, costs: Costs) -> Costs:
        """Costs (batch, stages) with the factors, (batch, stages, microbatches) if they differ."""
        return self._map_leaves(
            lambda leaf, factors: (leaf[..., None] if self.differ else leaf) * factors, costs
        )

    def counts(self, counts: Costs) -> Costs:
        """Convert counts of slowed costs to counts of the costs without factors (batch, stages)."""

        def back(leaf: Any, factors: Any) -> Any:
            return (leaf * factors).sum(axis=-1) if self.differ else leaf * factors

        return self._map_leaves(back, counts)

    def _map_leaves(self, function: Callable[[Any, Any], Any], costs: Costs) -> Costs:
        if np.all(self.factors == 1):
            return costs
        leaves = {name: getattr(costs, name) for name in ON_WORKERS}
        return unchecked_costs(
            vars(costs)
            | {
                name: function(np.asarray(leaf), self.factors.astype(leaf.dtype))
                for name, leaf in leaves.items()
                if leaf is not None
            }
        )


class StagePlaces(NamedTuple):
    """Place of each stage and each boundary among the distinct ones."""

    stage: Int[NumpyArray, " stages"]  # (stages) place of each stage
    boundary: Int[NumpyArray, "pipes boundaries"]  # (pipes, boundaries) place of each boundary

    def spread(self, costs: Costs) -> Costs:
        """Copy costs of the distinct stages to all stages, behind the batch axis."""
        return _map_leaves(
            costs,
            on_stages=lambda leaf: leaf[:, self.stage],
            on_boundaries=lambda leaf: leaf[:, :, 0, self.boundary],
        )

    def gather(self, counts: Costs) -> Costs:
        """Sum the values of equal stages, in the shapes of distinct stages."""
        to_stage = _members(self.stage, LEAST_STAGES)
        to_boundary = _members(self.boundary.ravel(), LEAST_BOUNDARIES)
        return _map_leaves(
            counts,
            on_stages=lambda leaf: leaf @ to_stage,
            on_boundaries=lambda leaf: leaf.reshape(*leaf.shape[:2], 1, -1) @ to_boundary,
        )


class PricedSystems(NamedTuple):
    """Work priced on a batch of systems."""

    costs: Costs  # with the batch axis first [s]
    systems: System  # the batch
    work: StageWork  # of distinct stages
    places: StagePlaces  # where these stand
    # costs of distinct stages with slopes by resources, where the host knows them
    moved: Costs | None
    quickly: bool  # whether few systems are priced in all

    def rows(self, rows: Rows) -> "PricedSystems":
        """Return the prices of some of the systems."""

        def pick(leaf: Any) -> Any:
            if isinstance(leaf, Many):
                return Many(pick(leaf.value), {name: pick(s) for name, s in leaf.slopes.items()})
            return leaf[rows] if np.ndim(leaf) and len(leaf) > 1 else leaf

        selected = (jax.tree.map(pick, tree) for tree in (self.costs, self.systems, self.moved))
        costs, systems, moved = selected
        return self._replace(costs=costs, systems=systems, moved=moved)


def price_systems(
    work: StageWork,
    systems: System,
    *,
    dtype: Any = float,
    quickly: bool = False,
    slopes: bool = False,
) -> PricedSystems:
    """Price work on a batch of systems, and if wanted with slopes by resources."""
    # quickly: compile fast and compute slowly, for few systems that the host does not price
    distinct, places = distinct_stages(work)
    moved = None
    if are_few_numbers(systems):
        moved = work_costs(distinct, many_systems(systems, moved=slopes))
        costs = jax.tree.map(many_values, moved)
    else:
        costs = in_parts(functools.partial(priced, _work_costs, distinct, quickly=quickly), systems)
    costs = places.spread(jax.tree.map(lambda leaf: np.asarray(leaf, dtype), costs))
    size = len(np.asarray(systems.gpus_per_node))
    # a value that all share is broadcast: the engine keeps it once
    costs = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (size, *leaf.shape[1:])), costs)
    return PricedSystems(costs, systems, distinct, places, moved if slopes else None, quickly)


def _work_costs(work: StageWork, system: System, _: tuple[()]) -> Costs:
    return work_costs(work, system)


def are_few_numbers(systems: System) -> bool:
    """Return whether pricing a batch on the host takes less time than compiling for it."""
    # So it is if there are few systems, or if only their networks differ: of all kernels and of all
    # exchanges inside a node one is priced then.
    without: dict[str, Any] = dict.fromkeys(NETWORK)
    others = dataclasses.replace(systems, **without)
    return len(np.asarray(systems.gpus_per_node)) <= FEW or not any(
        isinstance(to_many(leaf), Many) for leaf in jax.tree.leaves(others)
    )


def many_systems(systems: System, *, moved: bool = False) -> System:
    """Turn the numbers of a batch of systems into `Many`; with slopes by resource if `moved`."""
    resources = {FIELDS[name]: name for name in POWER if moved}

    def lifted(path: Any, leaf: NumpyArray) -> Many | Any:
        value, name = to_many(leaf), resources.get(tuple(getattr(key, "name", "") for key in path))
        return value if name is None else Many(many_values(value), {name: np.ones((1, 1))})

    batch: System = jax.tree_util.tree_map_with_path(lifted, systems)
    return batch


def resource_shares(
    program: Program, priced: PricedSystems, *, slowed: Slowed | None = None
) -> tuple[Found, Float[NumpyArray, "batch resources"]]:
    """Step times, and shares of the critical path by resource, for a batch of systems."""
    # The costs are those with slow workers. Returns (batch) step times [s], and (batch, resources)
    # shares in the order of RESOURCES, which sum to 1.
    systems = priced.systems
    size = len(np.asarray(systems.gpus_per_node))
    times, counts = makespans_and_grad(program, priced.costs, batch_size=size)
    # no system has the factor of fused pairs; it is in the counts of their ops
    counts = unchecked_costs({**vars(counts), "pair_factor": None})
    work_counts = priced.places.gather(counts if slowed is None else slowed.counts(counts))
    slopes = _slopes_by_resource(priced, work_counts)
    on_path = [power * slopes[name] * _get(systems, FIELDS[name]) for name, power in POWER.items()]
    return times, np.stack(on_path, axis=-1) / np.asarray(times)[:, None]


def _slopes_by_resource(
    priced: PricedSystems, counts: Costs
) -> dict[str, Float[NumpyArray, " batch"]]:
    """Return slopes of paths by the numbers of each system, from counts of each cost."""
    if priced.moved is None:
        pull = functools.partial(_system_slopes, priced.work, priced.quickly)
        system_slopes = in_parts(pull, (priced.systems, counts))
        return {name: _get(system_slopes, FIELDS[name]) for name in POWER}
    slopes = {name: np.zeros(len(np.asarray(priced.systems.gpus_per_node))) for name in POWER}
    for field, cost in vars(priced.moved).items():
        for name, slope in cost.slopes.items() if isinstance(cost, Many) else ():
            count = np.asarray(getattr(counts, field))
            axes = "abcd"[: count.ndim - 1]
            slopes[name] += np.einsum(f"n{axes},n{axes}->n", count, slope[:, 0])
    return slopes


def _system_slopes(work: StageWork, quickly: bool, solved: tuple[System, Costs]) -> System:
    """The same by every number of a system, from a compiled pricer."""
    systems, counts = solved
    slopes: System = pulled(_work_costs, work, systems, (), counts, quickly=quickly)[1]
    return slopes


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, tree)


def distinct_stages(work: StageWork) -> tuple[StageWork, StagePlaces]:
    """Keep one stage and one boundary of each kind; return the places of all others."""
    stages = work.stages
    # copies of a stage matter to each other, and the two ends of the pipeline do
    alone = (stages.nearest == stages.farthest) & (stages.first + stages.last == 0)
    unlinked = stages._replace(
        nearest=np.where(alone, 0.0, stages.nearest),
        farthest=np.where(alone, 0.0, stages.farthest),
        senders=np.zeros(()),
        receivers=np.zeros(()),
        before=np.zeros(()),  # the kinds of layers follow from it, and are there
    )
    columns = (
        unlinked,
        work.layers,
        work.recomputed,
        work.heads,
        work.parameters,
        work.offload_bytes,
    )
    leaves, structure = jax.tree.flatten(columns)
    chosen, stage = _distinct([np.broadcast_to(leaf, len(alone)) for leaf in leaves], LEAST_STAGES)
    distinct = [np.asarray(leaf)[chosen] if np.ndim(leaf) else leaf for leaf in leaves]
    unlinked, layers, recomputed, heads, parameters, offload_bytes = jax.tree.unflatten(
        structure, distinct
    )
    is_real = np.arange(len(chosen)) <= stage.max()  # what only fills up is no end of the pipeline
    sent = np.broadcast_to(work.message_bytes, stages.senders.shape)
    links = stages.senders.ravel(), stages.receivers.ravel(), sent.ravel()
    pairs, boundary = _distinct(links, LEAST_BOUNDARIES)
    senders, receivers, sent = (np.append(link, 0.0)[None, pairs] for link in links)
    few = work._replace(
        stages=unlinked._replace(
            first=unlinked.first * is_real,
            last=unlinked.last * is_real,
            senders=senders,
            receivers=receivers,
        ),
        layers=layers,
        recomputed=recomputed,
        heads=heads,
        message_bytes=sent,
        parameters=parameters,
        offload_bytes=offload_bytes,
    )
    return few, StagePlaces(stage, boundary.reshape(stages.senders.shape))


def _distinct(rows: Any, least: int) -> tuple[Int[NumpyArray, " new"], Int[NumpyArray, " columns"]]:
    """Return distinct columns, padded to a power of two, and the place of each column there."""
    # Without columns, the place behind the last is kept.
    _, chosen, place = np.unique(np.stack(rows), axis=1, return_index=True, return_inverse=True)
    more = _size(len(chosen), least) - len(chosen)
    return np.append(chosen, np.full(more, chosen[-1] if len(chosen) else 0)), place.ravel()


def _size(count: int, least: int) -> int:
    return max(least, 1 << max(count - 1, 0).bit_length())


def _members(place: Int[NumpyArray, " columns"], least: int) -> Int[NumpyArray, "columns new"]:
    """Return the distinct column of each column, as a matrix of zeros and ones."""
    return np.eye(_size(int(place.max(initial=0)) + 1, least))[place]


def _map_leaves(
    costs: Costs, *, on_stages: Callable[[Any], Any], on_boundaries: Callable[[Any], Any]
) -> Costs:
    """Change the leaves (batch, ...) that have an axis of stages or of boundaries."""

    def changed(name: str, leaf: Any) -> Any:
        if leaf is None or np.ndim(leaf) < 2:
            return leaf
        return (on_boundaries if name in MESSAGE_FIELDS else on_stages)(np.asarray(leaf))

    return unchecked_costs({name: changed(name, leaf) for name, leaf in vars(costs).items()})
