"""A measured run: the slices of time of every worker of every replica, as arrays."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, wrong
from pipejax.base.display import short_repr, with_short_repr

NONE = -1  # stage or microbatch of a slice that has no stage or microbatch
# phases of pipeline ops; other phases are collectives, the optimizer and the like
OPS = ("F", "B", "I", "W", "R")
# Phases of messages. Their slices show which worker waited, not the time of the message, so they
# are no nodes of a step.
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
INTEGERS = ("step", "replica", "worker", "stage", "phase", "microbatch")
TIMES = ("start", "end")


@short_repr
@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Content of a file or a run that is not used, with the reason.

    Attributes:
      what: name of the content, with its file or rank.
      why: reason.
      count: number of slices, rows or files.
    """

    what: str
    why: str
    count: int = 1


@short_repr
class StepBudget(NamedTuple):
    """Times of the device in one step of a rank [s]; the first five sum to the step."""

    step: int
    replica: int
    worker: int
    compute: float  # a kernel computes
    exposed: float  # the device exchanges data and does not compute
    blocking: float  # the device is idle, and the host waits in a call
    launch_starved: float  # the device is idle, and its next work is not launched yet
    dependency_stalled: float  # the device is idle: its next work waits, or is in the next step
    starved_ops: float = 0.0  # launch-starved between first and last op, if waits are recorded


@with_short_repr("steps replicas workers stages")
@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Slices of time of a measured run: every array has one entry per slice.

    Attributes:
      step: (slices) number of the training step, as in the file.
      replica: (slices) copy of the pipeline, from 0.
      worker: (slices) rank in the pipeline, from 0.
      stage: (slices) stage of the model, from 0; -1 for a slice without a stage.
      phase: (slices) index in `phases`.
      microbatch: (slices) number in the step, from 0; -1 for a slice without a microbatch.
      start: (slices) start [s], by a clock that the workers of a step share.
      end: (slices) end [s].
      phases: names of phases: F, B, I, W for ops; SEND_F, RECV_F, SEND_B, RECV_B for messages;
        names in the file for other slices, such as collectives and the optimizer.
      left_out: content of the files that is not in the arrays.
      source: origin of the trace, in words.
      known_workers: number of workers of a pipeline that the files state; 0 if they state none.
      inferred: sentences about numbers that no file states: their values, and the reasons.
      has_step_clocks: whether the clock of a worker restarts at 0 in every step.
      budgets: times of the device in each step of each rank, if the files have device work.
      marks: (step, marked time [s], time of the ops [s]) of each marked step.
      ranks: {(replica, worker): rank in the files}, if the files are of ranks.
      launcher: launcher that labels ops so, as "DeepSpeed"; empty if labels are of several.

    Raises:
      ValueError: if arrays differ in length, a time is not finite, or a phase has no name.
    """

    step: Int[NumpyArray, " slices"]
    replica: Int[NumpyArray, " slices"]
    worker: Int[NumpyArray, " slices"]
    stage: Int[NumpyArray, " slices"]
    phase: Int[NumpyArray, " slices"]
    microbatch: Int[NumpyArray, " slices"]
    start: Float[NumpyArray, " slices"]
    end: Float[NumpyArray, " slices"]
    phases: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    source: str = ""
    known_workers: int = 0
    inferred: tuple[str, ...] = ()
    has_step_clocks: bool = False
    budgets: tuple[StepBudget, ...] = ()
    marks: tuple[tuple[int, float, float], ...] = ()
    ranks: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    launcher: str = ""

    def __post_init__(self) -> None:
        """Check that columns have equal lengths, times are finite, and phases exist."""
        size = len(self.start)
        for name in (*INTEGERS, *TIMES):
            if len(getattr(self, name)) != size:
                count = len(getattr(self, name))
                raise MismatchError(f"{name} has {count} entries, start has {size}", name)
        for name in TIMES:
            if not np.isfinite(getattr(self, name)).all():
                raise wrong(name, "must be finite: leave out slices without a time")
        if size and not 0 <= self.phase.min() <= self.phase.max() < len(self.phases):
            raise wrong("phase", f"must be a position in the {len(self.phases)} phases")

    def __len__(self) -> int:
        return len(self.start)

    @property
    def steps(self) -> list[int]:
        """List the numbers of the steps, ascending."""
        return np.unique(self.step).tolist()

    @property
    def replicas(self) -> list[int]:
        """List the numbers of the replicas, ascending."""
        return np.unique(self.replica).tolist()

    @property
    def workers(self) -> int:
        """Count the workers of a pipeline, including workers without a slice."""
        return max(int(self.worker.max(initial=NONE)) + 1, self.known_workers)

    @property
    def stages(self) -> int:
        """Count the stages of the model."""
        return int(self.stage.max(initial=NONE)) + 1

    def has_phase(self, names: Iterable[str]) -> Bool[NumpyArray, " slices"]:
        """Return for each slice whether its phase has one of these names."""
        selected_phases = [k for k, name in enumerate(self.phases) if name in set(names)]
        return np.isin(self.phase, selected_phases)

    def only(self, is_selected: Bool[NumpyArray, " slices"]) -> "Trace":
        """Return a trace of the selected slices."""
        arrays = {name: getattr(self, name)[is_selected] for name in (*INTEGERS, *TIMES)}
        steps = {*arrays["step"].tolist()}
        arrays["budgets"] = tuple(budget for budget in self.budgets if budget.step in steps)
        marks = (mark for mark in self.marks if mark[0] in steps)
        return dataclasses.replace(self, **arrays).with_marks(marks)

    def with_marks(self, marks: Iterable[tuple[int, float, float]]) -> "Trace":
        """Return the trace with these marks, and a note if ops take less time than the marks."""
        old_note, marks = _note_on_marks(self.marks), (*marks,)
        others = (text for text in self.inferred if text not in old_note)
        notes = (*others, *_note_on_marks(marks))
        return dataclasses.replace(self, marks=marks, inferred=notes)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, NumpyArray],
        phases: Sequence[str],
        left_out: Iterable[LeftOut] = (),
        source: str = "",
        **fields: Any,
    ) -> "Trace":
        """Sort columns (slices) by step, replica, worker and start, and make a trace of them."""
        order = np.lexsort([columns[k] for k in ("end", "start", "worker", "replica", "step")])
        fields |= {name: np.asarray(columns[name], np.int64)[order] for name in INTEGERS}
        fields |= {name: np.asarray(columns[name], np.float64)[order] for name in TIMES}
        return cls(phases=(*phases,), left_out=(*left_out,), source=source, **fields)


def _note_on_marks(marks: Sequence[tuple[int, float, float]]) -> list[str]:
    """Return a note if the marks (step, marked time, time of ops) [s] are longer than the ops."""
    marked, span = np.median([mark[1:] for mark in marks], axis=0).tolist() if marks else (0, 0)
    if marked <= 1.01 * span:
        return []
    step = "the median step" if len({mark[0] for mark in marks}) > 1 else "the only step"
    return [
        f"{step} takes {marked:.3g} s by its mark: ops take {span:.3g} s of it, and the other "
        f"{marked - span:.3g} s, before and after its ops, are not in times per step"
    ]


Dependencies = Sequence[tuple[Sequence[str], Sequence[str], int]]
Slices = Int[NumpyArray, " transfers"]

# (phases of the producer, phases of the consumer, consumer's stage - producer's stage)
OP_INPUTS: Dependencies = (("F", "F", 1), ("BI", "BI", -1))


def transfers(trace: Trace, dependencies: Dependencies) -> tuple[Slices, Slices]:
    """Match producers with consumers; return the slices of both, in arrays of equal length."""
    # A dependency ("F", "F", 1) means that F of the next stage consumes F of a stage.
    _, step = np.unique(trace.step, return_inverse=True)
    num_stages, microbatches = trace.stages + 2, int(trace.microbatch.max(initial=0)) + 1
    pipeline = step * (int(trace.replica.max(initial=0)) + 1) + trace.replica
    # op_number is unique for (pipeline, stage, microbatch); a stage further adds `microbatches`
    op_number = (pipeline * num_stages + trace.stage + 1) * microbatches + trace.microbatch
    has_place = (trace.stage >= 0) & (trace.microbatch >= 0)
    pairs = []
    for producer_phases, consumer_phases, stage_step in dependencies:
        producers = np.flatnonzero(trace.has_phase(producer_phases) & has_place)
        consumers = np.flatnonzero(trace.has_phase(consumer_phases) & has_place)
        consumer_numbers = op_number[producers] + stage_step * microbatches
        numbers = op_number[consumers]
        _, rows, columns = np.intersect1d(consumer_numbers, numbers, return_indices=True)
        pairs.append((producers[rows], consumers[columns]))
    producers, consumers = map(np.concatenate, zip(*pairs, strict=True))
    return producers, consumers


# {pattern in the name of a phase: scope of the collective}; the first match counts. Scopes are
# "replicas" (all copies of a stage), "ends" (first and last worker of a pipeline), "all" (all
# workers of all replicas) and "alone" (no other worker of the trace, as in tensor parallelism).
SCOPES = {
    "layernorm": "alone",
    "embedding": "ends",
    "clip": "all",
    "all[-_]?(gather|reduce)|reduce[-_]?scatter": "replicas",
}


def collective_scope(phase: str) -> str | None:
    """Return the scope of a collective by name; None if the name is not that of a collective."""
    scopes = (scope for pattern, scope in SCOPES.items() if re.search(pattern, phase.lower()))
    return next(scopes, None)
