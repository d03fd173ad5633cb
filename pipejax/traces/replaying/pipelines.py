"""Pipelines of a trace: every replica in every step, held against the rules of a table.

What breaks a rule is left out, named and counted; nothing is filled in.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NewType

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.display import short_repr, with_short_repr
from pipejax.schedules.cells.ops import Cell, Op, Phase, ScheduleError
from pipejax.schedules.registry import REGISTRY
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import NONE, OF_OPS, OPS, LeftOut, Trace, transfers

Slices = Int[NumpyArray, " ops"]
# a fused pair is two ops and one cell: places in one numbering are none in the other
OpSlices = NewType("OpSlices", NumpyArray)  # (ops) slices of a trace
CellSlices = NewType("CellSlices", NumpyArray)  # (cells) the first slice of every cell
CellCount = NewType("CellCount", int)

# of the shorter of two ops of a worker: what they overlap by more is no rounding of clocks
OVERLAP = 0.1
EARLY = 0.1  # of an op: what it starts sooner than its input is there
GAPLESS = 0.9  # share of a worker's slices that follow without a gap, if slices hold waits
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
    slices: OpSlices


@with_short_repr("tables pipelines left_out")
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
        return sorted({pipeline.step for pipeline in self.pipelines if pipeline.table})

    @property
    def spans(self) -> NumpyArray:
        """From the first start to the last end of the ops of each pipeline (pipelines) [s]."""
        start, end = self.trace.start, self.trace.end
        return np.array([end[p.slices].max() - start[p.slices].min() for p in self.pipelines])

    def starts(self, pipeline: Pipeline) -> Float[NumpyArray, "workers slots"]:
        """Recorded start of every cell of a pipeline's table, from the first; NaN of none [s]."""
        first = cell_slices(self.trace, pipeline.slices)
        cells = self.tables[pipeline.table].cells.phase
        result = np.full(cells.shape, np.nan)
        result[cells != Phase.IDLE] = self.trace.start[first] - self.trace.start[first].min()
        return result


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
    members, sooner = dict(_members(trace)), _sooner(trace)
    if not members:
        raise MismatchError(f"{trace.source or 'the trace'} holds no F, B, I or W of any stage")
    whole = [slices for slices in members.values() if not _missing(trace, slices)] or [
        *members.values()
    ]
    usual = Counter(map(len, whole)).most_common(1)[0][0]
    table_numbers: dict[bytes, int | str] = {}
    tables: list[ScheduleTable] = []
    pipelines: list[Pipeline] = []
    for (step, replica), slices in members.items():
        where = _unsound(trace, slices, usual) or _table_number(
            trace, slices, table_numbers, tables
        )
        if isinstance(where, int):
            where = _too_early(trace, slices, sooner) or where
        if isinstance(where, int):
            pipelines.append(Pipeline(step, replica, where, slices))
        else:
            left_out.append(LeftOut(f"step {step}, replica {replica}", where))
    if not pipelines:
        source = trace.source or "the trace"
        before = "".join(f"; {part.what}: {part.why}" for part in trace.left_out[:MOST_SAID])
        raise MismatchError(f"no pipeline of {source} can be: {left_out[-1].why}{before}")
    by_use = [k for k, _ in Counter(pipeline.table for pipeline in pipelines).most_common()]
    number = {old: new for new, old in enumerate(by_use)}
    return Pipelines(
        trace,
        tuple(tables[k] for k in by_use),
        tuple(pipeline._replace(table=number[pipeline.table]) for pipeline in pipelines),
        tuple(left_out),
    )


def _members(trace: Trace) -> Iterator[tuple[tuple[int, int], OpSlices]]:
    """Slices of the ops of every replica in every step, worker by worker as they started."""
    ops = np.flatnonzero(trace.is_of(OPS) & (trace.stage >= 0) & (trace.microbatch >= 0))
    # a fused pair starts and ends at once: its forward comes first
    phase = _ranks(trace)[trace.phase]
    keys = phase, trace.end, trace.start, trace.worker, trace.replica, trace.step
    ops = ops[np.lexsort([key[ops] for key in keys])]
    step, replica = trace.step[ops], trace.replica[ops]
    first = np.flatnonzero(np.diff(step, prepend=step[:1] - 1) | np.diff(replica, prepend=-2) != 0)
    for slices in np.split(ops, first[1:]):
        if len(slices):
            yield (int(trace.step[slices[0]]), int(trace.replica[slices[0]])), OpSlices(slices)


def _missing(trace: Trace, slices: Slices) -> list[int]:
    return np.setdiff1d(np.arange(trace.workers), trace.worker[slices]).tolist()


def _unsound(trace: Trace, slices: Slices, usual: int) -> str | None:
    """Return the fault of the slices of a pipeline by themselves; None without one."""
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
        first, second = slices[over.argmax()], slices[over.argmax() + 1]
        names = _name(trace, second), _name(trace, first)
        is_doubled = names[0] == names[1] or len(trace.steps) == 1
        hint = ": are steps or replicas not told apart?" if is_doubled else ""
        return f"{names[0]} starts while {names[1]} runs on the same worker{hint}"
    return None


def _name(trace: Trace, at: int) -> str:
    return f"{trace.stage[at]}{trace.phases[trace.phase[at]]}{trace.microbatch[at]}"


def _table_number(
    trace: Trace, slices: Slices, table_numbers: dict[bytes, int | str], tables: list[ScheduleTable]
) -> int | str:
    """Position of the table of a pipeline, a new one if need be; or what is wrong with it."""
    fused = fused_with_last(trace, slices)
    keys = (trace.worker, trace.phase, trace.stage, trace.microbatch)
    key = np.stack([*(x[slices] for x in keys), fused]).tobytes()
    if key not in table_numbers:
        try:
            tables.append(ScheduleTable.from_rows(_rows(trace, slices, fused), name="trace"))
            table_numbers[key] = len(tables) - 1
        except ScheduleError as error:
            table_numbers[key] = f"no order that can run: {error.reason}"
    return table_numbers[key]


def fused_with_last(trace: Trace, slices: Slices) -> Bool[NumpyArray, " ops"]:
    """Return whether each op runs as one with the op before it: (ops)."""
    start, end, worker = (x[slices] for x in (trace.start, trace.end, trace.worker))
    same = (start[1:] == start[:-1]) & (end[1:] == end[:-1]) & (worker[1:] == worker[:-1])
    return np.append(False, same & (end[1:] > start[1:]))


def cell_slices(trace: Trace, slices: OpSlices) -> CellSlices:
    """Slice of every cell: of a fused pair the first."""
    return CellSlices(slices[~fused_with_last(trace, slices)])


class PipelineOps(NamedTuple):
    """Ops of some pipelines, one pipeline behind the other, with what they took."""

    run: Slices  # (ops) position of its pipeline among these
    slices: Slices  # (ops) where in the trace
    stage: Slices  # (ops) of the model
    microbatch: Slices  # (ops) of the step
    phase: Slices  # (ops) position in `OPS`
    is_first: Bool[NumpyArray, " ops"]  # whether it is the first of a fused pair, its forward
    is_second: Bool[NumpyArray, " ops"]  # whether it is the second
    seconds: Float[NumpyArray, " ops"]  # what it took, or its pair [s]

    @classmethod
    def of(cls, trace: Trace, members: Sequence[Pipeline]) -> "PipelineOps":
        """Look up ops of pipelines."""
        slices = np.concatenate([member.slices for member in members])
        is_second = fused_with_last(trace, slices)
        return cls(
            np.repeat(np.arange(len(members)), [len(member.slices) for member in members]),
            slices,
            trace.stage[slices],
            trace.microbatch[slices],
            _ranks(trace)[trace.phase[slices]],
            np.append(is_second[1:], False),
            is_second,
            trace.end[slices] - trace.start[slices],
        )

    def by_kind(self) -> Iterator[tuple[str, "PipelineOps"]]:
        """Yield ops of each phase that run alone, then fused pairs by their forward."""
        is_alone = ~(self.is_first | self.is_second)
        kinds = [(name, is_alone & (self.phase == k)) for k, name in enumerate(OPS)]
        for name, is_kind in [*kinds, ("pair", self.is_first)]:
            if is_kind.any():
                yield name, PipelineOps(*(column[is_kind] for column in self))


def _ranks(trace: Trace) -> Slices:
    """Position in `OPS` of every phase of a trace (phases); -1 of what is no op."""
    return np.array([OPS.index(name) if name in OPS else NONE for name in trace.phases])


def _rows(
    trace: Trace, slices: Slices, fused: Bool[NumpyArray, " ops"]
) -> Sequence[Sequence[Cell]]:
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


def _sooner(trace: Trace) -> Float[NumpyArray, " slices"]:
    """Return how long before its input every op starts (slices) [s]; -inf without input."""
    producers, consumers = transfers(trace, OF_OPS)
    lead = np.full(len(trace), -np.inf)
    lead[consumers] = trace.end[producers] - trace.start[consumers]
    return lead


def _too_early(trace: Trace, slices: Slices, sooner: Float[NumpyArray, " slices"]) -> str | None:
    """An op that starts before its input is there, by more than clocks round."""
    worst = slices[sooner[slices].argmax()]
    by = float(sooner[worst])
    slack = float(EARLY * np.median(trace.end[slices] - trace.start[slices]))
    if by <= slack:
        return None
    return (
        f"{_name(trace, worst)} starts {1e3 * by:.3g} ms before what it waits for has ended: "
        f"clocks may differ{_held_waits(trace, slices, sooner, slack)}"
    )


def _held_waits(
    trace: Trace, slices: Slices, sooner: Float[NumpyArray, " slices"], slack: float
) -> str:
    """Return the evidence that slices begin before the waits of their ops; empty without it."""
    # An offset of two clocks cancels in the sum of the quickest message each way, which thus cannot
    # be below 0. On a worker whose slices hold their waits each begins where the one before ended.
    producers, consumers = transfers(trace, OF_OPS)
    inside = np.isin(producers, slices) & np.isin(consumers, slices)
    quickest = np.full((trace.workers, trace.workers), np.inf)
    ends = trace.worker[producers[inside]], trace.worker[consumers[inside]]
    np.minimum.at(quickest, ends, -sooner[consumers[inside]])
    is_contradictory = (quickest + quickest.T < -slack).any(axis=1)
    follows = np.diff(trace.worker[slices]) == 0
    idle = (trace.start[slices[1:]] - trace.end[slices[:-1]])[follows]
    worker = trace.worker[slices[1:]][follows]
    gapless, count = (
        np.bincount(names, minlength=trace.workers) for names in (worker[idle <= slack], worker)
    )
    holding = np.flatnonzero(is_contradictory & (gapless >= GAPLESS * count))
    if not len(holding):
        return ""
    return (
        f", or slices of worker {', '.join(map(str, holding))} seem to hold their waits: "
        f"{gapless[holding].sum()} of {count[holding].sum()} begin where the one before ended, and "
        "no offset of clocks explains the messages of both directions; record receives as slices "
        "of their own, or ops without their waits"
    )


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
    slices = table.grammar.slices
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches // slices}
    possible = {"stages_per_worker": table.num_stages // table.num_workers, "slices": slices}
    for name, builder in REGISTRY.items():
        options = {name: possible[name] for name in possible if name in builder.options}
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
    return [[cell for cell in row if cell] for row in table.rows()]
