"""Search of the lookahead and residency with which each worker gathers sharded weights.

An option of a worker is a row with UNSHARD and RESHARD cells. Among options with the same residency
and lane order, only the one that gathers earliest is tried: an earlier gather delays nothing. First
each worker in turn takes its best option; then branch and bound goes through all combinations.

The bound: workers without a chosen option have their weights all the time and reduce no gradients,
so none of their ops waits for a lane. The bound of all combinations gathers every stage once, in
the order of first uses, and gives reductions a lane of their own.
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
    on_lane,
    with_gathers,
    with_reductions,
)
from pipejax.schedules.table.slot_simulation import in_host_order
from pipejax.schedules.table.table import ScheduleTable, dense_rows, without
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.orders.permutations import LocalSearch
from pipejax.search.schedule.problem import InfeasibleError

PYTORCH = 3  # stages that PyTorch's runtime gathers at once by default
ROUNDING = 1e-12  # relative error of a sum of sizes
NODES_PER_STEP = 64  # partial combinations

Sizes = float | Sequence[float] | Float[NumpyArray, " stages"]
Limits = float | Sequence[float] | Float[NumpyArray, " workers"]


@with_short_repr("lookahead residency peak")
class Gathering(NamedTuple):
    """Lookahead of every worker, and the memory that it takes.

    Attributes:
      table: the schedule with sharding cells.
      lookahead: (workers) number of uses between a gather and its own use.
      residency: (workers) largest number of stages gathered at once.
      peak: (workers) peak memory of gathered weights, in the unit of the sizes.
    """

    table: ScheduleTable
    lookahead: tuple[int, ...]
    residency: tuple[int, ...]
    peak: Float[NumpyArray, " workers"]


class _Option(NamedTuple):
    """A row of one worker, with its lookahead and residency."""

    ahead: int
    residency: int
    row: list[Cell]
    peak: float

    @property
    def key(self) -> tuple[int, tuple[Cell, ...]]:
        """Return residency and lane order; options with equal keys are interchangeable."""
        on_lane = (cell for cell in self.row if cell[0].phase in (Phase.UNSHARD, Phase.REDUCE_GRAD))
        return self.residency, tuple(on_lane)


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
    the best so far. Of equally fast options, the one with less memory is taken.

    Args:
      table: the schedule; its sharding cells are replaced.
      costs: unbatched costs [s], with `unshard` and `reduce_grad`.
      link: link model, or `Links`.
      limit: largest memory of gathered weights on a worker, or (workers), in the unit of sizes;
        None for no limit.
      sizes: size of the gathered weights of a stage, or (stages), in any unit.
      lane: lane of gathers and reductions, beside compute.
      iterations: largest number of steps: in one, a worker chooses its best option, or the search
        goes through 64 partial combinations.
      time_limit: time after which no further step starts [s]; None for no limit.
      on_progress: called after each step with its number, `iterations`, and a text.

    Returns:
      The best combination; if all others are ruled out, the bound is its makespan. Baselines are
      gathers right before their use ("no lookahead"), one use earlier ("one ahead"), both with as
      many stages as fit, and "PyTorch", the rule of its runtime; None if that exceeds the limit.

    Raises:
      ValueError: as `evaluate`; if a size or limit is wrong.
      InfeasibleError: if a worker cannot hold what one of its ops needs.

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
        super().__init__(seed=0)
        costs.check_values()
        if lane == COMPUTING:
            raise ValueError(
                "lane must be beside compute: in the row, no gather is ahead of its use"
            )
        self._run_arguments, self._lane = (costs, links), lane
        self.table = without(on_lane(table, COMPUTING), SHARDING)
        stages, workers = self.table.num_stages, self.table.num_workers
        self._rows, self._ends = dense_rows(self.table), self.table.grammar.backward_ends
        self._sizes = _with_axis("sizes", sizes, stages)
        limits = np.full(workers, np.inf) if limit is None else _with_axis("limit", limit, workers)
        self._all_options = _list_options(self.table, self._sizes, limits)
        # of options with the same lane order and residency, the one that gathers earliest
        self.options = [
            list({option.key: option for option in options}.values())
            for options in self._all_options
        ]
        self._times: dict[tuple[int | None, ...], float] = {}
        self.best = tuple(len(options) - 1 for options in self.options)
        self.value = self._makespan(self.best)
        usual = {
            name: [_largest_residency(options, ahead) for options in self._all_options]
            for name, ahead in (("no lookahead", 0), ("one ahead", 1))
        }
        self.baselines = {name: self._evaluate(combination) for name, combination in usual.items()}
        self.baselines |= {"PyTorch": self._pytorch(limits)}
        self.plain = self._build_table(usual["no lookahead"])
        for combination in usual.values():
            keys = [[option.key for option in options] for options in self.options]
            pairs = zip(keys, combination, strict=True)
            self._try(tuple(own_keys.index(option.key) for own_keys, option in pairs))
        self.lower_bound = self._relaxed_bound()
        self._turns = itertools.cycle(range(workers))
        self._unchanged = 0  # consecutive turns without a better option
        self._open: Iterator[None] | None = None

    def step(self, iteration: int) -> None:
        """Choose the best option of one worker; once all are stable, run branch and bound."""
        if self._unchanged < len(self.options):
            self._choose(next(self._turns))
            return
        if self._open is None:
            self._open = self._branch(())
        for _ in range(NODES_PER_STEP):
            if next(self._open, StopIteration) is StopIteration:
                self.lower_bound = self.value  # nothing is left that could be better
                return

    def best_so_far(self) -> tuple[Gathering, float]:
        """Return the best combination and its makespan [s], with the least memory at this time."""
        options = [worker_ways[k] for worker_ways, k in zip(self.options, self.best, strict=True)]
        value = self._evaluate(options)
        for worker, worker_ways in enumerate(self._all_options):
            for option in sorted(
                worker_ways, key=lambda option: (option.peak, option.residency, option.ahead)
            ):
                if option == options[worker]:
                    break
                trial = [*options[:worker], option, *options[worker + 1 :]]
                if self._evaluate(trial) <= value:
                    options = trial
                    break
        table = self._build_table(options)
        peak = gathered_peak(table, self._sizes)
        ahead, residency, *_ = zip(*options, strict=True)
        costs, links = self._run_arguments
        makespan = evaluate(table, costs, link=links).makespan
        return Gathering(table, ahead, residency, peak), makespan

    def _choose(self, worker: int) -> None:
        """Take the best option of a worker, all others unchanged."""
        before = self.best
        for k in range(len(self.options[worker])):
            self._try((*self.best[:worker], k, *self.best[worker + 1 :]))
        self._unchanged = self._unchanged + 1 if self.best == before else 0

    def _try(self, choices: tuple[int, ...]) -> None:
        time = self._makespan(choices)
        if time < self.value * (1 - self.precision):
            self.best, self.value = choices, time

    def _branch(self, prefix: tuple[int, ...]) -> Iterator[None]:
        """Search all combinations with this prefix, depth first; yield once per node."""
        worker = len(prefix)
        if worker == len(self.options):
            self._try(prefix)
            return
        open_ways = (None,) * (len(self.options) - worker - 1)
        bounds = [
            (self._makespan((*prefix, k, *open_ways)), k) for k in range(len(self.options[worker]))
        ]
        yield
        for bound, k in sorted(bounds):
            if bound < self.value * (1 - self.precision):
                yield from self._branch((*prefix, k))

    def _makespan(self, choices: tuple[int | None, ...]) -> float:
        """Return the makespan of some options [s]; None stands for a row without sharding cells."""
        if choices not in self._times:
            options = [
                None if k is None else w[k] for w, k in zip(self.options, choices, strict=True)
            ]
            self._times[choices] = self._evaluate(options)
        return self._times[choices]

    def _evaluate(self, options: Sequence[_Option | None]) -> float:
        self.evaluated += 1
        costs, links = self._run_arguments
        return float(evaluate(self._build_table(options), costs, link=links).makespan)

    def _build_table(self, options: Sequence[_Option | None]) -> ScheduleTable:
        rows = [
            bare if option is None else option.row
            for bare, option in zip(self._rows, options, strict=True)
        ]
        rows = in_host_order(self.table, rows) if self.table.offloads else rows
        return on_lane(self.table.with_rows(rows), self._lane)

    def _pytorch(self, limits: Float[NumpyArray, " workers"]) -> float | None:
        """Return the makespan of PyTorch's rule on the lane [s]; None if it exceeds the limit."""
        ruled = insert_sharding(
            self.table, lookahead=PYTORCH - 1, residency=PYTORCH, counted=STAGES, lane=self._lane
        )
        if (gathered_peak(ruled, self._sizes) > limits).any():
            return None
        costs, links = self._run_arguments
        return float(evaluate(ruled, costs, link=links).makespan)

    def _relaxed_bound(self) -> float:
        """Return a lower bound [s]: stages are gathered once, reductions have their own lane."""
        costs, links = self._run_arguments
        compute = self.table.grammar.compute
        rows = []
        for row in self._rows:
            stages = dict.fromkeys(op.stage for cell in row for op in cell if op.phase in compute)
            gathers = [(Op(Phase.UNSHARD, stage),) for stage in stages]  # by first use
            rows.append([*gathers, *with_reductions(row, True, self._ends)])
        rows = in_host_order(self.table, rows) if self.table.offloads else rows
        grammar = dataclasses.replace(
            self.table.grammar,
            lanes={"UNSHARD": self._lane, "REDUCE_GRAD": f"{self._lane}, reductions"},
        )
        table = dataclasses.replace(self.table.with_rows(rows), grammar=grammar)
        return float(evaluate(table, costs, link=links).makespan)


def _list_options(
    table: ScheduleTable, sizes: Float[NumpyArray, " stages"], limits: Float[NumpyArray, " workers"]
) -> list[list[_Option]]:
    """List the different rows that each worker can have, by residency and lookahead."""
    options_by_worker = []
    for worker, row in enumerate(dense_rows(table)):
        options = list(_worker_options(row, table.grammar, sizes))
        allowed = [option for option in options if option.peak <= limits[worker] * (1 + ROUNDING)]
        if not allowed:
            least = min(option.peak for option in options)
            raise InfeasibleError(
                f"worker {worker} gathers {least:g} at once at least, the limit is "
                f"{limits[worker]:g}"
            )
        options_by_worker.append(allowed)
    return options_by_worker


def _worker_options(
    row: Sequence[Cell], grammar: Grammar, sizes: Float[NumpyArray, " stages"]
) -> Iterator[_Option]:
    """Yield the different rows of a worker, by residency, then lookahead."""
    compute = grammar.compute
    stages = [{op.stage for op in cell if op.phase in compute} for cell in row]
    for residency in range(max(map(len, stages)), len(set().union(*stages)) + 1):
        last: list[Cell] = []
        for ahead in range(len(row) + 1):
            gathered = with_gathers(row, compute, Lookahead(ahead, residency))
            if gathered == last:  # every gather stands where it stands earliest
                break
            last = gathered
            whole = with_reductions(gathered, True, grammar.backward_ends)
            yield _Option(ahead, residency, whole, _peak(gathered, sizes))


def _peak(row: Sequence[Cell], sizes: Float[NumpyArray, " stages"]) -> float:
    """Return the peak memory of gathered weights in a row."""
    held = [0.0]
    signs = {Phase.UNSHARD: 1, Phase.RESHARD: -1}
    for cell in row:
        held += [held[-1] + signs[op.phase] * sizes[op.stage] for op in cell if op.phase in signs]
    return float(max(held))


def _largest_residency(options: Sequence[_Option], ahead: int) -> _Option:
    """Return the option with the largest residency and at most this lookahead."""
    largest = max(option.residency for option in options)
    return max(
        (option for option in options if option.residency == largest and option.ahead <= ahead),
        key=lambda option: option.ahead,
    )


def _with_axis(name: str, numbers: Sizes | Limits, count: int) -> Float[NumpyArray, " some"]:
    """Give numbers one axis, as long as there are stages or workers."""
    values = as_floats(numbers, name)
    if values.shape not in ((), (count,)) or not (values >= 0).all():
        raise wrong(name, f"must be a number of at least 0, or {count} of them, got {numbers!r}")
    return np.broadcast_to(values, count)
