"""The state of a run on the workers of a pipe: times, messages, memory, and what can run next.

Every scheduler of this folder stands on it and only chooses which op runs next. Times are whole
numbers or floats, and stay what they are: sums of whole numbers are exact.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipejax.schedules.cells.memory_ledger import END, START, change_of
from pipejax.schedules.cells.ops import HOST, Op, Phase

Time = int | float
FOREVER = float("inf")
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


class _Step(NamedTuple):
    """All that an op of one phase, pipe and stage does, found out before the run.

    Of what it makes: phase, stage, link of two workers, how long that is occupied, and the lag.
    """

    worker: int
    lasts: Time
    takes: Time
    frees: Time
    makes: Sequence[tuple[Phase, int, tuple[int, int], Time, Time]]


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
        self._links: dict[tuple[int, int], Time] = {}
        self._steps = {
            phase: [[self._step(phase, p, s) for s in range(len(row))] for p, row in pipes]
            for pipes in [list(enumerate(work.placement))]
            for phase in work.lasts
        }

    def worker(self, op: Op) -> int:
        """Return where an op runs."""
        return self.work.placement[self.work.pipe_of[op[2]]][op[1]]

    def start(self, op: Op, now: Time) -> list[tuple[Op, Time]]:
        """Start an op: return the ops whose inputs it makes, and when these arrive."""
        phase, stage, microbatch = op
        pipe = self.work.pipe_of[microbatch]
        worker, lasts, takes, _, makes = self._steps[phase][pipe][stage]
        end = now + lasts
        self.log.append((phase, stage, microbatch, worker, now, end))
        self.done[phase][pipe][stage] += 1
        self.held[worker] += takes
        if phase not in HOST:
            self.clock[worker] = end
        made = []
        for phase_made, stage_made, link, transmit, lag in makes:
            there = end
            if transmit:  # a link carries one message at a time
                there = self._links[link] = max(end, self._links.get(link, 0)) + transmit
            op_made = Op(phase_made, stage_made, microbatch)
            arrival = self.arrival[op_made] = there + lag
            made.append((op_made, arrival))
        return made

    def end(self, op: Op) -> int:
        """Free what an op releases at its end; return its worker."""
        step = self._steps[op[0]][self.work.pipe_of[op[2]]][op[1]]
        self.held[step.worker] += step.frees
        return step.worker

    def rows(self) -> list[list[Op]]:
        """Return the ops of each worker, in the order in which they were started."""
        rows: list[list[Op]] = [[] for _ in self.work.limits]
        for phase, stage, microbatch, worker, *_ in self.log:
            rows[worker].append(Op(phase, stage, microbatch))
        return rows

    def _step(self, phase: Phase, pipe: int, stage: int) -> _Step:
        """What an op does; what waits for it are the rules of `cells.dependencies`."""
        work, row = self.work, self.work.placement[pipe]
        gradient, last = work.gradient, len(row) - 1
        makes: list[tuple[Phase, int, tuple[int, int], Time, Time]] = []
        for by, made, at in (
            (Phase.F, gradient if stage == last else Phase.F, min(stage + 1, last)),
            (gradient, gradient, stage - 1),
            (Phase.I, Phase.W, stage),
        ):
            if by is phase and at >= 0:
                way, boundary = int(at < stage), min(stage, at)
                times = (kind[way][pipe][boundary] for kind in (work.transmit, work.lag))
                link = row[stage], row[at]
                makes.append((made, at, link, *(times if at != stage else (0, 0))))
        size = {"whole": work.sizes[stage], "for_w": work.kept[stage]}
        takes, frees = (change_of(phase, moment, **size) for moment in (START, END))
        return _Step(row[stage], work.lasts[phase][stage], takes, frees, makes)
