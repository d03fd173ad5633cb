"""Greedy schedules that offload activations when a memory limit asks for it.

A forward that only memory keeps from starting makes its worker run a weight gradient, or, if
there is none, sends the youngest activation to the host: the one whose backward comes last. It
returns when few backwards are left before its own, and room for its return is kept. This is the
greedy start of OptPipe (AdaOffload, arXiv:2510.05186); how far forwards run ahead and how early
activations return is varied, and the best schedule is kept. Under little memory an activation
must not return before the gradient that it waits for is on its way, and where a later stage has
room for few, those before it must not run ahead of it.
"""

import itertools
from collections.abc import Sequence

from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.heuristics.list_scheduling import NO_LIMIT, Rules, list_schedule
from pipejax.schedules.heuristics.memory_limited_pipe import LimitedPipe, Numbers, per_entry
from pipejax.schedules.heuristics.rows_from_starts import TimedOps

AHEAD = (0.0, 0.5, 1.0)  # forwards in flight beyond those of 1F1B, for each later stage
# gradients before its own, at which an activation returns: of its stage, or of the next one
DUE = ((1, False), (2, False), (0, True), (1, True))
LATEST = (0, True)
CAPS = (2, 3)  # forwards in flight on any stage, where one later on has room for few
PATIENCE: tuple[tuple[Phase, ...], ...] = ((Phase.I,), ())  # whether gaps before gradients stay


def ada_offload_starts(
    pipe: LimitedPipe,
    *,
    offload: Numbers | None = None,
    load: Numbers | None = None,
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Plan a pipe greedily under its memory limits, with offloads only where memory is short."""
    work, after = pipe.work(), range(pipe.num_stages)[::-1]
    depths = [[1 + n + int(ahead * n) for n in after] for ahead in AHEAD]
    rules = [
        Rules([depth], patience=patience, due=due, by_next=by_next, host_links=host_links)
        for depth, (due, by_next), patience in itertools.product(depths, DUE, PATIENCE)
    ]
    # on a slow link nothing may be better than a little; then no activation returns, either way
    runs = [list_schedule(work, rule) for rule in rules if (rule.due, rule.by_next) == DUE[0]]
    if offload is not None:
        there = per_entry(offload, pipe.num_stages, "offload").tolist()
        back = there if load is None else per_entry(load, pipe.num_stages, "load").tolist()
        timed = work._replace(lasts={**work.lasts, Phase.O: there, Phase.L: back})
        due, by_next = LATEST
        rules += [
            Rules(
                [[min(cap, 1 + n) for n in after]], NO_LIMIT, NO_LIMIT, p, due, by_next, host_links
            )
            for cap, p in itertools.product(CAPS, PATIENCE)
        ]
        runs += [list_schedule(timed, rule) for rule in rules]
    ops = (TimedOps.of(run.log) for run in runs if run is not None)
    return min(ops, key=lambda found: float(found.end.max()))
