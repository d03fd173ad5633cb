"""Lower bounds of makespans in any order of microbatches, and in any deal of them to replicas."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.costs.stage.microbatches import of_each_microbatch
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, Program
from pipejax.engine.pricing import lower_and_price
from pipejax.engine.recurrence_host import HostRun, run_on_host
from pipejax.schedules.cells.ops import ROW_OPS, Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.orders.permutations import Orders

Workers = Float[NumpyArray, " workers"]


def order_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int = 1) -> float:
    """Lower bound on the makespan in any order, or on the slowest replica's in any deal [s]."""
    # With every time the least of all microbatches, no op starts later and no path gets longer. And
    # behind the start of a worker's first op there, and before what follows its last, the worker
    # computes all of its ops: of each stage as many as it has, those of the shortest microbatches.
    # Of several replicas the bound is one on the mean: each has another microbatch in every place,
    # so the mean time of an op there is at least that of so many shortest, and the longest path
    # through means is no longer than the mean of longest paths.
    program, found, around = _least_run(table, costs, links, replicas)
    if len(program.fused):  # a pair is of two microbatches
        return found
    busy = np.zeros(table.num_workers)
    for worker, count, time in _ops_of_workers(table, program, costs, replicas):
        busy[worker] += np.sort(time)[: count * replicas].sum() / replicas
    return max(found, float((around + busy).max()))


def packed_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int) -> float:
    """Lower bound on the slowest replica's makespan in any deal, as of packing into bins [s]."""
    # Of the k R + 1 microbatches that a worker has longest with, one of R replicas gets k + 1, and
    # others that are no shorter than the shortest of all.
    program, found, around = _least_run(table, costs, links, 1)
    if len(program.fused):
        return found
    size = table.num_microbatches
    every = size * replicas
    work = np.zeros((table.num_workers, every))
    for worker, count, time in _ops_of_workers(table, program, costs, replicas):
        if count == size:  # each microbatch passes here
            work[worker] += time
    work = np.sort(work)
    filled = [
        work[:, every - k * replicas - 1 :][:, : k + 1].sum(axis=1)
        + work[:, : size - k - 1].sum(axis=1)
        for k in range(size)
    ]
    return float((around + np.max(filled, axis=0)).max())


def with_least(costs: Costs) -> Costs:
    """Add a microbatch behind the others that takes the least of every time."""

    def extended(time: Any) -> Any:
        return np.concatenate([time, time.min(axis=-1, keepdims=True)], axis=-1)

    return of_each_microbatch(extended, costs)


def alone(longest: int, least: int, count: int) -> Orders:
    """Put the longest microbatch into each place by itself, among so many of the least."""
    # Whatever the others are, no order with it there is faster.
    orders = np.full((count, count), least)
    np.fill_diagonal(orders, longest)
    return orders


def _least_run(
    table: ScheduleTable, costs: Costs, links: Links, replicas: int
) -> tuple[Program, float, Workers]:
    """Run where every time is the mean of as many least ones as there are replicas."""
    # Returns the program, the makespan, and (workers) what stands before, between and behind the
    # ops of each worker there [s].
    least = of_each_microbatch(
        lambda time: np.sort(np.asarray(time, float))[..., :replicas].mean(axis=-1), costs
    )
    program, vector = lower_and_price(table, least, links)
    run = run_on_host(program, vector)
    tails = longest_path.tails(run.preds, run.duration, run.lag)
    first, last = np.asarray(program.first_node), np.asarray(program.last_node)
    around = run.start[first] + _held(program, run) + tails[last]
    return program, float(run.finish.max()), around


def _held(program: Program, run: HostRun) -> Workers:
    """Time (workers) for which an op waits until what the op before it sends is transmitted [s]."""
    producer = np.full(program.num_nodes, SOURCE)
    producer[program.messages.carrier] = program.messages.producer
    found = np.zeros(program.num_workers)
    for worker in range(program.num_workers):
        row = np.flatnonzero(_on_workers(program) & (program.worker == worker))
        waits = run.preds[row[1:]]
        own = (waits != SOURCE) & (producer[waits] == row[:-1, None])
        found[worker] = np.where(own, run.duration[waits], 0.0).max(axis=1, initial=0.0).sum()
    return found


def _ops_of_workers(
    table: ScheduleTable, program: Program, costs: Costs, replicas: int
) -> Iterator[tuple[int, int, Float[NumpyArray, " members"]]]:
    """Yield each kind of op of each worker: the worker, how many of it, (members) its times [s]."""
    shape = table.num_stages, table.num_microbatches * replicas
    ops = (program.worker, program.phase, program.stage, program.pipe)
    kinds, counts = np.unique(np.stack(ops)[:, _on_workers(program)], axis=1, return_counts=True)
    for (worker, phase, stage, _), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
        time = np.asarray(getattr(costs, PHASE_FIELDS[Phase(phase).name]), float)
        whole = np.broadcast_to(time if time.ndim == 2 else time[..., None], shape)
        yield worker, count, whole[stage]


def _on_workers(program: Program) -> Bool[NumpyArray, " nodes"]:
    """Which nodes are ops of rows."""
    return (np.asarray(program.worker) != NO_WORKER) & np.isin(program.phase, ROW_OPS)
