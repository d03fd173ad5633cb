"""Search of how far ahead of its use each worker gathers weights, and how many stages at once.

What one worker does is one of its ways: a row with UNSHARD and RESHARD cells. Of ways with the same
residency and the same order on the lane only the one that gathers earliest is tried: to issue a
gather earlier delays nothing. First each worker in turn takes its best way; then all combinations
are gone through, worker by worker, without those that a bound rules out.

The bound: workers whose way is open have their weights all the time and reduce no gradients, so
nothing of them waits for a lane. And of all ways together: every stage is gathered once at the
start, in the order of first uses, and reductions have a lane of their own.
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
from pipejax.schedules.cells.ops import COMPUTING, NETWORK, SHARDING, AnyPhase, Cell, Op, Phase
from pipejax.schedules.table.held_activations import gathered_peak
from pipejax.schedules.table.host_links import in_host_order
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.sharding import (
    STAGES,
    Lookahead,
    dense_rows,
    insert_sharding,
    on_lane,
    with_gathers,
    with_reductions,
)
from pipejax.schedules.table.table import ScheduleTable, without
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.orders.local_search import LocalSearch
from pipejax.search.schedule.problem import InfeasibleError

PYTORCH = 3  # stages that its runtime gathers at once unless told otherwise
ROUNDING = 1e-12  # by which a sum of sizes may exceed a limit that it equals
NODES = 64  # partial combinations that a step goes through

Sizes = float | Sequence[float] | Float[NumpyArray, " stages"]
Limits = float | Sequence[float] | Float[NumpyArray, " workers"]


@with_short_repr("lookahead residency peak")
class Gathering(NamedTuple):
    """Lookahead of every worker, and the memory that it takes.

    Attributes:
      table: with the cells, for `evaluate`.
      lookahead: (workers) uses by which a gather stands before its own.
      residency: (workers) stages that are gathered at once, at most.
      peak: (workers) most that gathered weights take at once, in the unit of the sizes.
    """

    table: ScheduleTable
    lookahead: tuple[int, ...]
    residency: tuple[int, ...]
    peak: Float[NumpyArray, " workers"]


class _Way(NamedTuple):
    """A row of one worker, with what made it."""

    ahead: int
    residency: int
    row: list[Cell]
    peak: float

    @property
    def key(self) -> tuple[int, tuple[Cell, ...]]:
        """Residency and lane order; lookaheads with equal keys are interchangeable."""
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
    """Search how far ahead of its use every worker gathers weights, and of how many stages at once.

    The same arguments give the same result, unless the time runs out. An interrupt (Ctrl-C) ends
    the search with the best so far. Of ways that are as fast those are taken that hold less.

    Args:
      table: the schedule; sharding cells that it has give way.
      costs: unbatched costs [s], `unshard` and `reduce_grad` among them.
      link: link model, or `Links`.
      limit: most that gathered weights may take on a worker at once, or (workers), in the unit of
        sizes; None for no limit.
      sizes: what the gathered weights of a stage take, or (stages), in any unit.
      lane: where gathers and reductions run, beside compute.
      iterations: most steps of the search: one lets a worker choose, or goes through 64 partial
        combinations.
      time_limit: when no further step starts [s]; None for no limit.
      on_progress: called after each step with its number, `iterations`, and the best makespan so
        far as a text; a bar in notebooks if None.

    Returns:
      The best; the bound is its makespan where all combinations are ruled out. Baselines: gathers
      right before their use ("no lookahead"), one use earlier ("one ahead"), both with as many
      stages as fit, and "PyTorch", the rule of its runtime; None where that exceeds the limit.

    Raises:
      ValueError: as `evaluate`; if a size or limit is wrong.
      InfeasibleError: if a worker cannot hold what one of its ops needs.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build(
      ...     "interleaved-1f1b", num_workers=2, num_microbatches=4, stages_per_worker=3)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, unshard=1.5, reduce_grad=1.5)
      >>> found = pj.search.lookahead(table, costs, limit=2)
      >>> found.value, found.baselines["no lookahead"], found.stopped
      (42.5, 55.5, 'optimal')
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs), lane=(lane, str))
    iterations, _ = check_local_search(iterations, 0, time_limit)
    search = LookaheadSearch(table, costs, Links.resolve(link), limit, sizes, lane)
    with telling("look ahead", on_progress) as tell:
        return search.run(iterations, time_limit, tell)


class LookaheadSearch(LocalSearch[Gathering]):
    """State of the search: the best way of each worker, and partial combinations to go through."""

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
        self._sizes = _shaped("sizes", sizes, stages)
        limits = np.full(workers, np.inf) if limit is None else _shaped("limit", limit, workers)
        self._all_ways = _ways(self.table, self._sizes, limits)
        self.ways = [_undominated(ways) for ways in self._all_ways]
        self._times: dict[tuple[int | None, ...], float] = {}
        self.best = tuple(len(ways) - 1 for ways in self.ways)
        self.value = self._makespan(self.best)
        usual = {
            name: [_with_most(ways, ahead) for ways in self._all_ways]
            for name, ahead in (("no lookahead", 0), ("one ahead", 1))
        }
        self.baselines = {name: self._evaluate(combination) for name, combination in usual.items()}
        self.baselines |= {"PyTorch": self._pytorch(limits)}
        self.plain = self._build_table(usual["no lookahead"])
        for combination in usual.values():
            keys = [[way.key for way in ways] for ways in self.ways]
            pairs = zip(keys, combination, strict=True)
            self._try(tuple(own_keys.index(way.key) for own_keys, way in pairs))
        self.lower_bound = self._relaxed()
        self._turns = itertools.cycle(range(workers))
        self._unchanged = 0  # turns in which a worker found nothing better
        self._open: Iterator[None] | None = None

    def step(self, iteration: int) -> None:
        """Let one worker choose; once none of them finds anything better, rule combinations out."""
        if self._unchanged < len(self.ways):
            self._choose(next(self._turns))
            return
        if self._open is None:
            self._open = self._go_through(())
        for _ in range(NODES):
            if next(self._open, StopIteration) is StopIteration:
                self.lower_bound = self.value  # nothing is left that could be better
                return

    def best_so_far(self) -> tuple[Gathering, float]:
        """The best combination, with as little held as it can be without being slower."""
        chosen = [worker_ways[k] for worker_ways, k in zip(self.ways, self.best, strict=True)]
        value = self._evaluate(chosen)
        for worker, worker_ways in enumerate(self._all_ways):
            for way in sorted(worker_ways, key=lambda way: (way.peak, way.residency, way.ahead)):
                if way == chosen[worker]:
                    break
                trial = [*chosen[:worker], way, *chosen[worker + 1 :]]
                if self._evaluate(trial) <= value:
                    chosen = trial
                    break
        table = self._build_table(chosen)
        peak = gathered_peak(table, self._sizes)
        ahead, residency = (
            tuple(way.ahead for way in chosen),
            tuple(way.residency for way in chosen),
        )
        costs, links = self._run_arguments
        makespan = evaluate(table, costs, link=links).makespan
        return Gathering(table, ahead, residency, peak), makespan

    def _choose(self, worker: int) -> None:
        """Take the best way of a worker, beside those of the others."""
        before = self.best
        for k in range(len(self.ways[worker])):
            self._try((*self.best[:worker], k, *self.best[worker + 1 :]))
        self._unchanged = self._unchanged + 1 if self.best == before else 0

    def _try(self, ways: tuple[int, ...]) -> None:
        time = self._makespan(ways)
        if time < self.value * (1 - self.precision):
            self.best, self.value = ways, time

    def _go_through(self, chosen: tuple[int, ...]) -> Iterator[None]:
        """Go through combinations that begin like this, depth first; one turn for each node."""
        worker = len(chosen)
        if worker == len(self.ways):
            self._try(chosen)
            return
        open_ways = (None,) * (len(self.ways) - worker - 1)
        bounds = [
            (self._makespan((*chosen, k, *open_ways)), k) for k in range(len(self.ways[worker]))
        ]
        yield
        for bound, k in sorted(bounds):
            if bound < self.value * (1 - self.precision):
                yield from self._go_through((*chosen, k))

    def _makespan(self, ways: tuple[int | None, ...]) -> float:
        """Makespan [s] of some ways; that of an open one is its row without any cells."""
        if ways not in self._times:
            chosen = [None if k is None else w[k] for w, k in zip(self.ways, ways, strict=True)]
            self._times[ways] = self._evaluate(chosen)
        return self._times[ways]

    def _evaluate(self, ways: Sequence[_Way | None]) -> float:
        self.evaluated += 1
        costs, links = self._run_arguments
        return float(evaluate(self._build_table(ways), costs, link=links).makespan)

    def _build_table(self, ways: Sequence[_Way | None]) -> ScheduleTable:
        rows = [
            bare if way is None else way.row for bare, way in zip(self._rows, ways, strict=True)
        ]
        rows = in_host_order(self.table, rows) if self.table.offloads else rows
        return on_lane(self.table.with_rows(rows), self._lane)

    def _pytorch(self, limits: Float[NumpyArray, " workers"]) -> float | None:
        """Makespan of PyTorch's rule, on the lane, if the limit lets it."""
        ruled = insert_sharding(
            self.table,
            lookahead=PYTORCH - 1,
            residency=PYTORCH,
            counted=STAGES,
            lane=self._lane,
        )
        if (gathered_peak(ruled, self._sizes) > limits).any():
            return None
        costs, links = self._run_arguments
        return float(evaluate(ruled, costs, link=links).makespan)

    def _relaxed(self) -> float:
        """Makespan where each stage is gathered once, and reductions have a lane of their own."""
        costs, links = self._run_arguments
        compute = self.table.grammar.compute
        rows = [
            [*_gathers(row, compute), *with_reductions(row, True, self._ends)] for row in self._rows
        ]
        rows = in_host_order(self.table, rows) if self.table.offloads else rows
        grammar = dataclasses.replace(
            self.table.grammar,
            lanes={"UNSHARD": self._lane, "REDUCE_GRAD": f"{self._lane}, reductions"},
        )
        table = dataclasses.replace(self.table.with_rows(rows), grammar=grammar)
        return float(evaluate(table, costs, link=links).makespan)


def _gathers(row: Sequence[Cell], compute: Sequence[AnyPhase]) -> list[Cell]:
    """Gather the stages of a row in the order of their first uses."""
    stages = dict.fromkeys(op.stage for cell in row for op in cell if op.phase in compute)
    return [(Op(Phase.UNSHARD, stage),) for stage in stages]


def _ways(
    table: ScheduleTable,
    sizes: Float[NumpyArray, " stages"],
    limits: Float[NumpyArray, " workers"],
) -> list[list[_Way]]:
    """List the different rows that each worker can have, by residency and lookahead."""
    ways_by_worker = []
    for worker, row in enumerate(dense_rows(table)):
        all_ways = list(_worker_ways(row, table.grammar, sizes))
        allowed = [way for way in all_ways if way.peak <= limits[worker] * (1 + ROUNDING)]
        if not allowed:
            least = min(way.peak for way in all_ways)
            raise InfeasibleError(
                f"worker {worker} gathers {least:g} at once at least, the limit is "
                f"{limits[worker]:g}"
            )
        ways_by_worker.append(allowed)
    return ways_by_worker


def _worker_ways(
    row: Sequence[Cell], grammar: Grammar, sizes: Float[NumpyArray, " stages"]
) -> Iterator[_Way]:
    """List the different rows of a worker, by residency, then lookahead."""
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
            yield _Way(ahead, residency, whole, _peak(gathered, sizes))


def _peak(row: Sequence[Cell], sizes: Float[NumpyArray, " stages"]) -> float:
    """Most that gathered weights of a row take at once."""
    held = [0.0]
    signs = {Phase.UNSHARD: 1, Phase.RESHARD: -1}
    for cell in row:
        held += [held[-1] + signs[op.phase] * sizes[op.stage] for op in cell if op.phase in signs]
    return float(max(held))


def _undominated(ways: Sequence[_Way]) -> list[_Way]:
    """Keep the earliest gathers among ways with the same lane order and residency."""
    return list({way.key: way for way in ways}.values())


def _with_most(ways: Sequence[_Way], ahead: int) -> _Way:
    """Return the way with the largest residency and at most this lookahead."""
    largest = max(way.residency for way in ways)
    return max(
        (way for way in ways if way.residency == largest and way.ahead <= ahead),
        key=lambda way: way.ahead,
    )


def _shaped(name: str, numbers: Sizes | Limits, count: int) -> Float[NumpyArray, " some"]:
    """Give numbers one axis, as long as there are stages or workers."""
    values = as_floats(numbers, name)
    if values.shape not in ((), (count,)) or not (values >= 0).all():
        raise wrong(name, f"must be a number of at least 0, or {count} of them, got {numbers!r}")
    return np.broadcast_to(values, count)
