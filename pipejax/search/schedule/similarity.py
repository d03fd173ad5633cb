"""What one problem implies for another of the same shape.

A plan of one is an order of ops, which also runs at the other's times. If all times are s times as
long, so is every schedule, so of what is compared are proportions: where no time of a problem is
above s times that of another, and every set of activations that fits there fits here, no schedule
here need take longer than s times the one there.
"""

from fractions import Fraction

import numpy as np

from pipejax.search.schedule.problem import HOST_TIMES, TIMES, Problem


def stretch(problem: Problem, other: Problem) -> Fraction | None:
    """Return by how much the other problem's times are longer, at most."""
    names = (*TIMES, *(HOST_TIMES if _both_offload(problem, other) else ()))
    here = np.concatenate([np.ravel(getattr(problem, name)) for name in names])
    there = np.concatenate([np.ravel(getattr(other, name)) for name in names])
    if (there[here == 0] > 0).any():
        return None
    takes = here > 0
    pairs = zip(there[takes].tolist(), here[takes].tolist(), strict=True)
    return max((Fraction(t, h) for t, h in pairs), default=Fraction(1))


def _both_offload(problem: Problem, other: Problem) -> bool:
    return problem.offload is not None and other.offload is not None


def fits_in(problem: Problem, other: Problem) -> bool:
    """Return whether every set of activations that fits one problem's memory fits another's."""
    stage = np.broadcast_to(np.arange(problem.num_stages), problem.placement.shape)
    here, there = problem.limits[problem.placement], other.limits[problem.placement]
    return all(
        bool((theirs[stage] * here <= ours[stage] * there).all())
        for ours, theirs in ((problem.sizes, other.sizes), (problem.kept, other.kept))
    )


def rows_keep_limits(plan_of: Problem, problem: Problem) -> bool:
    """Return whether rows made for one problem keep the limits of another for any times."""
    hosts = plan_of.offload is None or (
        problem.offload is not None and plan_of.host_links == problem.host_links
    )
    return hosts and fits_in(plan_of, problem)


def bound_from(easier: Problem, bound: int, problem: Problem) -> int:
    """Transfer a bound from a problem that is nowhere harder, up to a factor of all times."""
    may_offload = easier.offload is not None or problem.offload is None
    if not (may_offload and fits_in(problem, easier) and _shares_less(easier, problem)):
        return 0
    longer = stretch(problem, easier)  # easier <= longer * problem
    if not longer:
        return 0
    return -int(-(bound / longer) // 1)


def _shares_less(easier: Problem, problem: Problem) -> bool:
    """Whether workers that share a host link in the easier problem do so in the other."""
    return problem.offload is None or all(
        any({*group} <= {*other} for other in problem.host_links) for group in easier.host_links
    )


def reach(problem: Problem, plan_of: Problem, objective: int) -> Fraction | None:
    """Return a guaranteed upper bound for a plan of another problem here, or None."""
    longer = stretch(plan_of, problem)
    return longer * objective if longer is not None and rows_keep_limits(plan_of, problem) else None


def distance(problem: Problem, other: Problem) -> float:
    """Return how different the proportions of two problems of one shape are."""
    return float(np.abs(_proportions(problem) - _proportions(other)).sum())


def _proportions(problem: Problem) -> np.ndarray:
    work = float((problem.forward + problem.gradient).sum()) or 1.0
    given = [getattr(problem, name) for name in (*TIMES, *HOST_TIMES)]
    times = [np.ravel(np.zeros(problem.num_stages) if t is None else t) / work for t in given]
    limits = problem.limits[problem.placement]
    return np.concatenate(
        [*times, *(np.ravel(part / limits) for part in (problem.sizes, problem.kept))]
    )
