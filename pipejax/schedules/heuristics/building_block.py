"""Building blocks: the ops of one microbatch, which all others repeat at an interval.

Pipeline Parallelism with Controllable Memory (arXiv:2405.15362) makes its V schedules of them. How
long a microbatch waits on its way says how many are under way at once, that is how much memory they
take; the interval says how busy the workers are. What is used of a repeated block is its order: the
list scheduler runs it as early as times and memory allow (`row_order`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.schedules.cells.ops import COMPUTE, SPLIT, Op, Phase
from pipejax.schedules.heuristics.timeline import Work

ROUNDING = 1e-9  # of the interval: ops that overlap by less do not


class Waits(NamedTuple):
    """How long a microbatch waits on its way, messages aside.

    A leg of the way is a run of stages on which no worker comes twice: a V placement has two.

    Attributes:
      forward: (legs) before each F of a leg but its first.
      gradient: (legs) before each gradient of a leg but its first.
      turns: (2 legs - 1) between legs: forth, then before the first gradient, then back.
    """

    forward: Sequence[float]
    gradient: Sequence[float]
    turns: Sequence[float]


class BuildingBlock(NamedTuple):
    """The ops of one microbatch of each pipe, and when they come again.

    Attributes:
      starts: by phase (F, W, and I or B), (pipes, stages) after the first F, in any unit of time.
      offsets: (microbatches) of the first F of each.
    """

    starts: Mapping[Phase, Sequence[Sequence[float]]]
    offsets: Sequence[float]

    def start(self, op: Op, pipe: int) -> float:
        """Return when an op starts."""
        phase, stage, microbatch = op
        return self.starts[phase][pipe][stage] + self.offsets[microbatch]


def legs_of(row: Sequence[int]) -> list[int]:
    """Number the leg of the way that each stage is on: (stages), from 0."""
    legs: list[int] = []
    seen: set[int] = set()
    for worker in row:
        if worker in seen:
            seen = set()
        legs.append(legs[-1] + (not seen) if legs else 0)
        seen.add(worker)
    return legs


def building_block(work: Work, waits: Waits, interval: float) -> BuildingBlock:
    """Lay the ops of a microbatch along its way, where repetitions leave their workers free.

    Where nothing is free for long enough, an op stays where its input arrives: the list scheduler
    puts in order what overlaps.
    """
    period = interval * len(work.placement)
    taken: list[list[tuple[float, float]]] = [[] for _ in work.limits]
    starts = {phase: np.zeros_like(work.placement, float) for phase in (*SPLIT, Phase.B)}

    def put(phase: Phase, pipe: int, stage: int, earliest: float) -> float:
        lasts, others = float(work.lasts[phase][stage]), taken[work.placement[pipe][stage]]
        starts[phase][pipe, stage] = start = _first_free(others, earliest, lasts, period)
        others.append((start, lasts))
        return start + lasts

    for pipe in range(len(work.placement)):
        now = 0.0
        for phase, stage, wait in _way(work, pipe, waits):
            now = put(phase, pipe, stage, now + wait)
    for pipe, stage in np.ndindex(starts[Phase.F].shape) if Phase.W in work.lasts else ():
        put(Phase.W, pipe, stage, float(starts[Phase.I][pipe, stage]) + work.lasts[Phase.I][stage])
    times = {phase: rows.tolist() for phase, rows in starts.items()}
    return BuildingBlock(times, [interval * turn for turn in _turns(work)])


def _way(work: Work, pipe: int, waits: Waits) -> Iterator[tuple[Phase, int, float]]:
    """Yield phase and stage along the way of a microbatch, and the time from the op before."""
    row, last = work.placement[pipe], len(work.placement[pipe]) - 1
    legs = legs_of(row)

    def hop(stage: int, to: int) -> float:
        where = int(to < stage), min(stage, to)
        message = (kind[where[0]][pipe][where[1]] for kind in (work.lag, work.transmit))
        return float(sum(message)) if row[stage] != row[to] else 0.0

    yield Phase.F, 0, 0.0
    for stage in range(1, last + 1):
        leg = legs[stage]
        turns = leg != legs[stage - 1]
        wait = waits.turns[leg - 1] if turns else waits.forward[leg]
        yield Phase.F, stage, wait + hop(stage - 1, stage)
    yield work.gradient, last, waits.turns[len(waits.turns) // 2]
    for stage in range(last - 1, -1, -1):
        leg = legs[stage]
        turns = leg != legs[stage + 1]
        wait = waits.turns[-1 - leg] if turns else waits.gradient[leg]
        yield work.gradient, stage, wait + hop(stage + 1, stage)


def _first_free(
    taken: Sequence[tuple[float, float]], start: float, lasts: float, period: float
) -> float:
    """Return the first time from the start on at which no repetition of another op is met."""
    now, same = start, ROUNDING * period
    for _ in range(2 * len(taken) + 2):  # each is met twice at most, whatever is rounded
        if now >= start + period:
            break
        for place, length in taken:
            since = (now - place) % period  # the last repetition of the other began
            if since < length - same:
                now += length - since
                break
            if since + lasts > period + same:
                now += period - since + length
                break
        else:
            return now
    return start


def _turns(work: Work) -> list[float]:
    """Number the microbatches (microbatches) so that those of several pipes take turns."""
    pipes, count = len(work.placement), len(work.pipe_of)
    of_pipe = np.bincount(work.pipe_of, minlength=pipes).tolist()
    passed, turns = [0] * pipes, []
    for pipe in work.pipe_of:
        turns.append((passed[pipe] + pipe / pipes) * count / of_pipe[pipe])
        passed[pipe] += 1
    return turns


def least_interval(work: Work, block: BuildingBlock | None = None) -> float:
    """Return how often microbatches may come for the work of all, and for a block's memory."""
    busy, held = (np.zeros(len(work.limits)) for _ in range(2))
    lasts = np.sum([work.lasts[phase] for phase in COMPUTE if phase in work.lasts], axis=0)
    shares = np.bincount(work.pipe_of, minlength=len(work.placement)) / len(work.pipe_of)
    for pipe, row in enumerate(work.placement):
        np.add.at(busy, row, shares[pipe] * lasts)
        if block is not None:
            end = np.add(block.starts[work.gradient][pipe], work.lasts[work.gradient])
            stays = end - np.array(block.starts[Phase.F][pipe])
            np.add.at(held, row, shares[pipe] * np.array(work.sizes) * stays)
    return float(max(busy.max(), (held / np.array(work.limits)).max()))
