"""Neighbourhoods of a plan: which ops may change their order, and which keep it.

A neighbourhood is a set of free ops. All others keep their order on workers and host links, but
not their times: where something is gained in the middle, what follows moves up. An offload or load
that is free may also be left out or come anew.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from pipejax.base.array_types import Bool, NumpyArray
from pipejax.schedules.cells.ops import Phase
from pipejax.search.schedule.plan import NEVER, PerOp, Plan, gradient_end, input_grad_end
from pipejax.search.schedule.problem import Problem

Ops = Bool[NumpyArray, "stages microbatches"]
Free = Mapping[str, Ops]  # by phase letter
Op = tuple[str, tuple[int, int]]  # phase letter; stage and microbatch


def _microbatches(
    problem: Problem, plan: Plan, share: float, rng: np.random.Generator
) -> dict[str, Ops]:
    """All ops of some microbatches in a row; a window may reach over the ends."""
    count = max(2, round(share * problem.num_microbatches))
    first = rng.integers(1 - count // 2, problem.num_microbatches - count // 2)
    place = np.arange(problem.num_microbatches)
    free = np.broadcast_to((place >= first) & (place < first + count), plan.forward.shape)
    return dict.fromkeys("FIWOL", free)


def _workers(
    problem: Problem, plan: Plan, share: float, rng: np.random.Generator
) -> dict[str, Ops]:
    """All ops of some workers in a row."""
    count = max(1, round(share * problem.num_workers))
    first = rng.integers(0, problem.num_workers - count + 1)
    free = (problem.worker >= first) & (problem.worker < first + count)
    return dict.fromkeys("FIWOL", free)


def _time(problem: Problem, plan: Plan, share: float, rng: np.random.Generator) -> dict[str, Ops]:
    """All ops that start within some time, and offloads of all that is there."""
    end = int(gradient_end(problem, plan).max())
    lasts = share * end
    first = rng.uniform(-lasts / 3, end - 2 * lasts / 3)
    free = {p: (at >= first) & (at <= first + lasts) for p, at in plan.starts.items()}
    return free | dict.fromkeys("OL", free["F"] | free["I"] | free["O"] | free["L"])


def _offloads(
    problem: Problem, plan: Plan, share: float, rng: np.random.Generator
) -> dict[str, Ops]:
    """Offloads alone: all compute keeps its order."""
    free = _some(plan, 2 * share, rng)
    return dict.fromkeys("OL", free)


def _weight_grads(
    problem: Problem, plan: Plan, share: float, rng: np.random.Generator
) -> dict[str, Ops]:
    """Weight gradients, and offloads of their activations."""
    free = _some(plan, 2 * share, rng)
    return dict.fromkeys("WOL", free)


def _some(plan: Plan, share: float, rng: np.random.Generator) -> Ops:
    return np.asarray(rng.random(plan.forward.shape) < share)


KINDS: Mapping[str, Callable[[Problem, Plan, float, np.random.Generator], dict[str, Ops]]] = {
    "microbatches": _microbatches,
    "workers": _workers,
    "time": _time,
    "offloads": _offloads,
    "weight grads": _weight_grads,
}


def draw(kind: str, problem: Problem, plan: Plan, share: float, rng: np.random.Generator) -> Free:
    """Draw the free ops of a neighbourhood; `share` says how large it is, up to 1 for all."""
    nothing = np.zeros(plan.forward.shape, bool)
    return dict.fromkeys("FIWOL", nothing) | KINDS[kind](problem, plan, share, rng)


def kept_order(problem: Problem, plan: Plan, free: Free) -> Iterator[tuple[Op, Op]]:
    """Yield ops that are not free, in pairs: the first one ends before the other starts."""
    ends = _ends(problem, plan)
    worker_of, group = problem.worker, np.arange(problem.num_workers)
    for shared in problem.host_links:
        group[list(shared)] = min(shared)
    rows: dict[tuple[bool, int], list[tuple[int, int, Op]]] = {}
    for letter, start in plan.starts.items():
        # what takes no time holds nobody, and has no place in a row
        stands = ~free[letter] & (start != NEVER) & (ends[letter] > start)
        for stage, microbatch in np.argwhere(stands).tolist():
            place, worker = (stage, microbatch), int(worker_of[stage, microbatch])
            row = (True, int(group[worker])) if letter in "OL" else (False, worker)
            op = int(start[place]), int(ends[letter][place]), (letter, place)
            rows.setdefault(row, []).append(op)
    for ops in rows.values():
        yield from ((one[2], other[2]) for one, other in itertools.pairwise(sorted(ops)))


def order_of_microbatches(problem: Problem, plan: Plan) -> Iterator[tuple[Op, Op]]:
    """Yield ops of one kind on a stage in pairs: the first one ends before the other starts."""
    ends = _ends(problem, plan)
    for letter, stage in itertools.product("FIW", range(problem.num_stages)):
        for pipe in np.unique(problem.pipe_of):
            passing = np.flatnonzero(problem.pipe_of == pipe)
            order = np.lexsort((ends[letter][stage, passing], plan.starts[letter][stage, passing]))
            ops = ((letter, (stage, microbatch)) for microbatch in passing[order].tolist())
            yield from itertools.pairwise(ops)


def _ends(problem: Problem, plan: Plan) -> Mapping[str, PerOp]:
    """Return ends of all ops by phase letter."""
    return {
        "I": input_grad_end(problem, plan),
        "W": gradient_end(problem, plan),
        **{p: plan.starts[p] + problem.times[Phase[p]][:, None] for p in "FOL"},
    }
