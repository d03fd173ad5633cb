"""The state of a run on the workers of a pipe: times, messages, memory, and what can run next.

Every scheduler of this folder stands on it and only chooses which op runs next. Times are whole
numbers or floats, and stay what they are: sums of whole numbers are exact.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipejax.schedules.cells.memory_ledger import END, START, change_of
from pipejax.schedules.cells.ops import HOST, Op, Phase

Time = int | float
MOMENTS = START, END
TimedOp = tuple[Phase, int, int, int, Time, Time]  # phase, stage, microbatch, worker, start, end


class Work(NamedTuple):
    """What is to run. Times and sizes are in any unit.

    Attributes:
      placement: (pipes, stages) worker of each stage.
      pipe_of: (microbatches) pipe of each microbatch.
      lasts: (stages) times of each phase: of F and B, or of F, I and W; of O and L where
        activations may go to the host.
      lag: (directions, pipes, boundaries) delay of a message behind what occupies its link.
      transmit: (directions, pipes, boundaries) time for which it occupies the link of its two
        workers, which carries one message at a time.
      sizes: (stages) memory that an activation takes at the start of F or L.
      kept: (stages) what of it is left after I and goes with W.
      limits: (workers) memory for activations.
    """

    placement: Sequence[Sequence[int]]
    pipe_of: Sequence[int]
    lasts: Mapping[Phase, Sequence[Time]]
    lag: Sequence[Sequence[Sequence[Time]]]
    transmit: Sequence[Sequence[Sequence[Time]]]
    sizes: Sequence[Time]
    kept: Sequence[Time]
    limits: Sequence[Time]

    @property
    def total(self) -> int:
        """Number of ops that compute."""
        phases = sum(phase in self.lasts for phase in (Phase.F, Phase.B, Phase.I, Phase.W))
        return phases * len(self.placement[0]) * len(self.pipe_of)

    @property
    def gradient(self) -> Phase:
        """The phase whose end sends a gradient back: I, or B where backwards are not split."""
        return Phase.I if Phase.I in self.lasts else Phase.B


class Timeline:
    """The ops that have been started, in that order.

    Attributes:
      log: ops with their times.
      clock: (workers) when the last op that a worker computes ends.
      held: (workers) memory that its activations take.
      done: by phase, (pipes, stages) ops that have been started.
      arrival: when the input of an op is there; known as soon as the op that makes it starts.
    """

    def __init__(self, work: Work) -> None:
        """Begin with an empty run."""
        self.work = work
        self.log: list[TimedOp] = []
        self.clock: list[Time] = [0 for _ in work.limits]
        self.held: list[Time] = [0 for _ in work.limits]
        self.done = {phase: [[0 for _ in row] for row in work.placement] for phase in work.lasts}
        self.arrival: dict[Op, Time] = {Op(Phase.F, 0, m): 0 for m in range(len(work.pipe_of))}
        self._makes = [
            {phase: self._made_by(phase, stage) for phase in work.lasts}
            for stage in range(len(work.placement[0]))
        ]
        self._takes = [
            {
                (p, at): change_of(p, at, whole=size, for_w=kept)
                for p in work.lasts
                for at in (START, END)
            }
            for size, kept in zip(work.sizes, work.kept, strict=True)
        ]
        self._links: dict[tuple[int, int], Time] = {}

    def worker(self, op: Op) -> int:
        """Return where an op runs."""
        return self.work.placement[self.work.pipe_of[op.microbatch]][op.stage]

    def start(self, op: Op, now: Time) -> list[Op]:
        """Start an op: return the ops whose inputs it makes, which `arrival` knows from now on."""
        phase, stage, microbatch = op
        pipe = self.work.pipe_of[microbatch]
        worker = self.work.placement[pipe][stage]
        end = now + self.work.lasts[phase][stage]
        self.log.append((phase, stage, microbatch, worker, now, end))
        self.done[phase][pipe][stage] += 1
        self.held[worker] += self._takes[stage][phase, START]
        if phase in HOST:
            return []
        self.clock[worker] = end
        made = []
        for phase_made, stage_made in self._makes[stage][phase]:
            op_made = Op(phase_made, stage_made, microbatch)
            same = stage_made == stage
            self.arrival[op_made] = end if same else self._arrives(pipe, stage, stage_made, end)
            made.append(op_made)
        return made

    def end(self, op: Op) -> None:
        """Free what an op releases at its end."""
        self.held[self.worker(op)] += self._takes[op.stage][op.phase, END]

    def _made_by(self, phase: Phase, stage: int) -> list[tuple[Phase, int]]:
        """Phase and stage of the ops that wait for an op, by the rules of `dependencies`."""
        gradient, last = self.work.gradient, len(self.work.placement[0]) - 1
        rules = (
            (Phase.F, Phase.F, stage + 1, stage < last),
            (Phase.F, gradient, stage, stage == last),
            (gradient, gradient, stage - 1, stage > 0),
            (Phase.I, Phase.W, stage, True),
        )
        return [(made, at) for by, made, at, exists in rules if by is phase and exists]

    def _arrives(self, pipe: int, stage: int, other: int, end: Time) -> Time:
        """Arrival time of a message between stages; a link carries one message at a time."""
        direction, boundary = int(other < stage), min(stage, other)
        transmit = self.work.transmit[direction][pipe][boundary]
        if transmit:
            row = self.work.placement[pipe]
            link = row[stage], row[other]
            end = self._links[link] = max(end, self._links.get(link, 0)) + transmit
        return end + self.work.lag[direction][pipe][boundary]
