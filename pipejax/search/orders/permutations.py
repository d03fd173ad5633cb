"""Local search over permutations: swaps and insertions, all neighbours of one in one batch.

What is permuted, and what that costs, is said by who searches: microbatches that differ, or workers
on a machine. Where there are few permutations that differ, all of them are tried.
"""

import abc
import itertools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.progress import OnProgress, to_nobody
from pipejax.costs.costs import Costs
from pipejax.engine.batched.makespans import makespans
from pipejax.engine.lowering.program import Program

Order = Int[NumpyArray, " members"]
Orders = Int[NumpyArray, "orders members"]
Places = Int[NumpyArray, " pairs"]

EXHAUSTIVE = 50_000  # different orders up to which all are evaluated
BATCH = 2048  # most orders in a batch
PATIENCE = 4  # batches without a better order, from which the search goes on elsewhere
SHAKES = 3  # swaps at random that lead there
PRECISION = 1e-12  # relative, by which a makespan is above its bound when both are equal


class PermutationSearch(abc.ABC):
    """State of a search: current and best order.

    Attributes:
      program: what runs under every order.
      kind: (members) orders whose members are of the same kinds are alike.
      batch: most orders that the engine runs at once.
      bound: no order is faster [s].
      evaluated: orders that the engine ran.
      best: fastest order so far.
      makespan: of that [s].
    """

    program: Program
    kind: Order
    batch: int
    bound: float
    best: Order
    makespan: float

    def __init__(self, seed: int) -> None:
        """Start the clock."""
        self._begun = time.monotonic()
        self._rng = np.random.default_rng(seed)
        self._stale = self.evaluated = 0

    @abc.abstractmethod
    def costs_of(self, orders: Orders) -> Costs:
        """Costs of orders, for `makespans`."""

    def start_from(self, orders: Orders) -> Float[NumpyArray, " orders"]:
        """Begin at the best of some orders, the first of equals: (orders) their makespans [s]."""
        times = self.times(orders)
        first = int(times.argmin())
        self.best = self.current = orders[first]
        self.makespan = self._current = float(times[first])
        return times

    def run(self, iterations: int, time_limit: float | None, tell: OnProgress = to_nobody) -> str:
        """Search; return why it ended. The time runs from the start of the clock."""
        deadline = np.inf if time_limit is None else self._begun + time_limit
        steps = self._every_order() if self._are_few() else self._neighbours()
        try:
            for iteration, orders in enumerate(itertools.islice(steps, iterations), 1):
                if self._is_optimal():
                    return "optimal"
                if time.monotonic() >= deadline:
                    return "time"
                self._step(orders)
                tell(iteration, iterations, f"best {self.makespan:.6g} s")
            if self._are_few() and next(steps, None) is None:  # no order is left
                self.bound = self.makespan
        except KeyboardInterrupt:
            return "interrupted"
        return "optimal" if self._is_optimal() else "iterations"

    def _is_optimal(self) -> bool:
        return self.makespan <= self.bound * (1 + PRECISION)

    def times(self, orders: Orders) -> Float[NumpyArray, " orders"]:
        """Evaluate orders: (orders) makespans [s]."""
        self.evaluated += len(orders)
        return batched_makespans(self.program, self.costs_of, orders, self.batch)

    def _step(self, orders: Orders) -> None:
        """Go to the best of some orders, or elsewhere where none has been better for a while."""
        times = self.times(orders)
        # among equals any may be taken: a plateau is crossed at random
        chosen = int(np.lexsort((self._rng.random(len(times)), times))[0])
        self._stale = 0 if times[chosen] < self._current else self._stale + 1
        self.current, self._current = orders[chosen], float(times[chosen])
        if self._current < self.makespan:
            self.best, self.makespan = self.current, self._current
        if self._stale >= PATIENCE:
            self._shake()

    def _shake(self) -> None:
        """Continue from the best order, with some members swapped at random."""
        order = self.best.copy()
        for _ in range(SHAKES):
            pair = self._rng.choice(len(order), 2, replace=False)
            order[pair] = order[pair[::-1]]
        self.current, self._current, self._stale = order, np.inf, 0

    def _neighbours(self) -> Iterator[Orders]:
        """Yield orders one swap or insertion away from the current one, again and again."""
        size = len(self.current)
        places = np.indices((size, size)).reshape(2, -1)
        while True:
            if places.shape[1] > 2 * BATCH:  # more than a batch can hold: some of them
                places = self._rng.integers(0, size, (2, 2 * BATCH))
            found = neighbours(self.current, *places)
            # what changes nothing is left out; to find all that are alike takes longer than a run
            differ = (self.kind[found] != self.kind[self.current]).any(axis=1)
            yield found[self._rng.permutation(np.flatnonzero(differ))[: self.batch]]

    def _are_few(self) -> bool:
        """Whether there are so few different orders that all can be tried."""
        return num_orders(self.kind) <= EXHAUSTIVE

    def _every_order(self) -> Iterator[Orders]:
        """Yield all different orders, batch by batch."""
        orders = different_orders(self.kind.tolist())
        while part := list(itertools.islice(orders, self.batch)):
            yield np.array(part)


def batched_makespans(
    program: Program, costs_of: Callable[[Orders], Costs], orders: Orders, batch: int
) -> Float[NumpyArray, " orders"]:
    """Makespans of orders (orders) [s]; a few sizes of batches are few compilations."""
    found = []
    for low in range(0, len(orders), batch):
        part = orders[low : low + batch]
        size = min(batch, 1 << (len(part) - 1).bit_length())
        whole = np.concatenate([part, np.tile(part[-1:], (size - len(part), 1))])
        found.append(np.asarray(makespans(program, costs_of(whole)))[: len(part)])
    return np.concatenate(found)


def neighbours(order: Order, start: Places, target: Places) -> Orders:
    """Swap two places of an order, and take a microbatch from one and insert it at the other.

    Places (pairs); returns an order for each swap and for each insertion that is none.
    """
    at, swaps = np.arange(len(order)), start < target
    low, high = start[swaps, None], target[swaps, None]
    swapped = np.where(at == low, high, np.where(at == high, low, at))
    moves = abs(start - target) > 1
    start, target = start[moves, None], target[moves, None]
    # those between the old and the new place make room by one
    came_from = at + ((start <= at) & (at < target)) - ((target < at) & (at <= start))
    return order[np.concatenate([swapped, np.where(at == target, start, came_from)])]


def num_orders(kind: Order) -> int:
    """How many orders are different."""
    _, counts = np.unique(kind, return_counts=True)
    return math.factorial(len(kind)) // math.prod(map(math.factorial, counts.tolist()))


def different_orders(kind: list[int]) -> Iterator[list[int]]:
    """Yield an order for every different sequence of kinds, in lexicographic order of these."""
    left = {k: [m for m, own in enumerate(kind) if own == k] for k in sorted({*kind})}
    order: list[int] = []

    def complete() -> Iterator[list[int]]:
        if len(order) == len(kind):
            yield [*order]
        for members in left.values():
            if members:
                order.append(members.pop(0))
                yield from complete()
                members.insert(0, order.pop())

    return complete()
