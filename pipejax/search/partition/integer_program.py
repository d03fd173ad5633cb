"""The split that no path and no memory limit rules out: an integer program over holdings.

One variable for each stage and holding says that the stage has it. Everything is linear in these:
how many layers there are, in what order their kinds stand, how long a path is, what a worker holds.
"""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.schedules.table.held_activations import HeldCounts
from pipejax.search.cutting_planes import CuttingPlanes, Matrix
from pipejax.search.partition.cuts import Cut
from pipejax.search.partition.holdings import dense_layers
from pipejax.search.partition.splits import Shares, Splits


class SplitProgram(CuttingPlanes):
    """Splits of a model into stages; columns are stages by holdings, then what `_order` adds."""

    # Of a relaxation the point is a mixture of splits.

    def __init__(self, splits: Splits, *, unit: float, limit: float) -> None:
        """Write down what a split is, and that it fits."""
        self.prices, model = splits.prices, splits.model
        self.may_hold = splits.may_hold.copy()
        stages = splits.stages
        layers, self.mtp = self.prices.counts("layers"), self.prices.counts("mtp")
        # layers for further tokens lie on the last stage of a worker, as in Megatron
        self.may_hold[self.mtp > 0, : max(stages - splits.workers, 0)] = False
        self.holding, self.stage = np.nonzero(self.may_hold)
        columns = len(self.holding) + stages  # begun: (stages)
        super().__init__(np.zeros(columns), np.ones(columns), unit=unit, limit=limit)
        on_stage = (self.stage == np.arange(stages)[:, None]) * 1.0
        self._add(on_stage, 1.0, 1.0)
        self._order(on_stage, layers)
        totals = {"layers": model.layers, "dense": dense_layers(model), "mtp": model.mtp_layers > 0}
        for name, total in totals.items():
            self._add(self.prices.counts(name)[None, self.holding] * 1.0, int(total), int(total))
        if splits.held is not None:
            self._limit_memory(splits.held, splits.capacity)

    def _order(self, on_stage: Matrix, layers: Int[NumpyArray, " holdings"]) -> None:
        """Layers of the first kind stand before the others, those for further tokens behind all."""
        stages = len(on_stage)
        dense, rest = (self.prices.counts(name)[self.holding] > 0 for name in ("dense", "rest"))
        begun = np.eye(stages)  # whether the second kind has begun by the end of a stage
        before = np.eye(stages, k=-1)
        self._add(on_stage * rest, -np.inf, 0.0, begun=-begun)
        self._add(on_stage * dense, -np.inf, 1.0, begun=before)
        self._add(np.zeros_like(on_stage), -np.inf, 0.0, begun=before - begun)
        has_mtp = self.mtp[self.holding] > 0
        earlier = (self.stage < np.arange(stages)[:, None]) & has_mtp
        self._add(on_stage * (layers[self.holding] > 0) + earlier, -np.inf, 1.0)

    def _add(self, rows: Matrix, low: float, high: float, *, begun: Matrix | None = None) -> None:
        middle = np.zeros((len(rows), self.may_hold.shape[1])) if begun is None else begun
        self.restrict(np.hstack([rows, middle]), low, high)

    def _limit_memory(self, held: HeldCounts, capacity: float) -> None:
        """Keep what every worker holds at each moment that may be its peak below the capacity."""
        prices, own = self.prices, (self.holding, self.stage)
        for copies, stashed, parts in zip(
            held.copies, held.stashed, held.parts.swapaxes(0, 1), strict=True
        ):
            lasting = (prices.static, copies), (prices.version, stashed)
            static = sum((size[own] * counts[self.stage] for size, counts in lasting), 0.0)
            moments = [
                counts[self.stage].T * size[own]
                for counts, size in zip(parts, prices.parts, strict=True)
            ]
            need = static + sum(moments[1:], start=moments[0])  # (moments, columns)
            self._add(need[need.any(axis=1)] / capacity, -np.inf, 1.0)

    def cut_path(self, cut: Cut) -> None:
        """No split is faster than a path lasts."""
        begun = np.zeros(self.may_hold.shape[1])
        self.cut(np.append(cut.of_holding[self.holding, self.stage], begun), cut.fixed)

    @property
    def shares(self) -> Shares:
        """The share of each holding in each stage that the solver chose: of a split 0 or 1."""
        taken = self.point[: len(self.holding)]
        found = np.zeros(self.may_hold.shape)
        found[self.holding, self.stage] = (
            np.round(taken) if self.is_whole else np.clip(taken, 0.0, 1.0)
        )
        return found
