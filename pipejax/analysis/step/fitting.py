"""Smallest changes that make a workload fit: sequence parallelism, ZeRO, recomputation."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pipejax.costs.model.launchers import launcher_lacks
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.schedules.table.table import ScheduleTable

Change = Mapping[str, Any]
# possible changes and their cost rank: each is above the sum of all before it
COST_RANKS: Mapping[tuple[str, Any], int] = {
    ("sequence_parallel", True): 0,
    ("zero", 1): 1,
    ("recompute", "selective"): 2,
    ("zero", 2): 4,
    ("recompute", "full"): 8,
    ("zero", 3): 16,
}


def fitting_change(
    workload: Workload, table: ScheduleTable, room: float, launcher: str | None = None
) -> Change | None:
    """Find the smallest change, that a launcher runs, with which a workload fits memory [B]."""
    for change in sorted(_changes(workload), key=_cost_rank):
        changed = dataclasses.replace(workload, **change)
        lacks = launcher is not None and launcher_lacks(launcher, changed, table)
        if not lacks and memory_bytes(changed, table).max() <= room:
            return change
    return None


def _cost_rank(change: Change) -> tuple[int, int]:
    """Return the cost rank of a change, and its number of fields."""
    return sum(COST_RANKS[entry] for entry in change.items()), len(change)


def _changes(workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield every combination of possible changes, as fields of the workload, but not none."""
    values: dict[str, list[Any]] = {name: [None] for name, _ in COST_RANKS}
    if workload.tensor_parallel > 1 and not workload.sequence_parallel:
        values["sequence_parallel"].append(True)
    if workload.data_parallel * workload.context_parallel > 1:
        values["zero"].extend(range(workload.zero + 1, 4))
    # flash attention writes no scores out that could be recomputed
    if workload.recompute == "none" and not workload.model.flash_attention:
        values["recompute"].append("selective")
    if not workload.recomputation.layers:
        values["recompute"].append("full")
    for choice in itertools.product(*values.values()):
        change = {k: v for k, v in zip(values, choice, strict=True) if v is not None}
        if change:
            yield change
