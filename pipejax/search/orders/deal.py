"""The deal of microbatches: which of a step's go to which replica of a pipeline, in which order.

Replicas wait for the slowest of them, so microbatches that differ are dealt to make that one fast.
"""

from collections.abc import Sequence

import numpy as np

from pipejax.base.checks import MismatchError, check_local_search, check_types, whole_number
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs, differs_by_microbatch
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.orders.deal_search import Deal, DealSearch


def deal(
    table: ScheduleTable,
    costs: Costs,
    *,
    replicas: int,
    link: str | Links = "delay",
    iterations: int = 60,
    time_limit: float | None = TIME_LIMIT,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Found[Deal]:
    """Search the deal of a step's microbatches that makes its slowest replica fastest.

    Every replica runs the same table, each with as many of the given microbatches as the table has,
    in an order of its own. Where all together are at most 12, and a replica has at most 50,000
    choices, all are tried. The result is never slower than a baseline, and the same arguments give
    the same result, unless the time runs out. An interrupt (Ctrl-C) ends the search with the best
    deal so far.

    Args:
      table: the schedule of each replica, M microbatches.
      costs: unbatched costs per microbatch [s] of all N = replicas x M microbatches of the step:
        (stages, N) for an op, four axes for a message, the last N.
      replicas: pipelines that share the step, 2 or more.
      link: link model, or `Links`, of each replica.
      iterations: most rounds in which pairs of replicas exchange microbatches.
      time_limit: when no further round starts [s]; None for no limit.
      seed: of all random choices.
      on_progress: called after each round with its number, `iterations`, and the best value so far
        as a text; a bar in notebooks if None.

    Returns:
      The best deal; its value is the makespan of its slowest replica [s], and `evaluated` counts
      runs of one replica. The bound is the value where all deals were tried, else the largest of
      three: the work of every worker divided evenly, between the shortest ways to it and from it;
      the longest microbatches, some of which must meet; the longest one among shortest ones.
      Baselines are consecutive blocks as "given", "round robin", "greedy" (the longest next, to the
      replica with the least work on the stage with the most), "greedy with order" (the same
      microbatches, each replica's in an order from which no swap or move is better), and the "best
      of random".

    Raises:
      ValueError: as `evaluate`; if costs are not of N microbatches or none differs by microbatch,
        replicas is below 2 (`pj.search.microbatches` is for one), or iterations, seed or time_limit
        is negative.

    Cost:
      A round holds all swaps and moves between the two replicas of every pair, or as many of
      them as a million places of microbatches hold. 32 replicas of 8 on 2 stages take a
      second, most of it to compile; 16 of 32 on 8 stages take 20.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> lengths = np.array([[1.0, 4.0, 3.0, 5.0, 2.0, 2.0]])  # of all stages alike
      >>> costs = pj.Costs(forward=lengths, backward=lengths)
      >>> found = pj.search.deal(table, costs, replicas=3)
      >>> found.value, found.baselines["given"], found.stopped
      (21.0, 24.0, 'optimal')
      >>> found.best.order.tolist()
      [[0, 3], [1, 4], [2, 5]]
    """
    check_types(costs=(costs, Costs))
    return deals(
        table,
        [costs],
        replicas=replicas,
        link=link,
        iterations=iterations,
        time_limit=time_limit,
        seed=seed,
        on_progress=on_progress,
    )[0]


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
    """Search the deals of many steps at once, each as `deal` does: all are one batch.

    Args:
      table: the schedule of each replica.
      costs_by_step: what `deal` takes, of each step; shapes are those of the first.
      replicas: as for `deal`.
      link: as for `deal`.
      iterations: most rounds, in each of which every step takes part until it is optimal.
      time_limit: when no further round starts [s], of all steps together; None for no limit.
      seed: of all random choices.
      on_progress: as for `deal`; the text says the mean over the steps.

    Returns:
      What `deal` returns, of each step.

    Raises:
      ValueError: as `deal`; if there are no steps, or the costs of two have other shapes.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> steps = np.array(([[3.0, 3.0, 1.0, 1.0]], [[1.0, 1.0, 2.0, 5.0]]))
      >>> costs = [pj.Costs(forward=times, backward=times) for times in steps]
      >>> found = pj.search.deals(table, costs, replicas=2)
      >>> [step.baselines["given"] for step in found], [step.value for step in found]
      ([18.0, 22.0], [13.0, 21.0])
    """
    check_types(table=(table, ScheduleTable), costs_by_step=(costs_by_step, list, tuple))
    costs_list = list(costs_by_step)
    for costs in costs_list:
        check_types(costs_by_step=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    replicas = _checked(table, costs_list, replicas)
    search = DealSearch(table, costs_list, replicas, Links.resolve(link), seed)
    with telling("deal", on_progress) as tell:
        return search.split_by_step(search.run(iterations, time_limit, tell))


def _checked(table: ScheduleTable, step_costs: list[Costs], replicas: int) -> int:
    """Check how many replicas there are, and that each step has costs of all their microbatches."""
    if not step_costs:
        raise ValueError("costs_by_step is empty: give the costs of a step or more")
    replicas, size = whole_number(replicas, "replicas", minimum=2), table.num_microbatches
    for step, costs in enumerate(step_costs):
        costs.check_values()
        if not costs.per_microbatch():
            raise ValueError(
                "costs do not differ by microbatch: any deal is as good, give costs of shape "
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
                    f"{name} is of {shape[-1]} microbatches, {replicas} replicas of {size} "
                    f"microbatches have {size * replicas}"
                )
    return replicas
