"""Pipelines of a trace, checked against the rules of a table.

A pipeline is one replica in one step. Pipelines that break a rule are dropped, and `left_out` names
them. No missing slice is filled in.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NewType

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.medians import medians_of_others
from pipejax.schedules.cells.ops import Cell, Op, Phase, ScheduleError
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import NONE, OP_INPUTS, OPS, LeftOut, Trace, transfers

Slices = Int[NumpyArray, " ops"]
# a fused pair is two ops but one cell, so positions of ops and of cells have different types
OpSlices = NewType("OpSlices", NumpyArray)  # (ops) slices of a trace
CellSlices = NewType("CellSlices", NumpyArray)  # (cells) the first slice of every cell
CellCount = NewType("CellCount", int)

# rounding of clocks: overlap of two ops of a worker, over the shorter op; and start of an op before
# the end of its input, over the median op
MAX_OVERLAP = 0.1
MAX_LEAD_SHARE = 0.1
MAX_GAP = 5.0  # largest launch delay of an op, over the median; more is a stall
MIN_GAP = 1e-3  # smallest mean launch delay that counts, over the median op
MIN_STARVED = 0.02  # share of a pipeline from which a host counts as starved
MIN_GAPLESS = 0.9  # if slices hold waits, this share of a worker's slices has no gap before it
MAX_LISTED = 3  # number of entries of left_out in an error


@short_repr
class Pipeline(NamedTuple):
    """Ops of one replica in one step.

    Attributes:
      step: number of the step.
      replica: number of the replica.
      table: index of the pipeline's table among all recorded tables.
      slices: (ops) slices of the ops in the trace, worker by worker in the order of starts.
    """

    step: int
    replica: int
    table: int
    slices: OpSlices


@with_short_repr("tables pipelines left_out")
@dataclasses.dataclass(frozen=True, eq=False)
class Pipelines:
    """All valid pipelines of a trace, and their tables.

    Attributes:
      trace: the recorded trace.
      tables: tables that ran, the most frequent first.
      pipelines: valid pipelines, by step and replica.
      left_out: invalid pipelines, and content that the reader dropped.
      link_scales: (pipelines, links) factors on message times, above 1 for links that are slow in a
        replica; `scale_links` sets the factors.
      late_launches: (slices) delay after the inputs of ops that start late in most steps [s].

    Raises:
      ValueError: if there is no valid pipeline.
    """

    trace: Trace
    tables: tuple[ScheduleTable, ...]
    pipelines: tuple[Pipeline, ...]
    left_out: tuple[LeftOut, ...]
    link_scales: Float[NumpyArray, "pipelines links"] | float = 1.0
    late_launches: Float[NumpyArray, " slices"] | float = 0.0

    @property
    def table(self) -> ScheduleTable:
        """Return the most frequent table."""
        return self.tables[0]

    @property
    def odd_steps(self) -> list[int]:
        """List the steps in which a replica did not run the most frequent table."""
        return sorted({pipeline.step for pipeline in self.pipelines if pipeline.table})

    @property
    def complete_steps(self) -> Mapping[int, Sequence[int]]:
        """Return {step with all replicas: indices of the pipelines, by replica}."""
        by_step: dict[int, list[int]] = {}
        for position, pipeline in enumerate(self.pipelines):
            by_step.setdefault(pipeline.step, []).append(position)
        num_replicas = len({pipeline.replica for pipeline in self.pipelines})
        return {step: row for step, row in by_step.items() if len(row) == num_replicas}

    @property
    def spans(self) -> Float[NumpyArray, " pipelines"]:
        """Return for each pipeline the time from the first start to the last end of its ops [s]."""
        start, end = self.trace.start, self.trace.end
        return np.array([end[p.slices].max() - start[p.slices].min() for p in self.pipelines])

    @functools.cached_property
    def gaps(self) -> Float[NumpyArray, " slices"]:
        """Return for each slice how long its op starts after worker and inputs are ready [s].

        If neither an op nor the op before it has a message, its delay is a launch delay; more than
        `MAX_GAP` medians are a stall. Other ops get the mean launch delay. Workers of starved
        hosts, and ops that start late in most steps, have longer launch delays.
        """
        trace, gaps = self.trace, np.zeros(len(self.trace))
        slices = np.concatenate([pipeline.slices for pipeline in self.pipelines])
        ops, delay, is_launch = _start_delays(trace, slices)
        if is_launch.any():
            longest = MAX_GAP * float(np.median(delay[is_launch]))
            usual = float(np.minimum(delay[is_launch], longest).mean())
            if usual > MIN_GAP * float(np.median(trace.end[slices] - trace.start[slices])):
                gaps[ops] = np.minimum(delay, np.where(is_launch, longest, usual))
        num_steps = len({pipeline.step for pipeline in self.pipelines})
        for (replica, worker), starved in self.starved_hosts.items():
            on_rank = (trace.replica[ops] == replica) & (trace.worker[ops] == worker)
            longest = starved / (max(on_rank.sum(), 1) / num_steps)  # starved time per op
            rank_ops = ops[on_rank]
            gaps[rank_ops] = np.maximum(gaps[rank_ops], np.minimum(delay[on_rank], longest))
        return np.maximum(gaps, self.late_launches)

    @functools.cached_property
    def starved_hosts(self) -> Mapping[tuple[int, int], float]:
        """Return {rank: time that its device waits longer than others for launches [s]}.

        A rank is (replica, worker). The time is per step, between the first and the last op.
        """
        steps = {pipeline.step for pipeline in self.pipelines}
        by_rank: dict[tuple[int, int], list[float]] = {}
        for budget in self.trace.budgets:
            if budget.step in steps:
                by_rank.setdefault((budget.replica, budget.worker), []).append(budget.starved_ops)
        means = np.array([np.median(values) for values in by_rank.values()])
        excess = means - medians_of_others(means) if len(means) > 1 else np.zeros(len(means))
        min_seconds = MIN_STARVED * float(np.median(self.spans))
        hosts = zip(by_rank, excess.tolist(), strict=True)
        return {rank: seconds for rank, seconds in hosts if seconds > min_seconds}

    def starts(self, pipeline: Pipeline) -> Float[NumpyArray, "workers slots"]:
        """Return recorded starts of cells, from the first start on [s]; NaN for idle cells."""
        starts = self.trace.start[cell_slices(self.trace, pipeline.slices)]
        phases = self.tables[pipeline.table].cells.phase
        result = np.full(phases.shape, np.nan)
        result[phases != Phase.IDLE] = starts - starts.min()
        return result


def find_pipelines(trace: Trace) -> Pipelines:
    """Find the pipelines of a trace whose ops follow the rules of a table.

    Args:
      trace: a measured run.

    Returns:
      The valid pipelines, and the reasons why other pipelines are dropped.

    Raises:
      ValueError: if there is no valid pipeline.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> result = pj.traces.find_pipelines(pj.traces.record_runs([run, run]))
      >>> len(result.pipelines), result.table.num_microbatches, result.left_out
      (2, 4, ())
    """
    check_types(trace=(trace, Trace))
    left_out, by_pipeline = list(trace.left_out), dict(_op_slices(trace))
    if not by_pipeline:
        raise MismatchError(f"{trace.source or 'the trace'} holds no F, B, I or W of any stage")
    complete = [slices for slices in by_pipeline.values() if not _missing_workers(trace, slices)]
    lengths = Counter(map(len, complete or by_pipeline.values()))
    usual_length = lengths.most_common(1)[0][0]
    # (slices) time by which an op starts before its input ends [s]; -inf without input
    producers, consumers = transfers(trace, OP_INPUTS)
    lead = np.full(len(trace), -np.inf)
    lead[consumers] = trace.end[producers] - trace.start[consumers]
    answers: dict[bytes, tuple[int, str | None]] = {}
    tables: list[ScheduleTable] = []
    pipelines: list[Pipeline] = []
    for (step, replica), slices in by_pipeline.items():
        table, fault = NONE, _find_fault(trace, slices, usual_length)
        if fault is None:
            table, fault = _find_table(trace, slices, answers, tables)
        if fault is None:
            fault = _find_early_op(trace, slices, lead)
        if fault is None:
            pipelines.append(Pipeline(step, replica, table, slices))
        else:
            left_out.append(LeftOut(f"step {step}, replica {replica}", fault))
    if not pipelines:
        source = trace.source or "the trace"
        reasons = "".join(f"; {entry.what}: {entry.why}" for entry in trace.left_out[:MAX_LISTED])
        raise MismatchError(f"no pipeline of {source} can be: {left_out[-1].why}{reasons}")
    by_frequency = [k for k, _ in Counter(pipeline.table for pipeline in pipelines).most_common()]
    new_number = {old: new for new, old in enumerate(by_frequency)}
    sorted_tables = tuple(tables[k] for k in by_frequency)
    runs = tuple(pipeline._replace(table=new_number[pipeline.table]) for pipeline in pipelines)
    return Pipelines(trace, sorted_tables, runs, tuple(left_out))


def _start_delays(
    trace: Trace, slices: Slices
) -> tuple[Int[NumpyArray, " late"], Float[NumpyArray, " late"], Bool[NumpyArray, " late"]]:
    """Return ops, delays after worker and inputs are ready [s], and whether launches cause them."""
    # A launch causes the delay if neither the op nor the op before it has a message. First ops
    # without inputs are left out. `slices` are the ops of all pipelines.
    producers, consumers = transfers(trace, OP_INPUTS)
    is_remote = trace.worker[producers] != trace.worker[consumers]
    ready, is_launch = np.full(len(trace), -np.inf), np.ones(len(trace), bool)
    np.maximum.at(ready, consumers, trace.end[producers])
    is_next = trace.end[slices[:-1]] <= trace.start[slices[1:]]
    for numbers in (trace.worker, trace.step, trace.replica):
        is_next &= np.diff(numbers[slices]) == 0
    previous_ops, next_ops = slices[:-1][is_next], slices[1:][is_next]
    ready[next_ops] = np.maximum(ready[next_ops], trace.end[previous_ops])
    is_launch[next_ops] = ~np.isin(previous_ops, producers[is_remote])
    is_launch[consumers[is_remote]] = False
    ops = slices[np.isfinite(ready[slices])]
    return ops, np.maximum(trace.start[ops] - ready[ops], 0.0), is_launch[ops]


def _op_slices(trace: Trace) -> Iterator[tuple[tuple[int, int], OpSlices]]:
    """Yield ((step, replica), slices of the ops by worker and start) of each pipeline."""
    ops = np.flatnonzero(trace.has_phase(OPS) & (trace.stage >= 0) & (trace.microbatch >= 0))
    # both ops of a fused pair have the same times: sort its forward first
    phase = _op_phases(trace)[trace.phase]
    keys = phase, trace.end, trace.start, trace.worker, trace.replica, trace.step
    ops = ops[np.lexsort([key[ops] for key in keys])]
    is_new = (np.diff(trace.step[ops]) != 0) | (np.diff(trace.replica[ops]) != 0)
    for slices in np.split(ops, np.flatnonzero(is_new) + 1):
        if len(slices):
            yield (int(trace.step[slices[0]]), int(trace.replica[slices[0]])), OpSlices(slices)


def _missing_workers(trace: Trace, slices: Slices) -> list[int]:
    return np.setdiff1d(np.arange(trace.workers), trace.worker[slices]).tolist()


def _find_fault(trace: Trace, slices: Slices, usual_length: int) -> str | None:
    """Describe the first fault: missing ops, wrong times or an overlap. Return None if valid."""
    missing = _missing_workers(trace, slices)
    if missing:
        return f"worker {missing[0]} is missing"
    if len(slices) != usual_length:
        return f"{len(slices)} ops, most have {usual_length}"
    start, end, worker = trace.start[slices], trace.end[slices], trace.worker[slices]
    if (end < start).any():
        return f"{op_name(trace, int(slices[(end < start).argmax()]))} ends before it starts"
    is_pair = (start[1:] == start[:-1]) & (end[1:] == end[:-1])
    shorter = np.minimum(end[1:] - start[1:], end[:-1] - start[:-1])
    overlaps = end[:-1] - start[1:] > MAX_OVERLAP * shorter
    overlaps &= (worker[1:] == worker[:-1]) & ~is_pair
    if overlaps.any():
        row = int(overlaps.argmax())
        earlier, later = (op_name(trace, k) for k in slices[row : row + 2].tolist())
        is_repeated = earlier == later or len(trace.steps) == 1
        hint = ": are steps or replicas not told apart?" if is_repeated else ""
        return f"{later} starts while {earlier} runs on the same worker{hint}"
    return None


def op_name(trace: Trace, row: int) -> str:
    """Return stage, phase and microbatch of a slice as a name, such as 0F1."""
    return f"{trace.stage[row]}{trace.phases[trace.phase[row]]}{trace.microbatch[row]}"


def _find_table(
    trace: Trace,
    slices: Slices,
    answers: dict[bytes, tuple[int, str | None]],
    tables: list[ScheduleTable],
) -> tuple[int, str | None]:
    """Return (index of the pipeline's table in `tables`, reason why the table is illegal)."""
    # A new table is appended to `tables`. `answers` caches the results of earlier calls.
    is_second = is_second_of_pair(trace, slices)
    keys = (trace.worker, trace.phase, trace.stage, trace.microbatch)
    key = np.stack([*(field[slices] for field in keys), is_second]).tobytes()
    if key not in answers:
        try:
            rows = _table_rows(trace, slices, is_second)
            tables.append(ScheduleTable.from_rows(rows, name="trace"))
            answers[key] = len(tables) - 1, None
        except ScheduleError as error:
            answers[key] = NONE, f"no order that can run: {error.reason}"
    return answers[key]


def is_second_of_pair(trace: Trace, slices: Slices) -> Bool[NumpyArray, " ops"]:
    """Return for each op whether it is second in a fused pair: its times equal those before it."""
    start, end, worker = trace.start[slices], trace.end[slices], trace.worker[slices]
    is_same = (start[1:] == start[:-1]) & (end[1:] == end[:-1]) & (worker[1:] == worker[:-1])
    return np.append(False, is_same & (end[1:] > start[1:]))


def cell_slices(trace: Trace, slices: OpSlices) -> CellSlices:
    """Return the slice of every cell; a fused pair has the slice of its first op."""
    return CellSlices(slices[~is_second_of_pair(trace, slices)])


class PipelineOps(NamedTuple):
    """Ops of some pipelines with their times, pipeline after pipeline."""

    run: Slices  # index of the pipeline among the selected ones
    slices: Slices  # slice of the trace
    stage: Slices
    microbatch: Slices
    phase: Slices  # index in `OPS`
    is_first: Bool[NumpyArray, " ops"]  # whether the op is the forward of a fused pair
    is_second: Bool[NumpyArray, " ops"]  # whether the op is the backward of a fused pair
    seconds: Float[NumpyArray, " ops"]  # time of the op, or of its fused pair [s]

    @classmethod
    def select(cls, trace: Trace, pipelines: Sequence[Pipeline]) -> "PipelineOps":
        """Select the ops of these pipelines of a trace."""
        slices = np.concatenate([pipeline.slices for pipeline in pipelines])
        is_second = is_second_of_pair(trace, slices)
        counts = [len(pipeline.slices) for pipeline in pipelines]
        return cls(
            run=np.repeat(np.arange(len(pipelines)), counts),
            slices=slices,
            stage=trace.stage[slices],
            microbatch=trace.microbatch[slices],
            phase=_op_phases(trace)[trace.phase[slices]],
            is_first=np.append(is_second[1:], False),
            is_second=is_second,
            seconds=trace.end[slices] - trace.start[slices],
        )

    def by_kind(self) -> Iterator[tuple[str, "PipelineOps"]]:
        """Yield (phase, ops outside fused pairs), then ("pair", forwards of fused pairs)."""
        is_alone = ~(self.is_first | self.is_second)
        kinds = [(name, is_alone & (self.phase == k)) for k, name in enumerate(OPS)]
        for name, is_kind in [*kinds, ("pair", self.is_first)]:
            if is_kind.any():
                yield name, PipelineOps(*(column[is_kind] for column in self))


def _op_phases(trace: Trace) -> Slices:
    """Return the index of each phase in `OPS`; -1 if it is not there."""
    return np.array([OPS.index(name) if name in OPS else NONE for name in trace.phases])


def _table_rows(
    trace: Trace, slices: Slices, is_second: Bool[NumpyArray, " ops"]
) -> Sequence[Sequence[Cell]]:
    """Return the cells of every worker; a cell has one op, or both ops of a fused pair."""
    rows: list[list[Cell]] = [[] for _ in range(trace.workers)]
    fields = (trace.worker, trace.phase, trace.stage, trace.microbatch)
    for worker, phase, stage, microbatch, is_second_op in zip(
        *(field[slices].tolist() for field in fields), is_second.tolist(), strict=True
    ):
        op = Op(Phase[trace.phases[phase]], stage, microbatch)
        if is_second_op:
            rows[worker][-1] = (*rows[worker][-1], op)
        else:
            rows[worker].append((op,))
    return rows


def _find_early_op(trace: Trace, slices: Slices, lead: Float[NumpyArray, " slices"]) -> str | None:
    """Describe the op that starts most before the end of its input; None if that is rounding."""
    # `lead` (slices): time from the start of an op to the end of its input [s]
    worst = int(slices[lead[slices].argmax()])
    max_lead = float(lead[worst])
    tolerance = float(MAX_LEAD_SHARE * np.median(trace.end[slices] - trace.start[slices]))
    if max_lead <= tolerance:
        return None
    return (
        f"{op_name(trace, worst)} starts {1e3 * max_lead:.3g} ms before its input has "
        f"ended: clocks may differ{_find_included_waits(trace, slices, lead, tolerance)}"
    )


def _find_included_waits(
    trace: Trace, slices: Slices, lead: Float[NumpyArray, " slices"], tolerance: float
) -> str:
    """Describe workers whose slices seem to include waits for messages; empty if there are none."""
    # At any offset of two clocks, the quickest messages of both directions take at least 0 s in
    # sum. If slices include waits, messages of this worker contradict that, and its slices have no
    # gaps between them.
    producers, consumers = transfers(trace, OP_INPUTS)
    is_inside = np.isin(producers, slices) & np.isin(consumers, slices)
    producers, consumers = producers[is_inside], consumers[is_inside]
    quickest = np.full((trace.workers, trace.workers), np.inf)
    np.minimum.at(quickest, (trace.worker[producers], trace.worker[consumers]), -lead[consumers])
    is_contradictory = (quickest + quickest.T < -tolerance).any(axis=1)
    is_same_worker = np.diff(trace.worker[slices]) == 0
    gap = (trace.start[slices[1:]] - trace.end[slices[:-1]])[is_same_worker]
    worker = trace.worker[slices[1:]][is_same_worker]
    gapless_count = np.bincount(worker[gap <= tolerance], minlength=trace.workers)
    count = np.bincount(worker, minlength=trace.workers)
    suspects = np.flatnonzero(is_contradictory & (gapless_count >= MIN_GAPLESS * count))
    if not len(suspects):
        return ""
    share = f"{gapless_count[suspects].sum()} of {count[suspects].sum()}"
    return (
        f", or slices of worker {', '.join(map(str, suspects))} seem to include waits: "
        f"{share} begin where the previous slice ended, "
        "and no offset of clocks explains the messages of both directions; record receives as "
        "slices of their own, or ops without their waits"
    )
