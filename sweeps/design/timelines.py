"""Runs of six schedules at four workers and eight microbatches, op by op, as one dataset.

All schedules do the same work: a forward of a microbatch on a worker takes 1, its backward 2, and
a message 0.2, whatever the schedule.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.analysis import bars
from pipejax.files import provenance
from pipejax.typing import Bool, NumpyArray
from sweeps.kit.cases import build
from sweeps.kit.command import write

SHOWN = ("gpipe", "1f1b", "interleaved-1f1b", "chimera", "chimera-asymmetric", "hanayo, 1 wave")
WORKERS, MICROBATCHES = 4, 8
SLOTS: Mapping[str, float] = {"F": 1, "B": 2}  # of a microbatch on a worker [s]
DELAY = 0.2  # of a message [s]
COLUMNS: Mapping[str, str] = {
    "worker": "1",
    "start": "s",
    "finish": "s",
    "phase": "1",
    "stage": "1",
    "microbatch": "1",
    "is_critical": "1",
    "part": "1",
    "is_pair": "1",
    "is_upward": "1",
}


def sweep(
    cases: Sequence[str] = SHOWN,
    *,
    microbatches: int = MICROBATCHES,
    slots: Mapping[str, float] = SLOTS,
    delay: float = DELAY,
) -> xr.Dataset:
    """Run every schedule.

    Args:
      cases: labels of schedules.
      microbatches: of each schedule.
      slots: times of a microbatch on a worker by phase; the tables are drawn with them [s].
      delay: of a message [s].

    Returns:
      The dataset, one entry along `op` for every op; `part` counts the ops of a fused pair,
      `is_upward` tells whether the forward of the op's microbatch moves from the last worker
      towards the first there. Every variable states its unit.
    """
    shown = Console(stderr=True)
    runs = {
        case: _run(build(case, WORKERS, microbatches, slots), slots, delay)
        for case in track(cases, "schedules", console=shown)
    }
    rows = [(case, *row) for case, run in runs.items() for row in _ops(run)]
    labels, *columns = zip(*rows, strict=True)
    columns_by_name = {
        name: ("op", np.array(column), {"units": unit})
        for (name, unit), column in zip(COLUMNS.items(), columns, strict=True)
    }
    whole = {
        "makespan": ("schedule", [run.makespan for run in runs.values()], {"units": "s"}),
        "bubble_ratio": ("schedule", [run.bubble_ratio for run in runs.values()], {"units": "1"}),
    }
    return xr.Dataset(
        {**columns_by_name, **whole},
        coords={"schedule": list(runs), "case": ("op", list(labels))},
        attrs={
            "title": "Schedules, op by op",
            "workers": WORKERS,
            "microbatches": microbatches,
            "forward [s]": slots["F"],
            "backward [s]": slots["B"],
            "message [s]": delay,
            "link": "delay",
            **provenance(),
        },
    )


def _run(table: pj.ScheduleTable, slots: Mapping[str, float], delay: float) -> pj.Evaluation:
    times = {"forward": float(slots["F"]), "backward": float(slots["B"])}
    return pj.evaluate(table, pj.Costs.per_worker(table, **times, latency=delay))


def _ops(run: pj.Evaluation) -> list[tuple[Any, ...]]:
    """One row per op, in the order of `COLUMNS`."""
    upward = _upward(run.table)
    return [
        (
            bar.worker,
            bar.start,
            bar.finish,
            op.phase.name,
            op.stage,
            op.microbatch,
            bar.is_critical,
            part,
            len(bar.ops) > 1,
            upward[run.table.pipe_of_microbatch[op.microbatch], op.stage],
        )
        for bar in bars(run)
        for part, op in enumerate(bar.ops)
    ]


def _upward(table: pj.ScheduleTable) -> Bool[NumpyArray, "pipes stages"]:
    """Tell where a forward goes, or if it turns or ends there has come, to a worker before."""
    hops = np.diff(table.placement, axis=1)
    leaves, comes = np.pad(hops, ((0, 0), (0, 1))), np.pad(hops, ((0, 0), (1, 0)))
    return np.where(leaves != 0, leaves, comes) == -1  # a loop leaps to where it began


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.sizes['op']} ops of all schedules")


if __name__ == "__main__":
    main()
