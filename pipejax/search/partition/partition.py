"""Fastest split of a model into the stages of a table: exact, by cutting planes.

A split assigns a holding (stage content) to each stage. The step time of a split is the longest
path of the program. So under any split, the length of any path is a lower bound. An integer program
finds the split that is fastest under the known paths. A run of this split gives a step time and new
paths. If no split has a bound below the best step time so far, the best split is optimal.

Before, a relaxation finds important paths (Kelley's cutting planes). It runs mixtures, in which a
stage has shares of several holdings. Then splits near the last mixture are run, unless their lower
bounds rule them out.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_local_search, check_types, wrong
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import jax
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_costs import stage_costs
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.system import System
from pipejax.engine.lowering.program import run_on_host
from pipejax.engine.pricing import cost_vector, lower_and_price
from pipejax.schedules.table.held_activations import held_counts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.search.found import TIME_LIMIT, Found, gap
from pipejax.search.partition import integer_program
from pipejax.search.partition.holdings import Point, Shares, Splits, default_layouts, price_holdings

RELAXATION_GAP = 1e-3  # gap at which the relaxation ends, relative to the step time
CENTRE_WEIGHT = 0.7  # weight of the old centre in the new centre of mixtures
END_SHARES = {"relaxation": 0.3, "local search": 0.55}  # {step: its end over the time limit}
SOLVER_GAP_SHARE = 0.1  # relative gap of the solver, as a share of the gap of the search


@short_repr
class Split(NamedTuple):
    """A split of the model's layers over the stages, with its evaluated step time."""

    layout: PipelineLayout  # content of each stage
    step_time: float  # exact [s]
    memory_bytes: float  # memory need of the fullest worker, per accelerator [B]
    fits: bool  # whether this need fits in the accelerators' memory


class SplitSearch:
    """State of the search: the splits evaluated so far, and a lower bound on all splits."""

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
        check_usual(table, "the search of layers")
        self.table, self.system, self.links = table, system, links
        self.defaults = default_layouts(workload, table)
        self.workload = dataclasses.replace(workload, embedding_units=0, loss_units=0)
        self.capacity = float(system.memory_available) if memory_limit else math.inf
        self.on_split = on_split
        self.splits_run: dict[PipelineLayout, Split] = {}
        self.bound = 0.0
        self.baselines: dict[str, Split] = {}

    def evaluate_layout(self, layout: PipelineLayout) -> Split:
        """Return the step time and memory of a layout, from a run with the exact costs."""
        if layout not in self.splits_run:
            workload = dataclasses.replace(self.workload, pipeline_layout=str(layout))
            costs = stage_costs(workload, self.system, self.table)
            step = evaluate(self.table, costs, link=self.links).step_time
            need = float(memory_bytes(workload, self.table).max())
            split = Split(layout, step, need, need <= float(self.system.memory_available))
            self.splits_run[layout] = split
            self.on_split()
        return self.splits_run[layout]

    @property
    def best(self) -> Split | None:
        """Return the fastest split so far that fits in memory; None if none fits."""
        legal = (split for split in self.splits_run.values() if split.memory_bytes <= self.capacity)
        return min(legal, key=lambda split: split.step_time, default=None)

    @property
    def limit(self) -> float:
        """Return the step time of the best split so far [s]; infinite if none fits."""
        return math.inf if self.best is None else self.best.step_time

    @property
    def is_optimal(self) -> bool:
        """Return whether the bound proves that no split is faster than the best split."""
        return self.bound >= self.limit * (1 - 2 * integer_program.SLACK)

    def search(self, seconds: float) -> str:
        """Search until a split is optimal or time is up; return the reason for the end."""
        start_time = time.monotonic()
        deadlines = {name: start_time + share * seconds for name, share in END_SHARES.items()}
        for name, layout in self.defaults.items():
            self.baselines[name] = self.evaluate_layout(layout)
        if not self.splits_run:  # too few layers for any runtime: put a layer on each first stage
            num_stages, model = self.table.num_stages, self.workload.model
            layers = [int(stage < int(model.layers)) for stage in range(num_stages)]
            mtp = [0] * (num_stages - 1) + [int(model.mtp_layers)]
            self.evaluate_layout(PipelineLayout.with_layers(layers, mtp))
        self._prepare()
        self._improve(self._relax(deadlines["relaxation"]), deadlines["local search"])
        self._solve_exactly(start_time + seconds)
        if self.is_optimal:
            return "optimal"
        return "time" if time.monotonic() - start_time >= seconds else "tolerance"

    def _prepare(self) -> None:
        """Set up the integer program with prices of all holdings and paths of evaluated splits."""
        first = dataclasses.replace(self.workload, pipeline_layout=str(next(iter(self.splits_run))))
        costs = stage_costs(first, self.system, self.table)
        self.program, _ = lower_and_price(self.table, costs, self.links)
        stage_work = integer_program.stage_work_function(self.program, self.workload.pair_factor)
        limit = self.limit * (1 + integer_program.SLACK)
        self.prices = price_holdings(
            self.workload, self.system, self.table, lambda costs: stage_work(costs).min() <= limit
        )
        # for each holding, the costs of a table with this holding on every stage
        rows = (
            Costs(**{name: seconds[k] for name, seconds in self.prices.seconds.items()})
            for k in range(len(self.prices.holdings))
        )
        may_hold = np.stack([stage_work(costs) <= limit for costs in rows])
        self.paths = integer_program.PathCuts(self.program, self.prices)
        held = held_counts(self.table) if math.isfinite(self.capacity) else None
        self.splits = Splits(
            self.prices, may_hold, self.workload.model, self.table.num_workers, held, self.capacity
        )
        unit = min(run.step_time for run in self.splits_run.values())
        self.integer = integer_program.SplitProgram(self.splits, unit=unit, limit=self.limit)
        for split in self.splits_run.values():
            for point in self.splits.from_layout(split.layout):
                self._add_paths(self.splits.shares(point))

    def _add_paths(self, shares: Shares) -> tuple[float, bool]:
        """Run a split or a mixture of splits; return its makespan [s] and whether cuts are new."""
        vector = np.asarray(cost_vector(self.program, self.prices.costs(shares)))
        run = run_on_host(self.program, vector)
        cuts = self.paths.new_cuts(run, vector)
        for cut in cuts:
            self.integer.cut_path(cut)
        return float(run.finish.max()), bool(cuts)

    def _raise_bound(self, run_solution: Callable[[], bool], deadline: float) -> None:
        """Solve the integer program and run the solution, until `run_solution` returns False."""
        program, can_continue = self.integer, True
        while can_continue and not self.is_optimal:
            program.solve(deadline - time.monotonic() if program.is_whole else math.inf)
            self.bound = program.bound
            if not program.is_open:
                break
            can_continue = run_solution() and time.monotonic() <= deadline
            program.limit = self.limit

    def _relax(self, deadline: float) -> Shares | None:
        """Raise the lower bound by runs of mixtures; return the shares of the last mixture."""
        # In a mixture, a stage may have half 3 and half 4 layers. `centre` is a mean of past
        # mixtures.
        centre: Shares | None = None
        shares: Shares | None = None

        def run_solution() -> bool:
            """Run the last mixture and the centre; return whether a better bound is possible."""
            nonlocal centre, shares
            shares = self.integer.shares
            if centre is not None:
                centre = CENTRE_WEIGHT * centre + (1 - CENTRE_WEIGHT) * shares
            makespan, has_new_path = self._add_paths(shares)
            centre = shares if centre is None else centre
            _, has_new_centre_path = self._add_paths(centre)
            has_new_path |= has_new_centre_path
            return has_new_path and makespan * (1 - RELAXATION_GAP) > self.integer.bound

        self._raise_bound(run_solution, deadline)
        self.on_split()
        return shares

    def _solve_exactly(self, deadline: float) -> None:
        """Evaluate the splits that lower bounds do not rule out."""
        program = self.integer

        def run_solution() -> bool:
            """Run the program's split; return whether the bound may rise."""
            self.on_split()
            layout = self.prices.layout(program.shares.argmax(axis=0))
            is_new = layout not in self.splits_run
            self.evaluate_layout(layout)
            _, has_new_path = self._add_paths(program.shares)
            is_new |= has_new_path
            was_exact = program.gap == 0
            program.gap = SOLVER_GAP_SHARE * gap(self.limit, self.bound) if is_new else 0.0
            return is_new or not was_exact

        program.is_whole, program.limit = True, self.limit
        program.gap = SOLVER_GAP_SHARE * gap(self.limit, self.bound)
        if time.monotonic() < deadline:
            self._raise_bound(run_solution, deadline)

    def _improve(self, relaxed_shares: Shares | None, deadline: float) -> None:
        """Move single layers while this shortens the best split or the rounded relaxation."""
        starts: list[Point] = []
        if self.best is not None:
            starts += [*self.splits.from_layout(self.best.layout)]
        if relaxed_shares is not None:
            starts += [*self.splits.from_shares(relaxed_shares)]
        for point in starts:
            step_time = self.evaluate_layout(self.prices.layout(point)).step_time
            while (faster := self._faster_neighbour(point, step_time, deadline)) is not None:
                point, step_time = faster

    def _faster_neighbour(
        self, point: Point, step_time: float, deadline: float
    ) -> tuple[Point, float] | None:
        """Return the first faster neighbour and its step time [s], in the order of lower bounds."""
        neighbours = self.splits.neighbours(point)
        bounds, num_cuts = np.zeros(len(neighbours)), 0
        while len(neighbours) and time.monotonic() < deadline:
            bounds = np.maximum(bounds, self.paths.lower_bounds(neighbours, num_cuts))
            num_cuts, k = len(self.paths.cuts), int(bounds.argmin())
            if bounds[k] >= step_time * (1 - integer_program.SLACK):
                break
            new_step_time = self.evaluate_layout(self.prices.layout(neighbours[k])).step_time
            self._add_paths(self.splits.shares(neighbours[k]))
            if new_step_time < step_time * (1 - integer_program.SLACK):
                return neighbours[k], new_step_time
            bounds[k] = new_step_time
        return None


@short_repr
class Partition(NamedTuple):
    """A split of a model into stages.

    Attributes:
      layout: content of each stage.
      workload: the workload with this layout.
      memory_bytes: (workers) memory need per accelerator [B].
      fits: whether the needs fit in the accelerators' memory.
      defaults: {name: default split of a runtime}.
    """

    layout: PipelineLayout
    workload: Workload
    memory_bytes: Float[NumpyArray, " workers"]
    fits: bool
    defaults: Mapping[str, Split]


def layers(
    table: ScheduleTable,
    workload: Workload,
    system: System,
    *,
    link: str | Links = "delay",
    no_memory_limit: bool = False,
    time_limit: float | None = TIME_LIMIT,
    on_progress: OnProgress | None = None,
    on_best: Callable[[Found[Partition]], object] | None = None,
) -> Found[Partition]:
    """Find the layers of stages that make the step shortest, and prove that no split is faster.

    The first stage holds the embedding, with layers or alone; the last stage holds the head. MTP
    layers are together, after all other layers.

    Args:
      table: the schedule.
      workload: model, minibatch and parallelism, without a layout.
      system: the machine.
      link: link model, or `Links`.
      no_memory_limit: whether workers may need more memory than their accelerators have.
      time_limit: time after which the search ends [s]; None for no limit.
      on_progress: called with the number of evaluated splits, None, and the best step as a text.
      on_best: called after each step with the best result so far.

    Returns:
      The fastest split with its exact step time, a lower bound on all splits that fit, and default
      splits of runtimes.

    Raises:
      ValueError: if the workload has a layout already, time_limit is negative, or no split fits.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
      >>> workload = pj.Workload(pj.load_model("llama3-8b"), minibatch=16, tensor_parallel=2)
      >>> result = pj.search.layers(table, workload, pj.load_system("h100"))
      >>> print(result.best.layout, result.stopped)
      Et*9|t*9|t*8|t*6L optimal
    """
    check_types(
        table=(table, ScheduleTable),
        workload=(workload, Workload),
        system=(system, System),
        no_memory_limit=(no_memory_limit, bool),
    )
    check_local_search(0, 0, time_limit)
    if workload.pipeline_layout:
        raise wrong("pipeline_layout", "is the result of this search: leave it out")
    links = link if isinstance(link, Links) else Links(link)

    def tell_split() -> None:
        best = search.best
        progress = "none fits" if best is None else f"best {best.step_time:.6g} s"
        tell(len(search.splits_run), None, f"splits, {progress}")
        if on_best is not None and best is not None:
            on_best(_current_result(search, "interrupted"))

    with jax.enable_x64(True), telling("partition", on_progress) as tell:
        search = SplitSearch(
            table, workload, system, links, memory_limit=not no_memory_limit, on_split=tell_split
        )
        stopped = search.search(math.inf if time_limit is None else time_limit)
    return _current_result(search, stopped)


def _current_result(search: SplitSearch, stopped: str) -> Found[Partition]:
    """Return the best split so far; `stopped` says why the search ended."""
    best = search.best
    if best is None:
        need = min(split.memory_bytes for split in search.splits_run.values())
        raise ValueError(
            f"no split fits: the smallest need is {need / 1e9:.1f} GB per accelerator, and the "
            f"system has {search.capacity / 1e9:.1f} GB"
        )
    workload = dataclasses.replace(search.workload, pipeline_layout=str(best.layout))
    needs = memory_bytes(workload, search.table)
    return Found(
        Partition(best.layout, workload, needs, best.fits, dict(search.baselines)),
        value=best.step_time,
        lower_bound=min(search.bound, best.step_time),
        baselines={name: split.step_time for name, split in search.baselines.items()},
        evaluated=len(search.splits_run),
        stopped=stopped,
    )
