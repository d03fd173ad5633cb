"""The splits of a model into the stages of a table: which there are, and which are neighbours."""

import contextlib
import dataclasses

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.costs.model.model import Model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import Workload, stage_layers
from pipejax.schedules.table.held_activations import HeldCounts
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.partition.holdings import HoldingPrices, dense_layers
from pipejax.search.tuning.rounding import swaps, whole_with_sum

Points = Int[NumpyArray, "points stages"]
Found = Int[NumpyArray, "found stages"]
Shares = Float[NumpyArray, "holdings stages"]


@dataclasses.dataclass(frozen=True)
class Splits:
    """Splits as the place of each stage's holding among those that are priced."""

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
        return self._of_layers(layout.count("t")[None], (mtp > 0)[None])

    def shares(self, chosen: Int[NumpyArray, " stages"]) -> Shares:
        """Write one split as shares of 0 and 1."""
        return (chosen == np.arange(len(self.may_hold))[:, None]) * 1.0

    def rounded(self, shares: Shares) -> Found:
        """Round a mixture to a split (1 or none, stages)."""
        layers = whole_with_sum((self.prices.counts("layers") @ shares)[None])
        return self._of_layers(layers, self._mtp(self.prices.counts("mtp") @ shares))

    def neighbours(self, chosen: Int[NumpyArray, " stages"]) -> Found:
        """List splits with one layer elsewhere, or with the layers for further tokens elsewhere."""
        layers, mtp = (self.prices.counts(name)[chosen] for name in ("layers", "mtp"))
        moved = layers + swaps(self.stages)
        found = [self._of_layers(moved, np.broadcast_to(mtp > 0, moved.shape))]
        if mtp.any():
            elsewhere = np.eye(self.stages, dtype=bool)
            found.append(self._of_layers(np.broadcast_to(layers, elsewhere.shape), elsewhere))
        return np.concatenate(found)

    def _mtp(self, shares: Float[NumpyArray, " stages"]) -> Bool[NumpyArray, "1 stages"]:
        """Where the layers for further tokens are, if there are any."""
        return ((np.arange(self.stages) == shares.argmax()) & (self.model.mtp_layers > 0))[None]

    def _of_layers(self, layers: Points, mtp: Bool[NumpyArray, "points stages"]) -> Found:
        """Find splits by their layers; leave out what is none, too slow, or does not fit."""
        place = {holding: k for k, holding in enumerate(self.prices.holdings)}
        table = np.full((1 + int(self.model.layers), 1 + int(self.model.layers), 2), -1)
        for holding, k in place.items():
            table[holding.dense, holding.rest, int(holding.mtp)] = k
        before = np.cumsum(layers, axis=1) - layers
        behind_mtp = (np.cumsum(mtp, axis=1) - mtp > 0) & (layers > 0)
        legal = (layers >= 0).all(axis=1) & ~behind_mtp.any(axis=1)
        layers, mtp, before = layers[legal], mtp[legal], before[legal]
        dense = np.clip(dense_layers(self.model) - before, 0, layers)
        found = table[dense, layers - dense, mtp.astype(int)]
        legal = (found >= 0).all(axis=1)
        found = found[legal]
        stages = np.arange(self.stages)
        found = found[self.may_hold[found, stages].all(axis=1)]
        return found[self._fit(found)]

    def _fit(self, points: Points) -> Bool[NumpyArray, " points"]:
        """Whether every worker has room (points)."""
        if self.held is None:
            return np.ones(len(points), bool)
        own = points, np.arange(self.stages)
        static = self.held.static_bytes(self.prices.static[own], self.prices.version[own])
        moving = self.held.activation_bytes(tuple(size[own] for size in self.prices.parts))
        fits: Bool[NumpyArray, " points"] = (static + moving).max(axis=1) <= self.capacity
        return fits


ENDS = {  # what Megatron counts as a layer: embedding, loss
    "megatron": (0, 0),
    "megatron, embedding counted": (1, 0),
    "megatron, loss counted": (0, 1),
    "megatron, embedding and loss counted": (1, 1),
}


def default_layouts(workload: Workload, table: ScheduleTable) -> dict[str, PipelineLayout]:
    """Splits by name, as far as the runtimes take so many layers on so many stages."""
    # Megatron divides layers evenly, with embedding and loss counted as layers if asked
    # (`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`); where that
    # does not come out even, it takes the layers of the first and the last worker by hand, so that
    # the others have the same. torchtitan counts both ends as a layer and gives what is left over
    # to the first stages. Layers for further tokens are on the last stage.
    layers, stages = int(workload.model.layers), table.num_stages
    found = {name: _even(layers, stages, ends) for name, ends in ENDS.items()}
    found["megatron, first and last set"] = _first_and_last(layers, table)
    found["torchtitan"] = _torchtitan(layers, stages)
    with contextlib.suppress(MismatchError):  # fewer layers than stages
        units = workload.embedding_units, workload.loss_units
        found["by stage shares"] = stage_layers(workload.model, table, units).tolist()
    mtp = [0] * (stages - 1) + [int(workload.model.mtp_layers)]
    return {
        name: PipelineLayout.with_layers(split, mtp)
        for name, split in found.items()
        if split is not None and min(split) >= 0
    }


def _even(layers: int, stages: int, ends: tuple[int, int]) -> list[int] | None:
    each, rest = divmod(layers + sum(ends), stages)
    split = [each] * stages
    split[0] -= ends[0]
    split[-1] -= ends[1]
    return None if rest else split


def _first_and_last(layers: int, table: ScheduleTable) -> list[int] | None:
    """The most even split with a number of its own on the first and on the last worker."""
    workers = table.num_workers
    several, rest = divmod(table.num_stages, workers)
    if rest or workers < 3 or layers % several:
        return None
    total = layers // several  # of one stage of each worker
    ways = []
    for middle in range(1, (total - 2) // (workers - 2) + 1):
        first, odd = divmod(total - (workers - 2) * middle, 2)
        ways.append([first, *[middle] * (workers - 2), first + odd])
    if not ways:
        return None
    return min(ways, key=lambda way: (max(way), max(way) - min(way), way[0] + way[-1])) * several


def _torchtitan(layers: int, stages: int) -> list[int] | None:
    if stages == 1:
        return [layers]
    each, more = divmod(layers + 2, stages)
    split = [each + (stage < more) for stage in range(stages)]
    split[0] -= 1
    split[-1] -= 1
    return split if each else None
