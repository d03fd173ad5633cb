"""Microbatch sizes: the relaxation to any size, and exact evaluation of whole ones.

At fixed costs the makespan is affine in M beyond a few periods, so the makespans of a few small
programs give that of every M = N / b, for any b.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.costs.system import System
from pipejax.costs.workload import StageBytes, Workload
from pipejax.search.tuning.schedule_family import ScheduleFamily
from pipejax.search.tuning.step_time_objective import StepTimeObjective, exact_makespans, in_bucket
from pipejax.search.tuning.workload_system_pairs import (
    Pair,
    lasting_bytes,
    pair_bytes,
    pair_costs,
    peak_bytes,
    stack_pairs,
)

OVERRUN = 10.0  # relative penalty of memory beyond the limit, per share of the limit


@dataclasses.dataclass(eq=False)
class Sizes:
    """All sizes that divide the minibatch, of all pairs one after the other.

    Attributes:
      pair: (sizes) which pair.
      size: (sizes) b [sequences].
      microbatches: (sizes) M.
      is_known: (sizes) whether it was evaluated.
      is_legal: (sizes) whether it was, and the schedule exists.
      fits: (sizes) whether it was, and every worker has room.
      step_time: (sizes) [s], infinite where not evaluated.
      memory_bytes: (sizes) need of the fullest worker, infinite where not evaluated.
    """

    pair: Int[NumpyArray, " sizes"]
    size: Int[NumpyArray, " sizes"]
    microbatches: Int[NumpyArray, " sizes"]
    is_known: Bool[NumpyArray, " sizes"]
    is_legal: Bool[NumpyArray, " sizes"]
    fits: Bool[NumpyArray, " sizes"]
    step_time: Float[NumpyArray, " sizes"]
    memory_bytes: Float[NumpyArray, " sizes"]

    @classmethod
    def of(cls, minibatch: Float[NumpyArray, " pairs"]) -> "Sizes":
        """List the divisors of each minibatch."""
        pairs, sizes = [], []
        for total in np.unique(minibatch).astype(int):
            divisors = np.flatnonzero(total % np.arange(1, total + 1) == 0) + 1
            found = np.flatnonzero(minibatch == total)
            pairs.append(np.repeat(found, len(divisors)))
            sizes.append(np.tile(divisors, len(found)))
        pair, size = np.concatenate(pairs), np.concatenate(sizes)
        order = np.argsort(pair, kind="stable")
        pair, size = pair[order], size[order]
        count = minibatch[pair].astype(int) // size
        no = np.zeros(len(pair), bool)
        far = np.full(len(pair), np.inf)
        return cls(pair, size, count, no, no.copy(), no.copy(), far, far.copy())


class _Given(NamedTuple):
    """What one configuration of the relaxation takes besides b."""

    pair: Pair
    lasting: Float[NumpyArray, " workers"]
    peaks: Float[NumpyArray, "nodes workers"]
    capacity: Float[NumpyArray, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class TuningProblem:
    """Pairs under one family of schedules, with what all ways to solve them need.

    Attributes:
      family: the schedule.
      workload: parallelism and recomputation, the same for all.
      pairs: models, systems, layers and minibatches.
      capacity: (pairs) memory limit, infinite for none [B].
    """

    family: ScheduleFamily
    workload: Workload
    pairs: Pair
    capacity: Float[NumpyArray, " pairs"]

    @classmethod
    def of(
        cls,
        family: ScheduleFamily,
        workloads: Sequence[Workload],
        systems: Sequence[System],
        *,
        memory_limit: bool = True,
    ) -> "TuningProblem":
        """Lay pairs out as arrays."""
        table = family.table(_nodes(family)[0])
        pairs = stack_pairs(workloads, systems, table)
        limit = pairs.system.memory_capacity
        capacity = np.asarray(limit) if memory_limit else np.full(len(workloads), np.inf)
        return cls(family, workloads[0], pairs, capacity)

    @functools.cached_property
    def nodes(self) -> tuple[int, ...]:
        """Microbatches whose programs give the makespans of the relaxation."""
        return _nodes(self.family)

    @property
    def objective(self) -> StepTimeObjective:
        """Step time, with a penalty where memory is short, by log b."""
        return self.once("microbatch", self._objective)

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """Return what the family keeps for workloads like these: nothing is compiled twice."""
        w = self.workload
        common = (
            w.tensor_parallel,
            w.sequence_parallel,
            w.data_parallel,
            w.recompute,
            w.weight_share,
        )
        return self.family.once((what, common), make)

    def _objective(self) -> StepTimeObjective:
        table, workload = self.family.table(self.nodes[0]), self.workload
        nodes = np.array(self.nodes, float)

        def value(log_size: Array, ends: Array, given: _Given) -> Array:
            size = jnp.exp(log_size)
            weights = _weights(given.pair.minibatch / size, nodes)
            need = jnp.max(given.lasting + size * (weights @ given.peaks))
            excess = jnp.maximum(need / given.capacity - 1, 0)
            return weights @ ends * (1 + OVERRUN * excess)

        return StepTimeObjective(
            programs=tuple(map(self.family.program, self.nodes)),
            price=lambda log_size, given: pair_costs(
                workload, table, given.pair, jnp.exp(log_size)
            ),
            value=value,
        )

    @functools.cached_property
    def given(self) -> _Given:
        """What the relaxation takes, for each pair."""
        held = [self.family.held(count) for count in self.nodes]
        peaks = np.stack([peak_bytes(each, self.memory) for each in held], axis=1)
        return _Given(self.pairs, lasting_bytes(held[0], self.memory), peaks, self.capacity)

    @functools.cached_property
    def memory(self) -> StageBytes:
        """Bytes of each stage for a microbatch of one sequence, for each pair."""
        table, workload = self.family.table(self.nodes[0]), self.workload
        priced = self.once(
            "memory", lambda: jax.jit(jax.vmap(lambda pair: pair_bytes(workload, table, pair, 1.0)))
        )
        size = len(self.capacity)
        return jax.tree.map(
            lambda leaf: np.asarray(leaf)[:size], priced(in_bucket(self.pairs, size))
        )

    def given_of(self, pair: Int[NumpyArray, " batch"], *, limited: bool = True) -> _Given:
        """What the relaxation takes, for some pairs; without their memory limit if so wished."""
        given = jax.tree.map(lambda leaf: leaf[pair], self.given)
        return given if limited else given._replace(capacity=np.full(len(pair), np.inf))

    def relaxed_step_times(
        self, pair: Int[NumpyArray, " batch"], size: Float[NumpyArray, " batch"]
    ) -> Float[NumpyArray, " batch"]:
        """Return the relaxed step time of pairs at any sizes, whatever memory they need [s]."""
        given = self.given_of(pair, limited=False)
        return np.asarray(self.objective.values(np.log(size), given))

    def relaxed_need(
        self, pair: Int[NumpyArray, " batch"], size: Float[NumpyArray, " batch"]
    ) -> Float[NumpyArray, " batch"]:
        """Return what the fullest worker of pairs needs at any sizes, by the relaxation [B]."""
        given = self.given
        count = given.pair.minibatch[pair] / size
        weights = np.asarray(_weights_of_many(count, np.array(self.nodes, float)))
        peaks = np.einsum("bn,bnw->bw", weights, given.peaks[pair])
        return (given.lasting[pair] + size[:, None] * peaks).max(axis=1)

    def forecast(self, sizes: Sizes) -> Float[NumpyArray, " sizes"]:
        """Return the step time of whole sizes from small programs, infinite where illegal [s].

        Up to 3P microbatches it is exact. Beyond, a period is for P microbatches, so the program
        of 2P and the remainder of M, or up to P more, gives what the relaxation cannot know.
        """
        workers = self.family.num_workers
        small = sizes.microbatches <= 3 * workers
        base = np.where(small, sizes.microbatches, 2 * workers + sizes.microbatches % workers)
        costs = self._costs(sizes.pair, sizes.size)
        times = np.full(len(base), np.inf)
        for count, rows in self._legal(base):
            times[rows] = exact_makespans(self.family.program(count), _rows(costs, rows))
        low, high = self.nodes[-2:]
        long = np.flatnonzero(~small)
        if len(long):
            ends = [
                exact_makespans(self.family.program(count), _rows(costs, long))
                for count in (low, high)
            ]
            cycle = (ends[1] - ends[0]) / (high - low)
            times[long] += cycle * (sizes.microbatches - base)[long]
        return times

    def evaluate(self, sizes: Sizes, wanted: Bool[NumpyArray, " sizes"]) -> None:
        """Fill in step time and memory of the sizes that are wanted, exactly.

        The pairs that want the same number of microbatches go through its program at once.
        """
        chosen = np.flatnonzero(wanted)
        if not len(chosen):
            return
        costs = self._costs(sizes.pair[chosen], sizes.size[chosen])
        sizes.is_known[chosen] = True
        for count, rows in self._legal(sizes.microbatches[chosen]):
            at = chosen[rows]
            memory = _rows(self.memory, sizes.pair[at])
            held = self.family.held(count)
            peaks = sizes.size[at, None] * peak_bytes(held, memory)
            sizes.memory_bytes[at] = (lasting_bytes(held, memory) + peaks).max(axis=1)
            sizes.step_time[at] = exact_makespans(self.family.program(count), _rows(costs, rows))
            sizes.is_legal[at] = True
        room = self.capacity[sizes.pair]
        sizes.fits[chosen] = (sizes.is_legal & (sizes.memory_bytes <= room))[chosen]

    def _costs(self, pair: Int[NumpyArray, " batch"], size: Int[NumpyArray, " batch"]) -> Costs:
        return self.objective.costs(np.log(size), self.given_of(pair))

    def _legal(
        self, microbatches: Int[NumpyArray, " batch"]
    ) -> Iterator[tuple[int, Int[NumpyArray, " rows"]]]:
        """Go through the numbers of microbatches for which the schedule exists."""
        for count in np.unique(microbatches).tolist():
            if not self.family.refusal(count):
                yield count, np.flatnonzero(microbatches == count)


def _rows(tree: Any, rows: Int[NumpyArray, " rows"]) -> Any:
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def _nodes(family: ScheduleFamily) -> tuple[int, ...]:
    """Choose the microbatches of the relaxation: the fewest, and multiples of P up to a period."""
    workers = family.num_workers
    few = [count for count in (1, 2) if not family.refusal(count)][:1]
    many = [times * workers for times in (1, 2, 4)]
    if family.refusal(many[-1]):
        raise ValueError(family.refusal(many[-1]))
    return tuple(sorted({*few, *many}))


def _weights(count: Array | NumpyArray, nodes: Array | NumpyArray) -> Array:
    """Weights of the nodes that interpolate linearly, and go on as the last two do."""
    left = jnp.clip(jnp.sum(count >= nodes) - 1, 0, len(nodes) - 2)
    share = (count - jnp.asarray(nodes)[left]) / jnp.asarray(nodes[1:] - nodes[:-1])[left]
    place = jnp.arange(len(nodes))
    return jnp.where(place == left, 1 - share, jnp.where(place == left + 1, share, 0.0))


_weights_of_many = jax.jit(jax.vmap(_weights, in_axes=(0, None)))
