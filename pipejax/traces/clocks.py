"""Offsets between the clocks of workers, and a trace on one clock.

The lead of a clock is the time by which it is ahead of another clock. No op starts before its input
is sent. So messages in one direction bound the lead from above, and messages in the other direction
bound it from below. The estimate is the middle of both bounds, as in NTP.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr
from pipejax.traces.record import NONE, OP_INPUTS, LeftOut, Trace, transfers

_BOUND_QUANTILE = 0.25  # quantile over steps; this share of the steps may have wrong times
_CLOCK_ERROR = 5e-5  # rounding of the clocks of one machine, and of times in 32 bits [s]


@short_repr
class Offset(NamedTuple):
    """Lead of a worker's clock over most other clocks of its replica.

    Attributes:
      replica: replica of the worker.
      worker: rank in the pipeline.
      step: step of this offset; -1 for all steps.
      seconds: estimate [s]; 0 without an estimate.
      residual: largest possible error of the estimate [s]; infinite without an estimate.
      is_corrected: whether the trace was corrected by this offset.
      why: reason why there is no estimate; empty if there is one.
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
    """Put the workers of each replica on the clock of one worker, which agrees with most others.

    No op may start before the end of its inputs. Messages in both directions bound the offset of
    two clocks. Bounds over several workers add up. In each step the quickest message counts. Over
    steps the lower quartile of these counts, because a single time may be wrong.

    Args:
      trace: a measured run.
      always: whether to correct all clocks; otherwise only clocks by which a message would arrive
        before it was sent.
      by_step: whether every step has offsets of its own, because the clock of each rank restarts in
        each step; default: as the trace states.

    Returns:
      The trace on one clock, and the offsets. A clock that cannot be corrected stays as it is, and
      `left_out` names it.

    Example:
      >>> import dataclasses, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> trace = pj.traces.record_runs([pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))])
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
    ends = transfers(trace, OP_INPUTS)
    for step in trace.steps if by_step else [NONE]:
        for replica in trace.replicas:
            on_replica = trace.replica == replica
            if by_step:
                on_replica &= trace.step == step
            workers = np.unique(trace.worker[on_replica])
            bounds = _lead_bounds(trace, workers, *(slices[on_replica[ends[0]]] for slices in ends))
            solutions = _solve_offsets(bounds, always=always)
            for worker, solution in zip(workers.tolist(), solutions, strict=True):
                offsets.append(Offset(replica, worker, step, *solution))
                if offsets[-1].is_corrected:
                    shift[on_replica & (trace.worker == worker)] = offsets[-1].seconds
    start, end = trace.start - shift, trace.end - shift
    left_out = (*trace.left_out, *_dropped_clocks(offsets))
    return dataclasses.replace(trace, start=start, end=end, left_out=left_out), offsets


def _dropped_clocks(offsets: Sequence[Offset]) -> Iterator[LeftOut]:
    """Yield an entry for each reason why clocks have no offset, with their workers."""
    for why in sorted({offset.why for offset in offsets if offset.why}):
        group = [offset for offset in offsets if offset.why == why]
        workers = ", ".join(map(str, sorted({offset.worker for offset in group})))
        yield LeftOut(f"clock of worker {workers}", why, len(group))


def _lead_bounds(
    trace: Trace,
    workers: Int[NumpyArray, " workers"],
    sources: Int[NumpyArray, " transfers"],
    targets: Int[NumpyArray, " transfers"],
) -> Float[NumpyArray, "workers workers"]:
    """Return (a, b) the largest possible lead of clock b over clock a [s]; inf without messages."""
    size = len(workers)
    upper = np.full((size, size), math.inf)
    sender, receiver = (np.searchsorted(workers, trace.worker[ends]) for ends in (sources, targets))
    pair, step = sender * size + receiver, trace.step[sources]
    seconds = trace.start[targets] - trace.end[sources]  # an op sends when it ends
    order = np.lexsort([seconds, step, pair])
    pair, step, seconds = pair[order], step[order], seconds[order]
    # sorted by pair, step, seconds: the first row of each pair and step is its quickest message
    is_quickest = (np.diff(pair, prepend=NONE) != 0) | (np.diff(step, prepend=NONE) != 0)
    pair, seconds = pair[is_quickest], seconds[is_quickest]
    for number in np.unique(pair):
        pair_seconds = np.sort(seconds[pair == number])
        last = len(pair_seconds) - 1
        upper.flat[number] = pair_seconds[max(int(_BOUND_QUANTILE * last), min(1, last))]
    np.fill_diagonal(upper, 0.0)  # a worker has one clock
    return upper


def _solve_offsets(
    bounds: Float[NumpyArray, "workers workers"], *, always: bool
) -> list[tuple[float, float, bool, str]]:
    """Return (offset [s], error [s], whether to correct, why there is no offset) of each clock."""
    # `bounds[a, b]` is the largest lead of clock b over clock a [s]. With `always`, all clocks but
    # the reference are corrected, otherwise only clocks that contradict most other clocks.
    size = len(bounds)
    for middle in range(size):  # Floyd-Warshall: bounds over several workers add up
        bounds = np.minimum(bounds, bounds[:, middle, None] + bounds[None, middle])
        np.fill_diagonal(bounds, 0.0)  # otherwise contradictory bounds fall without end
    is_contradiction = (bounds < -_CLOCK_ERROR) | (bounds.T < -_CLOCK_ERROR)
    agrees = np.ones(size, bool)
    # drop the clock with the most contradictions until none is left; at a tie the last worker
    while (counts := (is_contradiction & agrees & agrees[:, None]).sum(axis=1)).any():
        agrees[size - 1 - counts[::-1].argmax()] = False  # the last of the largest counts
    reference = int(agrees.argmax())
    upper, lower = bounds[reference].copy(), -bounds[:, reference]
    is_bounded = np.isfinite(upper) & np.isfinite(lower)
    stays = np.arange(size) == reference if always else agrees
    is_wrong, references = is_bounded & ~stays, np.flatnonzero(is_bounded & stays)
    offset = np.zeros(size)
    for worker in np.flatnonzero(is_wrong):  # a corrected clock is a reference for later clocks
        upper[worker] = (offset[references] + bounds[references, worker]).min()
        lower[worker] = (offset[references] - bounds[worker, references]).max()
        offset[worker] = (upper[worker] + lower[worker]) / 2
        references = np.append(references, worker)
    solutions = []
    for high, low, wrong in zip(upper.tolist(), lower.tolist(), is_wrong.tolist(), strict=True):
        ways = [way for way, bound in (("to", high), ("from", low)) if not math.isfinite(bound)]
        if ways:
            why = f"no messages lead {' and '.join(ways)} its worker, so its offset is unknown"
            solutions.append((0.0, math.inf, False, why))
        else:
            solutions.append(((high + low) / 2, abs(high - low) / 2, wrong, ""))
    return solutions
