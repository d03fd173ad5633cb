"""Local search over deals: moves between two replicas, of all pairs of all steps in one batch.

All microbatches of a step stand in one sequence, replica behind replica. A slow replica and a
faster one are a part of it, and swaps and insertions there are those of the search for an order:
some move members within a replica, others between the two.
"""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.display import ResultList, short_repr
from pipejax.base.trees import leaves, mapped
from pipejax.costs.costs import (
    FIELDS,
    PHASE_FIELDS,
    Costs,
    differs_by_microbatch,
    unchecked_costs,
)
from pipejax.costs.stage.microbatches import in_order, map_microbatches
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import TIMED
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import Found
from pipejax.search.orders.local_search import LocalSearch
from pipejax.search.orders.permutations import (
    BATCH,
    EXHAUSTIVE,
    PATIENCE,
    SHAKES,
    Orders,
    alone,
    batched_makespans,
    neighbours,
    order_bound,
    packed_bound,
    with_least,
)

Members = Int[NumpyArray, "steps replicas microbatches"]
Replicas = Int[NumpyArray, "steps groups replicas"]
Values = Float[NumpyArray, " steps"]
Steps = Int[NumpyArray, " steps"]

RANDOM = 64  # random deals that the result is compared with
RUNS = 1 << 14  # pipelines in a batch of the engine
MAX_COSTS = 1 << 24  # of the costs of a batch
MAX_NUMBERS = 1 << 20  # of the orders that are tried at once
MOST_MEMBERS = 12  # microbatches up to which every deal is tried, where replicas have few orders
SLOW = 0.25  # of the replicas that exchange microbatches with others
OTHER = 0.1  # what the faster of two replicas counts beside the slower


class StepCosts(NamedTuple):
    """Costs of many steps, whose microbatches are numbered through all of them."""

    # (members, ...) fields that differ by microbatch, of those that the program reads
    by_member: dict[str, NumpyArray]
    by_step: dict[str, NumpyArray]  # (steps, ...) or (1, ...) all others
    step_members: int  # members of a step

    @classmethod
    def stack(cls, step_costs: list[Costs], program: Program, step_members: int) -> "StepCosts":
        """Stack costs of one shape; the shortest microbatch of each step follows its own ones."""
        phases = {*program.layout.phases, *program.layout.paired_phases}
        unread = {PHASE_FIELDS[phase.name] for phase in TIMED if phase not in phases}
        by_member, by_step = {}, {}
        extended = [vars(with_least(costs)) for costs in step_costs]
        for name in FIELDS:
            leaves = [leaves[name] for leaves in extended]
            if leaves[0] is None:
                continue
            if not differs_by_microbatch(name, leaves[0]):
                alike = all(np.array_equal(leaf, leaves[0]) for leaf in leaves)
                by_step[name] = np.stack(leaves[:1] if alike else leaves)
            elif name not in unread:
                whole = np.concatenate(leaves, axis=-1)
                by_member[name] = np.ascontiguousarray(np.moveaxis(whole, -1, 0))
        return cls(by_member, by_step, step_members)

    def step_index(self, orders: Orders) -> Int[NumpyArray, " orders"]:
        """Return the step of each order."""
        return orders[:, 0] // self.step_members

    def order_costs(self, orders: Orders) -> Costs:
        """Costs of orders, for `makespans`."""
        steps = self.step_index(orders)
        leaves = {
            name: time[steps] if len(time) > 1 else time for name, time in self.by_step.items()
        }
        for name, time in self.by_member.items():
            leaves[name] = np.moveaxis(time[orders], 1, -1)
        return unchecked_costs(leaves)


@short_repr
class Deal(NamedTuple):
    """Assignment of microbatches to replicas.

    Attributes:
      order: (replicas, microbatches) which of all given microbatches is microbatch k of replica r.
      costs: what the table is to be priced with then, a batch of replicas for `makespans`.
    """

    order: Orders
    costs: Costs


class DealSearch(LocalSearch[list[Deal]]):
    """State of the search for deals; the value is the mean over the steps."""

    # Members are numbered through all steps. Behind those of each step stands one more, which takes
    # the least of every time.

    values: Values  # makespan of the slowest replica in the best deal of each step so far [s]
    bounds: Values  # no deal of a step is faster [s]
    best: Members  # best deal of each step so far

    def __init__(
        self, table: ScheduleTable, step_costs: list[Costs], replicas: int, links: Links, seed: int
    ) -> None:
        super().__init__(seed)
        size = table.num_microbatches
        self._step_costs, self._shape = step_costs, (len(step_costs), replicas, size)
        exact = [mapped(lambda leaf: np.asarray(leaf, np.float64), costs) for costs in step_costs]
        first_replica = map_microbatches(lambda time: time[..., :size], exact[0])
        self.program, _ = lower_and_price(table, first_replica, links)
        self._costs = StepCosts.stack(exact, self.program, replicas * size + 1)
        self._first = np.arange(len(step_costs))[:, None, None] * (replicas * size + 1)
        largest = MAX_COSTS // sum(np.size(leaf) for leaf in leaves(first_replica))
        runs = 1 << (len(step_costs) * replicas * RANDOM).bit_length()
        self.batch = max(1, min(RUNS, runs, largest))
        self._runs, self._rested = np.zeros((2, len(step_costs)), int)
        work = np.stack([_work(costs, table.num_stages, replicas * size) for costs in exact])
        self._begin(_longest_first(work, self._shape))
        lonely = np.stack([alone(int(n), replicas * size, size) for n in work.argmax(axis=1)])
        proven = [self.times(self._first + lonely).min(axis=1)]
        for bound in (order_bound, packed_bound):
            proven.append(np.array([bound(table, costs, links, replicas) for costs in exact]))
        self.bounds = np.max(proven, axis=0)
        self._note()

    def _begin(self, greedy: Members) -> None:
        """Evaluate the baselines, and start from the best of each step."""
        steps, replicas, size = self._shape
        members = np.tile(np.arange(replicas * size), (steps, 1))
        random = self.rng.permuted(np.tile(members, (RANDOM, 1, 1)), axis=2)
        fixed = [
            members.reshape(self._shape),
            members.reshape(steps, size, replicas).swapaxes(1, 2),
            greedy,
        ]
        orders = self._first + np.concatenate([fixed, random.reshape(RANDOM, *self._shape)])
        times = self.times(orders)
        self._order, self._times = orders[2].copy(), times[2].copy()
        every_step = np.arange(steps)
        each_alone = np.tile(np.arange(replicas)[:, None], (steps, 1, 1))
        for _ in range(size):
            if not self._improve(every_step, each_alone).any():
                break
        orders = np.concatenate([orders, self._order[None]])
        times = np.concatenate([times, self._times[None]])
        slowest = times.max(axis=2)
        chosen = slowest.argmin(axis=0), every_step
        self._order, self._times = orders[chosen], times[chosen]
        self.best, self.values = self._order.copy(), slowest[chosen]
        names = ("given", "round robin", "greedy")
        self._baselines = dict(zip(names, slowest, strict=False)) | {
            "greedy with order": slowest[-1],
            "best of random": slowest[len(names) : -1].min(axis=0),
        }
        self.baselines = {name: float(values.mean()) for name, values in self._baselines.items()}

    def times(self, orders: Int[NumpyArray, "*some microbatches"]) -> Float[NumpyArray, "*some"]:
        """Evaluate replicas (*some) [s], in batches of one size: that compiles once."""
        size = orders.shape[-1]
        flat = orders.reshape(-1, size)
        whole = np.resize(flat, (-(-len(flat) // self.batch) * self.batch, size))
        makespans = batched_makespans(self.program, self._costs.order_costs, whole, self.batch)
        self._runs += np.bincount(self._costs.step_index(flat), minlength=len(self._runs))
        return makespans[: len(flat)].reshape(orders.shape[:-1])

    def step(self, iteration: int) -> None:
        """Improve all pairs of replicas once; or try all deals, where they are few."""
        steps = np.flatnonzero(~self._are_optimal())
        if self._are_few():
            self._try_all(steps)
        else:
            if len(rested := steps[self._rested[steps] >= PATIENCE]):
                self._shake(rested)
            changed = self._improve(steps, self._pairs(steps))
            self._rested[steps] = np.where(changed, 0, self._rested[steps] + 1)
        self._note()

    def _are_optimal(self) -> Bool[NumpyArray, " steps"]:
        """Return whether the bound of each step is reached (steps)."""
        return self.values <= self.bounds * (1 + self.precision)

    def _is_optimal(self) -> bool:
        return bool(self._are_optimal().all())

    def _note(self) -> None:
        slowest = self._times.max(axis=1)
        better = slowest < self.values
        self.best[better], self.values[better] = self._order[better], slowest[better]
        self.value, self.lower_bound = float(self.values.mean()), float(self.bounds.mean())

    def _pairs(self, steps: Steps) -> Replicas:
        """Pair each of the slowest replicas with a random other one."""
        ranked = np.argsort(-self._times[steps], axis=1, kind="stable")
        slow = math.ceil(ranked.shape[1] * SLOW)
        others = self.rng.permuted(ranked[:, slow:], axis=1)[:, :slow]
        return np.stack([ranked[:, :slow], others], axis=2)

    def _improve(self, steps: Steps, groups: Replicas) -> Bool[NumpyArray, " steps"]:
        """Make the best move within each group of replicas, if any is better than none."""
        # A move is better where the slower replica is, and of those where the faster is. Returns
        # (steps) whether any was made.
        at = steps[:, None, None], groups
        members = self._order[at]
        moves = self._moves(groups.shape)
        # most moves change one replica alone, and many leave the same in it: each runs once
        size = members.shape[-1]
        rows, which = np.unique(moves.reshape(-1, size), axis=0, return_inverse=True)
        pool = members.reshape(*groups.shape[:2], -1)
        times = self.times(pool[..., rows])[..., which.reshape(moves.shape[:2])]
        rank = times.max(axis=3) + OTHER * times.sum(axis=3)
        chosen = rank.argmin(axis=2)  # the first, which changes nothing, of equals
        members_order = moves[chosen].reshape(pool.shape)
        self._order[at] = np.take_along_axis(pool, members_order, axis=2).reshape(members.shape)
        self._times[at] = np.take_along_axis(times, chosen[..., None, None], axis=2)[:, :, 0]
        return (chosen > 0).any(axis=1)

    def _moves(self, groups: tuple[int, ...]) -> Int[NumpyArray, "moves replicas microbatches"]:
        """Return the empty move, then swaps and insertions in a group, up to the batch limit."""
        shape = groups[2], self._shape[2]
        length = math.prod(shape)
        places = np.indices((length, length)).reshape(2, -1)
        if places.shape[1] > 2 * BATCH:
            places = self.rng.integers(0, length, (2, 2 * BATCH))
        proposals = neighbours(np.arange(length), *places)
        max_moves = max(1, MAX_NUMBERS // (math.prod(groups[:2]) * length))
        proposals = proposals[self.rng.permutation(len(proposals))[:max_moves]]
        return np.concatenate([np.arange(length)[None], proposals]).reshape(-1, *shape)

    def _shake(self, steps: Steps) -> None:
        """Continue from the best deals of some steps, with some members swapped at random."""
        for step in steps.tolist():
            order = self.best[step].flatten()
            for _ in range(SHAKES):
                pair = self.rng.choice(len(order), 2, replace=False)
                order[pair] = order[pair[::-1]]
            self._order[step] = order.reshape(self._shape[1:])
        self._times[steps] = self.times(self._order[steps])
        self._rested[steps] = 0

    def _are_few(self) -> bool:
        """Return whether there are few enough deals to try all."""
        _, replicas, size = self._shape
        members = replicas * size
        return members <= MOST_MEMBERS and math.perm(members, size) <= EXHAUSTIVE

    def _try_all(self, steps: Steps) -> None:
        """Find the best deals of some steps, from the best order of every set of microbatches."""
        _, replicas, size = self._shape
        orders = np.array([*itertools.permutations(range(replicas * size), size)])
        masks = (1 << orders).sum(axis=1)
        times = self.times(self._first[steps] + orders)
        for step, seconds in zip(steps.tolist(), times, strict=True):
            ranked = np.lexsort((seconds, masks))
            by_set = ranked[np.unique(masks[ranked], return_index=True)[1]]
            chosen = by_set[_fastest_sets(masks[by_set], seconds[by_set], replicas * size)]
            self._order[step] = self._first[step] + orders[chosen]
            self._times[step] = seconds[chosen]
        self.bounds[steps] = self._times[steps].max(axis=1)

    def best_so_far(self) -> tuple[list[Deal], float]:
        """Return the best deal of each step so far, and the mean of their values [s]."""
        orders = self.best - self._first
        pairs = zip(self._step_costs, orders, strict=True)
        return [Deal(order, in_order(costs, order)) for costs, order in pairs], self.value

    def split_by_step(self, total: Found[list[Deal]]) -> list[Found[Deal]]:
        """Split the result of all steps into one per step."""
        is_optimal = self._are_optimal()
        return ResultList(
            Found(
                best,
                float(self.values[step]),
                float(self.bounds[step]),
                {name: float(values[step]) for name, values in self._baselines.items()},
                int(self._runs[step]),
                "optimal" if is_optimal[step] else total.stopped,
            )
            for step, best in enumerate(total.best)
        )


def _work(costs: Costs, stages: int, members: int) -> Float[NumpyArray, " members"]:
    """Return the compute time of each microbatch on the busiest stage [s]."""
    times = (np.asarray(time) for time in (costs.forward, costs.backward))
    whole = (time if time.ndim == 2 else time[..., None] for time in times)
    stage_times = np.sum([np.broadcast_to(time, (stages, members)) for time in whole], axis=0)
    return stage_times[stage_times.sum(axis=1).argmax()]


def _longest_first(
    work: Float[NumpyArray, "steps members"], shape: tuple[int, int, int]
) -> Members:
    """Give the longest next to the replica with the least work that has room."""
    steps, replicas, size = shape
    every_step = np.arange(steps)
    order = np.zeros(shape, int)
    load, count = np.zeros((steps, replicas)), np.zeros((steps, replicas), int)
    for member in np.argsort(-work, axis=1, kind="stable").T:
        to = np.where(count < size, load, np.inf).argmin(axis=1)
        order[every_step, to, count[every_step, to]] = member
        load[every_step, to] += work[every_step, member]
        count[every_step, to] += 1
    return order


def _fastest_sets(
    masks: Int[NumpyArray, " sets"], times: Float[NumpyArray, " sets"], members: int
) -> list[int]:
    """Choose sets that hold each member once, of which the slowest is fastest."""
    # A set is a number whose bits are its members.
    holding: list[list[tuple[int, float, int]]] = [[] for _ in range(members)]
    for row, (mask, time) in enumerate(zip(masks.tolist(), times.tolist(), strict=True)):
        holding[(mask & -mask).bit_length() - 1].append((mask, time, row))

    @functools.cache
    def best(remaining: int) -> tuple[float, tuple[int, ...]]:
        if not remaining:
            return 0.0, ()
        fastest: tuple[float, tuple[int, ...]] = (math.inf, ())
        for mask, time, row in holding[(remaining & -remaining).bit_length() - 1]:
            if not mask & ~remaining:
                slowest, others = best(remaining & ~mask)
                fastest = min(fastest, (max(time, slowest), (row, *others)))
        return fastest

    return [*best((1 << members) - 1)[1]]
