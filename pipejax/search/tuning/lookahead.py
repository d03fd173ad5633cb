"""Search of the lookahead and residency with which each worker gathers sharded weights.

A use of weights is an op of their stage. The lookahead is the number of uses between a gather and
the use that needs it. The residency is the largest number of stages that are gathered at once.

An option of a worker is a row with UNSHARD and RESHARD cells. Among options with the same residency
and lane order, only the option that gathers earliest is tried, because an earlier gather delays no
op. First each worker in turn chooses its best option. Then branch and bound searches all
combinations. For a lower bound, workers without a chosen option hold their weights all the time and
reduce no gradients, so their ops wait for no lane. The lower bound of all combinations gathers
every stage once, in the order of first uses, and has an extra lane for reductions.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import as_floats, check_local_search, check_types, wrong
from pipejax.base.display import with_short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import COMPUTING, NETWORK, SHARDING, Cell, Op, Phase
from pipejax.schedules.table.held_activations import gathered_peak
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.sharding import (
    STAGES,
    Lookahead,
    insert_sharding,
    on_sharding_lane,
    with_gathers,
    with_reductions,
)
from pipejax.schedules.table.slot_simulation import with_host_order
from pipejax.schedules.table.table import ScheduleTable, dense_rows, without_phases
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.orders.permutations import LocalSearch
from pipejax.search.schedule.problem import InfeasibleError

PYTORCH = 3  # number of stages that PyTorch's runtime gathers at once by default
ROUNDING = 1e-12  # relative error of a sum of sizes
NODES_PER_STEP = 64  # partial combinations of options in a step

Sizes = float | Sequence[float] | Float[NumpyArray, " stages"]
Limits = float | Sequence[float] | Float[NumpyArray, " workers"]


@with_short_repr("lookahead residency peak")
class Gathering(NamedTuple):
    """Lookahead of every worker's weight gathers, and the memory of gathered weights.

    Attributes:
      table: the schedule with sharding cells.
      lookahead: (workers) number of uses between a gather and the use that needs it.
      residency: (workers) largest number of stages gathered at once.
      peak: (workers) peak memory of gathered weights, in the unit of the sizes.
    """

    table: ScheduleTable
    lookahead: tuple[int, ...]
    residency: tuple[int, ...]
    peak: Float[NumpyArray, " workers"]


class _Option(NamedTuple):
    """A possible row of a worker, with the lookahead and residency of its weight gathers."""

    ahead: int
    residency: int
    row: list[Cell]
    peak: float

    @property
    def key(self) -> tuple[int, tuple[Cell, ...]]:
        """Return (residency, lane order); options with equal keys are interchangeable."""
        lane_phases = (Phase.UNSHARD, Phase.REDUCE_GRAD)
        return self.residency, tuple(cell for cell in self.row if cell[0].phase in lane_phases)


def lookahead(
    table: ScheduleTable,
    costs: Costs,
    *,
    link: str | Links = "delay",
    limit: Limits | None = None,
    sizes: Sizes = 1.0,
    lane: str = NETWORK,
    iterations: int = 1000,
    time_limit: float | None = TIME_LIMIT,
    on_progress: OnProgress | None = None,
) -> Found[Gathering]:
    """Search the lookahead and residency of every worker's weight gathers for the shortest step.

    The result is deterministic unless the time runs out. An interrupt (Ctrl-C) ends the search with
    the best so far. Of equally fast options, the search takes the option with less memory.

    Args:
      table: the schedule. Its sharding cells are replaced.
      costs: unbatched costs [s], with `unshard` and `reduce_grad`.
      link: link model, or `Links`.
      limit: largest memory of gathered weights on a worker, in the unit of sizes: a number or
        (workers); None for no limit.
      sizes: size of the gathered weights of a stage, in any unit: a number or (stages).
      lane: lane of gathers and reductions, beside compute.
      iterations: largest number of steps. In a step, a worker chooses its best option, or the
        search goes through 64 partial combinations.
      time_limit: time after which no further step starts [s]; None for no limit.
      on_progress: called after each step with its number, `iterations`, and a text.

    Returns:
      The best combination. If all other combinations are ruled out, the lower bound is its
      makespan. Baselines are "no lookahead" (gathers right before their use) and "one ahead" (one
      use earlier), both with as many stages as fit, and "PyTorch" (the rule of its runtime, None if
      it exceeds the limit).

    Raises:
      ValueError: as `evaluate`; or if a size or limit is wrong.
      InfeasibleError: if a worker cannot hold the weights that one of its ops needs.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build(
      ...     "interleaved-1f1b", num_workers=2, num_microbatches=4, stages_per_worker=3)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, unshard=1.5, reduce_grad=1.5)
      >>> result = pj.search.lookahead(table, costs, limit=2)
      >>> result.value, result.baselines["no lookahead"], result.stopped
      (42.5, 55.5, 'optimal')
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs), lane=(lane, str))
    iterations, _ = check_local_search(iterations, 0, time_limit)
    search = LookaheadSearch(table, costs, Links.resolve(link), limit, sizes, lane)
    with telling("look ahead", on_progress) as tell:
        return search.run(iterations, time_limit, tell)


class LookaheadSearch(LocalSearch[Gathering]):
    """State of the search: an option of each worker, and the open branches."""

    def __init__(
        self,
        table: ScheduleTable,
        costs: Costs,
        links: Links,
        limit: Limits | None = None,
        sizes: Sizes = 1.0,
        lane: str = NETWORK,
    ) -> None:
        """List the options of each worker, and measure the baselines and the lower bound."""
        super().__init__(seed=0)
        costs.check_values()
        if lane == COMPUTING:
            raise ValueError(
                "lane must not be compute: in the compute lane, no gather can run ahead of its use"
            )
        self._run_arguments, self._lane = (costs, links), lane
        self.table = without_phases(on_sharding_lane(table, COMPUTING), SHARDING)
        stages, workers = self.table.num_stages, self.table.num_workers
        self._rows, self._ends = dense_rows(self.table), self.table.grammar.backward_ends
        self._sizes = _with_axis("sizes", sizes, stages)
        limits = np.full(workers, np.inf) if limit is None else _with_axis("limit", limit, workers)
        self._all_options = _list_options(self.table, self._sizes, limits)
        # later options gather earlier, and replace options with the same lane order and residency
        self.options = [
            list({option.key: option for option in options}.values())
            for options in self._all_options
        ]
        self._makespans: dict[tuple[int | None, ...], float] = {}
        self.best = tuple(len(options) - 1 for options in self.options)
        self.value = self._makespan(self.best)
        baselines = {
            name: [_largest_residency(options, ahead) for options in self._all_options]
            for name, ahead in (("no lookahead", 0), ("one ahead", 1))
        }
        self.baselines = {name: self._evaluate(options) for name, options in baselines.items()}
        self.baselines |= {"PyTorch": self._pytorch(limits)}
        self.plain = self._build_table(baselines["no lookahead"])
        keys = [[option.key for option in options] for options in self.options]
        for options in baselines.values():
            pairs = zip(keys, options, strict=True)
            self._try(tuple(worker_keys.index(option.key) for worker_keys, option in pairs))
        self.lower_bound = self._relaxed_bound()
        self._turns = itertools.cycle(range(workers))
        self._unchanged = 0  # consecutive turns without a better option
        self._branches: Iterator[None] | None = None

    def step(self, iteration: int) -> None:
        """Choose the best option of one worker; if no choice changes, run branch and bound."""
        if self._unchanged < len(self.options):
            worker, old_best = next(self._turns), self.best
            for k in range(len(self.options[worker])):
                self._try((*self.best[:worker], k, *self.best[worker + 1 :]))
            self._unchanged = self._unchanged + 1 if self.best == old_best else 0
            return
        if self._branches is None:
            self._branches = self._branch(())
        for _ in range(NODES_PER_STEP):
            if next(self._branches, StopIteration) is StopIteration:
                self.lower_bound = self.value  # all combinations are ruled out
                return

    def best_so_far(self) -> tuple[Gathering, float]:
        """Return the best table so far, and its makespan [s]; of equally fast, least memory."""
        # On each worker, an option of less memory replaces the best if the makespan stays the same.
        options = [choices[k] for choices, k in zip(self.options, self.best, strict=True)]
        value = self._evaluate(options)
        for worker, choices in enumerate(self._all_options):
            for option in sorted(choices, key=lambda x: (x.peak, x.residency, x.ahead)):
                if option == options[worker]:
                    break
                new_options = [*options[:worker], option, *options[worker + 1 :]]
                if self._evaluate(new_options) <= value:
                    options = new_options
                    break
        table = self._build_table(options)
        peak = gathered_peak(table, self._sizes)
        ahead, residency, *_ = zip(*options, strict=True)
        return Gathering(table, ahead, residency, peak), self._table_makespan(table)

    def _try(self, choices: tuple[int, ...]) -> None:
        """Evaluate a combination (option index of each worker), and keep it if it is the best."""
        makespan = self._makespan(choices)
        if makespan < self.value * (1 - self.precision):
            self.best, self.value = choices, makespan

    def _branch(self, prefix: tuple[int, ...]) -> Iterator[None]:
        """Search all combinations that begin with these option indices, by branch and bound."""
        # The search is depth first, and yields after each partial combination.
        worker = len(prefix)
        if worker == len(self.options):
            self._try(prefix)
            return
        open_workers = (None,) * (len(self.options) - worker - 1)
        choices = range(len(self.options[worker]))
        bounds = [(self._makespan((*prefix, k, *open_workers)), k) for k in choices]
        yield
        for bound, k in sorted(bounds):
            if bound < self.value * (1 - self.precision):
                yield from self._branch((*prefix, k))

    def _makespan(self, choices: tuple[int | None, ...]) -> float:
        """Return the makespan [s] with these options; None: the worker has no sharding."""
        if choices not in self._makespans:
            options = [
                None if k is None else worker_options[k]
                for worker_options, k in zip(self.options, choices, strict=True)
            ]
            self._makespans[choices] = self._evaluate(options)
        return self._makespans[choices]

    def _evaluate(self, options: Sequence[_Option | None]) -> float:
        self.evaluated += 1
        return self._table_makespan(self._build_table(options))

    def _table_makespan(self, table: ScheduleTable) -> float:
        costs, links = self._run_arguments
        return evaluate(table, costs, link=links).makespan

    def _build_table(self, options: Sequence[_Option | None]) -> ScheduleTable:
        pairs = zip(self._rows, options, strict=True)  # of a worker: its row, its choice
        rows = [row if option is None else option.row for row, option in pairs]
        rows = with_host_order(self.table, rows) if self.table.offloads else rows
        return on_sharding_lane(self.table.with_rows(rows), self._lane)

    def _pytorch(self, limits: Float[NumpyArray, " workers"]) -> float | None:
        """Return the makespan with PyTorch's lookahead [s]; None if it exceeds the limit."""
        table = insert_sharding(
            self.table, lookahead=PYTORCH - 1, residency=PYTORCH, counted=STAGES, lane=self._lane
        )
        exceeds = gathered_peak(table, self._sizes) > limits
        return None if exceeds.any() else self._table_makespan(table)

    def _relaxed_bound(self) -> float:
        """Return a lower bound [s]: stages gather once, and reductions have their own lane."""
        # Any option gathers each stage at least once; its lane may have more cells.
        compute = self.table.grammar.compute_phases
        rows = []
        for row in self._rows:
            stages = dict.fromkeys(op.stage for cell in row for op in cell if op.phase in compute)
            gathers = [(Op(Phase.UNSHARD, stage),) for stage in stages]  # in order of first use
            rows.append([*gathers, *with_reductions(row, True, self._ends)])
        rows = with_host_order(self.table, rows) if self.table.offloads else rows
        grammar = dataclasses.replace(
            self.table.grammar,
            lanes={"UNSHARD": self._lane, "REDUCE_GRAD": f"{self._lane}, reductions"},
        )
        relaxed_table = dataclasses.replace(self.table.with_rows(rows), grammar=grammar)
        return self._table_makespan(relaxed_table)


def _list_options(
    table: ScheduleTable, sizes: Float[NumpyArray, " stages"], limits: Float[NumpyArray, " workers"]
) -> list[list[_Option]]:
    """List the options of each worker within its limit, by residency, then lookahead."""
    options_by_worker = []
    for worker, row in enumerate(dense_rows(table)):
        options = list(_worker_options(row, table.grammar, sizes))
        fitting = [option for option in options if option.peak <= limits[worker] * (1 + ROUNDING)]
        if not fitting:
            min_peak = min(option.peak for option in options)
            raise InfeasibleError(
                f"worker {worker} must gather at least {min_peak:g} at once, but the limit is "
                f"{limits[worker]:g}"
            )
        options_by_worker.append(fitting)
    return options_by_worker


def _worker_options(
    row: Sequence[Cell], grammar: Grammar, sizes: Float[NumpyArray, " stages"]
) -> Iterator[_Option]:
    """Yield all options of a worker: residency (stages at once), then lookahead (ops ahead)."""
    compute = grammar.compute_phases
    cell_stages = [{op.stage for op in cell if op.phase in compute} for cell in row]
    num_stages = len(set().union(*cell_stages))
    for residency in range(max(map(len, cell_stages)), num_stages + 1):
        last_gathers: list[Cell] = []
        for ahead in range(len(row) + 1):
            gathers_row = with_gathers(row, compute, Lookahead(ahead, residency))
            if gathers_row == last_gathers:  # no gather can be earlier
                break
            last_gathers = gathers_row
            complete_row = with_reductions(gathers_row, True, grammar.backward_ends)
            yield _Option(ahead, residency, complete_row, _peak(gathers_row, sizes))


def _peak(row: Sequence[Cell], sizes: Float[NumpyArray, " stages"]) -> float:
    """Return the peak memory of gathered weights in a row."""
    signs = {Phase.UNSHARD: 1, Phase.RESHARD: -1}
    ops = [op for cell in row for op in cell if op.phase in signs]
    changes = (signs[op.phase] * sizes[op.stage] for op in ops)
    return float(max(itertools.accumulate(changes, initial=0.0)))


def _largest_residency(options: Sequence[_Option], ahead: int) -> _Option:
    """Return the option with the largest residency and at most this lookahead."""
    largest = max(option.residency for option in options)
    return max(
        (option for option in options if option.residency == largest and option.ahead <= ahead),
        key=lambda option: option.ahead,
    )


def _with_axis(name: str, numbers: Sizes | Limits, count: int) -> Float[NumpyArray, " some"]:
    """Return a number, or `count` numbers, as an array with one entry per stage or worker."""
    values = as_floats(numbers, name)
    if values.shape not in ((), (count,)) or not (values >= 0).all():
        raise wrong(name, f"must be a number of at least 0, or {count} of them, got {numbers!r}")
    return np.broadcast_to(values, count)
