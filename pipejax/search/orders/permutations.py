"""Local search over permutations by swaps and insertions, all neighbours in one batch.

Subclasses define the members of an order, such as microbatches or workers, and their costs. If
there are few different orders, all of them are tried.
"""

import abc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.progress import OnProgress, no_progress
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.costs.stage.microbatches import map_microbatches
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, HostRun, Program, run_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import ROW_OPS, Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import Best, Found, gap as gap_of


class LocalSearch(abc.ABC, Generic[Best]):
    """State of a local search, with its loop: deadline, interruption, progress and seed."""

    # A subclass provides the start, the neighbours of a candidate, their values, and a lower bound.

    value: float  # of the best candidate so far [s]
    lower_bound: float  # on the value of every candidate [s]
    baselines: Mapping[str, float | None]  # values of simple candidates by name [s]
    precision = 1e-12  # relative rounding of values

    def __init__(self, seed: int) -> None:
        self._start_time = time.monotonic()
        self.rng = np.random.default_rng(seed)
        self.evaluated = 0
        self.stale = 0  # steps since the last improvement

    @abc.abstractmethod
    def step(self, iteration: int) -> None:
        """Evaluate neighbours of the present candidate, and continue from one of them."""

    @abc.abstractmethod
    def best_so_far(self) -> tuple[Best, float]:
        """Return the best candidate, and its value as `evaluate` computes it [s]."""

    def run(
        self,
        iterations: int,
        time_limit: float | None = None,
        tell: OnProgress = no_progress,
        gap: float = 0.0,
    ) -> Found[Best]:
        """Search until one limit is reached: iterations, seconds since the start, or the gap."""
        deadline = np.inf if time_limit is None else self._start_time + time_limit
        try:
            for iteration in range(1, iterations + 1):
                if self._is_optimal() or gap_of(self.value, self.lower_bound) <= gap:
                    break
                if time.monotonic() >= deadline:
                    return self.result("time")
                self.step(iteration)
                tell(iteration, iterations, f"best {self.value:.6g} s")
        except KeyboardInterrupt:
            return self.result("interrupted")
        if self._is_optimal():
            return self.result("optimal")
        is_close = gap_of(self.value, self.lower_bound) <= gap
        return self.result("gap" if is_close else "iterations")

    def result(self, stopped: str) -> Found[Best]:
        """Return the result of the search so far."""
        best, value = self.best_so_far()
        return Found(best, value, self.lower_bound, self.baselines, self.evaluated, stopped)

    def _is_optimal(self) -> bool:
        return self.value <= self.lower_bound * (1 + self.precision)


Order = Int[NumpyArray, " members"]
Orders = Int[NumpyArray, "orders members"]
Places = Int[NumpyArray, " pairs"]

NUM_RANDOM = 256  # random orders that the result is compared with
EXHAUSTIVE = 50_000  # different orders up to which all are evaluated
BATCH = 2048  # largest number of orders in a batch
PATIENCE = 4  # batches without a better order before a restart
SHAKES = 3  # random swaps of a restart


class PermutationSearch(LocalSearch[Best]):
    """Local search over orders of members; members of equal kind are interchangeable."""

    program: Program
    kind: Order  # kind of each member
    batch: int  # largest number of orders that the engine runs at once
    best: Order  # fastest order so far
    current: Order  # order whose neighbours are tried next

    @abc.abstractmethod
    def order_costs(self, orders: Orders) -> Costs:
        """Return a batch of costs for `makespans`, one entry per order."""

    def start_from(self, named: Mapping[str, Order], *unnamed: Order, random: str) -> None:
        """Start from the fastest of the passed orders and of random orders; set the baselines."""
        # Baselines are the named orders, and with random "x" the "best of x" and the "mean of x".
        members = np.tile(np.arange(len(self.kind)), (NUM_RANDOM, 1))
        orders = np.stack([*named.values(), *unnamed, *self.rng.permuted(members, axis=1)])
        times = self.times(orders)
        fastest = int(times.argmin())
        self.best = self.current = orders[fastest]
        self.value = self._current_time = float(times[fastest])
        self._num_tried = 0  # orders so far, if all are tried
        self._is_exhaustive = num_orders(self.kind) <= EXHAUSTIVE
        self._batches = self._all_orders() if self._is_exhaustive else self._neighbours()
        random_times = times[-NUM_RANDOM:]
        self.baselines = dict(zip(named, times.tolist(), strict=False)) | {
            f"best of {random}": float(random_times.min()),
            f"mean of {random}": float(random_times.mean()),
        }

    def times(self, orders: Orders) -> Float[NumpyArray, " orders"]:
        """Return the makespan of each order [s]."""
        self.evaluated += len(orders)
        return batched_makespans(self.program, self.order_costs, orders, self.batch)

    def step(self, iteration: int) -> None:
        """Move to the best neighbour, or try the next orders of all; restart if that is stuck."""
        if self.stale >= PATIENCE:
            self.current, self._current_time = shaken(self.best, self.rng), np.inf
            self.stale = 0
        orders = next(self._batches)
        times = self.times(orders)
        row = int(np.lexsort((self.rng.random(len(times)), times))[0])  # the least, ties at random
        self.stale = 0 if times[row] < self._current_time else self.stale + 1
        self.current, self._current_time = orders[row], float(times[row])
        if self._current_time < self.value:
            self.best, self.value = self.current, self._current_time
        self._num_tried += len(orders)
        if self._is_exhaustive and self._num_tried == num_orders(self.kind):
            self.lower_bound = self.value

    def _neighbours(self) -> Iterator[Orders]:
        """Yield endless batches of orders, a swap or insertion away from the present order."""
        size = len(self.current)
        places = np.indices((size, size)).reshape(2, -1)
        while True:
            if places.shape[1] > 2 * BATCH:  # more than a batch holds: a random selection
                places = self.rng.integers(0, size, (2, 2 * BATCH))
            orders = neighbours(self.current, *places)
            # drop orders equal to the present one; other duplicates cost less than their search
            is_new = (self.kind[orders] != self.kind[self.current]).any(axis=1)
            yield orders[self.rng.permutation(np.flatnonzero(is_new))[: self.batch]]

    def _all_orders(self) -> Iterator[Orders]:
        orders = different_orders(self.kind.tolist())
        while batch := list(itertools.islice(orders, self.batch)):
            yield np.array(batch)


def shaken(order: Order, rng: np.random.Generator) -> Order:
    """Return an order with some random swaps, for a restart of a search."""
    order = order.copy()
    for _ in range(SHAKES):
        pair = rng.choice(len(order), 2, replace=False)
        order[pair] = order[pair[::-1]]
    return order


def batched_makespans(
    program: Program, order_costs: Callable[[Orders], Costs], orders: Orders, batch: int
) -> Float[NumpyArray, " orders"]:
    """Return the makespan of each order [s]."""
    # Batches are padded to powers of two by repetition, so the engine compiles few sizes.
    from pipejax.engine.batched.makespans import makespans  # searches are set up without JAX

    results = []
    for begin in range(0, len(orders), batch):
        rows = orders[begin : begin + batch]
        size = min(batch, 1 << (len(rows) - 1).bit_length())
        padded = np.concatenate([rows, np.tile(rows[-1:], (size - len(rows), 1))])
        times = makespans(program, order_costs(padded), batch_size=size)
        results.append(np.asarray(times)[: len(rows)])
    return np.concatenate(results)


def neighbours(order: Order, start: Places, target: Places) -> Orders:
    """Return an order for each swap of two places, and for each insertion that is not a swap."""
    # `start` and `target` hold all pairs of places, in both directions: (0, 1) and (1, 0). From
    # a b c, a swap makes c b a, and an insertion from 0 to 2 makes b c a.
    place, is_swap = np.arange(len(order)), start < target
    low, high = start[is_swap, None], target[is_swap, None]
    swapped = np.where(place == low, high, np.where(place == high, low, place))
    is_insertion = abs(start - target) > 1
    start, target = start[is_insertion, None], target[is_insertion, None]
    # members between both places move by one: from 0 to 2, 0 1 2 3 becomes 1 2 0 3
    moves_down = (start <= place) & (place < target)
    moves_up = (target < place) & (place <= start)
    inserted = np.where(place == target, start, place + moves_down - moves_up)
    return order[np.concatenate([swapped, inserted])]


def num_orders(kind: Order) -> int:
    """Count the different orders, if members of one kind are interchangeable."""
    _, counts = np.unique(kind, return_counts=True)
    return math.factorial(len(kind)) // math.prod(map(math.factorial, counts.tolist()))


def different_orders(kind: list[int]) -> Iterator[list[int]]:
    """Yield one order for every different sequence of kinds, in lexicographic order of kinds."""
    # kinds 0 0 1 of members 0 1 2: the sequences 0 0 1, 0 1 0, 1 0 0 are orders 0 1 2, 0 2 1, 2 0 1
    unplaced: dict[int, list[int]] = {k: [] for k in sorted({*kind})}  # members by kind
    for member, member_kind in enumerate(kind):
        unplaced[member_kind].append(member)
    order: list[int] = []

    def complete() -> Iterator[list[int]]:
        """Yield all completions of the prefix in `order`."""
        if len(order) == len(kind):
            yield [*order]
        for members in unplaced.values():
            if members:
                order.append(members.pop(0))
                yield from complete()
                members.insert(0, order.pop())

    return complete()


def order_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int = 1) -> float:
    """Return a lower bound [s] on the makespan in any order, or of any deal's slowest replica."""
    # A run with the shortest times has no later starts and no longer paths. Between its first start
    # and the path after its last op, each worker has at least the work of the shortest
    # microbatches. For several replicas this bounds the mean over them, because a longest path of
    # mean times is at most the mean of longest paths.
    program, shortest_makespan, seconds_around = _shortest_run(table, costs, links, replicas)
    if len(program.fused):  # a pair is of two microbatches
        return shortest_makespan
    work = np.zeros(table.num_workers)
    for worker, count, durations in _worker_ops(table, program, costs, replicas):
        work[worker] += np.sort(durations)[: count * replicas].sum() / replicas
    return max(shortest_makespan, float((seconds_around + work).max()))


def packed_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int) -> float:
    """Return a bin-packing lower bound on the makespan of the slowest replica in any deal [s]."""
    # Of the k R + 1 longest microbatches on a worker, some replica of R gets at least k + 1: of the
    # 3 longest, one of 2 replicas gets 2. Its others take at least as long as the shortest ones.
    program, shortest_makespan, seconds_around = _shortest_run(table, costs, links, 1)
    if len(program.fused):
        return shortest_makespan
    size = table.num_microbatches
    num_members = size * replicas
    work = np.zeros((table.num_workers, num_members))
    for worker, count, durations in _worker_ops(table, program, costs, replicas):
        if count == size:  # each microbatch has such an op here
            work[worker] += durations
    work = np.sort(work)  # the longest microbatch is the last
    totals = []
    for k in range(size):
        longest = work[:, num_members - k * replicas - 1 :]
        totals.append(longest[:, : k + 1].sum(axis=1) + work[:, : size - k - 1].sum(axis=1))
    return float((seconds_around + np.max(totals, axis=0)).max())


def with_shortest(costs: Costs) -> Costs:
    """Append the costs of an artificial microbatch, each the least over all microbatches."""
    return map_microbatches(
        lambda time: np.append(time, time.min(axis=-1, keepdims=True), axis=-1), costs
    )


def orders_of_longest(longest: int, shortest: int, count: int) -> Orders:
    """Return an order per place of the longest microbatch; the other places have the shortest."""
    # The fastest of them bounds the makespan of any order from below.
    orders = np.full((count, count), shortest)
    np.fill_diagonal(orders, longest)
    return orders


def _shortest_run(
    table: ScheduleTable, costs: Costs, links: Links, replicas: int
) -> tuple[Program, float, Float[NumpyArray, " workers"]]:
    """Run a table in which every op takes the mean of its `replicas` shortest times."""
    # Return the program, the makespan [s], and per worker the sum [s] of the times before its first
    # op, of blocking sends between its ops, and after its last op.
    shortest_costs = map_microbatches(
        lambda time: np.sort(np.asarray(time, float))[..., :replicas].mean(axis=-1), costs
    )
    program, vector = lower_and_price(table, shortest_costs, links)
    run = run_on_host(program, vector)
    tails = longest_path.times_to_end(run.preds, run.duration, run.lag)
    first_node, last_node = np.asarray(program.first_node), np.asarray(program.last_node)
    seconds_around = run.start[first_node] + _blocked_times(program, run) + tails[last_node]
    return program, float(run.finish.max()), seconds_around


def _blocked_times(program: Program, run: HostRun) -> Float[NumpyArray, " workers"]:
    """Return per worker the total time [s] for which blocking sends of an op delay its next op."""
    # nodes are in the order of execution; a blocking send is a predecessor of its sender's next op
    producer = np.full(program.num_nodes, SOURCE)
    producer[program.messages.carrier] = program.messages.producer
    blocked = np.zeros(program.num_workers)
    for worker in range(program.num_workers):
        op_nodes = np.flatnonzero(_on_workers(program) & (program.worker == worker))
        preds = run.preds[op_nodes[1:]]
        is_message = (preds != SOURCE) & (producer[preds] == op_nodes[:-1, None])
        times = np.where(is_message, run.duration[preds], 0.0)
        blocked[worker] = times.max(axis=1, initial=0.0).sum()
    return blocked


def _worker_ops(
    table: ScheduleTable, program: Program, costs: Costs, replicas: int
) -> Iterator[tuple[int, int, Float[NumpyArray, " members"]]]:
    """Yield, by phase and stage, a worker, its number of ops, and their times by microbatch [s]."""
    shape = table.num_stages, table.num_microbatches * replicas
    ops = (program.worker, program.phase, program.stage, program.pipe)
    kinds, counts = np.unique(np.stack(ops)[:, _on_workers(program)], axis=1, return_counts=True)
    for (worker, phase, stage, _), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
        times = np.asarray(getattr(costs, PHASE_FIELDS[Phase(phase).name]), float)
        if times.ndim < 2:  # equal for all members
            times = times[..., None]
        yield worker, count, np.broadcast_to(times, shape)[stage]


def _on_workers(program: Program) -> Bool[NumpyArray, " nodes"]:
    return (np.asarray(program.worker) != NO_WORKER) & np.isin(program.phase, ROW_OPS)
