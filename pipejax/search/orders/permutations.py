"""Local search over permutations: swaps and insertions, all neighbours of one in one batch.

What is permuted, and what that costs, is said by who searches: microbatches that differ, or workers
on a machine. Where there are few permutations that differ, all of them are tried.
"""

import abc
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.costs.stage.microbatches import map_microbatches
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, Program
from pipejax.engine.pricing import lower_and_price
from pipejax.engine.recurrence_host import HostRun, run_on_host
from pipejax.schedules.cells.ops import ROW_OPS, Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import Best
from pipejax.search.orders.local_search import LocalSearch

Order = Int[NumpyArray, " members"]
Orders = Int[NumpyArray, "orders members"]
Places = Int[NumpyArray, " pairs"]

EXHAUSTIVE = 50_000  # different orders up to which all are evaluated
BATCH = 2048  # most orders in a batch
PATIENCE = 4  # batches without a better order, from which the search goes on elsewhere
SHAKES = 3  # swaps at random that lead there


class PermutationSearch(LocalSearch[Best]):
    """Local search over orders."""

    program: Program  # what runs under every order
    kind: Order  # orders whose members are of the same kinds are alike
    batch: int  # most orders that the engine runs at once
    best: Order  # fastest order so far
    current: Order  # order from which the search goes on

    @abc.abstractmethod
    def order_costs(self, orders: Orders) -> Costs:
        """Costs of orders, for `makespans`."""

    def start_from(self, orders: Orders) -> Float[NumpyArray, " orders"]:
        """Begin at the best of some orders, the first of equals: (orders) their makespans [s]."""
        times = self.times(orders)
        first = int(times.argmin())
        self.best = self.current = orders[first]
        self.value = self._current = float(times[first])
        self._tried = 0  # of every order, where there are few
        return times

    def times(self, orders: Orders) -> Float[NumpyArray, " orders"]:
        """Evaluate orders: (orders) makespans [s]."""
        self.evaluated += len(orders)
        return batched_makespans(self.program, self.order_costs, orders, self.batch)

    def step(self, iteration: int) -> None:
        """Move to the best neighbour; after steps without a gain, restart near the best order."""
        if self.stale >= PATIENCE:
            self._shake()
        orders = next(self._batches)
        times = self.times(orders)
        chosen = self.choose(times)
        self.stale = 0 if times[chosen] < self._current else self.stale + 1
        self.current, self._current = orders[chosen], float(times[chosen])
        if self._current < self.value:
            self.best, self.value = self.current, self._current
        self._tried += len(orders)
        if self._are_few() and self._tried == num_orders(self.kind):
            self.lower_bound = self.value

    @functools.cached_property
    def _batches(self) -> Iterator[Orders]:
        return self._every_order() if self._are_few() else self._neighbours()

    def _shake(self) -> None:
        """Continue from the best order, with some members swapped at random."""
        order = self.best.copy()
        for _ in range(SHAKES):
            pair = self.rng.choice(len(order), 2, replace=False)
            order[pair] = order[pair[::-1]]
        self.current, self._current, self.stale = order, np.inf, 0

    def _neighbours(self) -> Iterator[Orders]:
        """Yield orders one swap or insertion away from the current one, again and again."""
        size = len(self.current)
        places = np.indices((size, size)).reshape(2, -1)
        while True:
            if places.shape[1] > 2 * BATCH:  # more than a batch can hold: some of them
                places = self.rng.integers(0, size, (2, 2 * BATCH))
            orders = neighbours(self.current, *places)
            # what changes nothing is left out; to find all that are alike takes longer than a run
            differ = (self.kind[orders] != self.kind[self.current]).any(axis=1)
            yield orders[self.rng.permutation(np.flatnonzero(differ))[: self.batch]]

    def _are_few(self) -> bool:
        """Return whether there are few enough different orders to try all."""
        return num_orders(self.kind) <= EXHAUSTIVE

    def _every_order(self) -> Iterator[Orders]:
        orders = different_orders(self.kind.tolist())
        while part := list(itertools.islice(orders, self.batch)):
            yield np.array(part)


def batched_makespans(
    program: Program, order_costs: Callable[[Orders], Costs], orders: Orders, batch: int
) -> Float[NumpyArray, " orders"]:
    """Makespans of orders (orders) [s]; a few sizes of batches are few compilations."""
    from pipejax.engine.batched.makespans import makespans  # searches are set up without JAX

    parts = []
    for low in range(0, len(orders), batch):
        part = orders[low : low + batch]
        size = min(batch, 1 << (len(part) - 1).bit_length())
        whole = np.concatenate([part, np.tile(part[-1:], (size - len(part), 1))])
        times = makespans(program, order_costs(whole), batch_size=size)
        parts.append(np.asarray(times)[: len(part)])
    return np.concatenate(parts)


def neighbours(order: Order, start: Places, target: Places) -> Orders:
    """Return orders with two places swapped, and orders with a member moved."""
    # Places (pairs); returns an order for each swap and for each insertion that is none.
    at, swaps = np.arange(len(order)), start < target
    low, high = start[swaps, None], target[swaps, None]
    swapped = np.where(at == low, high, np.where(at == high, low, at))
    moves = abs(start - target) > 1
    return np.concatenate([order[swapped], inserted(order, start[moves], target[moves])])


def inserted(order: Order, start: Places, target: Places) -> Orders:
    """Move one member of an order to another place: one order for each pair of places."""
    at = np.arange(len(order))
    start, target = start[:, None], target[:, None]
    # those between the old and the new place make room by one
    came_from = at + ((start <= at) & (at < target)) - ((target < at) & (at <= start))
    return order[np.where(at == target, start, came_from)]


def num_orders(kind: Order) -> int:
    """Return the number of different orders."""
    _, counts = np.unique(kind, return_counts=True)
    return math.factorial(len(kind)) // math.prod(map(math.factorial, counts.tolist()))


def different_orders(kind: list[int]) -> Iterator[list[int]]:
    """Yield an order for every different sequence of kinds, in lexicographic order of these."""
    remaining = {k: [m for m, other in enumerate(kind) if other == k] for k in sorted({*kind})}
    order: list[int] = []

    def complete() -> Iterator[list[int]]:
        if len(order) == len(kind):
            yield [*order]
        for members in remaining.values():
            if members:
                order.append(members.pop(0))
                yield from complete()
                members.insert(0, order.pop())

    return complete()


Workers = Float[NumpyArray, " workers"]


def order_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int = 1) -> float:
    """Lower bound on the makespan in any order, or on the slowest replica's in any deal [s]."""
    # With the times of the shortest microbatch everywhere, no op starts later and no path gets
    # longer. Between the first start of a worker there and the path after its last op, the worker
    # computes all of its ops, at least those of the shortest microbatches. For several replicas
    # this bounds the mean: each has another microbatch in every place, so the mean time of an op
    # is at least that of the shortest ones, and means of longest paths exceed paths of means.
    program, bound, around = _least_run(table, costs, links, replicas)
    if len(program.fused):  # a pair is of two microbatches
        return bound
    busy = np.zeros(table.num_workers)
    for worker, count, time in _ops_of_workers(table, program, costs, replicas):
        busy[worker] += np.sort(time)[: count * replicas].sum() / replicas
    return max(bound, float((around + busy).max()))


def packed_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int) -> float:
    """Lower bound on the slowest replica's makespan in any deal, as of packing into bins [s]."""
    # Of the k R + 1 microbatches that a worker has longest with, one of R replicas gets k + 1, and
    # others that are no shorter than the shortest of all.
    program, bound, around = _least_run(table, costs, links, 1)
    if len(program.fused):
        return bound
    size = table.num_microbatches
    num_members = size * replicas
    work = np.zeros((table.num_workers, num_members))
    for worker, count, time in _ops_of_workers(table, program, costs, replicas):
        if count == size:  # each microbatch passes here
            work[worker] += time
    work = np.sort(work)
    filled = [
        work[:, num_members - k * replicas - 1 :][:, : k + 1].sum(axis=1)
        + work[:, : size - k - 1].sum(axis=1)
        for k in range(size)
    ]
    return float((around + np.max(filled, axis=0)).max())


def with_least(costs: Costs) -> Costs:
    """Append a microbatch with the least of every time."""

    def extended(time: Any) -> Any:
        return np.concatenate([time, time.min(axis=-1, keepdims=True)], axis=-1)

    return map_microbatches(extended, costs)


def alone(longest: int, least: int, count: int) -> Orders:
    """Put the longest microbatch into each place in turn, among microbatches with least times."""
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
    least = map_microbatches(
        lambda time: np.sort(np.asarray(time, float))[..., :replicas].mean(axis=-1), costs
    )
    program, vector = lower_and_price(table, least, links)
    run = run_on_host(program, vector)
    tails = longest_path.tails(run.preds, run.duration, run.lag)
    first, last = np.asarray(program.first_node), np.asarray(program.last_node)
    around = run.start[first] + _held(program, run) + tails[last]
    return program, float(run.finish.max()), around


def _held(program: Program, run: HostRun) -> Workers:
    """Return the time (workers) that ops wait for the message of the op before them [s]."""
    producer = np.full(program.num_nodes, SOURCE)
    producer[program.messages.carrier] = program.messages.producer
    held = np.zeros(program.num_workers)
    for worker in range(program.num_workers):
        row = np.flatnonzero(_on_workers(program) & (program.worker == worker))
        waits = run.preds[row[1:]]
        is_sent = (waits != SOURCE) & (producer[waits] == row[:-1, None])
        held[worker] = np.where(is_sent, run.duration[waits], 0.0).max(axis=1, initial=0.0).sum()
    return held


def _ops_of_workers(
    table: ScheduleTable, program: Program, costs: Costs, replicas: int
) -> Iterator[tuple[int, int, Float[NumpyArray, " members"]]]:
    """Yield (worker, count, times by member [s]) of each kind of op of each worker."""
    shape = table.num_stages, table.num_microbatches * replicas
    ops = (program.worker, program.phase, program.stage, program.pipe)
    kinds, counts = np.unique(np.stack(ops)[:, _on_workers(program)], axis=1, return_counts=True)
    for (worker, phase, stage, _), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
        time = np.asarray(getattr(costs, PHASE_FIELDS[Phase(phase).name]), float)
        whole = np.broadcast_to(time if time.ndim == 2 else time[..., None], shape)
        yield worker, count, whole[stage]


def _on_workers(program: Program) -> Bool[NumpyArray, " nodes"]:
    return (np.asarray(program.worker) != NO_WORKER) & np.isin(program.phase, ROW_OPS)
