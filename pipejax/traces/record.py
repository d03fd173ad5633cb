"""A measured run: the slices of time of every worker of every replica, as arrays."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, wrong
from pipejax.base.display import short_repr, with_short_repr

NONE = -1  # stage or microbatch of a slice without one
# phases that a table has cells for; all others are collectives, the optimizer and the like
OPS = ("F", "B", "I", "W")
# slices of messages show who waited, not the time to send: they are no nodes of a step
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
INTEGERS = ("step", "replica", "worker", "stage", "phase", "microbatch")
TIMES = ("start", "end")


@short_repr
@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Content of a file or a run that is not used, with the reason.

    Attributes:
      what: name of the content, with its place.
      why: the fault.
      count: number of such entries.
    """

    what: str
    why: str
    count: int = 1


@short_repr
class StepBudget(NamedTuple):
    """Parts of one rank's step [s]; the first five sum to it, and each excludes earlier parts."""

    step: int
    replica: int
    worker: int
    compute: float  # some kernel computes
    exposed: float  # the device only exchanges data
    blocking: float  # it is idle while the host waits in a call
    launch_starved: float  # its next work is not launched yet
    dependency_stalled: float  # its next work is launched, or of the next step
    starved_ops: float = 0.0  # launch-starved between first and last op, if waits are recorded


@with_short_repr("steps replicas workers stages")
@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Slices of time of a measured run: every array has one entry per slice.

    Attributes:
      step: (slices) number of the training step, as in the file.
      replica: (slices) copy of the pipeline, from 0.
      worker: (slices) rank in the pipeline, from 0.
      stage: (slices) stage of the model, from 0; -1 for a slice without one.
      phase: (slices) position in `phases`.
      microbatch: (slices) number in the step, from 0; -1 for a slice without one.
      start: (slices) [s], by any clock that the workers of a step share.
      end: (slices) [s].
      phases: names: F, B, I, W of ops, SEND_F, RECV_F, SEND_B, RECV_B of messages; others
        (collectives, the optimizer) keep the name in the file.
      left_out: content of the files that is not in the arrays.
      source: origin of the trace, in words.
      known_workers: workers of a pipeline, as the files state; 0 if they do not.
      inferred: sentences on numbers that no file states: their value, and its reason.
      has_step_clocks: whether the clock of a worker restarts at 0 in every step.
      budgets: parts of the steps of each rank, if the files have work of devices.
      marks: number, marked time and time of the ops [s] of each marked step.
      ranks: number of the rank in the files by (replica, worker), if they are files of ranks.

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

    def __post_init__(self) -> None:
        size = len(self.start)
        for name in (*INTEGERS, *TIMES):
            if len(getattr(self, name)) != size:
                raise MismatchError(
                    f"{name} has {len(getattr(self, name))} entries, start has {size}", name
                )
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
        return dataclasses.replace(self, **arrays).with_marks(
            mark for mark in self.marks if mark[0] in steps
        )

    def with_marks(self, marks: Iterable[tuple[int, float, float]]) -> "Trace":
        """Return a trace with these marks, and their note if ops take less than the marks."""
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
    """Return the median length of marked steps, if the median span of their ops is shorter."""
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

# phases of the producer, phases of the consumer, and stage of the consumer minus the producer's
OP_INPUTS: Dependencies = (("F", "F", 1), ("BI", "BI", -1))


def transfers(trace: Trace, dependencies: Dependencies) -> tuple[Slices, Slices]:
    """Match producers with consumers; return both as slice numbers, of equal length."""
    # A dependency ("F", "F", 1) says that F of a stage has F of the next stage as its consumer.
    _, step = np.unique(trace.step, return_inverse=True)
    num_stages, microbatches = trace.stages + 2, int(trace.microbatch.max(initial=0)) + 1
    pipeline = step * (int(trace.replica.max(initial=0)) + 1) + trace.replica
    # one number for pipeline, stage and microbatch; the next stage is `microbatches` further
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


# workers of a collective, by a pattern in the name of its phase; the first match counts.
# "replicas": all copies of a stage; "ends": first and last worker of a pipeline; "all": all workers
# of all replicas; "alone": no other worker of a trace (tensor parallelism)
SCOPES = {
    "layernorm": "alone",
    "embedding": "ends",
    "clip": "all",
    "all[-_]?(gather|reduce)|reduce[-_]?scatter": "replicas",
}


def collective_scope(phase: str) -> str | None:
    """Return the scope of a collective with this name; None if the name is no collective's."""
    scopes = (scope for pattern, scope in SCOPES.items() if re.search(pattern, phase.lower()))
    return next(scopes, None)
