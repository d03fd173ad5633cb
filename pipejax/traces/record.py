"""A measured run: what ran when, on which worker of which replica, as arrays."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, wrong
from pipejax.base.display import short_repr, with_short_repr

NONE = -1  # stage or microbatch of what belongs to none
# what a table has cells for; all other phases are of the rest of the step: collectives, the
# optimizer, whatever a file names
OPS = ("F", "B", "I", "W")
# how long these last says who waited, not what is sent: no node of a step
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
INTEGERS = ("step", "replica", "worker", "stage", "phase", "microbatch")
TIMES = ("start", "end")


@short_repr
@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Something that a file or a run has and that is not used.

    Attributes:
      what: what it is, with its place.
      why: what is wrong with it.
      count: how many there are.
    """

    what: str
    why: str
    count: int = 1


@with_short_repr("steps replicas workers stages")
@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Slices of time of some steps of a run, one entry each.

    Attributes:
      step: (slices) number of the training step, as the file has it.
      replica: (slices) which copy of the pipeline, from 0.
      worker: (slices) rank in the pipeline, from 0.
      stage: (slices) of the model, from 0; -1 where a slice is of none.
      phase: (slices) position in `phases`.
      microbatch: (slices) from 0 in every step; -1 where a slice is of none.
      start: (slices) [s], of any clock that the workers of a step share.
      end: (slices) [s].
      phases: names: F, B, I, W of ops, SEND_F, RECV_F, SEND_B, RECV_B of messages, and of the rest
        (collectives, the optimizer) whatever the file says.
      left_out: what the files have and is not in here.
      source: where it came from, in words.
      known_workers: how many workers a pipeline has by what the files say; 0 if they do not.
      inferred: sentences that say which numbers no file has, and what they follow from.
      has_step_clocks: whether workers count from a zero of each step.

    Raises:
      ValueError: if arrays differ in length, a time is not finite, or a phase has no name.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> pj.traces.of_runs([run]).steps
      [0]
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
        """Numbers of the steps, ascending."""
        return np.unique(self.step).tolist()

    @property
    def replicas(self) -> list[int]:
        """Numbers of the replicas, ascending."""
        return np.unique(self.replica).tolist()

    @property
    def workers(self) -> int:
        """Number of workers of a pipeline, with those that have no slice."""
        return max(int(self.worker.max(initial=NONE)) + 1, self.known_workers)

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return int(self.stage.max(initial=NONE)) + 1

    def is_of(self, names: Iterable[str]) -> Bool[NumpyArray, " slices"]:
        """Return which slices are of phases with these names."""
        selected_phases = [k for k, name in enumerate(self.phases) if name in set(names)]
        return np.isin(self.phase, selected_phases)

    def only(self, chosen: Bool[NumpyArray, " slices"]) -> "Trace":
        """Keep some slices."""
        arrays = {name: getattr(self, name)[chosen] for name in (*INTEGERS, *TIMES)}
        return dataclasses.replace(self, **arrays)

    @classmethod
    def of(
        cls,
        columns: Mapping[str, NumpyArray],
        phases: Sequence[str],
        left_out: Iterable[LeftOut] = (),
        source: str = "",
        **more: Any,
    ) -> "Trace":
        """Put columns into order: by step, replica, worker, start."""
        order = np.lexsort([columns[k] for k in ("end", "start", "worker", "replica", "step")])
        more |= {name: np.asarray(columns[name], np.int64)[order] for name in INTEGERS}
        more |= {name: np.asarray(columns[name], np.float64)[order] for name in TIMES}
        return cls(phases=(*phases,), left_out=(*left_out,), source=source, **more)


Ways = Sequence[tuple[Sequence[str], Sequence[str], int]]
Slices = Int[NumpyArray, " transfers"]

# phases that make, phases that take, and by how many stages these stand behind
OF_OPS: Ways = (("F", "F", 1), ("BI", "BI", -1))
OF_MESSAGES: Ways = ((("SEND_F",), ("RECV_F",), 1), (("SEND_B",), ("RECV_B",), -1))


def transfers(trace: Trace, ways: Ways) -> tuple[Slices, Slices]:
    """Slices that make, and those that take from them (transfers); of an op that ran twice one."""
    _, step = np.unique(trace.step, return_inverse=True)
    stages, microbatches = trace.stages + 2, int(trace.microbatch.max(initial=0)) + 1
    pipeline = step * (int(trace.replica.max(initial=0)) + 1) + trace.replica
    place = (pipeline * stages + trace.stage + 1) * microbatches + trace.microbatch
    is_of_some = (trace.stage >= 0) & (trace.microbatch >= 0)
    pairs = []
    for make, take, move in ways:
        producers, consumers = (
            np.flatnonzero(trace.is_of(names) & is_of_some) for names in (make, take)
        )
        targets = place[producers] + move * microbatches
        _, first, second = np.intersect1d(targets, place[consumers], return_indices=True)
        pairs.append((producers[first], consumers[second]))
    producers, consumers = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return producers, consumers
