"""Local search over permutations by swaps and insertions, with all neighbours in one batch.

Subclasses define the members of an order and its costs. The members are microbatches here: a
schedule leaves open which part of the data is microbatch 0. In `places.py` they are workers. If
there are few different orders, all orders are evaluated.
"""

import abc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base import longest_path
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_local_search, check_types
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import leaves, mapped
from pipejax.base.progress import OnProgress, no_progress, telling
from pipejax.costs.costs import PHASE_FIELDS, Costs, differs_by_microbatch
from pipejax.costs.stage.microbatches import in_order, map_microbatches
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, HostRun, Program, run_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import ROW_OPS, Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.search.found import TIME_LIMIT, Best, Found, gap as gap_of


class LocalSearch(abc.ABC, Generic[Best]):
    """State of a local search, with its loop: deadline, interruption, progress and seed."""

    # A subclass provides the first candidate, neighbours and their values, and a lower bound.
    value: float  # value of the best candidate so far [s]
    lower_bound: float  # lower bound on the values of all candidates [s]
    baselines: Mapping[str, float | None]  # {name of a simple candidate: value [s]}
    precision = 1e-12  # relative rounding of values

    def __init__(self, seed: int) -> None:
        self._start_time = time.monotonic()
        self.rng = np.random.default_rng(seed)
        self.evaluated = 0
        self.stale = 0  # steps since the last improvement

    @abc.abstractmethod
    def step(self, iteration: int) -> None:
        """Evaluate neighbours of the present candidate, and move to one of the neighbours."""

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
        """Search until a limit is reached: iterations, seconds since the start, or the gap."""
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

NUM_RANDOM = 256  # number of random orders among the baselines
EXHAUSTIVE = 50_000  # if there are at most so many different orders, all are evaluated
BATCH = 2048  # largest number of orders in a batch
PATIENCE = 4  # batches without a better order before a restart
SHAKES = 3  # number of random swaps at a restart


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
        # Baselines are the named orders and, if `random` is "x", the "best of x" and "mean of x".
        members = np.tile(np.arange(len(self.kind)), (NUM_RANDOM, 1))
        orders = np.stack([*named.values(), *unnamed, *self.rng.permuted(members, axis=1)])
        times = self.times(orders)
        fastest = int(times.argmin())
        self.best = self.current = orders[fastest]
        self.value = self._current_time = float(times[fastest])
        self._num_tried = 0  # number of evaluated orders, if all are evaluated
        self.has_tried_all = False
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
        """Evaluate a batch of orders and move to the fastest; restart if the search is stuck."""
        if self.stale >= PATIENCE:
            self.current, self._current_time = shaken(self.best, self.rng), np.inf
            self.stale = 0
        orders = next(self._batches)
        times = self.times(orders)
        row = int(np.lexsort((self.rng.random(len(times)), times))[0])  # the fastest; ties: random
        self.stale = 0 if times[row] < self._current_time else self.stale + 1
        self.current, self._current_time = orders[row], float(times[row])
        if self._current_time < self.value:
            self.best, self.value = self.current, self._current_time
        self._num_tried += len(orders)
        if self._is_exhaustive and self._num_tried == num_orders(self.kind):
            self.lower_bound, self.has_tried_all = self.value, True

    def _neighbours(self) -> Iterator[Orders]:
        """Yield batches of orders that a swap or insertion in the present order gives."""
        size = len(self.current)
        places = np.indices((size, size)).reshape(2, -1)
        while True:
            if places.shape[1] > 2 * BATCH:  # too many for a batch: select at random
                places = self.rng.integers(0, size, (2, 2 * BATCH))
            orders = neighbours(self.current, *places)
            # drop orders equal to the present order; to find other duplicates would cost more
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
    """Return an order for each swap of two places, and for each insertion that is no swap."""
    # `start` and `target` hold all pairs of places in both directions, (0, 1) and (1, 0). From
    # a b c, a swap of 0 and 2 makes c b a, and an insertion from 0 to 2 makes b c a.
    place, is_swap = np.arange(len(order)), start < target
    low, high = start[is_swap, None], target[is_swap, None]
    swapped = np.where(place == low, high, np.where(place == high, low, place))
    is_insertion = abs(start - target) > 1
    start, target = start[is_insertion, None], target[is_insertion, None]
    # members between both places move by one place: from 0 to 2, 0 1 2 3 becomes 1 2 0 3
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
    # Members 0 1 2 have kinds 0 0 1. The sequences of kinds 0 0 1, 0 1 0 and 1 0 0 give the orders
    # 0 1 2, 0 2 1 and 2 0 1.
    unplaced: dict[int, list[int]] = {k: [] for k in sorted({*kind})}  # {kind: members}
    for member, member_kind in enumerate(kind):
        unplaced[member_kind].append(member)
    order: list[int] = []

    def complete() -> Iterator[list[int]]:
        if len(order) == len(kind):
            yield [*order]
        for members in unplaced.values():
            if members:
                order.append(members.pop(0))
                yield from complete()
                members.insert(0, order.pop())

    return complete()


def order_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int = 1) -> float:
    """Return a lower bound [s] on the makespan of the slowest replica in any order or deal."""
    # If every op takes the time of the shortest microbatches, no op starts later and no path is
    # longer. A worker takes at least the time before its first op, the work of the shortest
    # microbatches, and the time after its last op. With several replicas this bounds their mean
    # makespan, because a longest path at mean times is at most the mean of the longest paths.
    program, shortest_makespan, idle_seconds = _shortest_run(table, costs, links, replicas)
    if len(program.fused):  # a fused pair has two microbatches
        return shortest_makespan
    work = np.zeros(table.num_workers)
    for worker, count, durations in _worker_ops(table, program, costs, replicas):
        work[worker] += np.sort(durations)[: count * replicas].sum() / replicas
    return max(shortest_makespan, float((idle_seconds + work).max()))


def packed_bound(table: ScheduleTable, costs: Costs, links: Links, replicas: int) -> float:
    """Return a bin-packing lower bound on the makespan of the slowest replica in any deal [s]."""
    # One of R replicas runs at least k + 1 of the k R + 1 longest microbatches: one of 2 replicas
    # runs 2 of the 3 longest. So on each worker that replica takes at least the k + 1 shortest of
    # these, and the size - k - 1 shortest of all.
    program, shortest_makespan, idle_seconds = _shortest_run(table, costs, links, 1)
    if len(program.fused):
        return shortest_makespan
    size = table.num_microbatches
    num_members = size * replicas
    work = np.zeros((table.num_workers, num_members))
    for worker, count, durations in _worker_ops(table, program, costs, replicas):
        if count == size:  # each microbatch has such an op on this worker
            work[worker] += durations
    work = np.sort(work)  # the longest microbatch is the last
    totals = []
    for k in range(size):
        longest = work[:, num_members - k * replicas - 1 :]
        shortest = work[:, : size - k - 1]
        totals.append(longest[:, : k + 1].sum(axis=1) + shortest.sum(axis=1))
    return float((idle_seconds + np.max(totals, axis=0)).max())


def with_shortest(costs: Costs) -> Costs:
    """Append the costs of an artificial microbatch: the least of each cost."""
    return map_microbatches(
        lambda time: np.append(time, time.min(axis=-1, keepdims=True), axis=-1), costs
    )


def orders_of_longest(longest: int, shortest: int, count: int) -> Orders:
    """Return orders of microbatches: order k has the longest at place k, else the shortest."""
    # The fastest of these orders bounds the makespan of any order from below.
    orders = np.full((count, count), shortest)
    np.fill_diagonal(orders, longest)
    return orders


def _shortest_run(
    table: ScheduleTable, costs: Costs, links: Links, replicas: int
) -> tuple[Program, float, Float[NumpyArray, " workers"]]:
    """Run a table in which every op takes the mean of its `replicas` shortest times."""
    # Return the program, the makespan [s], and (workers) idle times [s]: before the first op, after
    # the last op, and in blocking sends between ops.
    shortest_costs = map_microbatches(
        lambda time: np.sort(np.asarray(time, float))[..., :replicas].mean(axis=-1), costs
    )
    program, vector = lower_and_price(table, shortest_costs, links)
    run = run_on_host(program, vector)
    tails = longest_path.times_to_end(run.preds, run.duration, run.lag)
    first_node, last_node = np.asarray(program.first_node), np.asarray(program.last_node)
    idle_seconds = run.start[first_node] + _blocked_times(program, run) + tails[last_node]
    return program, float(run.finish.max()), idle_seconds


def _blocked_times(program: Program, run: HostRun) -> Float[NumpyArray, " workers"]:
    """Return for each worker how long blocking sends of ops delay its next op [s]."""
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
    """Yield (worker, number of ops, their times by microbatch [s]) for each phase and stage."""
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


MAX_NUMBERS = 1 << 24  # numbers in the costs of a batch


@short_repr
class MicrobatchOrder(NamedTuple):
    """An order of microbatches.

    Attributes:
      order: (microbatches) order[k] is the microbatch that the table runs as its k-th.
      costs: costs of the table in this order.
    """

    order: Order
    costs: Costs


def microbatches(
    table: ScheduleTable,
    costs: Costs,
    *,
    link: str | Links = "delay",
    iterations: int = 200,
    time_limit: float | None = TIME_LIMIT,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Found[MicrobatchOrder]:
    """Search the order of microbatches that makes the step shortest.

    The table does not change; it runs microbatch `order[k]` as its k-th. If there are at most
    50,000 different orders, the search evaluates all. The result is never slower than a baseline,
    and deterministic unless the time runs out. An interrupt (Ctrl-C) ends the search with the best
    order so far.

    Args:
      table: the schedule.
      costs: unbatched costs per microbatch [s].
      link: link model, or `Links`.
      iterations: largest number of batches of orders.
      time_limit: time after which no further batch starts [s]; None for no limit.
      seed: seed of all random choices.
      on_progress: called after each batch with its number, `iterations`, and a text.

    Returns:
      The best order. If all orders were evaluated, the lower bound is its makespan. Baselines are
      the "given" order, "ascending" and "descending" times of microbatches, and the best and the
      mean of random orders ("best of random", "mean of random").

    Raises:
      ValueError: as `evaluate`; or if no cost differs by microbatch, or iterations, seed or
        time_limit is negative.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> lengths = [1.0, 1.0, 1.0, 8.0, 2.0, 1.0, 4.0, 1.0]
      >>> costs = pj.Costs(forward=1.0, backward=2.0)
      >>> costs = pj.costing.scaled_costs(costs, table, microbatches=lengths)
      >>> result = pj.search.microbatches(table, costs)
      >>> result.value, result.baselines["ascending"], result.baselines["descending"]
      (114.0, 121.0, 125.0)
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    search = MicrobatchSearch(table, costs, Links.resolve(link), seed)
    with telling("arrange", on_progress) as tell:
        return search.run(iterations, time_limit, tell)


class MicrobatchSearch(PermutationSearch[MicrobatchOrder]):
    """State of the search for an order of microbatches."""

    def __init__(self, table: ScheduleTable, costs: Costs, links: Links, seed: int) -> None:
        """Start from the best of sorted and random orders, and bound the makespan from below."""
        super().__init__(seed)
        check_usual(table, "the search of microbatches")
        costs.check_values()
        self._arguments = table, costs, links
        self._costs = mapped(lambda leaf: np.asarray(leaf, np.float64), costs)
        self.program, _ = lower_and_price(table, costs, links)
        if not costs.per_microbatch():
            raise ValueError(
                "costs do not differ by microbatch, any order is as good: give --lengths FILE or "
                "--costs FILE with a value for each stage and microbatch"
            )
        numbers = sum(np.size(leaf) for leaf in leaves(costs))
        self.batch = max(1, min(BATCH, MAX_NUMBERS // numbers))
        count = table.num_microbatches
        self.kind = _kinds(costs, count)
        descending = np.argsort(-_work(costs, count), kind="stable")
        ascending = descending[::-1]
        named = {"given": np.arange(count), "ascending": ascending, "descending": descending}
        # orders with the longest microbatches in the middle, or at both ends. Alternate members go
        # to the left and, reversed, to the right: 1 2 3 4 becomes 1 3 4 2.
        hills = [np.append(order[::2], order[1::2][::-1]) for order in (ascending, descending)]
        self.start_from(named, *hills, random="random")
        # a lower bound: all microbatches but the longest are artificial (`count`), with least costs
        extended_costs = with_shortest(self._costs)
        makespans = batched_makespans(
            self.program,
            lambda orders: in_order(extended_costs, orders),
            orders_of_longest(int(descending[0]), count, count),
            self.batch,
        )
        self.lower_bound = max(order_bound(table, costs, links), float(makespans.min()))

    def order_costs(self, orders: Orders) -> Costs:
        """Return the costs of a batch of orders."""
        return in_order(self._costs, orders)

    def best_so_far(self) -> tuple[MicrobatchOrder, float]:
        """Return the best order so far, and its makespan [s]."""
        table, costs, links = self._arguments
        ordered = in_order(costs, self.best)
        return MicrobatchOrder(self.best, ordered), evaluate(table, ordered, link=links).makespan


def _work(costs: Costs, count: int) -> Float[NumpyArray, " microbatches"]:
    """Return the mean compute time over the stages of each microbatch [s]."""
    times = (np.asarray(time, float) for time in (costs.forward, costs.backward))
    means = (time.mean(axis=0) if time.ndim == 2 else time.mean() for time in times)
    return np.broadcast_to(sum(means), count)


def _kinds(costs: Costs, count: int) -> Order:
    """Number the kinds of microbatches: microbatches of equal costs share a kind."""
    rows = [
        np.asarray(time).reshape(-1, count)
        for name, time in vars(costs).items()
        if differs_by_microbatch(name, time)
    ]
    _, kind = np.unique(np.concatenate(rows), axis=1, return_inverse=True)
    return kind.reshape(count)
