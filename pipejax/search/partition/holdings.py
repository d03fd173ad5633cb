"""Contents of a stage, their costs in seconds and bytes, and splits of a model into them.

The costs of a stage follow from what it holds itself: layers of each kind, those for further
tokens, embedding or head. So each possible holding is priced once, on all stages at a time.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.costs.costs import DIMENSIONLESS, MESSAGE_FIELDS, Costs
from pipejax.costs.model.model import Model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import (
    StageLayers,
    Stages,
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

Chosen = Int[NumpyArray, " stages"]
Seconds = dict[str, Float[NumpyArray, "holdings stages *microbatches"]]


class Holding(NamedTuple):
    """Content of one stage, without embedding and head."""

    dense: int  # layers of the model's first kind
    rest: int = 0  # layers of its other kind; 0 in a model that has one
    mtp: bool = False  # whether the layers for further tokens are there, all of them

    @property
    def layers(self) -> int:
        """Number of layers, without the layers for further tokens."""
        return self.dense + self.rest


class HoldingPrices(NamedTuple):
    """Prices of holdings on every stage."""

    holdings: tuple[Holding, ...]  # what is priced
    # by field of `Costs`: all that lasts on a stage; (holdings, stages, microbatches) where copies
    # of a stage differ
    seconds: Seconds
    pair_factor: Any  # k of fused pairs; None where they last the sum
    latency: Float[NumpyArray, "2 pipes boundaries"]  # of messages
    # of messages before the layers for further tokens
    transmit: Float[NumpyArray, "2 pipes boundaries"]
    mtp_layers: int  # how many of these there are: each is one message more behind them
    static: Float[NumpyArray, "holdings stages"]  # what lasts the whole step [B]
    version: Float[NumpyArray, "holdings stages"]  # one more version of the weights [B]
    # of an activation, in the order of the memory ledger [B]
    parts: Float[NumpyArray, "parts holdings stages"]

    def counts(self, name: str) -> Int[NumpyArray, " holdings"]:
        """Return one attribute of every holding (holdings)."""
        return np.array([int(getattr(holding, name)) for holding in self.holdings])

    def costs(self, shares: Float[NumpyArray, "holdings stages"]) -> Costs:
        """Return the costs of a split, given the share of each holding in each stage in [0, 1]."""
        mixed = {
            name: np.einsum("hs...,hs->s...", by_stage, shares)
            for name, by_stage in self.seconds.items()
        }
        mtp_before = np.cumsum(self.counts("mtp") @ shares)[:-1]
        transmit = self.transmit * (1 + self.mtp_layers * mtp_before)
        messages = {"latency": self.latency, "transmit": transmit}
        return Costs(**mixed, **messages, pair_factor=self.pair_factor)

    def layout(self, chosen: Chosen) -> PipelineLayout:
        """Write a split as a layout."""
        layers, mtp = (self.counts(name)[chosen] for name in ("layers", "mtp"))
        return PipelineLayout.with_layers(layers.tolist(), (mtp * self.mtp_layers).tolist())

    def everywhere(self) -> Iterator[Costs]:
        """Yield the costs of every holding, as if all stages had it."""
        for place in range(len(self.holdings)):
            yield Costs(**{name: by_stage[place] for name, by_stage in self.seconds.items()})


def dense_layers(model: Model) -> int:
    """Count the layers of the model's first kind."""
    return int(model.layers if model.moe is None else model.moe.dense_layers)


def price_holdings(
    workload: Workload, system: System, table: ScheduleTable, may_hold: Callable[[Costs], bool]
) -> HoldingPrices:
    """Price every holding that a stage may have, on every stage."""
    # `may_hold` decides by the costs of a table with this holding on every stage. If it refuses a
    # holding, it refuses all with more layers.
    pricing = _Pricing(workload, system, table)
    priced = list(pricing.holdings(may_hold))
    costs, memory = [entry[1] for entry in priced], [entry[2] for entry in priced]
    fields = [
        name
        for name, value in vars(costs[0]).items()
        if value is not None and name not in (*MESSAGE_FIELDS, *DIMENSIONLESS)
    ]
    stages = table.num_stages

    def by_stage(value: Any) -> Float[NumpyArray, "stages *microbatches"]:
        array = np.asarray(value, float)
        return array if array.ndim == 2 else np.broadcast_to(array, stages)

    def stacked(values: Sequence[object]) -> Float[NumpyArray, "holdings stages"]:
        return np.stack([np.broadcast_to(np.asarray(value, float), stages) for value in values])

    no_layers = Holding(0)  # the messages of a model without layers for further tokens
    prices = pricing.price(no_layers)[0]
    return HoldingPrices(
        tuple(entry[0] for entry in priced),
        {name: np.stack([by_stage(getattr(item, name)) for item in costs]) for name in fields},
        prices.pair_factor,
        np.asarray(prices.latency, float),
        np.asarray(prices.transmit, float),
        int(workload.model.mtp_layers),
        stacked([sizes.static for sizes in memory]),
        stacked([sizes.version for sizes in memory]),
        np.stack([stacked(sizes) for sizes in zip(*(item.parts for item in memory), strict=True)]),
    )


class _Pricing:
    """Prices of a workload with the same holding on every stage."""

    def __init__(self, workload: Workload, system: System, table: ScheduleTable) -> None:
        self.workload, self.system, self.table = workload, system, table
        self.recomputed = 1.0 * recomputed_stages(workload, table)
        self.max_recomputed = workload.recomputation.layers
        self.dense = dense_layers(workload.model)
        self.rest = int(workload.model.layers) - self.dense

    def holdings(
        self, may_hold: Callable[[Costs], bool]
    ) -> Iterator[tuple[Holding, Costs, StageBytes]]:
        """Yield holdings with their prices, of each kind with ever more layers."""
        for mtp in (False, True) if self.workload.model.mtp_layers else (False,):
            first = [Holding(0, 0, mtp)]
            by_dense = [Holding(dense, 0, mtp) for dense in range(1, self.dense + 1)]
            kinds = [first, by_dense]
            for dense in range(self.dense + 1 if self.rest else 0):
                kinds.append([Holding(dense, rest, mtp) for rest in range(1, self.rest + 1)])
            for way in kinds:
                for holding in way:
                    costs, memory = self.price(holding)
                    if holding.layers and not may_hold(costs):
                        break
                    yield holding, costs, memory

    def price(self, holding: Holding) -> tuple[Costs, StageBytes]:
        """Return seconds and bytes of every stage, if all stages have this holding."""
        arguments, stages = (self.workload, self.table), self._stages(holding)
        work = stage_work(*arguments, assigned=stages, offloads=has_host_link(self.system))
        costs = with_factors(work_costs(work, self.system), *arguments)
        return costs, stage_bytes(*arguments, stages)

    def _stages(self, holding: Holding) -> Stages:
        ones = np.ones(self.table.num_stages)
        recomputed = min(holding.layers, self.max_recomputed) * self.recomputed
        assigned = StageLayers(holding.layers * ones, recomputed)
        places = self.workload.worker_places
        stages = build_stages(self.table, assigned, holding.mtp * ones, places)
        return stages._replace(before=(self.dense - holding.dense) * ones)


Points = Int[NumpyArray, "points stages"]
Found = Int[NumpyArray, "found stages"]
Shares = Float[NumpyArray, "holdings stages"]


@dataclasses.dataclass(frozen=True)
class Splits:
    """Splits as an index of a priced holding for each stage."""

    prices: HoldingPrices  # of holdings
    may_hold: Bool[NumpyArray, "holdings stages"]  # which are not known to be too slow
    model: Model  # what is split
    workers: int  # of the table
    held: HeldCounts | None  # what the workers hold, where memory is limited
    capacity: float  # what each worker has [B]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.may_hold.shape[1]

    def chosen(self, layout: PipelineLayout) -> Found:
        """Find a layout among the splits (1 or none, stages)."""
        mtp = layout.count("m")
        if np.count_nonzero(mtp) > 1:
            return np.empty((0, self.stages), int)
        return self._splits_with_layers(layout.count("t")[None], (mtp > 0)[None])

    def shares(self, chosen: Int[NumpyArray, " stages"]) -> Shares:
        """Write one split as shares of 0 and 1."""
        return (chosen == np.arange(len(self.may_hold))[:, None]) * 1.0

    def rounded(self, shares: Shares) -> Found:
        """Round a mixture to a split (1 or none, stages)."""
        layers = whole_with_sum((self.prices.counts("layers") @ shares)[None])
        # the layers for further tokens are on one stage, if there are any
        stage = (self.prices.counts("mtp") @ shares).argmax()
        mtp = (np.arange(self.stages) == stage) & (self.model.mtp_layers > 0)
        return self._splits_with_layers(layers, mtp[None])

    def neighbours(self, chosen: Int[NumpyArray, " stages"]) -> Found:
        """List splits with one layer elsewhere, or with the layers for further tokens elsewhere."""
        layers, mtp = (self.prices.counts(name)[chosen] for name in ("layers", "mtp"))
        moved = layers + swaps(self.stages)
        splits = [self._splits_with_layers(moved, np.broadcast_to(mtp > 0, moved.shape))]
        if mtp.any():
            elsewhere = np.eye(self.stages, dtype=bool)
            same_layers = np.broadcast_to(layers, elsewhere.shape)
            splits.append(self._splits_with_layers(same_layers, elsewhere))
        return np.concatenate(splits)

    def _splits_with_layers(self, layers: Points, mtp: Bool[NumpyArray, "points stages"]) -> Found:
        """Return the splits with these layers that are legal, fast enough and fit."""
        table = np.full((1 + int(self.model.layers), 1 + int(self.model.layers), 2), -1)
        for k, holding in enumerate(self.prices.holdings):
            table[holding.dense, holding.rest, int(holding.mtp)] = k
        before = np.cumsum(layers, axis=1) - layers
        behind_mtp = (np.cumsum(mtp, axis=1) - mtp > 0) & (layers > 0)
        legal = (layers >= 0).all(axis=1) & ~behind_mtp.any(axis=1)
        layers, mtp, before = layers[legal], mtp[legal], before[legal]
        dense = np.clip(dense_layers(self.model) - before, 0, layers)
        splits = table[dense, layers - dense, mtp.astype(int)]
        legal = (splits >= 0).all(axis=1)
        splits = splits[legal]
        stages = np.arange(self.stages)
        splits = splits[self.may_hold[splits, stages].all(axis=1)]
        return splits[self._fit(splits)]

    def _fit(self, points: Points) -> Bool[NumpyArray, " points"]:
        """Return which splits fit in memory (points)."""
        if self.held is None:
            return np.ones(len(points), bool)
        chosen = points, np.arange(self.stages)
        static = self.held.static_bytes(self.prices.static[chosen], self.prices.version[chosen])
        moving = self.held.activation_bytes(tuple(size[chosen] for size in self.prices.parts))
        fits: Bool[NumpyArray, " points"] = (static + moving).max(axis=1) <= self.capacity
        return fits


ENDS = {  # what Megatron counts as a layer: embedding, loss
    "megatron": (0, 0),
    "megatron, embedding counted": (1, 0),
    "megatron, loss counted": (0, 1),
    "megatron, embedding and loss counted": (1, 1),
}


def default_layouts(workload: Workload, table: ScheduleTable) -> dict[str, PipelineLayout]:
    """Return the splits of the runtimes by name, where these support the sizes."""
    # Megatron divides layers evenly, and can count embedding and loss as layers
    # (`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`). If this is
    # not even, the user sets the layers of the first and the last worker. torchtitan counts both
    # ends as a layer and gives the remainder to the first stages. MTP layers are on the last stage.
    layers, stages = int(workload.model.layers), table.num_stages
    layers_by_name = {name: _even(layers, stages, ends) for name, ends in ENDS.items()}
    layers_by_name["megatron, first and last set"] = _first_and_last(layers, table)
    layers_by_name["torchtitan"] = _torchtitan(layers, stages)
    with contextlib.suppress(MismatchError):  # fewer layers than stages
        units = workload.embedding_units, workload.loss_units
        layers_by_name["by stage shares"] = stage_layers(workload.model, table, units).tolist()
    mtp = [0] * (stages - 1) + [int(workload.model.mtp_layers)]
    return {
        name: PipelineLayout.with_layers(split, mtp)
        for name, split in layers_by_name.items()
        if split is not None and min(split) >= 0
    }


def _even(layers: int, stages: int, ends: tuple[int, int]) -> list[int] | None:
    per_stage, rest = divmod(layers + sum(ends), stages)
    split = [per_stage] * stages
    split[0] -= ends[0]
    split[-1] -= ends[1]
    return None if rest else split


def _first_and_last(layers: int, table: ScheduleTable) -> list[int] | None:
    """Return the most even split with separate counts on the first and last worker."""
    workers = table.num_workers
    per_worker, rest = divmod(table.num_stages, workers)
    if rest or workers < 3 or layers % per_worker:
        return None
    total = layers // per_worker  # layers of one stage of every worker together
    splits = []
    for middle in range(1, (total - 2) // (workers - 2) + 1):
        first, odd_layer = divmod(total - (workers - 2) * middle, 2)
        splits.append([first, *[middle] * (workers - 2), first + odd_layer])
    if not splits:
        return None
    return per_worker * min(splits, key=lambda x: (max(x), max(x) - min(x), x[0] + x[-1]))


def _torchtitan(layers: int, stages: int) -> list[int] | None:
    """Return the layers of stages by torchtitan's rule; None if a stage would be empty."""
    if stages == 1:
        return [layers]
    per_stage, remainder = divmod(layers + 2, stages)
    split = [per_stage + (stage < remainder) for stage in range(stages)]
    split[0] -= 1
    split[-1] -= 1
    return split if per_stage else None
