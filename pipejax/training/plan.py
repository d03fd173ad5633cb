"""What a table says about training: which weights every gradient reads, moves, and when.

All stages of a microbatch use the weights that its forwards read (weight stashing), so the
backwards of a microbatch compute the gradient of one mixed model, which has of every stage the
version that its forward saw. A plan lists the microbatches in an order in which every version is
there when it is read; versions of a stage are kept in a ring, version v at place v mod depth.
"""

import dataclasses

import numpy as np

from pipejax.analysis.runs.staleness import SAME_MOMENT, op_times
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.schedules.cells.dependencies import find_versions
from pipejax.schedules.cells.ops import COMPUTING
from pipejax.schedules.table.sharding import on_lane
from pipejax.schedules.table.table import ScheduleTable, check_usual

NO_SAMPLE = -1


@dataclasses.dataclass(frozen=True)
class ReplayPlan:
    """Gradients and samples in the order in which they are computed."""

    microbatch: Int[NumpyArray, " events"]  # of the gradient, or before the sample
    run: Int[NumpyArray, " events"]  # run that it belongs to
    read: Int[NumpyArray, "events stages"]  # version that the gradient reads
    newest: Int[NumpyArray, "events stages"]  # newest version of the run before the gradient
    applies: Bool[NumpyArray, "events stages"]  # the update that follows applies what was collected
    collected: Int[NumpyArray, "events stages"]  # gradients that it applies together
    averages: Bool[NumpyArray, " events"]  # runs are averaged before it
    sample: Int[NumpyArray, " events"]  # taken instead of a gradient, or `NO_SAMPLE`
    sampled: Int[NumpyArray, "samples runs stages"]  # versions at the time of each sample
    time: Float[NumpyArray, " samples"]  # time of each sample
    update: Int[NumpyArray, " samples"]  # block updates that have been done by then, over all runs
    runs: int  # R
    depth: int  # versions to keep


def make_plan(
    table: ScheduleTable,
    finish: Float[NumpyArray, "workers slots"],
    time: Float[NumpyArray, " samples"],
) -> ReplayPlan:
    """Read the plan off a table and the times of its ops."""
    if not table.updates_within:
        raise ValueError(f"{table.name} does not update weights within the table: no U cell")
    check_usual(on_lane(table, COMPUTING), "training")  # wherever weights are gathered
    if table.num_pipes > 1:
        raise ValueError(f"{table.name} has {table.num_pipes} pipes, each with its own weights")
    order, gradients = _gradients(table)
    close = SAME_MOMENT * float(finish.max())
    first_end = finish.ravel()[find_versions(table).update_cell].min(axis=0)[order]
    begun = first_end[None] <= time[:, None] + close
    needed = np.where(begun.any(axis=1), begun.shape[1] - begun[:, ::-1].argmax(axis=1), 0)
    seen = [
        [np.searchsorted(of_stage, time + close, side="right") for of_stage in of_run]
        for of_run in _update_ends(table, finish)
    ]
    sampled = np.moveaxis(np.array(seen), -1, 0)
    mine = gradients["run"][None] == np.arange(table.weights.runs)[:, None]
    made = np.cumsum(gradients["applies"][None] * mine[..., None], axis=1)
    made = np.concatenate([np.zeros_like(made[:, :1]), made], axis=1)[:, needed]
    back = max(
        int((gradients["newest"] + gradients["applies"] - gradients["read"]).max()),
        int((np.moveaxis(made, 1, 0) - sampled).max()),
    )
    place = np.concatenate([2 * np.arange(len(order)) + 1, 2 * needed])
    merged = np.argsort(place, kind="stable")
    merged = merged[: np.flatnonzero(merged >= len(order))[-1] + 1]
    source = np.append(np.arange(len(order)), np.maximum(needed - 1, 0))[merged]
    events = {name: values[source] for name, values in gradients.items()}
    is_sample = merged >= len(order)
    events["averages"] &= ~is_sample
    return ReplayPlan(
        **events,
        sample=np.where(is_sample, merged - len(order), NO_SAMPLE),
        sampled=sampled,
        time=time,
        update=sampled.sum(axis=(1, 2)),
        runs=table.weights.runs,
        depth=1 << back.bit_length(),  # few different depths: each is compiled anew
    )


def _gradients(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, " microbatches"], dict[str, NumpyArray]]:
    """Microbatches in the order in which their gradients can be computed, and what these do."""
    found, rule = find_versions(table), table.weights
    _, finish = op_times(table)
    first = finish.ravel()[table.last_of_backward].min(axis=0)
    order = np.argsort(first, kind="stable")
    run, applied = order % rule.runs, found.applied[:, order].T
    key = applied * rule.runs + run[:, None]
    size = np.stack([np.bincount(column)[column] for column in key.T], axis=1)
    rank = np.empty_like(key)
    for stage, column in enumerate(key.T):
        by_key = np.argsort(column, kind="stable")
        same = np.append(0, np.cumsum(np.diff(column[by_key]) != 0))
        rank[by_key, stage] = np.arange(len(by_key)) - np.searchsorted(same, same)
    for own in range(rule.runs):
        if np.any(np.diff(applied[run == own], axis=0) < 0):
            raise ValueError(
                f"{table.name} updates the microbatches of run {own} in another order on one stage "
                "than on another: it cannot be replayed microbatch by microbatch"
            )
    rounds = order // rule.round_size
    averages = np.append(False, rounds[1:] != rounds[:-1]) & (rule.runs > 1)
    applies = rank == size - 1
    _check_averages(table, run, applies, averages)
    return order, {
        "microbatch": order,
        "run": run,
        "read": found.read[:, order].T,
        "newest": applied,
        "applies": applies,
        "collected": size,
        "averages": averages,
    }


def _check_averages(
    table: ScheduleTable, run: NumpyArray, applies: NumpyArray, averages: NumpyArray
) -> None:
    """All runs must stand at one version of each stage when they are averaged."""
    before = np.flatnonzero(averages) - 1
    made = [
        np.cumsum(applies * (run == own)[:, None], axis=0)[before]
        for own in range(table.weights.runs)
    ]
    if any(np.any(counts != made[0]) for counts in made):
        raise ValueError(f"{table.name} averages runs that do not have equal numbers of updates")


def _update_ends(
    table: ScheduleTable, finish: Float[NumpyArray, "workers slots"]
) -> list[list[Float[NumpyArray, " updates"]]]:
    """Ends of the updates by run and stage, in row order."""
    cell = table.updates
    key = table.microbatch.ravel()[cell] % table.weights.runs * table.num_stages
    key += table.stage.ravel()[cell]
    order = np.argsort(key, kind="stable")
    bounds = np.searchsorted(key[order], np.arange(table.weights.runs * table.num_stages + 1))
    ends = finish.ravel()[cell[order]]
    return [
        [
            ends[bounds[r * table.num_stages + s] : bounds[r * table.num_stages + s + 1]]
            for s in range(table.num_stages)
        ]
        for r in range(table.weights.runs)
    ]
