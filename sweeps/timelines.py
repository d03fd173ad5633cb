"""Runs of six schedules at four workers and eight microbatches, op by op, as one dataset.

All schedules do the same work: a forward of a microbatch on a worker takes 1, its backward 2, and
a message 0.2, whatever the schedule.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.analysis.evaluate import Evaluation
from pipejax.analysis.timeline import bars
from pipejax.base.provenance import provenance
from sweeps.cases import build
from sweeps.command import write

SHOWN = ("gpipe", "1f1b", "interleaved-1f1b", "chimera", "chimera-asymmetric", "hanayo, 1 wave")
WORKERS, MICROBATCHES = 4, 8
SLOTS = {"F": 1, "B": 2}
TIMES = {"forward": 1.0, "backward": 2.0}  # of a microbatch on a worker [s]
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
}


def sweep(microbatches: int = MICROBATCHES) -> xr.Dataset:
    """Run every schedule.

    Args:
      microbatches: of each schedule.

    Returns:
      The dataset, one entry along `op` for every op; `part` counts the ops of a fused pair. Every
      variable states its unit.
    """
    shown = Console(stderr=True)
    runs = {case: _run(case, microbatches) for case in track(SHOWN, "schedules", console=shown)}
    rows = [(case, *row) for case, run in runs.items() for row in _ops(run)]
    labels, *columns = zip(*rows, strict=True)
    found = {
        name: ("op", np.array(column), {"units": unit})
        for (name, unit), column in zip(COLUMNS.items(), columns, strict=True)
    }
    whole = {
        "makespan": ("schedule", [run.makespan for run in runs.values()], {"units": "s"}),
        "bubble_ratio": ("schedule", [run.bubble_ratio for run in runs.values()], {"units": "1"}),
    }
    return xr.Dataset(
        {**found, **whole},
        coords={"schedule": list(runs), "case": ("op", list(labels))},
        attrs={
            "title": "Six schedules, op by op",
            "workers": WORKERS,
            "microbatches": microbatches,
            "forward [s]": TIMES["forward"],
            "backward [s]": TIMES["backward"],
            "message [s]": DELAY,
            "link": "delay",
            **provenance(),
        },
    )


def _run(case: str, microbatches: int) -> Evaluation:
    table = build(case, WORKERS, microbatches, SLOTS)
    return pj.evaluate(table, pj.Costs.per_worker(table, **TIMES, latency=DELAY))


def _ops(run: Evaluation) -> list[tuple[Any, ...]]:
    """One row per op, in the order of `COLUMNS`."""
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
        )
        for bar in bars(run)
        for part, op in enumerate(bar.ops)
    ]


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.sizes['op']} ops of all schedules")


if __name__ == "__main__":
    main()
