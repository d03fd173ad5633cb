"""Search for a deal: an assignment of a step's microbatches to replicas, with an order in each.

Replicas wait for the slowest one, so the search makes the slowest replica fast. The microbatches of
a slow and of a faster replica form one sequence. Swaps and insertions in this sequence change the
order in a replica, or exchange microbatches between both replicas. All steps are searched at once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, check_local_search, check_types, whole_number
from pipejax.base.display import ResultList, short_repr
from pipejax.base.jax_on_demand import leaves, mapped
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import FIELDS, Costs, differs_by_microbatch, unchecked_costs
from pipejax.costs.stage.microbatches import in_order, map_microbatches
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.orders.permutations import (
    BATCH,
    PATIENCE,
    LocalSearch,
    Orders,
    batched_makespans,
    neighbours,
    order_bound,
    orders_of_longest,
    packed_bound,
    shaken,
    with_shortest,
)

Members = Int[NumpyArray, "steps replicas microbatches"]
Replicas = Int[NumpyArray, "steps groups replicas"]
Values = Float[NumpyArray, " steps"]
Steps = Int[NumpyArray, " steps"]

NUM_RANDOM = 64  # random deals among the baselines
MAX_RUNS = 1 << 14  # pipelines in a batch of the engine
MAX_COSTS = 1 << 24  # numbers in the costs of a batch
MAX_NUMBERS = 1 << 20  # numbers in the orders of one round
SLOW_SHARE = 0.25  # share of the replicas that count as slow, and exchange microbatches
FASTER_WEIGHT = 0.1  # weight of a faster replica's makespan in the rank of a move


class StepCosts(NamedTuple):
    """Costs of many steps; a member is a microbatch, numbered over all steps."""

    by_member: dict[str, NumpyArray]  # {field that differs by microbatch: (members, ...)}
    by_step: dict[str, NumpyArray]  # {other field: (steps, ...), or (1, ...) if all steps agree}
    step_members: int  # number of members of a step

    @classmethod
    def stack(cls, step_costs: list[Costs], step_members: int) -> "StepCosts":
        """Stack the costs of steps, each with an artificial microbatch of least costs."""
        # Lower bounds use the artificial microbatch. Example: 4 real and one artificial microbatch
        # per step. Then step 0 has the members 0 to 4, and step 1 the members 5 to 9.
        by_member, by_step = {}, {}  # {field: (members, ...) or (steps, ...) times [s]}
        fields_by_step = [vars(with_shortest(costs)) for costs in step_costs]
        for name in FIELDS:
            times = [fields[name] for fields in fields_by_step]
            if times[0] is None:
                continue
            if not differs_by_microbatch(name, times[0]):
                are_equal = all(np.array_equal(time, times[0]) for time in times)
                by_step[name] = np.stack(times[:1] if are_equal else times)
            else:
                all_times = np.concatenate(times, axis=-1)
                by_member[name] = np.ascontiguousarray(np.moveaxis(all_times, -1, 0))
        return cls(by_member, by_step, step_members)

    def step_index(self, orders: Orders) -> Int[NumpyArray, " orders"]:
        """Return the index of the step that each order belongs to."""
        return orders[:, 0] // self.step_members

    def order_costs(self, orders: Orders) -> Costs:
        """Return a batch of costs for `makespans`, with one entry per order of microbatches."""
        steps = self.step_index(orders)
        by_step = self.by_step.items()  # one entry if the costs of all steps are equal
        fields = {name: time[steps] if len(time) > 1 else time for name, time in by_step}
        for name, time in self.by_member.items():
            fields[name] = np.moveaxis(time[orders], 1, -1)
        return unchecked_costs(fields)


@short_repr
class Deal(NamedTuple):
    """Assignment of microbatches to replicas.

    Attributes:
      order: (replicas, microbatches) order[r, k] is the k-th microbatch that replica r runs.
      costs: costs of the table in this order, a batch of replicas for `makespans`.
    """

    order: Orders
    costs: Costs


def deals(
    table: ScheduleTable,
    costs_by_step: Sequence[Costs],
    *,
    replicas: int,
    link: str | Links = "delay",
    iterations: int = 60,
    time_limit: float | None = TIME_LIMIT,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> list[Found[Deal]]:
    """Assign the microbatches of steps to replicas so that each step's slowest replica is fast.

    Every replica runs the same table with its own microbatches in its own order. All steps are
    searched in one batch. A result is never slower than its baselines, and deterministic unless
    the time runs out. An interrupt (Ctrl-C) ends the search with the best deals so far.

    Args:
      table: the schedule of each replica, M microbatches.
      costs_by_step: unbatched costs of each step, with equal shapes in all steps. Times [s] have a
        last axis of the N = replicas x M microbatches of the step: (stages, N) for an op, four axes
        for a message.
      replicas: number of pipelines that share a step, 2 or more.
      link: link model, or `Links`, of each replica.
      iterations: largest number of rounds. In a round, pairs of replicas exchange microbatches in
        every step that is not yet optimal.
      time_limit: time for all steps after which no further round starts [s]; None for no limit.
      seed: seed of all random choices.
      on_progress: called after each round with its number, `iterations`, and a text with the mean
        makespan over the steps.

    Returns:
      The best deal of each step. Its value is the makespan of the slowest replica [s], and
      `evaluated` is the number of runs of a replica. The lower bound is the largest of three
      bounds: the evenly divided work of a worker between the shortest paths to and from it; the
      longest microbatches, some of which must share a replica; and the longest microbatch among
      microbatches of least costs. Baselines are "given" (consecutive blocks), "round robin",
      "greedy" (the longest first, to the replica with the least work), "greedy with order" (greedy
      with locally optimal orders), and "best of random".

    Raises:
      ValueError: as `evaluate`; or if there are no steps, the costs of two steps have different
        shapes, costs are not of N microbatches, no cost differs by microbatch, replicas is below 2
        (`pj.search.microbatches` orders one replica), or iterations, seed or time_limit is
        negative.

    Cost:
      A round tries all swaps and insertions of every pair of replicas; if these need over a million
      numbers, a part of them. 32 replicas of 8 microbatches on 2 stages take a second, most of it
      to compile; 16 replicas of 32 microbatches on 8 stages take 20 seconds.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> steps = np.array(([[3.0, 3.0, 1.0, 1.0]], [[1.0, 1.0, 2.0, 5.0]]))
      >>> costs = [pj.Costs(forward=times, backward=times) for times in steps]
      >>> result = pj.search.deals(table, costs, replicas=2)
      >>> [step.baselines["given"] for step in result], [step.value for step in result]
      ([18.0, 22.0], [13.0, 21.0])
      >>> sorted(result[0].best.order[0].tolist())
      [0, 2]
    """
    check_types(table=(table, ScheduleTable), costs_by_step=(costs_by_step, list, tuple))
    costs_list = list(costs_by_step)
    for costs in costs_list:
        check_types(costs_by_step=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    replicas = _check_replicas(table, costs_list, replicas)
    search = DealSearch(table, costs_list, replicas, Links.resolve(link), seed)
    with telling("deal", on_progress) as tell:
        return search.split_by_step(search.run(iterations, time_limit, tell))


def _check_replicas(table: ScheduleTable, step_costs: list[Costs], replicas: int) -> int:
    """Check that each step has costs for the microbatches of all replicas; return `replicas`."""
    if not step_costs:
        raise ValueError("costs_by_step is empty: give the costs of a step or more")
    replicas, size = whole_number(replicas, "replicas", minimum=2), table.num_microbatches
    for step, costs in enumerate(step_costs):
        costs.check_values()
        if not costs.per_microbatch():
            raise ValueError(
                "costs do not differ by microbatch, so all deals are equal: give costs of shape "
                f"(stages, {size * replicas})"
            )
        for name, time in vars(costs).items():
            shape, first = np.shape(time), np.shape(vars(step_costs[0])[name])
            if shape != first:
                raise MismatchError(
                    f"{name} has shape {shape} in step {step} and {first} in the first step"
                )
            if differs_by_microbatch(name, time) and shape[-1] != size * replicas:
                raise MismatchError(
                    f"{name} has {shape[-1]} microbatches, but {replicas} replicas of {size} "
                    f"microbatches have {size * replicas}"
                )
    return replicas


class DealSearch(LocalSearch[list[Deal]]):
    """State of the search for deals; its value is the mean makespan over the steps."""

    # Members are microbatches, numbered over all steps as in `StepCosts`. `_order` is the present
    # deal of each step, `_times` the makespans of its replicas.
    values: Values  # makespan of the slowest replica in the best deal of each step so far [s]
    bounds: Values  # lower bound of each step [s]
    best: Members  # best deal of each step so far

    def __init__(
        self, table: ScheduleTable, step_costs: list[Costs], replicas: int, links: Links, seed: int
    ) -> None:
        """Start from the baselines, and compute the lower bounds."""
        super().__init__(seed)
        size = table.num_microbatches
        self._step_costs, self._shape = step_costs, (len(step_costs), replicas, size)
        exact = [mapped(lambda leaf: np.asarray(leaf, np.float64), costs) for costs in step_costs]
        first_replica = map_microbatches(lambda time: time[..., :size], exact[0])
        self.program, _ = lower_and_price(table, first_replica, links)
        num_members = replicas * size + 1  # members of a step, with the artificial microbatch
        self._costs = StepCosts.stack(exact, num_members)
        self._first_member = np.arange(len(step_costs))[:, None, None] * num_members
        # runs that are evaluated at once: a power of two that fits into memory
        runs_within_memory = MAX_COSTS // sum(np.size(leaf) for leaf in leaves(first_replica))
        runs_of_random_orders = 1 << (len(step_costs) * replicas * NUM_RANDOM).bit_length()
        self.batch = max(1, min(MAX_RUNS, runs_of_random_orders, runs_within_memory))
        self._runs, self._idle_rounds = np.zeros((2, len(step_costs)), int)
        work = np.stack([_work(costs, table.num_stages, replicas * size) for costs in exact])
        self._start_from_baselines(_longest_first(work, self._shape))
        # Three lower bounds. In the first, all microbatches but the longest are artificial.
        longest = work.argmax(axis=1).tolist()
        orders = np.stack([orders_of_longest(n, replicas * size, size) for n in longest])
        bounds = [self.times(self._first_member + orders).min(axis=1)]
        for bound in (order_bound, packed_bound):
            bounds.append(np.array([bound(table, costs, links, replicas) for costs in exact]))
        self.bounds = np.max(bounds, axis=0)
        self._update_best()

    def _start_from_baselines(self, greedy: Members) -> None:
        """Start each step from its fastest simple deal; `greedy` deals the longest first."""
        steps, replicas, size = self._shape
        members = np.tile(np.arange(replicas * size), (steps, 1))
        random = self.rng.permuted(np.tile(members, (NUM_RANDOM, 1, 1)), axis=2)
        blocks = members.reshape(self._shape)
        round_robin = members.reshape(steps, size, replicas).swapaxes(1, 2)
        fixed = np.stack([blocks, round_robin, greedy])
        deals = np.concatenate([fixed, random.reshape(NUM_RANDOM, *self._shape)])
        orders = self._first_member + deals  # (deals, steps, replicas, microbatches)
        times = self.times(orders)  # (deals, steps, replicas) [s]
        self._order, self._times = orders[2].copy(), times[2].copy()  # greedy
        all_steps = np.arange(steps)
        single_replicas = np.tile(np.arange(replicas)[:, None], (steps, 1, 1))
        for _ in range(size):
            if not self._improve(all_steps, single_replicas).any():
                break
        orders = np.concatenate([orders, self._order[None]])
        times = np.concatenate([times, self._times[None]])
        slowest = times.max(axis=2)
        best_rows = slowest.argmin(axis=0), all_steps
        self._order, self._times = orders[best_rows], times[best_rows]
        self.best, self.values = self._order.copy(), slowest[best_rows]
        names = ("given", "round robin", "greedy")
        self._baselines = dict(zip(names, slowest, strict=False)) | {
            "greedy with order": slowest[-1],
            "best of random": slowest[len(names) : -1].min(axis=0),
        }
        self.baselines = {name: float(values.mean()) for name, values in self._baselines.items()}

    def times(self, orders: Int[NumpyArray, "*some microbatches"]) -> Float[NumpyArray, "*some"]:
        """Return the makespan [s] of a replica for each order of its microbatches."""
        rows = orders.reshape(-1, orders.shape[-1])
        makespans = batched_makespans(self.program, self._costs.order_costs, rows, self.batch)
        self._runs += np.bincount(self._costs.step_index(rows), minlength=len(self._runs))
        return makespans.reshape(orders.shape[:-1])

    def step(self, iteration: int) -> None:
        """Improve all pairs of replicas once; deals without recent gain first change at random."""
        steps = np.flatnonzero(~self._are_optimal())
        if len(stuck := steps[self._idle_rounds[steps] >= PATIENCE]):
            self._shake(stuck)
        has_changed = self._improve(steps, self._pairs(steps))
        self._idle_rounds[steps] = np.where(has_changed, 0, self._idle_rounds[steps] + 1)
        self._update_best()

    def _are_optimal(self) -> Bool[NumpyArray, " steps"]:
        return self.values <= self.bounds * (1 + self.precision)

    def _is_optimal(self) -> bool:
        return bool(self._are_optimal().all())

    def _update_best(self) -> None:
        slowest = self._times.max(axis=1)
        better = slowest < self.values
        self.best[better], self.values[better] = self._order[better], slowest[better]
        self.value, self.lower_bound = float(self.values.mean()), float(self.bounds.mean())

    def _pairs(self, steps: Steps) -> Replicas:
        """Pair each of the slowest replicas with a random faster replica."""
        ranked = np.argsort(-self._times[steps], axis=1, kind="stable")  # the slowest first
        num_slow = math.ceil(ranked.shape[1] * SLOW_SHARE)
        partners = self.rng.permuted(ranked[:, num_slow:], axis=1)[:, :num_slow]
        return np.stack([ranked[:, :num_slow], partners], axis=2)

    def _improve(self, steps: Steps, groups: Replicas) -> Bool[NumpyArray, " steps"]:
        """Make the best move in each group of replicas; return (steps) whether a deal changed."""
        # A group is a pair of replicas, or one replica. A move permutes its microbatches.
        group_index = steps[:, None, None], groups
        members = self._order[group_index]  # (steps, groups, replicas, microbatches)
        sequences = members.reshape(*groups.shape[:2], -1)  # the members of a group in one axis
        moves = self._moves(groups.shape)  # (moves, replicas, microbatches)
        # many moves give a replica the same order of members (`rows`), which runs once
        size = members.shape[-1]
        rows, move_rows = np.unique(moves.reshape(-1, size), axis=0, return_inverse=True)
        times = self.times(sequences[..., rows])[..., move_rows.reshape(moves.shape[:2])]
        # times: (steps, groups, moves, replicas); ranked mainly by the slowest replica
        rank = times.max(axis=3) + FASTER_WEIGHT * times.sum(axis=3)
        best = rank.argmin(axis=2)  # (steps, groups); at a tie move 0, which changes nothing
        new_order = np.take_along_axis(sequences, moves[best].reshape(sequences.shape), axis=2)
        self._order[group_index] = new_order.reshape(members.shape)
        best_times = np.take_along_axis(times, best[..., None, None], axis=2)
        self._times[group_index] = best_times[:, :, 0]
        return (best > 0).any(axis=1)

    def _moves(self, groups: tuple[int, ...]) -> Int[NumpyArray, "moves replicas microbatches"]:
        """List moves of a group's microbatches: first no change, then swaps and insertions."""
        # `groups` is the shape (steps, groups, replicas). A move is the new sequence of positions:
        # 0 3 2 1 swaps positions 1 and 3. If there are too many moves, some are chosen at random.
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
        """Restart some steps from their best deals, with random swaps of microbatches."""
        for step in steps.tolist():
            self._order[step] = shaken(self.best[step].ravel(), self.rng).reshape(self._shape[1:])
        self._times[steps] = self.times(self._order[steps])
        self._idle_rounds[steps] = 0

    def best_so_far(self) -> tuple[list[Deal], float]:
        """Return each step's best deal so far, and the mean makespan of these deals [s]."""
        pairs = zip(self._step_costs, self.best - self._first_member, strict=True)
        return [Deal(order, in_order(costs, order)) for costs, order in pairs], self.value

    def split_by_step(self, total: Found[list[Deal]]) -> list[Found[Deal]]:
        """Split the result for all steps into one result per step."""
        is_optimal = self._are_optimal()
        return ResultList(
            Found(
                best=best,
                value=float(self.values[step]),
                lower_bound=float(self.bounds[step]),
                baselines={name: float(values[step]) for name, values in self._baselines.items()},
                evaluated=int(self._runs[step]),
                stopped="optimal" if is_optimal[step] else total.stopped,
            )
            for step, best in enumerate(total.best)
        )


def _work(costs: Costs, stages: int, members: int) -> Float[NumpyArray, " members"]:
    """Return the compute time of each member's microbatches on the busiest stage [s]."""
    total = np.zeros((stages, members))
    for time in map(np.asarray, (costs.forward, costs.backward)):
        total += time if time.ndim == 2 else time[..., None]
    return total[total.sum(axis=1).argmax()]


def _longest_first(
    work: Float[NumpyArray, "steps members"], shape: tuple[int, int, int]
) -> Members:
    """Assign microbatches, the longest first, to the replica of least work with a free slot."""
    # `shape` is (steps, replicas, microbatches of a replica). With two replicas, work 5 4 3 1 is
    # divided into 5 1 and 4 3.
    steps, replicas, size = shape
    all_steps = np.arange(steps)
    order = np.zeros(shape, int)
    load, count = np.zeros((steps, replicas)), np.zeros((steps, replicas), int)
    for member in np.argsort(-work, axis=1, kind="stable").T:  # (steps) one member of each step
        replica = np.where(count < size, load, np.inf).argmin(axis=1)  # (steps)
        order[all_steps, replica, count[all_steps, replica]] = member
        load[all_steps, replica] += work[all_steps, member]
        count[all_steps, replica] += 1
    return order
