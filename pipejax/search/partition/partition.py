"""The fastest split of a model into the stages of a table: exact, by cutting planes.

Under given holdings the step time is the longest path of one program, so paths are lower bounds of
all splits. An integer program finds the split that is fastest by the paths known so far; running
it gives its step time and new paths, its critical path among them. When no split is faster by
these bounds than the best that was run, that one is optimal.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

import jax

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_local_search, check_types
from pipejax.base.display import short_repr_of
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_bytes import memory_bytes
from pipejax.costs.system.system import System
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.partition.split_search import Split, SplitSearch


@short_repr_of("layout step_time lower_bound status memory_bytes evaluated seconds baselines")
@dataclasses.dataclass(frozen=True)
class Partition:
    """The fastest split that was found, and how much faster one could be.

    Attributes:
      layout: what each stage holds.
      workload: with this layout.
      step_time: exact [s].
      lower_bound: no split that fits is faster [s].
      status: "optimal" where the bound meets the step time, else "feasible".
      memory_bytes: (workers) need per accelerator [B].
      fits: whether the accelerators have so much.
      baselines: splits that runtimes make by default, by name.
      evaluated: splits that were run.
      seconds: that the search took.
    """

    layout: PipelineLayout
    workload: Workload
    step_time: float
    lower_bound: float
    status: str
    memory_bytes: Float[NumpyArray, " workers"]
    fits: bool
    baselines: Mapping[str, Split]
    evaluated: int
    seconds: float

    @property
    def gap(self) -> float:
        """What an unknown split could save, at most, as a share of the step time."""
        return max(0.0, 1 - self.lower_bound / self.step_time) if self.step_time else 0.0


def partition(
    table: ScheduleTable,
    workload: Workload,
    system: System,
    *,
    link: str | Links = "delay",
    memory_limit: bool = True,
    time_limit: float | None = 60.0,
    on_progress: OnProgress | None = None,
    on_best: Callable[[Partition], object] | None = None,
) -> Partition:
    """Find the layers of every stage that make the step the shortest, and prove it.

    Embedding, head and the layers for further tokens (MTP) are units of the split beside the
    transformer layers: the first stage holds the embedding, with layers or alone, the last one the
    head; those for further tokens are together, behind all layers.

    Args:
      table: the schedule.
      workload: model, minibatch and parallelism, without a layout.
      system: the machine.
      link: link model, or `Links`.
      memory_limit: whether every worker must have room on its accelerators.
      time_limit: when the search ends, proven or not [s]; None for no limit.
      on_progress: called with how many splits were run, None, and the best as a text; a bar in
        notebooks if None.
      on_best: called with the best so far, and what is proven of it, after each step.

    Returns:
      The split, its exact step time, a lower bound of all splits, and the runtimes' defaults.

    Raises:
      ValueError: if the workload has a layout already, time_limit is negative, or nothing fits.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
      >>> workload = pj.Workload(pj.load_model("llama3-8b"), minibatch=16, tensor_parallel=2)
      >>> found = pj.partition(table, workload, pj.load_system("h100"))
      >>> print(found.layout, found.status)
      Et*9|t*9|t*8|t*6L optimal
    """
    check_types(
        table=(table, ScheduleTable), workload=(workload, Workload), system=(system, System)
    )
    check_types(memory_limit=(memory_limit, bool))
    check_local_search(0, 0, time_limit)
    if workload.pipeline_layout:
        raise ValueError("pipeline_layout is what is searched here: leave it out")
    links = link if isinstance(link, Links) else Links(link)
    began = time.monotonic()

    def tell_split() -> None:
        best = search.best
        found = "none fits" if best is None else f"best {best.step_time:.6g} s"
        tell(len(search.known), None, f"splits, {found}")
        if on_best is not None and best is not None:
            on_best(_result(search, time.monotonic() - began))

    with jax.enable_x64(True), telling("partition", on_progress) as tell:
        search = SplitSearch(
            table, workload, system, links, memory_limit=memory_limit, on_split=tell_split
        )
        search.search(math.inf if time_limit is None else time_limit)
    return _result(search, time.monotonic() - began)


def _result(search: SplitSearch, seconds: float) -> Partition:
    """Say what is known by now."""
    best = search.best
    if best is None:
        least = min(each.memory_bytes for each in search.known.values())
        raise ValueError(
            f"nothing fits: the smallest need found is {least / 1e9:.1f} GB per accelerator; the "
            f"system has {search.capacity / 1e9:.1f} GB"
        )
    workload = dataclasses.replace(search.workload, pipeline_layout=str(best.layout))
    return Partition(
        layout=best.layout,
        workload=workload,
        step_time=best.step_time,
        lower_bound=min(search.bound, best.step_time),
        status="optimal" if search.is_optimal else "feasible",
        memory_bytes=memory_bytes(workload, search.table),
        fits=best.fits,
        baselines=dict(search.baselines),
        evaluated=len(search.known),
        seconds=seconds,
    )
