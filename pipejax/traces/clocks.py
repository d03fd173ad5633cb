"""Clocks of workers that differ: what messages say of their offsets, and a trace without them.

No message arrives before it was sent. So messages from one worker to another bound how far the
clock of the second is ahead from above, and those back from below. As with NTP the truth is taken
to lie in the middle, which it does if the fastest messages of both ways take as long.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr
from pipejax.traces.record import MESSAGES, NONE, OF_MESSAGES, OF_OPS, LeftOut, Trace, transfers

_RELIABLE = 0.25  # so many of the steps may hold messages that are matched wrongly
_EXACT = 5e-5  # what clocks of one machine and times in 32 bits differ by [s]


@short_repr
class Offset(NamedTuple):
    """Lead of the clock of a worker over most others of its replica.

    Attributes:
      replica: of the worker.
      worker: rank in the pipeline.
      step: that it is of; -1 for all of them.
      seconds: estimate [s]; 0 where it cannot be had.
      residual: the estimate is off by this at most [s]; infinite where it cannot be had.
      is_corrected: whether the trace was corrected by it.
      why: what keeps it from being had; empty where it can.
    """

    replica: int
    worker: int
    step: int
    seconds: float
    residual: float
    is_corrected: bool
    why: str = ""


def aligned(
    trace: Trace, *, always: bool = False, by_step: bool | None = None
) -> tuple[Trace, list[Offset]]:
    """Put the workers of each replica on one clock, that of a worker that agrees with most others.

    A message must not arrive before it is sent: RECV may not end before SEND starts, nor, in
    traces without messages, an op start before the one ends that it takes its input from. Both ways
    together bound the offset of two clocks; over several workers the bounds add up. The quickest
    message of each step counts, and of steps the lower quartile: of five steps one may be wrong.

    Args:
      trace: a measured run.
      always: correct all clocks that can be corrected; else only those of which a message would
        arrive before it was sent.
      by_step: whether the clocks of each step have an offset of their own, as where each rank
        counts from its own begin of the step; what the trace says if None.

    Returns:
      The trace on one clock, and the offsets. A clock that cannot be corrected is named in
      `left_out`, and stays as it was.

    Example:
      >>> import dataclasses, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> trace = pj.traces.of_runs([pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))])
      >>> ahead = 5.0 * (trace.worker == 1)
      >>> wrong = dataclasses.replace(trace, start=trace.start + ahead, end=trace.end + ahead)
      >>> right, offsets = pj.traces.aligned(wrong)
      >>> [(offset.worker, offset.seconds, offset.is_corrected) for offset in offsets]
      [(0, 0.0, False), (1, 5.0, True)]
      >>> bool((right.start == trace.start).all())
      True
    """
    check_types(trace=(trace, Trace), always=(always, bool), by_step=(by_step, bool, type(None)))
    by_step = trace.has_step_clocks if by_step is None else by_step
    offsets: list[Offset] = []
    shift = np.zeros(len(trace))
    sent = _Transfers.of(trace)
    for step in trace.steps if by_step else [NONE]:
        for replica in trace.replicas:
            on_replica = trace.replica == replica
            is_sent = sent.replica == replica
            if by_step:
                on_replica, is_sent = (
                    on_replica & (trace.step == step),
                    is_sent & (sent.step == step),
                )
            workers = np.unique(trace.worker[on_replica])
            solutions = _solve_offsets(sent.bounds(is_sent, workers), always=always)
            for worker, (seconds, residual, is_corrected, why) in zip(
                workers.tolist(), solutions, strict=True
            ):
                offsets.append(Offset(replica, worker, step, seconds, residual, is_corrected, why))
                if is_corrected:
                    shift[on_replica & (trace.worker == worker)] = seconds
    start, end, left_out = (
        trace.start - shift,
        trace.end - shift,
        (*trace.left_out, *_dropped_clocks(offsets)),
    )
    return dataclasses.replace(trace, start=start, end=end, left_out=left_out), offsets


def _dropped_clocks(offsets: Sequence[Offset]) -> Iterator[LeftOut]:
    for why in sorted({offset.why for offset in offsets if offset.why}):
        group = [offset for offset in offsets if offset.why == why]
        workers = ", ".join(map(str, sorted({offset.worker for offset in group})))
        yield LeftOut(f"clock of worker {workers}", why, len(group))


class _Transfers(NamedTuple):
    """Ends of transfers, and their apparent durations."""

    step: Int[NumpyArray, " transfers"]
    replica: Int[NumpyArray, " transfers"]
    sender: Int[NumpyArray, " transfers"]  # worker
    receiver: Int[NumpyArray, " transfers"]  # worker
    seconds: Float[NumpyArray, " transfers"]  # [s], by the clocks of both

    @classmethod
    def of(cls, trace: Trace) -> "_Transfers":
        """Match messages; in a trace without any, the ops that make and take them."""
        if trace.is_of(MESSAGES).any():
            ways, departure, arrival = OF_MESSAGES, trace.start, trace.end
        else:
            ways, departure, arrival = OF_OPS, trace.end, trace.start
        sources, targets = transfers(trace, ways)
        apart = trace.worker[sources] != trace.worker[targets]
        sources, targets = sources[apart], targets[apart]
        seconds = arrival[targets] - departure[sources]
        return cls(
            trace.step[sources],
            trace.replica[sources],
            trace.worker[sources],
            trace.worker[targets],
            seconds,
        )

    def bounds(
        self, which: NumpyArray, workers: Int[NumpyArray, " workers"]
    ) -> Float[NumpyArray, "workers workers"]:
        """Return how far the second clock can be ahead of the first, at most [s]."""
        size = len(workers)
        upper = np.full((size, size), math.inf)
        np.fill_diagonal(upper, 0.0)
        pair = np.searchsorted(workers, self.sender[which]) * size
        pair += np.searchsorted(workers, self.receiver[which])
        order = np.lexsort([self.seconds[which], self.step[which], pair])
        pair, step, seconds = pair[order], self.step[which][order], self.seconds[which][order]
        first = np.flatnonzero(
            (np.diff(pair, prepend=NONE) != 0) | (np.diff(step, prepend=NONE) != 0)
        )
        pair, seconds = pair[first], seconds[first]  # the quickest of each step
        for number in np.unique(pair):
            upper.flat[number] = np.quantile(seconds[pair == number], _RELIABLE, method="lower")
        return upper


def _solve_offsets(
    bounds: Float[NumpyArray, "workers workers"], *, always: bool
) -> list[tuple[float, float, bool, str]]:
    """Offset, residual, whether it is to be corrected, and why it cannot be had."""
    size = len(bounds)
    for middle in range(size):  # over several workers bounds add up
        bounds = np.minimum(bounds, bounds[:, middle, None] + bounds[None, middle])
        np.fill_diagonal(bounds, 0.0)  # contradictory bounds would fall for ever
    is_broken = (bounds < -_EXACT) | (bounds.T < -_EXACT)
    agrees = np.ones(size, bool)
    while (broken := (is_broken & agrees & agrees[:, None]).sum(axis=1)).any():
        agrees[size - 1 - broken[::-1].argmax()] = False  # of two the second
    first = int(agrees.argmax())
    above, below = bounds[first].copy(), -bounds[:, first]
    is_known = np.isfinite(above) & np.isfinite(below)
    stays = np.arange(size) == first if always else agrees
    is_wrong, references = is_known & ~stays, np.flatnonzero(is_known & stays)
    offset = np.zeros(size)
    for worker in np.flatnonzero(is_wrong):  # beside those that stay, or are corrected already
        above[worker] = (offset[references] + bounds[references, worker]).min()
        below[worker] = (offset[references] - bounds[worker, references]).max()
        offset[worker] = (above[worker] + below[worker]) / 2
        references = np.append(references, worker)
    return [
        _offset(float(above[worker]), float(below[worker]), bool(is_wrong[worker]))
        for worker in range(size)
    ]


def _offset(above: float, below: float, is_wrong: bool) -> tuple[float, float, bool, str]:
    ways = [way for way, bound in (("to", above), ("from", below)) if not math.isfinite(bound)]
    if ways:
        why = f"no messages lead {' and '.join(ways)} it, so its offset cannot be had"
        return 0.0, math.inf, False, why
    return (above + below) / 2, abs(above - below) / 2, is_wrong, ""
