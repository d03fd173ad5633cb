"""Schedules whose order follows from times are planned for those of the run."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.schedules import naming
from pipejax.schedules.registry import Builder
from pipejax.schedules.table.table import ScheduleTable


def for_times(
    builder: Builder,
    size: Mapping[str, int],
    given: Mapping[str, Any],
    price: Callable[[ScheduleTable], Costs],
) -> dict[str, Any]:
    """Options of a builder with the times that its schedule is planned for, if it is planned.

    Args:
      builder: of the schedule.
      size: workers and microbatches.
      given: options that are given, which win.
      price: gives the costs of a table.
    """
    if not builder.planned or "slots" in given:
        return dict(given)
    times = times_of(price(like(builder, size, given)))
    return {k: v for k, v in times.items() if k in ("slots", *builder.options)} | dict(given)


def like(builder: Builder, size: Mapping[str, int], given: Mapping[str, Any]) -> ScheduleTable:
    """Return any table with as many stages per worker: costs depend on nothing else of it."""
    stages_per_worker = given.get("stages_per_worker", builder.stages_per_worker)
    if stages_per_worker == 1:
        return naming.build("1f1b", **size)
    return naming.build("interleaved-1f1b", **size, stages_per_worker=stages_per_worker)


def times_of(costs: Costs) -> dict[str, Any]:
    """Return what a schedule is planned for: means, but O and L of each stage.

    Args:
      costs: what the run costs [s].

    Returns:
      Options of builders: slots, transfer, offload, load.
    """

    def mean(name: str) -> float:
        values = np.asarray(0.0 if getattr(costs, name) is None else getattr(costs, name), float)
        return float(values.mean()) if values.size else 0.0

    def by_stage(time: Any) -> Any:
        values = np.asarray(0.0 if time is None else time, float)
        return (values.mean(axis=1) if values.ndim == 2 else values).tolist()

    host = {"offload": costs.offload, "load": costs.load}
    return {
        "slots": {letter: mean(PHASE_FIELDS[letter]) for letter in "FBIW"},
        "transfer": mean("latency") + mean("transmit"),
        **{name: by_stage(time) for name, time in host.items()},
    }
