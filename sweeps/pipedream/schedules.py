"""Schedules that update weights within the table, op by op: naive, PipeDream, LocalSGD.

Four stages, eight microbatches, every forward and backward takes one slot, messages and updates
nothing, as in the timelines of arXiv 2606.03498. PipeDream is there twice: a stage holds S - s
microbatches at most, or only the first stage is limited.
"""

import numpy as np
import xarray as xr

import pipejax as pj
from sweeps.design import timelines
from sweeps.kit.cases import ASYNCHRONOUS, build
from sweeps.kit.command import write

SLOTS = {"F": 1, "B": 1}
LONG = 160  # microbatches of the runs whose delays are counted


def sweep() -> xr.Dataset:
    """Run every schedule.

    Returns:
      The dataset of `sweeps.design.timelines.sweep` without updates, which take no time; in_flight
      and weight_versions (schedule, stage), each at its peak; max_delay (schedule) of the steady
      state of a long run [block updates].
    """
    data = timelines.sweep(tuple(ASYNCHRONOUS), slots=SLOTS, delay=0.0)
    runs = [build(case, timelines.WORKERS, timelines.MICROBATCHES, SLOTS) for case in ASYNCHRONOUS]
    long = [pj.staleness(build(case, timelines.WORKERS, LONG, SLOTS)) for case in ASYNCHRONOUS]
    costs = pj.Costs(forward=1.0, backward=1.0)
    in_flight = [np.asarray(pj.evaluate(table, costs).peak_in_flight) for table in runs]
    per_stage = ("schedule", "stage_number")
    return data.isel(op=np.flatnonzero(data.phase != "U")).assign(
        in_flight=(per_stage, np.stack(in_flight).astype(int), {"units": "microbatches"}),
        weight_versions=(per_stage, np.stack([staleness.weight_versions for staleness in long])),
        max_delay=(
            "schedule",
            [staleness.max_delay for staleness in long],
            {"units": "block updates"},
        ),
    )


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.sizes['schedule']} schedules")


if __name__ == "__main__":
    main()
