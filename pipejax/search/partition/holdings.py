"""Possible contents of a stage (holdings), their prices, and splits of a model into holdings.

A holding is a number of dense layers and of MoE layers, with or without the MTP layers (layers that
predict further tokens). A split assigns a holding to each stage; the first and last stage also have
embedding and head. The costs of a stage depend only on its holding and place. So each holding is
priced once, on all stages at a time.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.costs.costs import DIMENSIONLESS, MESSAGE_FIELDS, Costs
from pipejax.costs.model.model import Model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import (
    StageLayers,
    Workload,
    build_stages,
    recomputed_stages,
    stage_layers,
)
from pipejax.costs.stage.stage_costs import has_host_link, with_factors, work_costs
from pipejax.costs.stage.stage_work import StageBytes, stage_bytes, stage_work
from pipejax.costs.system.system import System
from pipejax.schedules.table.held_activations import HeldCounts
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.tuning.rounding import swaps, whole_with_sum

Point = Int[NumpyArray, " stages"]  # a split: index of each stage's holding
Points = Int[NumpyArray, "points stages"]
Legal = Int[NumpyArray, "legal_points stages"]
Seconds = dict[str, Float[NumpyArray, "holdings stages *microbatches"]]


class Holding(NamedTuple):
    """Content of one stage, without embedding and head."""

    dense: int  # number of layers without experts
    moe: int = 0  # number of layers with experts
    mtp: bool = False  # whether all MTP layers are on this stage

    @property
    def layers(self) -> int:
        """Return the number of layers without MTP layers."""
        return self.dense + self.moe


class HoldingPrices(NamedTuple):
    """Times and memory of each holding on every stage."""

    holdings: tuple[Holding, ...]
    # {field of `Costs`: op times [s]}, with a last axis of microbatches if copies of a stage differ
    seconds: Seconds
    pair_factor: Any  # factor k of fused pairs; None if a pair takes the sum of both ops
    latency: Float[NumpyArray, "2 pipes boundaries"]  # latency of messages [s]
    transmit: Float[NumpyArray, "2 pipes boundaries"]  # transmit time before the MTP layers [s]
    mtp_layers: int  # number of MTP layers; after them, messages carry as many further outputs
    static: Float[NumpyArray, "holdings stages"]  # memory of the whole step [B]
    version: Float[NumpyArray, "holdings stages"]  # memory of one more version of the weights [B]
    # parts of an activation, in the order of the memory ledger [B]
    parts: Float[NumpyArray, "parts holdings stages"]

    def counts(self, name: str) -> Int[NumpyArray, " holdings"]:
        """Return an attribute of each holding, such as the number of layers."""
        return np.array([int(getattr(holding, name)) for holding in self.holdings])

    def costs(self, shares: Float[NumpyArray, "holdings stages"]) -> Costs:
        """Return the costs of stages with these shares of holdings, from 0 to 1."""
        op_seconds = {
            name: np.einsum("hs...,hs->s...", seconds, shares)
            for name, seconds in self.seconds.items()
        }
        # a stage after an MTP layer also forwards its output, as one more message
        mtp_before = np.cumsum(self.counts("mtp") @ shares)[:-1]
        transmit = self.transmit * (1 + self.mtp_layers * mtp_before)
        messages = {"latency": self.latency, "transmit": transmit}
        return Costs(**op_seconds, **messages, pair_factor=self.pair_factor)

    def layout(self, point: Point) -> PipelineLayout:
        """Convert a split to a layout."""
        layers, mtp = (self.counts(name)[point] for name in ("layers", "mtp"))
        return PipelineLayout.with_layers(layers.tolist(), (mtp * self.mtp_layers).tolist())


def dense_layers(model: Model) -> int:
    """Count the dense layers of a model, which come before its MoE layers."""
    return int(model.layers if model.moe is None else model.moe.dense_layers)


def price_holdings(
    workload: Workload, system: System, table: ScheduleTable, may_hold: Callable[[Costs], bool]
) -> HoldingPrices:
    """Price each holding (layers, embedding and head of a stage) that `may_hold` admits."""
    # `may_hold` gets the costs of a table with this holding on every stage. If it refuses a
    # holding, it also refuses holdings with more layers.
    stages, pricing = table.num_stages, _Pricing(workload, system, table)
    holdings, costs, memory = zip(*pricing.holdings(may_hold), strict=True)
    fields = [
        name
        for name, value in vars(costs[0]).items()
        if value is not None and name not in (*MESSAGE_FIELDS, *DIMENSIONLESS)
    ]

    def stack(values: Iterable[Any]) -> Float[NumpyArray, "holdings stages *microbatches"]:
        """Stack one cost per holding, of shape (), (stages) or (stages, microbatches)."""
        return np.stack(
            [
                np.asarray(value if np.ndim(value) == 2 else np.broadcast_to(value, stages), float)
                for value in values
            ]
        )

    # messages of a model without MTP layers
    message_costs, _ = pricing.price(Holding(0))
    return HoldingPrices(
        holdings,
        {name: stack(getattr(stage_costs, name) for stage_costs in costs) for name in fields},
        message_costs.pair_factor,
        np.asarray(message_costs.latency, float),
        np.asarray(message_costs.transmit, float),
        int(workload.model.mtp_layers),
        stack(sizes.static for sizes in memory),
        stack(sizes.version for sizes in memory),
        np.stack([stack(part) for part in zip(*(sizes.parts for sizes in memory), strict=True)]),
    )


class _Pricing:
    """Prices of a workload with the same holding on every stage."""

    def __init__(self, workload: Workload, system: System, table: ScheduleTable) -> None:
        self.workload, self.system, self.table = workload, system, table
        self.recomputed = 1.0 * recomputed_stages(workload, table)
        self.max_recomputed = workload.recomputation.layers
        self.dense = dense_layers(workload.model)
        self.moe = int(workload.model.layers) - self.dense

    def holdings(
        self, may_hold: Callable[[Costs], bool]
    ) -> Iterator[tuple[Holding, Costs, StageBytes]]:
        """Yield (holding, costs, memory); within a series, layers of one kind increase."""
        for mtp in (False, True) if self.workload.model.mtp_layers else (False,):
            dense_series = [Holding(dense, 0, mtp) for dense in range(1, self.dense + 1)]
            moe_series = (
                [Holding(dense, moe, mtp) for moe in range(1, self.moe + 1)]
                for dense in range(self.dense + 1)
            )
            for series in ([Holding(0, 0, mtp)], dense_series, *moe_series):
                for holding in series:
                    costs, memory = self.price(holding)
                    if holding.layers and not may_hold(costs):
                        break  # more layers are slower
                    yield holding, costs, memory

    def price(self, holding: Holding) -> tuple[Costs, StageBytes]:
        """Return costs [s] and memory [B] of every stage, if all stages have this holding."""
        arguments, ones = (self.workload, self.table), np.ones(self.table.num_stages)
        recomputed = min(holding.layers, self.max_recomputed) * self.recomputed
        assigned = StageLayers(holding.layers * ones, recomputed)
        places = self.workload.worker_places
        stages = build_stages(self.table, assigned, holding.mtp * ones, places)
        # the number of layers before a stage decides how many of its layers are dense
        stages = stages._replace(before=(self.dense - holding.dense) * ones)
        work = stage_work(*arguments, assigned=stages, offloads=has_host_link(self.system))
        costs = with_factors(work_costs(work, self.system), *arguments)
        return costs, stage_bytes(*arguments, stages)


Shares = Float[NumpyArray, "holdings stages"]


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """The splits of a model that are legal, fast enough and fit in memory."""

    prices: HoldingPrices
    may_hold: Bool[NumpyArray, "holdings stages"]  # False if the stage would be too slow
    model: Model
    workers: int  # number of workers of the table
    held: HeldCounts | None  # activations that the workers hold; None without a memory limit
    capacity: float  # memory of each worker [B]

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.may_hold.shape[1]

    def from_layout(self, layout: PipelineLayout) -> Points:
        """Return the split of a layout as an array of one point; empty if it is not allowed."""
        mtp = layout.count("m")
        if np.count_nonzero(mtp) > 1:
            return np.empty((0, self.stages), int)
        return self._splits_with_layers(layout.count("t")[None], (mtp > 0)[None])

    def shares(self, point: Point) -> Shares:
        """Convert a split to shares of holdings in stages, which are 0 or 1."""
        return (point == np.arange(len(self.may_hold))[:, None]) * 1.0

    def from_shares(self, shares: Shares) -> Points:
        """Round shares to a split; return an empty array if the split is not allowed."""
        layers = whole_with_sum((self.prices.counts("layers") @ shares)[None])
        # all MTP layers are on one stage
        stage = (self.prices.counts("mtp") @ shares).argmax()
        mtp = (np.arange(self.stages) == stage) & (self.model.mtp_layers > 0)
        return self._splits_with_layers(layers, mtp[None])

    def neighbours(self, point: Point) -> Points:
        """List splits that move one layer, or all MTP layers, to another stage."""
        layers, mtp = (self.prices.counts(name)[point] for name in ("layers", "mtp"))
        new_layers = layers + swaps(self.stages)
        same_mtp = np.broadcast_to(mtp > 0, new_layers.shape)
        points = [self._splits_with_layers(new_layers, same_mtp)]
        if mtp.any():
            new_mtp = np.eye(self.stages, dtype=bool)
            same_layers = np.broadcast_to(layers, new_mtp.shape)
            points.append(self._splits_with_layers(same_layers, new_mtp))
        return np.concatenate(points)

    def _splits_with_layers(self, layers: Points, mtp: Bool[NumpyArray, "points stages"]) -> Legal:
        """Return the splits with these layers that are legal, fast enough and within memory."""
        # The first layers of a model are dense, the others have experts.
        size = 1 + int(self.model.layers)
        holding_index = np.full((size, size, 2), -1)  # [dense, moe, mtp]; -1: not priced
        for k, holding in enumerate(self.prices.holdings):
            holding_index[holding.dense, holding.moe, int(holding.mtp)] = k
        # numbers of layers may not be negative, and no layer may come after the MTP layers
        has_mtp_before = np.cumsum(mtp, axis=1) - mtp > 0
        is_legal = (layers >= 0).all(axis=1) & ~(has_mtp_before & (layers > 0)).any(axis=1)
        layers, mtp = layers[is_legal], mtp[is_legal]
        layers_before = np.cumsum(layers, axis=1) - layers
        dense = np.clip(dense_layers(self.model) - layers_before, 0, layers)
        points = holding_index[dense, layers - dense, mtp.astype(int)]
        points = points[(points >= 0).all(axis=1)]
        points = points[self.may_hold[points, np.arange(self.stages)].all(axis=1)]
        return points[self._fits_memory(points)]

    def _fits_memory(self, points: Points) -> Bool[NumpyArray, " points"]:
        """Return for each split whether it fits in memory."""
        if self.held is None:
            return np.ones(len(points), bool)
        index = points, np.arange(self.stages)
        static = self.held.static_bytes(self.prices.static[index], self.prices.version[index])
        activations = self.held.activation_bytes(tuple(size[index] for size in self.prices.parts))
        return (static + activations).max(axis=1) <= self.capacity


ENDS = {  # {name: (layers that embedding counts as, layers that the loss counts as)}
    "megatron": (0, 0),
    "megatron, embedding counted": (1, 0),
    "megatron, loss counted": (0, 1),
    "megatron, embedding and loss counted": (1, 1),
}


def default_layouts(workload: Workload, table: ScheduleTable) -> dict[str, PipelineLayout]:
    """Return {name: default split} of runtimes that support the numbers of layers and stages."""
    # Megatron divides layers evenly, and can count embedding and loss as a layer each
    # (`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`). If layers
    # do not divide evenly, the user sets the layers of the first and the last worker. torchtitan
    # counts embedding and loss as a layer each, and gives the remainder to the first stages. MTP
    # layers are on the last stage.
    layers, stages = int(workload.model.layers), table.num_stages
    layers_by_name = {name: _even_split(layers, stages, ends) for name, ends in ENDS.items()}
    layers_by_name["megatron, first and last set"] = _split_with_equal_middle(layers, table)
    layers_by_name["torchtitan"] = _even_split(layers, stages, (1, 1), allows_remainder=True)
    with contextlib.suppress(MismatchError):  # there may be fewer layers than stages
        units = workload.embedding_units, workload.loss_units
        layers_by_name["by stage shares"] = stage_layers(workload.model, table, units).tolist()
    mtp = [0] * (stages - 1) + [int(workload.model.mtp_layers)]
    return {
        name: PipelineLayout.with_layers(split, mtp)
        for name, split in layers_by_name.items()
        if split is not None and min(split) >= 0
    }


def _even_split(
    layers: int, stages: int, ends: tuple[int, int], *, allows_remainder: bool = False
) -> list[int] | None:
    """Return the number of layers of each stage in an even split, or None if there is none."""
    # `ends` are the layers that embedding and loss count as; a remainder goes to the first stages
    per_stage, remainder = divmod(layers + sum(ends), stages)
    if not per_stage or (remainder and not allows_remainder):
        return None
    split = [per_stage + 1] * remainder + [per_stage] * (stages - remainder)
    split[0] -= ends[0]
    split[-1] -= ends[1]
    return split


def _split_with_equal_middle(layers: int, table: ScheduleTable) -> list[int] | None:
    """Return the most even split with equal layers on all workers but the first and the last."""
    # It is None if no such split exists. 13 layers on 4 workers become 3 3 3 4.
    workers = table.num_workers
    per_worker, remainder = divmod(table.num_stages, workers)
    if remainder or workers < 3 or layers % per_worker:
        return None
    total = layers // per_worker  # layers of one stage of every worker together
    splits = []
    for middle in range(1, (total - 2) // (workers - 2) + 1):
        first, odd_layer = divmod(total - (workers - 2) * middle, 2)
        splits.append([first, *[middle] * (workers - 2), first + odd_layer])
    if not splits:
        return None
    # smallest maximum, then smallest range, then fewest layers on the first and last worker
    most_even = min(splits, key=lambda x: (max(x), max(x) - min(x), x[0] + x[-1]))
    return per_worker * most_even  # repeated, as all stages of a worker are equal
