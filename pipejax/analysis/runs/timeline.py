"""Ops (bars), messages (arrows) and parts of a run, for the terminal, drawings and traces.

A run has three parts: warm-up, steady state and cool-down. The warm-up of a worker ends when its
first backward starts. The cool-down of a worker begins when its last forward ends. In the steady
part of a run, every worker is between warm-up and cool-down.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types, resolve_choice, wrong
from pipejax.base.display import ResultList, short_repr
from pipejax.engine.lowering.program import SOURCE
from pipejax.schedules.cells.ops import (
    COMPUTING,
    INPUT_GRADS,
    NO_MICROBATCH,
    AnyPhase,
    Op,
    Phase,
    format_cell,
    format_number,
)
from pipejax.schedules.table.table import ScheduleTable

PARTS = ("warmup", "steady", "cooldown")


class Bar(NamedTuple):
    """An op (or fused pair) on a worker, from start to finish, for drawings.

    Attributes:
      worker: worker, or `NO_WORKER` for a collective, which runs beside compute.
      start: start [s].
      finish: end [s].
      ops: the op, or the forward and backward of a fused pair.
      is_critical: whether the op is on the critical path.
      node: node of the program, or the source if the run has no program.
      slices: number of slices of each microbatch.
    """

    worker: int
    start: float
    finish: float
    ops: tuple[Op, ...]
    is_critical: bool
    node: int = SOURCE
    slices: int = 1

    @property
    def lane(self) -> str:
        """Return the lane of the worker on which the op runs, such as "compute"."""
        return self.ops[0].phase.kind.lane

    @property
    def number(self) -> str:
        """Return the op's microbatch as text; for a fused pair, the forward's microbatch."""
        return format_number(self.ops[0].microbatch, self.slices)

    @property
    def label(self) -> str:
        """Return the bar's ops as text, as in a cell of the table."""
        return format_cell(self.ops, self.slices)


class Arrow(NamedTuple):
    """A message between workers."""

    sender: int  # worker
    receiver: int  # worker
    start: float  # departure [s]
    finish: float  # arrival [s]
    op: Op  # the SEND_F or SEND_B
    is_critical: bool  # whether the message is on the critical path


def timed_beside_cells(evaluation: Evaluation) -> Int[NumpyArray, " nodes"]:
    """Return the nodes of all-reduces and updates that are in no cell and take time."""
    nodes = evaluation.program.beside_cells
    return nodes[evaluation.node_finish[nodes] > evaluation.node_start[nodes]]


def bars(evaluation: Evaluation, *, untimed: bool = True) -> list[Bar]:
    """List a bar for each op of the table, then for each all-reduce and update.

    Without `untimed` the list skips ops that take no time, which a picture cannot show.
    """
    program = evaluation.program
    rows = []  # node, worker, ops
    for worker, slot in zip(*np.nonzero(program.node_of_cell != SOURCE), strict=True):
        node = int(program.node_of_cell[worker, slot])
        rows.append((node, int(worker), evaluation.table.cell(worker, slot)))
    for node in program.beside_cells.tolist():  # all-reduces and updates that are in no cell
        op = Op(Phase(int(program.phase[node])), int(program.stage[node]), NO_MICROBATCH)
        rows.append((node, int(program.worker[node]), (op,)))
    return [
        Bar(
            worker=worker,
            start=float(evaluation.node_start[node]),
            finish=float(evaluation.node_finish[node]),
            ops=ops,
            is_critical=bool(evaluation.critical[node]),
            node=node,
            slices=evaluation.table.grammar.slices,
        )
        for node, worker, ops in rows
        if untimed or evaluation.node_finish[node] > evaluation.node_start[node]
    ]


def bar_phases(bars: Iterable[Bar]) -> list[AnyPhase]:
    """List the distinct phases of bars, in the order of their codes."""
    phases = {op.phase.name: op.phase for bar in bars for op in bar.ops}
    return sorted(phases.values(), key=int)


def second_pipe(table: ScheduleTable) -> frozenset[Op]:
    """Return the ops in pipes 1, 3, ... of a bidirectional schedule, which drawings mark."""
    is_second = table.pipe_of_microbatch % 2 == 1
    if not np.any(is_second):
        return frozenset()
    ops = (op for row in table.rows() for cell in row for op in cell or ())
    return frozenset(op for op in ops if op.microbatch >= 0 and is_second[op.microbatch])


def second_pipe_name(tables: Iterable[ScheduleTable]) -> str:
    """Return the legend for the ops of `second_pipe`; "" if no table has a second pipe."""
    pipes = max((table.num_pipes for table in tables), default=1)
    return {1: "", 2: "second pipe"}.get(pipes, "every second pipe")


def depths(table: ScheduleTable) -> list[float]:
    """Return each stage's position on its worker: 1 for its first stage, 0 for its last."""
    values = []
    for stage, worker in enumerate(table.placement[0].tolist()):
        stages = np.flatnonzero(table.placement[0] == worker)
        values.append(float(np.mean(stages[stages != stage] > stage)) if len(stages) > 1 else 0.0)
    return values


def deep_stage_name(tables: Iterable[ScheduleTable]) -> str:
    """Return the legend for the shades of `depths`; "" if each worker has a single stage."""
    stages = max((table.stages_per_worker for table in tables), default=1)
    return {1: "", 2: "darker: first stages"}.get(stages, "darker: earlier stages")


def arrows(evaluation: Evaluation) -> list[Arrow]:
    """List every message between workers."""
    messages = evaluation.program.messages
    return [
        Arrow(
            sender=int(messages.sender[k]),
            receiver=int(messages.receiver[k]),
            start=float(evaluation.message_start[k]),
            finish=float(evaluation.message_finish[k]),
            op=Op(
                Phase(int(messages.phase[k])), int(messages.stage[k]), int(messages.microbatch[k])
            ),
            is_critical=bool(evaluation.message_critical[k]),
        )
        for k in range(len(messages.producer))
    ]


class Window(NamedTuple):
    """A part of the time axis, from start to stop [s]."""

    start: float
    stop: float


def part_window(run: Evaluation, part: str) -> Window:
    """Return the start and the end of a part of a run: warmup, steady or cooldown."""
    name = resolve_choice(part, PARTS, "part")
    ops = run.table.ops
    worker = ops.cell // run.table.num_slots
    start, finish = run.start.ravel()[ops.cell], run.finish.ravel()[ops.cell]
    is_forward = ops.phase == Phase.F
    is_backward = np.isin(ops.phase, INPUT_GRADS)  # W may come much later
    if not (is_forward.any() and is_backward.any()):
        raise ValueError(f"part {name}: {run.schedule} has no forwards and backwards")
    first_backward, last_forward = np.full(run.workers, np.inf), np.full(run.workers, -np.inf)
    np.minimum.at(first_backward, worker[is_backward], start[is_backward])
    np.maximum.at(last_forward, worker[is_forward], finish[is_forward])
    warmup_end = float(first_backward[np.isfinite(first_backward)].max())
    cooldown_start = float(last_forward[np.isfinite(last_forward)].min())
    window = {
        "warmup": Window(0.0, warmup_end),
        "steady": Window(warmup_end, cooldown_start),
        "cooldown": Window(cooldown_start, run.makespan),
    }[name]
    if window.start >= window.stop:
        raise ValueError(
            f"part {name}: {run.schedule} has none: warm-up ends at {warmup_end:.4g}, but a worker "
            f"has ended its last forward at {cooldown_start:.4g}"
        )
    return window


def time_window(
    runs: Sequence[Evaluation], start: float | None, stop: float | None, part: str | None
) -> Window | None:
    """Return the window from start to stop [s], or the window of a part over all runs."""
    # It is None if start, stop and part are None.
    if part is not None:
        if start is not None or stop is not None:
            raise ValueError("part gives both ends of the time axis: leave start and stop out")
        spans = [part_window(run, part) for run in runs]
        return Window(min(span.start for span in spans), max(span.stop for span in spans))
    if start is None and stop is None:
        return None
    end = max(run.makespan for run in runs)
    window = Window(0.0 if start is None else start, end if stop is None else stop)
    if not 0.0 <= window.start < end:
        raise wrong(
            "start",
            f"must be at least 0 and before {end:.5g}, the end of the longest run, got "
            f"{window.start:.5g}",
        )
    if not window.stop > window.start:
        raise wrong("stop", f"must be after start {window.start:.5g}, got {window.stop:.5g}")
    return Window(window.start, min(window.stop, end))


@short_repr
class LaneTimes(NamedTuple):
    """Busy time and exposed time of a lane beside compute, by worker.

    Attributes:
      lane: name of the lane.
      busy: (workers) time in which the lane runs an op [s].
      exposed: (workers) part of the busy time in which the worker does not compute [s].
    """

    lane: str
    busy: Float[NumpyArray, " workers"]
    exposed: Float[NumpyArray, " workers"]


def lane_times(evaluation: Evaluation) -> list[LaneTimes]:
    """Return busy and exposed times of each lane beside compute, such as "host".

    Args:
      evaluation: a run.

    Returns:
      Lanes in the order of their first kind of op; an empty list if all ops compute.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "0O0", "0F1", "0B1", "0L0", "0B0"]])
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, offload=2.5))
      >>> [(lane.lane, lane.busy.tolist(), lane.exposed.tolist())
      ...  for lane in pj.analysis.lane_times(run)]
      [('host', [5.0], [2.5])]
    """
    check_types(evaluation=(evaluation, Evaluation))
    table, lanes = evaluation.table, ResultList[LaneTimes]()
    for lane, phases in phases_beside(table).items():
        is_on_lane = np.isin(table.phase, phases)
        workers = range(evaluation.workers)
        pairs = [_busy_and_hidden(evaluation, worker, is_on_lane[worker]) for worker in workers]
        busy, hidden = np.array(pairs).T
        lanes.append(LaneTimes(lane, busy, busy - hidden))
    return lanes


def phases_beside(table: ScheduleTable) -> dict[str, list[AnyPhase]]:
    """List the phases that run on each lane beside compute, by name of the lane."""
    phases_by_lane: dict[str, list[AnyPhase]] = {}
    for phase in table.used_phases:
        if phase.kind.time and phase.kind.lane != COMPUTING:
            phases_by_lane.setdefault(phase.kind.lane, []).append(phase)
    return phases_by_lane


def _busy_and_hidden(
    evaluation: Evaluation, worker: int, is_on_lane: NumpyArray
) -> tuple[float, float]:
    """Return a lane's busy time on a worker, and the part of it during compute [s]."""
    start, finish = evaluation.start[worker][is_on_lane], evaluation.finish[worker][is_on_lane]
    # The compute time up to a moment rises while an op runs. With ops from 1 to 3 and 4 to 5, it is
    # 0 2 2 3 at times 1 3 4 5. So compute hides 2.5 - 1 = 1.5 of a lane op from 2 to 4.5.
    nodes = np.flatnonzero(np.asarray(evaluation.program.worker) == worker)
    op_start, op_end = evaluation.node_start[nodes], evaluation.node_finish[nodes]
    times = np.stack([op_start, op_end], axis=1).ravel()
    compute = np.stack([np.zeros(len(nodes)), op_end - op_start], axis=1).ravel().cumsum()
    if not len(times):
        times, compute = np.zeros(1), np.zeros(1)
    hidden = np.interp(finish, times, compute) - np.interp(start, times, compute)
    return float((finish - start).sum()), float(hidden.sum())
