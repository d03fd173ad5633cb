"""What stages hand to each other, as slices of a trace: who makes it, and who takes it.

Whatever table ran: only names, stages and microbatches of slices count.
"""

from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.traces.record import Trace

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
        made, taken = (np.flatnonzero(trace.is_of(names) & is_of_some) for names in (make, take))
        behind = place[made] + move * microbatches
        _, first, second = np.intersect1d(behind, place[taken], return_indices=True)
        pairs.append((made[first], taken[second]))
    made, taken = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return made, taken
