"""Search for a deal: an assignment of a step's microbatches to replicas, with their order.

Replicas wait for the slowest one, so the search makes the slowest replica fast.
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
    """Search the deal of a step's microbatches with the fastest slowest replica.

    Every replica runs the same table with its own microbatches in its own order. All deals are
    tried for at most 12 microbatches, if a replica has at most 50,000 choices. The result is never
    slower than a baseline, and deterministic unless the time runs out. An interrupt (Ctrl-C) ends
    the search with the best deal so far.

    Args:
      table: the schedule of each replica, M microbatches.
      costs: unbatched costs per microbatch [s] of all N = replicas x M microbatches of the step:
        (stages, N) for an op, four axes for a message, the last N.
      replicas: pipelines that share the step, 2 or more.
      link: link model, or `Links`, of each replica.
      iterations: largest number of rounds, in which pairs of replicas exchange microbatches.
      time_limit: time after which no further round starts [s]; None for no limit.
      seed: seed of all random choices.
      on_progress: called after each round with its number, `iterations`, and a text.

    Returns:
      The best deal; its value is the makespan of its slowest replica [s], and `evaluated` counts
      runs of one replica. If all deals were tried, the bound equals the value; else it is the
      largest of three: evenly divided work of a worker between the shortest paths to and from it;
      the longest microbatches, some of which must share a replica; the longest one among artificial
      shortest ones. Baselines are consecutive blocks as "given", "round robin", "greedy" (the
      longest first, to the replica with the least work), "greedy with order" (the same, with
      locally optimal orders), and the "best of random".

    Raises:
      ValueError: as `evaluate`; if costs are not of N microbatches or none differs by microbatch,
        replicas is below 2 (use `pj.search.microbatches` for one), or iterations, seed or
        time_limit is negative.

    Cost:
      A round tries all swaps and moves between the replicas of every pair, or as many as a million
      numbers hold. 32 replicas of 8 microbatches on 2 stages take a second, most of it to compile;
      16 of 32 on 8 stages take 20.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> lengths = np.array([[1.0, 4.0, 3.0, 5.0, 2.0, 2.0]])  # of all stages alike
      >>> costs = pj.Costs(forward=lengths, backward=lengths)
      >>> result = pj.search.deal(table, costs, replicas=3)
      >>> result.value, result.baselines["given"], result.stopped
      (21.0, 24.0, 'optimal')
      >>> result.best.order.tolist()
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
    """Search the deals of many steps at once, each as `deal` does, in one batch.

    Args:
      table: the schedule of each replica.
      costs_by_step: costs of each step, as for `deal`; all of the same shapes.
      replicas: as for `deal`.
      link: as for `deal`.
      iterations: largest number of rounds; a step takes part until it is optimal.
      time_limit: time for all steps after which no further round starts [s]; None for no limit.
      seed: seed of all random choices.
      on_progress: as for `deal`; the text says the mean over the steps.

    Returns:
      The result of `deal` for each step.

    Raises:
      ValueError: as `deal`; if there are no steps, or the costs of two steps have other shapes.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> steps = np.array(([[3.0, 3.0, 1.0, 1.0]], [[1.0, 1.0, 2.0, 5.0]]))
      >>> costs = [pj.Costs(forward=times, backward=times) for times in steps]
      >>> result = pj.search.deals(table, costs, replicas=2)
      >>> [step.baselines["given"] for step in result], [step.value for step in result]
      ([18.0, 22.0], [13.0, 21.0])
    """
    check_types(table=(table, ScheduleTable), costs_by_step=(costs_by_step, list, tuple))
    costs_list = list(costs_by_step)
    for costs in costs_list:
        check_types(costs_by_step=(costs, Costs))
    iterations, seed = check_local_search(iterations, seed, time_limit)
    replicas = _check_replicas(table, costs_list, replicas)
    search = DealSearch(table, costs_list, replicas, Links.of(link), seed)
    with telling("deal", on_progress) as tell:
        return search.split_by_step(search.run(iterations, time_limit, tell))


def _check_replicas(table: ScheduleTable, step_costs: list[Costs], replicas: int) -> int:
    """Check that each step has costs of the microbatches of all replicas; return their number."""
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
