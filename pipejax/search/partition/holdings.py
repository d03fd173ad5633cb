"""What a stage may hold, and what that costs there in seconds and bytes.

The costs of a stage follow from what it holds itself: layers of each kind, those for further
tokens, embedding or head. So each possible holding is priced once, on all stages at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.costs.costs import DIMENSIONLESS, MESSAGE_FIELDS, Costs
from pipejax.costs.model.model import Model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import StageLayers, Stages, Workload, recomputed_stages, stages_of
from pipejax.costs.stage.stage_costs import has_host_link, with_factors, work_costs
from pipejax.costs.stage.stage_work import StageBytes, stage_bytes, stage_work
from pipejax.costs.system.system import System
from pipejax.schedules.table.table import ScheduleTable

Chosen = Int[NumpyArray, " stages"]
Seconds = dict[str, Float[NumpyArray, "holdings stages *microbatches"]]


class Holding(NamedTuple):
    """What one stage may hold besides embedding and head."""

    dense: int  # layers of the model's first kind
    rest: int = 0  # layers of its other kind; 0 in a model that has one
    mtp: bool = False  # whether the layers for further tokens are there, all of them

    @property
    def layers(self) -> int:
        """Layers, but for those for further tokens."""
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
        """How much of something each holding has (holdings)."""
        return np.array([int(getattr(each, name)) for each in self.holdings])

    def costs(self, shares: Float[NumpyArray, "holdings stages"]) -> Costs:
        """Costs of a split: the share of each holding in each stage, 1 or in between."""
        own = {
            name: np.einsum("hs...,hs->s...", of_stages, shares)
            for name, of_stages in self.seconds.items()
        }
        behind = np.cumsum(self.counts("mtp") @ shares)[:-1]
        transmit = self.transmit * (1 + self.mtp_layers * behind)
        messages = {"latency": self.latency, "transmit": transmit}
        return Costs(**own, **messages, pair_factor=self.pair_factor)

    def layout(self, chosen: Chosen) -> PipelineLayout:
        """Write a split as a layout."""
        layers, mtp = (self.counts(name)[chosen] for name in ("layers", "mtp"))
        return PipelineLayout.with_layers(layers.tolist(), (mtp * self.mtp_layers).tolist())

    def everywhere(self) -> Iterator[Costs]:
        """Yield the costs of every holding, as if all stages had it."""
        for place in range(len(self.holdings)):
            yield Costs(**{name: of_stages[place] for name, of_stages in self.seconds.items()})


def dense_layers(model: Model) -> int:
    """Layers of the model's first kind."""
    return int(model.layers if model.moe is None else model.moe.dense_layers)


def price_holdings(
    workload: Workload,
    system: System,
    table: ScheduleTable,
    may_hold: Callable[[Costs], bool],
) -> HoldingPrices:
    """Price every holding that some stage may have."""
    # `may_hold` says so of costs where every stage has that holding; one with more layers may not
    # where one with fewer may not.
    price = _Pricing(workload, system, table)
    found = list(price.holdings(may_hold))
    costs, memory = [each[1] for each in found], [each[2] for each in found]
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
        return np.stack([np.broadcast_to(np.asarray(each, float), stages) for each in values])

    none = Holding(0)  # the messages of a model without layers for further tokens
    plain = price.of(none)[0]
    return HoldingPrices(
        tuple(each[0] for each in found),
        {name: np.stack([by_stage(getattr(each, name)) for each in costs]) for name in fields},
        plain.pair_factor,
        np.asarray(plain.latency, float),
        np.asarray(plain.transmit, float),
        int(workload.model.mtp_layers),
        stacked([each.static for each in memory]),
        stacked([each.version for each in memory]),
        np.stack([stacked(sizes) for sizes in zip(*(each.parts for each in memory), strict=True)]),
    )


class _Pricing:
    """Prices of a workload whose stages all hold the same."""

    def __init__(self, workload: Workload, system: System, table: ScheduleTable) -> None:
        self.workload, self.system, self.table = workload, system, table
        self.recomputed = 1.0 * recomputed_stages(workload, table)
        self.most = workload.recomputation.layers
        self.dense = dense_layers(workload.model)
        self.rest = int(workload.model.layers) - self.dense

    def holdings(
        self, may_hold: Callable[[Costs], bool]
    ) -> Iterator[tuple[Holding, Costs, StageBytes]]:
        """Yield holdings with their prices, of each kind with ever more layers."""
        for mtp in (False, True) if self.workload.model.mtp_layers else (False,):
            first = [Holding(0, 0, mtp)]
            by_dense = [Holding(dense, 0, mtp) for dense in range(1, self.dense + 1)]
            ways = [first, by_dense]
            for dense in range(self.dense + 1 if self.rest else 0):
                ways.append([Holding(dense, rest, mtp) for rest in range(1, self.rest + 1)])
            for way in ways:
                for holding in way:
                    costs, memory = self.of(holding)
                    if holding.layers and not may_hold(costs):
                        break
                    yield holding, costs, memory

    def of(self, holding: Holding) -> tuple[Costs, StageBytes]:
        """Seconds and bytes of every stage, if it had this holding."""
        given, stages = (self.workload, self.table), self._stages(holding)
        work = stage_work(*given, assigned=stages, offloads=has_host_link(self.system))
        costs = with_factors(work_costs(work, self.system), *given)
        return costs, stage_bytes(*given, stages)

    def _stages(self, holding: Holding) -> Stages:
        every = np.ones(self.table.num_stages)
        recomputed = min(holding.layers, self.most) * self.recomputed
        assigned = StageLayers(holding.layers * every, recomputed)
        places = self.workload.worker_places
        stages = stages_of(self.table, assigned, holding.mtp * every, places)
        return stages._replace(before=(self.dense - holding.dense) * every)
