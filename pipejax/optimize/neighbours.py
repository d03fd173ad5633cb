"""What one problem says of another of the same shape.

A plan of one is an order of ops, and runs at the other's times too. If all times are s times as
long, so is every schedule, so of what is compared are proportions: where no time of a problem is
above s times that of another, and every set of activations that fits there fits here, no schedule
here need take longer than s times the one there.
"""

from fractions import Fraction

import numpy as np

from pipejax.optimize.problem import Problem

TIMES = ("forward", "input_grad", "weight_grad", "backward", "lag", "transmit", "step_end",
         "update")  # fmt: skip
HOST_TIMES = ("offload", "load")


def stretch(problem: Problem, other: Problem) -> Fraction | None:
    """Return by how much the other problem's times are longer, at most.

    Args:
      problem: a problem.
      other: one of the same shape.

    Returns:
      The least s for which no time of the other is above s times that of the problem; None if
      there is none, for something takes no time here and some there. Host links are compared
      where both problems have them.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> one, other = (pose(table, Costs.uniform(table, forward=1.0, backward=2.0, transfer=c),
      ...     memory_limit=2) for c in (0.5, 2.0))
      >>> one.forward.tolist(), other.forward.tolist()  # units differ
      ([2, 2], [1, 1])
      >>> stretch(one, other), stretch(other, one)
      (Fraction(2, 1), Fraction(2, 1))
    """
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
    """Return whether every set of activations that fits in one problem's memory fits in another's.

    Args:
      problem: a problem.
      other: one of the same shape.

    Returns:
      Whether it does, by the parts of its worker's limit that each activation takes.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> costs = Costs.uniform(table, forward=1.0, backward=2.0)
      >>> two, three = (pose(table, costs, memory_limit=limit) for limit in (2, 3))
      >>> fits_in(two, three), fits_in(three, two)
      (True, False)
    """
    stage = np.broadcast_to(np.arange(problem.num_stages), problem.placement.shape)
    here, there = problem.limits[problem.placement], other.limits[problem.placement]
    return all(
        bool((theirs[stage] * here <= ours[stage] * there).all())
        for ours, theirs in ((problem.sizes, other.sizes), (problem.kept, other.kept))
    )


def rows_keep_limits(plan_of: Problem, problem: Problem) -> bool:
    """Return whether rows made for one problem keep the limits of another, whatever the times.

    Args:
      plan_of: the problem that they were made for.
      problem: one of the same shape.

    Returns:
      Whether they do.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> two, three = (pose(table, Costs.uniform(table, forward=t, backward=2.0), memory_limit=m)
      ...     for t, m in ((1.0, 2), (5.0, 3)))
      >>> rows_keep_limits(two, three), rows_keep_limits(three, two)
      (True, False)
    """
    hosts = plan_of.offload is None or (
        problem.offload is not None and plan_of.host_links == problem.host_links
    )
    return hosts and fits_in(plan_of, problem)


def bound_from(easier: Problem, bound: int, problem: Problem) -> int:
    """Take over a bound of a problem that is nowhere harder, up to a factor of all times.

    Args:
      easier: the other problem.
      bound: units that no schedule of it goes below.
      problem: a problem of the same shape.

    Returns:
      Units that no schedule of the problem goes below; 0 where the other says nothing of it.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> easy, hard = (pose(table, Costs.uniform(table, forward=f, backward=2.0), memory_limit=2)
      ...     for f in (1.0, 1.5))
      >>> easy.unit, hard.unit  # 14 s are 28 half seconds
      (1.0, 0.5)
      >>> bound_from(easy, 14, hard)
      28
    """
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
    """Return within what a plan of another problem ends here, where that is certain.

    Args:
      problem: the problem.
      plan_of: the plan's own problem, of the same shape.
      objective: of the plan, in that problem's units.

    Returns:
      Units; None if the plan need not keep the limits, or nothing can be said of its end.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> costs = Costs.uniform(table, forward=1.0, backward=2.0)
      >>> two, three = (pose(table, costs, memory_limit=limit) for limit in (2, 3))
      >>> reach(three, two, 16), reach(two, three, 15)
      (Fraction(16, 1), None)
    """
    longer = stretch(plan_of, problem)
    return longer * objective if longer is not None and rows_keep_limits(plan_of, problem) else None


def distance(problem: Problem, other: Problem) -> float:
    """Return how different the proportions of two problems of one shape are.

    Args:
      problem: a problem.
      other: another one.

    Returns:
      Sum of the differences of all times, as shares of the work of a microbatch, and of what
      activations take of the limits.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> costs = Costs.uniform(table, forward=1.0, backward=2.0)
      >>> two, three, four = (pose(table, costs, memory_limit=limit) for limit in (2, 3, 4))
      >>> distance(two, two), distance(two, three) < distance(two, four)
      (0.0, True)
    """
    return float(np.abs(_proportions(problem) - _proportions(other)).sum())


def _proportions(problem: Problem) -> np.ndarray:
    work = float((problem.forward + problem.gradient).sum()) or 1.0
    host = [np.zeros(problem.num_stages) if times is None else times
            for times in (problem.offload, problem.load)]  # fmt: skip
    times = [np.ravel(values) / work for values in
             (*(getattr(problem, name) for name in TIMES), *host)]  # fmt: skip
    limits = problem.limits[problem.placement]
    return np.concatenate([*times, *(np.ravel(part / limits) for part in
                                     (problem.sizes, problem.kept))])  # fmt: skip
