"""The entry point of tuning, which takes the faster method unless one is given."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pipejax.base.checks import ArgumentError, check_types, one_of, whole_number, wrong
from pipejax.base.display import short_repr_of
from pipejax.base.progress import OnProgress, telling, to_nobody
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import System
from pipejax.schedules.table.links import Links
from pipejax.search.tuning.joint_space import PARTS
from pipejax.search.tuning.problem import ScheduleFamily
from pipejax.search.tuning.rounding import TooManyError
from pipejax.search.tuning.system_design import PartPrices
from pipejax.search.tuning.ways import (
    FoundSetting,
    TuningTask,
    baseline_of,
    faster,
    price_told,
    way_of,
)

METHODS = ("gradient", "exhaustive", "both")


@short_repr_of(
    "what microbatch_size microbatches step_time fits memory_bytes method setting "
    "evaluated seconds baseline reason"
)
@dataclasses.dataclass(frozen=True)
class TuningResult:
    """What makes a step the shortest.

    Attributes:
      what: what was tuned.
      method: "gradient", "exhaustive" or "both".
      reason: why this method.
      microbatch_size: b [sequences].
      microbatches: M.
      step_time: exact [s].
      memory_bytes: need of the fullest worker, per accelerator [B].
      fits: whether the accelerators have so much.
      seconds: that tuning took.
      evaluated: settings that were evaluated, by both methods together.
      setting: what is set beside the microbatch size: `layers` and `recomputed` of each stage, or
        `shares` of the budget and the `quantities` that they buy.
      relaxed: the optimum among real numbers, what it was rounded to (`tuned_step_time`), seconds
        and evaluations; None if no gradient was followed.
      exhaustive: the best of all candidates, seconds and evaluations, and all `sizes`; or that it
        was `refused`; None if candidates were not all evaluated.
      baseline: step times [s] of what one would set without tuning, None where that does not fit.
    """

    what: str
    method: str
    reason: str
    microbatch_size: int
    microbatches: int
    step_time: float
    memory_bytes: float
    fits: bool
    seconds: float
    evaluated: int
    setting: Mapping[str, Any]
    relaxed: Mapping[str, Any] | None
    exhaustive: Mapping[str, Any] | None
    baseline: Mapping[str, float | None]


def tune(
    schedule: str,
    num_workers: int,
    workload: Workload,
    system: System,
    *,
    what: str | Sequence[str] = "microbatch_size",
    method: str | None = None,
    link: str | Links = "delay",
    memory_limit: bool = True,
    microbatch_size: int | None = None,
    prices: PartPrices | tuple[float, ...] | None = None,
    budget: float | None = None,
    on_progress: OnProgress | None = None,
    on_best: "Callable[[TuningResult], object] | None" = None,
    **schedule_options: Any,
) -> TuningResult:
    """Find what makes a step the shortest: the microbatch size, or what else is asked for.

    The gradient way relaxes what is tuned to real numbers, descends along the exact gradient of the
    step time from many starts, rounds, and evaluates exactly what is left. The exhaustive way
    evaluates every legal candidate. In either case the answer is exact for what it names.

    Args:
      schedule: name of the schedule, as for `pj.schedules.build`.
      num_workers: P.
      workload: model, minibatch and parallelism.
      system: the machine.
      what: "microbatch_size"; "layers" of each stage; "recompute", how many layers of each stage
        are recomputed; or "system", how a budget is best spent on the parts of an accelerator.
        Several of them are tuned together: a sequence, or names with commas between them.
      method: "gradient", "exhaustive" or "both"; if None, the one that by the number of
        candidates and the cost of each is the faster. Shares of a budget are continuous: there
        the gradient is followed.
      link: link model, or `Links`.
      memory_limit: whether every worker must have room on its accelerators.
      microbatch_size: where it is not tuned; the one that is best alone if None [sequences].
      prices: for "system": of a TFLOP/s, of GB/s of memory, inside a node and between nodes, and
        of a GB of capacity.
      budget: for "system": for one accelerator; what the system costs if None.
      on_progress: called with how many settings are evaluated, None, and the best step time so far
        as a text; a bar in notebooks if None.
      on_best: called with the best so far when something has been evaluated exactly: one
        more microbatch size, or all that a method finds.
      **schedule_options: what the schedule takes besides, such as stages_per_worker.

    Returns:
      The best setting, its exact step time and memory, and what each way found.

    Raises:
      ValueError: if a name is unknown, the links have `eager_below`, an argument does not go with
        what is tuned, the microbatch size does not divide the minibatch, no setting fits
        (`NothingFitsError` where it is the microbatch size), or all candidates are asked for and
        there are too many.

    Example:
      >>> import pipejax as pj
      >>> workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=32, tensor_parallel=8)
      >>> found = pj.tune("1f1b", 4, workload, pj.load_system("h100"))
      >>> found.microbatch_size, found.microbatches, found.method
      (2, 16, 'exhaustive')
    """
    check_types(
        workload=(workload, Workload), system=(system, System), memory_limit=(memory_limit, bool)
    )
    num_workers = whole_number(num_workers, "num_workers")
    if microbatch_size is not None:
        microbatch_size = whole_number(microbatch_size, "microbatch_size")
    parts = _parts(what)
    what = ",".join(parts)
    method = None if method is None else one_of(method, METHODS, "method")
    for name, stray in (
        ("microbatch_size", microbatch_size is not None and "microbatch_size" in parts),
        ("prices", prices is not None and "system" not in parts),
        ("budget", budget is not None and "system" not in parts),
    ):
        if stray:
            raise wrong(name, f"does not go with what={what!r}")
    if workload.pipeline_layout and "layers" in parts:
        raise wrong("pipeline_layout", f"says the layers of each stage, which {what=} tunes")
    if "system" in parts and (prices is None or len(prices) != len(PartPrices._fields)):
        raise ArgumentError(
            "what", what, f"what='system' needs prices of {', '.join(PartPrices._fields)}"
        )
    if (least := Links.of(link).eager_below) > 0:
        raise ArgumentError(
            "eager_below",
            least,
            f"tune knows no eager_below, got {least:g}: what it tunes changes which messages are "
            "buffered",
        )
    family = ScheduleFamily(schedule, num_workers, schedule_options, link)
    paid = None if prices is None else PartPrices(*prices)
    task = TuningTask(family, workload, system, memory_limit, paid, budget)
    with jax.enable_x64(True):
        if "microbatch_size" not in parts:
            task = task._replace(microbatches=_microbatches(task, what, microbatch_size))
        with telling("tune", on_progress) as tell:
            return _tune(task, what, method, tell, on_best)


def _parts(what: str | Sequence[str]) -> tuple[str, ...]:
    """Names of what is tuned, in the order of `PARTS`."""
    check_types(what=(what, str, Sequence))
    given = what.split(",") if isinstance(what, str) else what
    names = [one_of(name, tuple(PARTS), "what") for name in given]
    if not names or len({*names}) < len(names):
        raise wrong("what", f"must name each part once, got {what!r}")
    return tuple(name for name in PARTS if name in names)


def _microbatches(task: TuningTask, what: str, size: int | None) -> int:
    """Number of microbatches for what is tuned at one microbatch size."""
    if size is None:
        # with what is recomputed still open, the size must fit with the most that can be
        recompute = "full" if "recompute" in what else task.workload.recompute
        workload = dataclasses.replace(task.workload, recompute=recompute)
        task = task._replace(workload=workload)
        return _tune(task, "microbatch_size", None).microbatches
    count, rest = divmod(task.workload.minibatch, size)
    if rest:
        raise wrong(
            "microbatch_size", f"{size} does not divide the minibatch of {task.workload.minibatch}"
        )
    return count


def _tune(
    task: TuningTask,
    what: str,
    method: str | None,
    tell_progress: OnProgress = to_nobody,
    on_best: Callable[[TuningResult], object] | None = None,
) -> TuningResult:
    """Take the ways that are asked for, and put together what they find."""
    reason = "as asked for"
    if method is None:
        method, reason = faster(task, what)
    found: dict[str, FoundSetting] = {}
    told: dict[str, Mapping[str, Any]] = {}
    began = time.perf_counter()

    def result(baseline: Mapping[str, float | None]) -> TuningResult:
        best = min(found.values(), key=lambda each: each.step_time)
        return TuningResult(
            what=what,
            method=method,
            reason=reason,
            microbatch_size=task.workload.minibatch // best.microbatches,
            microbatches=best.microbatches,
            step_time=best.step_time,
            memory_bytes=best.memory_bytes,
            # a budget buys as much memory as is needed
            fits=what == "system" or best.memory_bytes <= float(task.system.memory_available),
            seconds=time.perf_counter() - began,
            evaluated=sum(each.evaluated for each in found.values()),
            setting=best.setting,
            relaxed=told.get("gradient"),
            exhaustive=told.get("exhaustive"),
            baseline=baseline,
        )

    for way in ("gradient", "exhaustive") if method == "both" else (method,):
        start = time.perf_counter()

        def tell(own: FoundSetting, way: str = way, start: float = start) -> None:
            found[way], told[way] = own, own.told(task, time.perf_counter() - start)
            best = min(each.step_time for each in found.values())
            done = sum(each.evaluated for each in found.values())
            tell_progress(done, None, f"evaluated, best {best:.6g} s")
            if on_best is not None:
                on_best(result(price_told(task)))

        try:
            tell(way_of(what)(task._replace(tell=tell), way))
        except TooManyError as error:
            if method != "both":
                raise
            told[way] = {"refused": str(error)}
    return result(baseline_of(task, what) | price_told(task))
