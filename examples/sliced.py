r"""Schedules whose microbatches go through the pipe in slices of their sequences.

Slice k of a microbatch attends to all before it, so forwards go from the first slice to the last
and backwards from the last to the first. A slice is the K-th part of a microbatch: what is idle at
both ends of a step shrinks with it. Seq1F1B is Sun et al. (arXiv:2406.03488), TeraPipe is Li et al.
(arXiv:2102.07988).

    pipejax evaluate -s examples/sliced.py:seq_1f1b -P 4 -M 8 --schedule-options slices=4 \
        --worker-times F=1,B=2
"""

from pipejax import ScheduleTable
from pipejax.schedules import Grammar


def _ops(letter, stage, numbers, slices):
    """Cells of some slices by number: slice k of microbatch m is m K + k, and written m.k."""
    return [f"{stage}{letter}{number // slices}.{number % slices}" for number in numbers]


def _back(num_microbatches, slices):
    """Slices in the order of backwards: microbatch by microbatch, the last slice first."""
    every = range(num_microbatches * slices)
    return sorted(every, key=lambda number: (number // slices, -number))


def seq_1f1b(num_workers, num_microbatches, slices=2):
    """1F1B of slices: worker r holds at most P - r - 1 + K slices, 1F1B (P - r) K."""
    rows = []
    for r in range(num_workers):
        forwards = _ops("F", r, range(num_microbatches * slices), slices)
        backwards = _ops("B", r, _back(num_microbatches, slices), slices)
        # the first backward is of the last slice of the first microbatch: K - 1 forwards more
        warmup = min(num_workers - r - 1 + slices - 1, len(forwards))
        in_turn = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
        rows.append(forwards[:warmup] + in_turn + backwards[len(forwards) - warmup :])
    return ScheduleTable.from_rows(rows, name="seq-1f1b", grammar=Grammar(slices=slices))


def terapipe(num_workers, num_microbatches, slices=2):
    """GPipe of slices: all forwards, then all backwards; holds every microbatch."""
    rows = [
        _ops("F", r, range(num_microbatches * slices), slices)
        + _ops("B", r, _back(num_microbatches, slices), slices)
        for r in range(num_workers)
    ]
    return ScheduleTable.from_rows(rows, name="terapipe", grammar=Grammar(slices=slices))
