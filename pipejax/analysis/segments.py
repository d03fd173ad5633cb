"""The three segments of a run: warm-up, steady state and cool-down, as times.

On a worker the warm-up ends where its first backward begins, and the cool-down begins where its
last forward ends. Of a run, warm-up and cool-down are those of all workers together; what lies
between them is the time in which every worker is steady.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.evaluate import Evaluation
from pipejax.base.checks import one_of
from pipejax.schedules.cells.ops import Phase

SEGMENTS = ("warmup", "steady", "cooldown")
BACKWARDS = (Phase.B, Phase.I)  # W may come much later


class Window(NamedTuple):
    """A part of the time axis, from start to stop [s]."""

    start: float
    stop: float


def segment_of(run: Evaluation, segment: str) -> Window:
    """Return when a segment of a run begins and ends.

    Raises:
      ValueError: if there is no such segment, or it takes no time.
    """
    name = one_of(segment, SEGMENTS, "part")
    ops = run.table.ops
    worker = ops.cell // run.table.num_slots
    start, finish = run.start.ravel()[ops.cell], run.finish.ravel()[ops.cell]
    forward, backward = ops.phase == Phase.F, np.isin(ops.phase, BACKWARDS)
    if not (forward.any() and backward.any()):
        raise ValueError(f"part {name}: {run.schedule} has no forwards and backwards")
    first, last = np.full(run.workers, np.inf), np.full(run.workers, -np.inf)
    np.minimum.at(first, worker[backward], start[backward])
    np.maximum.at(last, worker[forward], finish[forward])
    warm = float(first[np.isfinite(first)].max())
    cool = float(last[np.isfinite(last)].min())
    window = {
        "warmup": Window(0.0, warm),
        "steady": Window(warm, cool),
        "cooldown": Window(cool, run.makespan),
    }[name]
    if window.start >= window.stop:
        raise ValueError(
            f"part {name}: {run.schedule} has none: its workers are warm at {warm:.4g}, and the "
            f"first of them is out of forwards at {cool:.4g}"
        )
    return window


def window_of(
    runs: Sequence[Evaluation], start: float | None, stop: float | None, part: str | None
) -> Window | None:
    """Return the part of the time axis that is asked for, long enough for all runs; None for all.

    Raises:
      ValueError: if it is empty, or given in two ways.
    """
    if part is not None:
        if start is not None or stop is not None:
            raise ValueError("part gives both ends of the time axis: leave start and stop out")
        each = [segment_of(run, part) for run in runs]
        return Window(min(one.start for one in each), max(one.stop for one in each))
    if start is None and stop is None:
        return None
    end = max(run.makespan for run in runs)
    window = Window(0.0 if start is None else start, end if stop is None else stop)
    if not 0.0 <= window.start < end:
        raise ValueError(
            f"start must be at least 0 and before {end:.5g}, the end of the longest run, got "
            f"{window.start:.5g}"
        )
    if not window.stop > window.start:
        raise ValueError(f"stop must be after start {window.start:.5g}, got {window.stop:.5g}")
    return Window(window.start, min(window.stop, end))
