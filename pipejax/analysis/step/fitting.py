"""Smallest changes that make a workload fit: sequence parallelism, ZeRO, recomputation."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.schedules.table.table import ScheduleTable

Change = Mapping[str, Any]
# possible changes and their cost rank: free ones first, each above all before it together
DEARNESS: Mapping[tuple[str, Any], int] = {
    ("sequence_parallel", True): 0,
    ("zero", 1): 1,
    ("recompute", "selective"): 2,
    ("zero", 2): 4,
    ("recompute", "full"): 8,
    ("zero", 3): 16,
}


def fitting_change(workload: Workload, table: ScheduleTable, room: float) -> Change | None:
    """Find the smallest change of a workload that makes it fit into memory [B]."""
    for change in sorted(_changes(workload), key=_dearness):
        if memory_bytes(dataclasses.replace(workload, **change), table).max() <= room:
            return change
    return None


def _dearness(change: Change) -> tuple[int, int]:
    """Return the cost rank of a change, and its number of fields."""
    return sum(DEARNESS[entry] for entry in change.items()), len(change)


def _changes(workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield every combination of changes, but none at all."""
    shared = workload.data_parallel * workload.context_parallel > 1
    # flash attention writes no scores out that could be recomputed
    parts = workload.recompute == "none" and not workload.model.flash_attention
    values = {
        "sequence_parallel": [True]
        * (workload.tensor_parallel > 1 and not workload.sequence_parallel),
        "zero": [*range(workload.zero + 1, 4)] * shared,
        "recompute": ["selective"] * parts + ["full"] * (not workload.recomputation.layers),
    }
    for chosen in itertools.product(*([None, *options] for options in values.values())):
        change = {k: v for k, v in zip(values, chosen, strict=True) if v is not None}
        if change:
            yield change
