"""Edits of a scenario: changes of its costs or of its table."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import ArgumentError, MismatchError, wrong
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.model.workload import Workload
from pipejax.costs.scaling import check_count, check_workers, scaled_costs
from pipejax.schedules.cells.ops import COMPUTING, NETWORK, SHARDING, Phase
from pipejax.schedules.table.table import ScheduleTable


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class Edit:
    """A change of a run's costs or of its table; this base class changes neither."""

    def apply(self, costs: Costs, table: ScheduleTable) -> Costs:
        """Return a table's costs after the change."""
        return costs

    def change_table(self, table: ScheduleTable) -> ScheduleTable:
        """Return the changed table."""
        return table


@dataclasses.dataclass(frozen=True, repr=False)
class RecomputeCells(Edit):
    """Insertion of a recomputation (an R cell) before every backward of a table."""

    def change_table(self, table: ScheduleTable) -> ScheduleTable:
        """Insert R cells into the table."""
        return table.with_recomputation()


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingCells(Edit):
    """Insertion of cells that gather weights and reduce gradients, or a change of their lane."""

    lane: str | None = None  # default: the network for new cells, else compute
    # lookahead: by how many uses of weights a gather runs ahead; residency: stages gathered at
    # once. Each has one number, or one per worker. If both are empty, no cells are inserted.
    lookahead: tuple[int, ...] = ()
    residency: tuple[int, ...] = ()

    def change_table(self, table: ScheduleTable) -> ScheduleTable:
        """Insert sharding cells, or move the existing sharding cells to the lane."""
        from pipejax.schedules.table.sharding import insert_sharding, on_sharding_lane

        def worker_numbers(numbers: tuple[int, ...]) -> int | list[int]:
            """Return a single number for all workers, or a list with a number for each worker."""
            return [*numbers] if len(numbers) > 1 else numbers[0]

        if self.lookahead or self.residency:
            return insert_sharding(
                table,
                lookahead=worker_numbers(self.lookahead or (1,)),
                residency=worker_numbers(self.residency) if self.residency else None,
                lane=self.lane or NETWORK,
            )
        if not np.isin(table.phase, SHARDING).any():
            text = f"{self.lane}: {table.name} has no UNSHARD and REDUCE_GRAD ops"
            raise wrong("sharding_lane", f"{text}: --lookahead N adds them")
        return on_sharding_lane(table, self.lane or COMPUTING)


@dataclasses.dataclass(frozen=True, repr=False)
class HostTimes(Edit):
    """Times of offloads O and loads L [s]: a number for all stages, or one for each stage."""

    offload: tuple[float, ...] | None  # None for the time on the system's host link
    load: tuple[float, ...] | None = None  # by default the time of the offload
    replaces: bool = False  # whether these times may replace the times of a model

    def apply(self, costs: Costs, table: ScheduleTable) -> Costs:
        """Set the times of O and L; refuse to replace times if `replaces` is False."""
        if self.offload is None and costs.offload is None:
            raise wrong("offload", "system needs a model, and a system whose file has a host_link")
        if self.offload is not None and not self.replaces and has_host_times(costs):
            raise wrong("offload", "and other times of O or L exclude each other: choose one")
        count, stage_times = table.num_stages, {}
        for name, values in {"offload": self.offload, "load": self.load}.items():
            if values is not None:
                if len(values) not in (1, count):
                    text = f"must be a number or one for each of {count} stages, got {len(values)}"
                    raise wrong(name, text)
                stage_times[name] = np.broadcast_to(np.array(values, float), (count,)).copy()
        return dataclasses.replace(costs, **stage_times)


def has_host_times(costs: Costs) -> bool:
    """Return whether an offload or a load has a cost above 0."""
    return any(
        np.any(np.asarray(time) > 0) for time in (costs.offload, costs.load) if time is not None
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Microbatches(Edit):
    """Different lengths or times of microbatches, and the order in which they run."""

    lengths: tuple[Any, ...] | None = None  # tokens, or lengths of sequences, of each microbatch
    scale: tuple[float, ...] | None = None  # factor on the times of each microbatch
    order: tuple[int, ...] | None = None  # run microbatch order[k] as number k

    def apply(self, costs: Costs, table: ScheduleTable) -> Costs:
        """Scale each microbatch's times, then put the microbatches in order."""
        from pipejax.costs.stage.microbatches import Packed, check_order, in_order

        count = table.num_microbatches
        if self.lengths is not None:
            check_count("lengths", self.lengths, count)
            tokens = Packed.from_lengths(self.lengths).tokens
            costs = scaled_costs(costs, table, microbatches=tokens / tokens.mean())
        elif self.scale is not None:
            check_count("microbatch_scale", self.scale, count)
            costs = scaled_costs(costs, table, microbatches=np.array(self.scale))
        if self.order is None:
            return costs
        costs.check_shapes(table.num_stages, table.num_pipes, count)
        return in_order(costs, check_order(self.order, count, "microbatch_order"))

    def reordered(self, order: Sequence[int]) -> "Microbatches":
        """Reorder the microbatches: microbatch k becomes the current number order[k]."""
        current = range(len(order)) if self.order is None else self.order
        return dataclasses.replace(self, order=tuple(current[k] for k in order))

    def ledger_sizes(self, workload: Workload, table: ScheduleTable) -> dict[str, NumpyArray]:
        """Return activation sizes [B], (stages, microbatches), for `activation_memory`."""
        from pipejax.costs.stage.microbatches import length_bytes
        from pipejax.costs.stage.stage_work import stage_bytes

        if self.lengths is not None:
            sizes = length_bytes(workload, table, self.lengths)
        else:
            count, sizes = table.num_microbatches, {}
            scale = np.ones(count) if self.scale is None else np.array(self.scale)
            for name, size in stage_bytes(workload, table).ledger_sizes.items():
                # the axes of microbatches and slices become one
                first_axes = size.shape[:2] if name == "at_work" else size.shape[:1]
                factors = np.ones(count) if name == "weight_share" else scale
                sizes[name] = size.reshape(*first_axes, -1) * factors
        if self.order is None:
            return sizes
        return {name: size[..., [*self.order]] for name, size in sizes.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class RecomputedAgain(Edit):
    """A second recomputation, which each weight gradient runs directly before it starts."""

    def apply(self, costs: Costs, table: ScheduleTable) -> Costs:
        """Add the time of R to the time of W; a model's W includes it already."""
        costs.check_known((Phase.W, Phase.R))
        weight_grad, recompute = np.asarray(costs.weight_grad), np.asarray(costs.recompute)
        # (stages) becomes (stages, 1) if the other cost is (stages, microbatches)
        if weight_grad.ndim == 1 and recompute.ndim == 2:
            weight_grad = weight_grad[:, None]
        if recompute.ndim == 1 and weight_grad.ndim == 2:
            recompute = recompute[:, None]
        return dataclasses.replace(costs, weight_grad=weight_grad + recompute)


@dataclasses.dataclass(frozen=True, repr=False)
class PairFactor(Edit):
    """Overlap factor of fused pairs: 0 for perfect overlap, 1 for no overlap."""

    factor: float

    def apply(self, costs: Costs, table: ScheduleTable) -> Costs:
        """Set the factor, unless costs have a time or a factor of fused pairs already."""
        if costs.pair is not None or costs.pair_factor is not None:
            raise wrong(
                "pair_factor:", "pair= or the file of --costs says already what a fused pair takes"
            )
        return dataclasses.replace(costs, pair_factor=self.factor)


@dataclasses.dataclass(frozen=True, repr=False)
class SlowWorkers(Edit):
    """Slow workers, each with the factor by which its ops take longer."""

    factors: Mapping[int, float]

    def apply(self, costs: Costs, table: ScheduleTable) -> Costs:
        """Multiply the times of all ops on slow workers."""
        check_workers(self.factors, table, "stragglers")
        return scaled_costs(costs, table, workers=self.factors)


@dataclasses.dataclass(frozen=True, repr=False)
class ScaledTimes(Edit):
    """Scaling of times by rules such as compute@stage2*0.5 (see `scaled_costs`)."""

    rules: str
    stages: int | None = None  # number of stages that the rules were written for

    def check_places(self, table: ScheduleTable) -> None:
        """Refuse rules that name a stage or boundary, if the table has another number of stages."""
        has_places = "@stage" in self.rules or "@boundary" in self.rules
        if has_places and self.stages not in (None, table.num_stages):
            text = f"scale names places of {self.stages} stages, the table has {table.num_stages}"
            raise MismatchError(text, "scale")

    def apply(self, costs: Costs, table: ScheduleTable) -> Costs:
        """Scale the costs of a table by the rules."""
        self.check_places(table)
        try:
            return scaled_costs(costs, table, self.rules)
        except ValueError as error:
            raise ArgumentError("scale", None, f"scale {self.rules}: {error}") from None


# kinds of edits in the order in which they apply
KINDS = (
    *(RecomputeCells, ShardingCells, HostTimes, Microbatches, RecomputedAgain, PairFactor),
    *(SlowWorkers, ScaledTimes),
)
