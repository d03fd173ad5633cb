"""The search of a split: bounds from a relaxation, local search, and an integer program.

Under given holdings the step time is the longest path of one program, so each path is a lower bound
of all splits (cuts.py). The relaxation, whose stages hold a mixture, finds the paths that matter
(Kelley's cutting planes). Splits near it are looked at by these bounds, and run where the bounds
do not rule them out. The integer program then proposes what no bound rules out, until nothing is.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipejax.analysis.evaluate import evaluate, lower_and_price
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_bytes import memory_bytes
from pipejax.costs.stage.stage_costs import stage_costs
from pipejax.costs.system.system import System
from pipejax.engine.pricing import cost_vector
from pipejax.engine.recurrence_host import run_on_host
from pipejax.schedules.table.held_activations import held_counts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.partition.cuts import PathCuts, busy_of_stages
from pipejax.search.partition.defaults import default_layouts
from pipejax.search.partition.holdings import price_holdings
from pipejax.search.partition.integer_program import SLACK, SplitProgram
from pipejax.search.partition.splits import Splits

CLOSE = 1e-3  # of the step time: a relaxation that is known so well is not refined
KEPT = 0.7  # of the centre of the relaxed points, where the second run of a round is
SHARES_OF_TIME = {"relaxation": 0.3, "local search": 0.55}  # ends of both, as shares of the limit

Shares = Float[NumpyArray, "holdings stages"]


@short_repr
class Split(NamedTuple):
    """A split that was run.

    Attributes:
      layout: what each stage holds.
      step_time: exact [s].
      memory_bytes: need of the fullest worker, per accelerator [B].
      fits: whether the accelerators have so much.
    """

    layout: PipelineLayout
    step_time: float
    memory_bytes: float
    fits: bool


class SplitSearch:
    """Splits that were run, and what follows from them of all others."""

    def __init__(
        self,
        table: ScheduleTable,
        workload: Workload,
        system: System,
        links: Links,
        *,
        memory_limit: bool,
        on_split: Callable[[], object],
    ) -> None:
        """Take what is split, and where; `on_split` is called as results come."""
        self.table, self.system, self.links = table, system, links
        self.defaults = default_layouts(workload, table)
        self.workload = dataclasses.replace(workload, embedding_units=0, loss_units=0)
        self.capacity = float(system.memory_available) if memory_limit else math.inf
        self.on_split = on_split
        self.known: dict[PipelineLayout, Split] = {}
        self.bound = 0.0
        self.baselines: dict[str, Split] = {}

    def run(self, layout: PipelineLayout) -> Split:
        """Run a split as any other command does."""
        if layout not in self.known:
            workload = dataclasses.replace(self.workload, pipeline_layout=str(layout))
            costs = stage_costs(workload, self.system, self.table)
            step = evaluate(self.table, costs, link=self.links).step_time
            need = float(memory_bytes(workload, self.table).max())
            split = Split(layout, step, need, need <= float(self.system.memory_available))
            self.known[layout] = split
            self.on_split()
        return self.known[layout]

    @property
    def best(self) -> Split | None:
        """The fastest split so far that may be."""
        legal = (each for each in self.known.values() if each.memory_bytes <= self.capacity)
        return min(legal, key=lambda each: each.step_time, default=None)

    @property
    def limit(self) -> float:
        """What a better split must undercut [s]."""
        return math.inf if self.best is None else self.best.step_time

    @property
    def is_optimal(self) -> bool:
        """Whether no split is faster than the best one."""
        return self.bound >= self.limit * (1 - 2 * SLACK)

    def search(self, seconds: float) -> None:
        """Search for so long, or until the best split is proven to be the best."""
        began = time.monotonic()
        until = {name: began + share * seconds for name, share in SHARES_OF_TIME.items()}
        for name, layout in self.defaults.items():
            self.baselines[name] = self.run(layout)
        if not self.known:  # fewer layers than any runtime splits: one each, as far as they go
            layers = np.arange(self.table.num_stages) < int(self.workload.model.layers)
            mtp = int(self.workload.model.mtp_layers) * np.eye(len(layers), dtype=int)[-1]
            self.run(PipelineLayout.with_layers(layers.astype(int).tolist(), mtp.tolist()))
        self._prepare()
        relaxed = self._relax(until["relaxation"])
        self.on_split()
        self._improve(relaxed, until["local search"])
        is_new = True
        while not self.is_optimal and (left := began + seconds - time.monotonic()) > 0:
            # what would be thrown away when the next paths are known is not proven to the end
            gap = 0.1 * max(0.0, 1 - self.bound / self.limit) * is_new
            found = self.integer.solve(self.unit, self.limit, left, gap=gap)
            self.bound = max(self.bound, min(found.bound, self.limit))
            self.on_split()
            is_new = found.shares is not None and self._propose(found.shares)
            if not is_new and gap == 0:
                break

    def _prepare(self) -> None:
        """Price what stages may hold, and learn from the splits that were run."""
        even = dataclasses.replace(self.workload, pipeline_layout=str(next(iter(self.known))))
        costs = stage_costs(even, self.system, self.table)
        self.program = lower_and_price(self.table, costs, self.links)[0]
        self.unit = min(each.step_time for each in self.known.values())
        busy = busy_of_stages(self.program, self.workload.pair_factor)
        limit = self.limit * (1 + SLACK)
        self.prices = price_holdings(
            self.workload, self.system, self.table, lambda costs: busy(costs).min() <= limit
        )
        may_hold = np.stack([busy(costs) <= limit for costs in self.prices.everywhere()])
        self.paths = PathCuts(self.program, self.prices)
        held = held_counts(self.table) if math.isfinite(self.capacity) else None
        self.splits = Splits(
            self.prices, may_hold, self.workload.model, self.table.num_workers, held, self.capacity
        )
        self.integer = SplitProgram(self.splits)
        for split in self.known.values():
            for chosen in self.splits.chosen(split.layout):
                self._learn(self.splits.shares(chosen))

    def _learn(self, shares: Shares) -> tuple[float, bool]:
        """Run a split or a mixture: its step time [s], and whether any of its paths is new."""
        vector = np.asarray(cost_vector(self.program, self.prices.costs(shares)))
        run = run_on_host(self.program, vector)
        cuts = self.paths.of_run(run, vector)
        for cut in cuts:
            self.integer.cut(cut, self.unit)
        return float(run.finish.max()), bool(cuts)

    def _propose(self, shares: Shares) -> bool:
        """Run a split that the bounds do not rule out; say whether that taught anything."""
        layout = self.prices.layout(shares.argmax(axis=0))
        is_known = layout in self.known
        self.run(layout)
        return self._learn(shares)[1] or not is_known

    def _relax(self, until: float) -> Shares | None:
        """Raise the bound by mixtures, with a second run at the centre of those so far."""
        centre, best = None, None
        while not self.is_optimal:
            found = self.integer.solve(self.unit, self.limit, math.inf, whole=False)
            self.bound = max(self.bound, min(found.bound, self.limit))
            if found.shares is None:
                break
            best = found.shares
            centre = best if centre is None else KEPT * centre + (1 - KEPT) * best
            value, is_new = self._learn(best)
            is_new |= self._learn(centre)[1]
            if value * (1 - CLOSE) <= self.bound or not is_new or time.monotonic() > until:
                break
        return best

    def _improve(self, relaxed: Shares | None, until: float) -> None:
        """Move layers one at a time, from the best split and the relaxed one rounded."""
        starts = [] if self.best is None else [self.splits.chosen(self.best.layout)]
        if relaxed is not None:
            starts.append(self.splits.rounded(relaxed))
        for point in (point for points in starts for point in points):
            now = self.run(self.prices.layout(point)).step_time
            while (found := self._better(point, now, until)) is not None:
                point, now = found

    def _better(
        self, point: Int[NumpyArray, " stages"], now: float, until: float
    ) -> tuple[Int[NumpyArray, " stages"], float] | None:
        """Find a neighbour that is faster than a split: what is not ruled out is run."""
        around = self.splits.neighbours(point)
        bounds, seen = np.zeros(len(around)), 0
        while len(around) and time.monotonic() < until:
            bounds = np.maximum(bounds, self.paths.lower_bounds(around, seen))
            seen, place = len(self.paths.cuts), int(bounds.argmin())
            if bounds[place] >= now * (1 - SLACK):
                break
            step = self.run(self.prices.layout(around[place])).step_time
            self._learn(self.splits.shares(around[place]))
            if step < now * (1 - SLACK):
                return around[place], step
            bounds[place] = step
        return None
