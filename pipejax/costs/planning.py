"""Schedules whose order is planned from the times of a run.

Planned times are in units of the mean F, rounded to a millionth. So costs that differ only in scale
or by rounding get the same plan.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.schedules import naming
from pipejax.schedules.builders.published import Builder
from pipejax.schedules.table.table import ScheduleTable

TOLERANCE = 1e-6  # share of the mean forward to which times of a plan are rounded
MIN_SLOT = 100  # shortest slot, in tolerances, so that sums of floats stay distinct
LETTERS = "FBIW"  # phases of ops whose times are slots
BY_STAGE = ("offload", "load")  # builders take these stage by stage
Options = Mapping[str, Any]


def build_for_run(
    builder: Builder, size: Options, options: Options, price: Callable[[ScheduleTable], Costs]
) -> ScheduleTable:
    """Build a schedule; if its order is planned, plan it with the costs of the run."""
    return builder.function(**size, **for_times(builder, size, options, price))


def for_times(
    builder: Builder, size: Options, options: Options, price: Callable[[ScheduleTable], Costs]
) -> dict[str, Any]:
    """Return a builder's options, with slots and other times if it plans the order from them."""
    # `size` has the numbers of workers and microbatches; `price` returns the costs [s] of a table.
    if not is_planned(builder, options):
        return dict(options)
    costs = price(similar_table(builder, size, options))
    # a batch of one configuration, so `plans` yields one pair of its indices and its options
    batch = {name: np.asarray(leaf)[None] for name, leaf in vars(costs).items() if leaf is not None}
    ((_, planned_options),) = plans(builder, options, batch)
    return planned_options


def is_planned(builder: Builder, options: Options) -> bool:
    """Return whether a builder plans the order of ops from the times of a run."""
    return builder.planned and "slots" not in options


def plans(
    builder: Builder, options: Options, costs: Mapping[str, Any]
) -> Iterator[tuple[Int[NumpyArray, " rows"], dict[str, Any]]]:
    """Group a batch of costs by plan, an order of ops; yield (indices, builder arguments)."""
    # The first axis of all costs is the batch of configurations. Configurations with equal mean
    # times, in units of the mean F, get the same plan: F 1 B 2 and F 2 B 4. `options` override
    # times from costs.
    batch_size = max(len(leaf) for leaf in costs.values())

    def mean(name: str) -> Float[NumpyArray, "batch entries"]:
        """Return a cost's mean over stages; for offload and load, the cost of each stage."""
        leaf = np.asarray(costs.get(name, np.zeros(1)), float)
        if not leaf.size:
            return np.zeros((batch_size, 1))
        entries = leaf.shape[1] if name in BY_STAGE and leaf.ndim > 1 else 1
        means = leaf.reshape(len(leaf), entries, -1).mean(axis=2)
        return np.broadcast_to(means, (batch_size, entries))

    times = {letter: mean(PHASE_FIELDS[letter]) for letter in LETTERS}
    times["transfer"] = mean("latency") + mean("transmit")
    times |= {name: mean(name) for name in BY_STAGE}
    # (batch, times): F, B, I and W first, then transfer, offload and load
    rounded = _in_forwards(np.hstack([*times.values()]))
    ends = np.cumsum([time.shape[1] for time in times.values()])  # end of each time's entries
    distinct_rows, row_indices = np.unique(rounded, axis=0, return_inverse=True)
    for index, row in enumerate(distinct_rows):
        plan_times: dict[str, Any] = {}
        for name, entries in zip(times, np.split(row, ends[:-1]), strict=True):
            is_per_stage = name in BY_STAGE and np.ndim(costs.get(name, 0.0)) > 1
            plan_times[name] = entries.tolist() if is_per_stage else entries.item()
        plan_times["slots"] = {letter: plan_times[letter] for letter in LETTERS}
        names = [name for name in ("slots", *builder.options) if name in plan_times]
        arguments = {name: plan_times[name] for name in names}
        yield np.flatnonzero(row_indices.ravel() == index), arguments | dict(options)


def _in_forwards(times: Float[NumpyArray, "batch times"]) -> Float[NumpyArray, "batch times"]:
    """Divide times by the mean forward (column 0), and round them to the tolerance."""
    # without forwards, the unit is the longest time; F, B, I and W are at least MIN_SLOT tolerances
    forward = times[:, :1]
    unit = np.where(forward > 0, forward, times.max(axis=1, keepdims=True))
    num_tolerances = np.round(times / np.where(unit > 0, unit, 1.0) / TOLERANCE)
    num_ops = len(LETTERS)
    num_tolerances[:, :num_ops] = np.maximum(num_tolerances[:, :num_ops], MIN_SLOT)
    return num_tolerances / round(1 / TOLERANCE)


def similar_table(builder: Builder, size: Options, options: Options) -> ScheduleTable:
    """Build a 1F1B table that has the same stages, and so the same costs, as a builder's tables."""
    stages_per_worker = options.get("stages_per_worker", builder.stages_per_worker)
    if stages_per_worker == 1:
        return naming.build("1f1b", **size)
    return naming.build("interleaved-1f1b", **size, stages_per_worker=stages_per_worker)
