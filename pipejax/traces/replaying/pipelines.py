"""Pipelines of a trace: every replica in every step, held against the rules of a table.

What breaks a rule is left out, named and counted; nothing is filled in.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.display import short_repr, short_repr_of
from pipejax.schedules.cells.ops import Cell, Op, Phase, ScheduleError
from pipejax.schedules.registry import REGISTRY
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import OPS, LeftOut, Trace

Slices = Int[NumpyArray, " ops"]

# of the shorter of two ops of a worker: what they overlap by more is no rounding of clocks
OVERLAP = 0.1
EARLY = 0.1  # of an op: what it starts sooner than its input is there
MOST_SAID = 3  # of what a reader left out, where no pipeline can be


@short_repr
class Pipeline(NamedTuple):
    """One replica in one step.

    Attributes:
      step: number of the step.
      replica: number of the replica.
      table: position of its table among those that were recorded.
      slices: (ops) where its ops are in the trace, worker by worker as they ran.
    """

    step: int
    replica: int
    table: int
    slices: Slices


@short_repr_of("tables pipelines left_out")
@dataclasses.dataclass(frozen=True, eq=False)
class Pipelines:
    """All pipelines of a trace that can be: tables that ran, and where they did.

    Attributes:
      trace: what was recorded.
      tables: orders in which ops ran, that of most pipelines first.
      pipelines: by step and replica.
      left_out: what is not among them, and what the reader left out.

    Raises:
      ValueError: if none can be.
    """

    trace: Trace
    tables: tuple[ScheduleTable, ...]
    pipelines: tuple[Pipeline, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def table(self) -> ScheduleTable:
        """The table of most pipelines."""
        return self.tables[0]

    @property
    def odd_steps(self) -> list[int]:
        """Steps in which a replica ran in another order than most."""
        return sorted({one.step for one in self.pipelines if one.table})

    @property
    def spans(self) -> NumpyArray:
        """From the first start to the last end of the ops of each pipeline (pipelines) [s]."""
        start, end = self.trace.start, self.trace.end
        return np.array([end[p.slices].max() - start[p.slices].min() for p in self.pipelines])

    def starts(self, one: Pipeline) -> Float[NumpyArray, "workers slots"]:
        """Recorded start of every cell of a pipeline's table, from the first; NaN of none [s]."""
        first = one.slices[~fused_with_last(self.trace, one.slices)]
        cells = self.tables[one.table].cells.phase
        found = np.full(cells.shape, np.nan)
        found[cells != Phase.IDLE] = self.trace.start[first] - self.trace.start[first].min()
        return found


def pipelines_of(trace: Trace) -> Pipelines:
    """Find the pipelines of a trace.

    Args:
      trace: what was recorded.

    Returns:
      Those that keep the rules of a table, and what is left out.

    Raises:
      ValueError: if there is none.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> found = pj.traces.pipelines_of(pj.traces.of_runs([run, run]))
      >>> len(found.pipelines), found.table.num_microbatches, found.left_out
      (2, 4, ())
    """
    check_types(trace=(trace, Trace))
    left_out = list(trace.left_out)
    members = dict(_members(trace))
    if not members:
        raise MismatchError(f"{trace.source or 'the trace'} holds no F, B, I or W of any stage")
    whole = [own for own in members.values() if not _missing(trace, own)] or [*members.values()]
    usual = Counter(map(len, whole)).most_common(1)[0][0]
    known: dict[bytes, int | str] = {}
    tables: list[ScheduleTable] = []
    found: list[Pipeline] = []
    for (step, replica), slices in members.items():
        where = _unsound(trace, slices, usual) or _table_of(trace, slices, known, tables)
        if isinstance(where, int):
            found.append(Pipeline(step, replica, where, slices))
        else:
            left_out.append(LeftOut(f"step {step}, replica {replica}", where))
    if not found:
        source = trace.source or "the trace"
        before = "".join(f"; {each.what}: {each.why}" for each in trace.left_out[:MOST_SAID])
        raise MismatchError(f"no pipeline of {source} can be: {left_out[-1].why}{before}")
    by_use = [k for k, _ in Counter(one.table for one in found).most_common()]
    number = {old: new for new, old in enumerate(by_use)}
    return Pipelines(
        trace,
        tuple(tables[k] for k in by_use),
        tuple(one._replace(table=number[one.table]) for one in found),
        tuple(left_out),
    )


def _members(trace: Trace) -> Iterator[tuple[tuple[int, int], Slices]]:
    """Slices of the ops of every replica in every step, worker by worker as they started."""
    ops = np.flatnonzero(trace.is_of(OPS) & (trace.stage >= 0) & (trace.microbatch >= 0))
    # a fused pair starts and ends at once: its forward comes first
    keys = ~trace.is_of("F"), trace.end, trace.start, trace.worker, trace.replica, trace.step
    ops = ops[np.lexsort([key[ops] for key in keys])]
    step, replica = trace.step[ops], trace.replica[ops]
    first = np.flatnonzero(np.diff(step, prepend=step[:1] - 1) | np.diff(replica, prepend=-2) != 0)
    for own in np.split(ops, first[1:]):
        if len(own):
            yield (int(trace.step[own[0]]), int(trace.replica[own[0]])), own


def _missing(trace: Trace, slices: Slices) -> list[int]:
    """Workers that ran no op of a pipeline."""
    return np.setdiff1d(np.arange(trace.workers), trace.worker[slices]).tolist()


def _unsound(trace: Trace, slices: Slices, usual: int) -> str | None:
    """What is wrong with the slices of a pipeline by themselves."""
    missing = _missing(trace, slices)
    if missing:
        return f"worker {missing[0]} is missing"
    if len(slices) != usual:
        return f"{len(slices)} ops, most have {usual}"
    start, end, worker = (x[slices] for x in (trace.start, trace.end, trace.worker))
    if (end < start).any():
        return f"{_name(trace, slices[(end < start).argmax()])} ends before it starts"
    alone = np.append(False, (start[1:] == start[:-1]) & (end[1:] == end[:-1]))  # of a fused pair
    shorter = np.minimum(end[1:] - start[1:], end[:-1] - start[:-1])
    over = end[:-1] - start[1:] > OVERLAP * shorter
    over &= (worker[1:] == worker[:-1]) & ~alone[1:]
    if over.any():
        one, other = slices[over.argmax()], slices[over.argmax() + 1]
        is_doubled = _name(trace, other) == _name(trace, one) or len(trace.steps) == 1
        hint = ": are steps or replicas not told apart?" * is_doubled
        return (
            f"{_name(trace, other)} starts while {_name(trace, one)} runs on the same worker{hint}"
        )
    return None


def _name(trace: Trace, at: int) -> str:
    return f"{trace.stage[at]}{trace.phases[trace.phase[at]]}{trace.microbatch[at]}"


def _table_of(
    trace: Trace, slices: Slices, known: dict[bytes, int | str], tables: list[ScheduleTable]
) -> int | str:
    """Position of the table of a pipeline, a new one if need be; or what is wrong with it."""
    fused = fused_with_last(trace, slices)
    keys = (trace.worker, trace.phase, trace.stage, trace.microbatch)
    key = np.stack([*(x[slices] for x in keys), fused]).tobytes()
    if key not in known:
        try:
            tables.append(ScheduleTable.from_rows(_rows(trace, slices, fused), name="trace"))
            known[key] = len(tables) - 1
        except ScheduleError as error:
            known[key] = f"no order that can run: {error.reason}"
    where = known[key]
    if isinstance(where, int) and (early := _too_early(trace, slices, tables[where])):
        return early
    return where


def fused_with_last(trace: Trace, slices: Slices) -> Bool[NumpyArray, " ops"]:
    """Whether each op runs as one with that before it: (ops)."""
    start, end, worker = (x[slices] for x in (trace.start, trace.end, trace.worker))
    same = (start[1:] == start[:-1]) & (end[1:] == end[:-1]) & (worker[1:] == worker[:-1])
    return np.append(False, same & (end[1:] > start[1:]))


def _rows(
    trace: Trace, slices: Slices, fused: Bool[NumpyArray, " ops"]
) -> Sequence[Sequence[Cell]]:
    """The cells of every worker."""
    rows: list[list[Cell]] = [[] for _ in range(trace.workers)]
    fields = (trace.worker, trace.phase, trace.stage, trace.microbatch)
    for worker, phase, stage, microbatch, with_last in zip(
        *(x[slices].tolist() for x in fields), fused.tolist(), strict=True
    ):
        op = Op(Phase[trace.phases[phase]], stage, microbatch)
        if with_last:
            rows[worker][-1] = (*rows[worker][-1], op)
        else:
            rows[worker].append((op,))
    return rows


def _too_early(trace: Trace, slices: Slices, table: ScheduleTable) -> str | None:
    """An op that starts before its input is there, by more than clocks round."""
    shape = (len(OPS), table.num_stages, table.num_microbatches)
    codes = [OPS.index(name) if name in OPS else 0 for name in trace.phases]
    where = np.array(codes)[trace.phase[slices]], trace.stage[slices], trace.microbatch[slices]
    start, end = np.full(shape, np.inf), np.full(shape, -np.inf)
    start[where], end[where] = trace.start[slices], trace.end[slices]
    forward, grads = OPS.index("F"), [OPS.index("B"), OPS.index("I")]
    # F of a stage waits for F of the stage before, B or I for that of the stage behind
    backward_end, backward_start = end[grads].max(axis=0), start[grads].min(axis=0)
    sooner = np.stack(
        [
            end[forward, :-1] - start[forward, 1:],
            backward_end[1:] - backward_start[:-1],
        ]
    )
    lasts = np.median(trace.end[slices] - trace.start[slices])
    if not (sooner > EARLY * lasts).any():
        return None
    direction, boundary, microbatch = np.unravel_index(sooner.argmax(), sooner.shape)
    by = 1e3 * float(sooner.max())
    name = f"{boundary + 1}F{microbatch}" if direction == 0 else f"{boundary}B{microbatch}"
    return f"{name} starts {by:.3g} ms before what it waits for has ended: clocks may differ"


def registered(table: ScheduleTable) -> tuple[str, Mapping[str, int]] | None:
    """The registered schedule whose rows a table has, and its options; None if it has none's.

    Args:
      table: any schedule, without communication.

    Returns:
      Name and options of its builder. Those that are planned for times are not tried: their rows
      follow from these.

    Example:
      >>> import pipejax as pj
      >>> rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
      >>> pj.traces.registered(pj.ScheduleTable.from_rows(rows))
      ('1f1b', {})
    """
    check_types(table=(table, ScheduleTable))
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
    per_worker = table.num_stages // table.num_workers
    for name, builder in REGISTRY.items():
        is_several = "stages_per_worker" in builder.options
        options = {"stages_per_worker": per_worker} if is_several else {}
        if builder.planned:
            continue
        try:
            other = builder.function(**size, **options)
        except ValueError:  # it does not exist for these numbers
            continue
        if _dense(other) == _dense(table):
            return name, options
    return None


def _dense(table: ScheduleTable) -> list[list[Cell]]:
    """The cells of every row, without idle ones."""
    return [[cell for cell in row if cell] for row in table.rows()]
