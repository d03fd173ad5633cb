"""Function `optimize`. It can be imported without OR-Tools; a call loads the solver."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from pipejax.analysis.scenario import Scenario
from pipejax.base.checks import check_types, whole_number, wrong
from pipejax.base.display import abbreviated
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.schedules.table.held_activations import WEIGHT_SHARE
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.slot_simulation import host_link_ids
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import TIME_LIMIT, Found
from pipejax.search.schedule.plan import Optimum
from pipejax.search.schedule.problem import PerEntry, build_problem
from pipejax.search.schedule.store import SolvedProblems


def optimize(
    run: Scenario | ScheduleTable,
    costs: Costs | None = None,
    *,
    memory_limit: PerEntry,
    sizes: PerEntry = 1.0,
    weight_share: PerEntry = WEIGHT_SHARE,
    offload: bool = False,
    link: str | Links = "delay",
    objective: str = "makespan",
    time_limit: float = TIME_LIMIT,
    effort: float | None = None,
    num_threads: int | None = None,
    store: SolvedProblems | str | Path | None = None,
    on_progress: OnProgress | None = None,
    on_best: Callable[[Found[Optimum]], object] | None = None,
) -> Found[Optimum]:
    """Search for the fastest schedule under a memory limit, with a lower bound on all schedules.

    Args:
      run: a scenario; or a table, with costs and link. Stages and microbatches stay on the table's
        workers. The search starts from the table's order of ops if it keeps the limit.
      costs: unbatched costs [s].
      memory_limit: memory of a worker, or one entry per worker, in the unit of `sizes`.
      sizes: size of an activation, or one entry per stage; 1 counts activations.
      weight_share: share of an activation that stays for W after I, or one entry per stage.
      offload: whether activations may go to the host and back, at the costs of O and L.
      link: link model "delay" or "queued", or `Links` with one of these models.
      objective: "makespan", or "span": the longest time between a worker's first start and last
        end.
      time_limit: time after which the search ends [s].
      effort: deterministic work after which the search ends, about seconds of one idle core. With
        one thread the answer is deterministic, unless the time ends first.
      num_threads: threads of the solver; default: one per processor, or one if effort is set.
      store: store of solved problems, or its folder. A stored optimum is returned at once, and a
        search of a stored problem goes on from its schedule and bound. Default: no store.
      on_progress: called at every solution with the seconds so far, the limit of time or effort,
        and makespan and gap as a text; default: a bar in notebooks.
      on_best: called with every solution that is shorter or has a better bound.

    Returns:
      The best schedule `best.table`, its makespan or span, and a lower bound on all schedules.
      `stopped` is "optimal", "time", "effort", or "iterations" if all steps of the search ended.
      Baselines are the objectives of published schedules, None if a schedule exceeds the limits.

    Raises:
      InfeasibleError: if no schedule stays within the limit.
      ValueError: if an argument has a wrong form, or no schedule was found in time.
      ModuleNotFoundError: if OR-Tools is not installed.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> costs = pj.Costs.uniform(table, forward=10.0, input_grad=10.0, weight_grad=10.0)
      >>> result = pj.optimize(table, costs, memory_limit=3)
      >>> result.value, result.best.status
      (310.0, 'optimal')
    """
    check_types(run=(run, Scenario, ScheduleTable), offload=(offload, bool))
    if isinstance(run, Scenario):
        if costs is not None or link != "delay":
            raise wrong("run", "is a scenario, with costs and link of its own: leave them out", run)
        table, costs, links = run.table(), run.table_costs(), run.links
    else:
        table, links = run, Links.resolve(link)
    check_types(costs=(costs, Costs))
    assert costs is not None
    host_link_ids(links, table.num_workers)
    memory = memory_limit, sizes, weight_share
    problem = build_problem(table, costs, *memory, offload, links, objective)
    seconds, work = ("time_limit", time_limit, " seconds"), ("effort", effort, "")
    for name, limit, unit in (seconds,) if effort is None else (seconds, work):
        if not (isinstance(limit, int | float) and limit > 0):
            raise wrong(name, f"must be above 0{unit}, got {abbreviated(limit)}")
    if num_threads is None:
        num_threads = 1 if effort is not None else os.cpu_count() or 1
    num_threads = whole_number(num_threads, "num_threads")
    check_types(store=(store, SolvedProblems, str, Path, type(None)))
    if isinstance(store, str | Path):
        store = SolvedProblems(store)
    try:
        from pipejax.search.schedule.anytime_search import AnytimeSearch  # OR-Tools is an extra
        from pipejax.search.schedule.effort import Budget
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ortools":
            raise
        raise ModuleNotFoundError(NO_SOLVER, name="ortools") from None
    with telling("optimize", on_progress) as tell:

        def pass_on(result: Found[Optimum]) -> None:
            spent = result.best.seconds if effort is None else result.best.effort
            tell(spent, effort or time_limit, f"s, best {result.value:.6g} s, gap {result.gap:.1%}")
            if on_best is not None:
                on_best(result)

        budget = Budget.start(effort, time_limit)
        search = AnytimeSearch(problem, table, costs, links, budget, num_threads, store, pass_on)
        result = search.run()
    # a search that ends before its limits found an optimum, at least on its time grid
    stopped = "iterations"
    if result.best.seconds >= ALMOST * time_limit:
        stopped = "time"
    elif effort is not None and result.best.effort >= ALMOST * effort:
        stopped = "effort"
    is_optimal = result.best.status == "optimal"
    return dataclasses.replace(result, stopped="optimal" if is_optimal else stopped)


NO_SOLVER = "optimize needs OR-Tools: pip install 'pipejax[optimize]'"
ALMOST = 0.9  # a search that took this share of a limit was ended by the limit
