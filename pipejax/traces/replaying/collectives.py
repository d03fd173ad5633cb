"""What a step has beside ops and messages: collectives, the optimizer, garbage collection."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.traces.readers.phase_names import scope_of
from pipejax.traces.record import MESSAGES, NONE, OPS, Trace
from pipejax.traces.replaying.pipelines import (
    CellCount,
    CellSlices,
    Pipeline,
    Pipelines,
    cell_slices,
)
from pipejax.traces.replaying.step_graph import Rest

TOUCH = 1e-4  # by which slices of one worker overlap where clocks round [s]


class Rests(NamedTuple):
    """Same slices in several steps."""

    places: tuple[Rest, ...]  # what they are, and where they stand
    slices: Int[NumpyArray, "steps rests"]  # where they are in the trace; -1 where a step has none
    # of collectives from when the last member has come [s]
    seconds: Float[NumpyArray, "steps rests"]


class _Key(NamedTuple):
    """Which slice it is, in every step."""

    replica: int
    worker: int
    phase: str
    occurrence: int


def rests_of(pipelines: Pipelines, steps: Sequence[Sequence[Pipeline]]) -> Rests:
    """Find what steps have beside ops and messages, whose replicas run the same tables."""
    trace = pipelines.trace
    by_row = _by_row(trace)
    found: dict[_Key, dict[int, int]] = {}
    placed: dict[_Key, list[tuple[CellCount, bool, float]]] = {}
    for number, replicas in enumerate(steps):
        begin = min(trace.start[one.slices].min() for one in replicas)
        for place, one in enumerate(replicas):
            cells = cell_slices(trace, one.slices)
            row = trace.worker[cells]
            for worker in range(trace.workers):
                own, count = CellSlices(cells[row == worker]), dict[str, int]()
                for at in by_row.get((one.step, one.replica, worker), ()):
                    name = trace.phases[trace.phase[at]]
                    key = _Key(place, worker, name, count.setdefault(name, 0))
                    count[name] += 1
                    found.setdefault(key, {})[number] = int(at)
                    where = _place(trace, own, int(at))
                    placed.setdefault(key, []).append((*where, trace.start[at] - begin))
    rests = sorted(_placed(placed), key=lambda pair: pair[1])
    numbers = dict(_groups([key for key, _ in rests], trace.workers))
    slices = np.full((len(steps), len(rests)), NONE)
    for column, (key, _) in enumerate(rests):
        for step, at in found[key].items():
            slices[step, column] = at
    places = tuple(
        Rest(key.phase, key.occurrence, key.replica, key.worker, after, beside, numbers[key])
        for key, (_, _, after, beside, _) in rests
    )
    return Rests(places, slices, _seconds(trace, places, slices))


def _by_row(trace: Trace) -> Mapping[tuple[int, int, int], Int[NumpyArray, " rests"]]:
    """Slices that are no ops and no messages, by step, replica and worker, as they start."""
    other = np.flatnonzero(~trace.is_of((*OPS, *MESSAGES)) & (trace.worker >= 0))
    keys = np.stack([trace.step[other], trace.replica[other], trace.worker[other]])
    other = other[np.lexsort((trace.start[other], *keys[::-1]))]
    keys = np.stack([trace.step[other], trace.replica[other], trace.worker[other]])
    cuts = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
    parts = np.split(other, cuts) if len(other) else []
    return {
        (int(trace.step[p[0]]), int(trace.replica[p[0]]), int(trace.worker[p[0]])): p for p in parts
    }


def _place(trace: Trace, cells: CellSlices, at: int) -> tuple[CellCount, bool]:
    """Count the cells of the row that have ended when a slice starts; does it run beside one."""
    after = int((trace.end[cells] <= trace.start[at] + TOUCH).sum())
    until = int((trace.start[cells] < trace.end[at] - TOUCH).sum())
    return CellCount(after), until > after


def _placed(
    placed: Mapping[_Key, Sequence[tuple[CellCount, bool, float]]],
) -> Iterator[tuple[_Key, tuple[int, int, CellCount, bool, float]]]:
    """Where every slice stands in most steps: replica, worker, after, beside, and when."""
    for key, where in placed.items():
        after, beside, when = zip(*where, strict=True)
        is_beside = 2 * sum(beside) > len(beside)
        usual = CellCount(int(np.median(after)))
        yield key, (key.replica, key.worker, usual, is_beside, float(np.median(when)))


def _groups(keys: Sequence[_Key], workers: int) -> Iterator[tuple[_Key, int]]:
    """Number of the collective that every slice is of; -1 of none, and of one that is alone."""
    members: dict[tuple[object, ...], list[_Key]] = {}
    for key in keys:
        scope = scope_of(key.phase)
        is_end = key.worker in (0, workers - 1)
        where = {
            "replicas": (key.worker,),
            "ends": (key.replica,) if is_end else None,
            "all": (),
        }.get(scope or "")
        if where is None:
            yield key, NONE
        else:
            members.setdefault((key.phase, key.occurrence, *where), []).append(key)
    for number, every in enumerate(members.values()):
        for key in every:
            yield key, number if len(every) > 1 else NONE


def _seconds(
    trace: Trace, places: Sequence[Rest], slices: Int[NumpyArray, "steps rests"]
) -> Float[NumpyArray, "steps rests"]:
    """What every slice takes (steps, rests) [s]; 0 where a step has none."""
    start = np.append(trace.start, -np.inf)[slices]
    end = np.append(trace.end, -np.inf)[slices]
    group = np.array([rest.group for rest in places], int)
    for number in np.unique(group[group != NONE]):
        mine = group == number
        start[:, mine] = start[:, mine].max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.where(slices == NONE, 0.0, np.maximum(end - start, 0.0))
