"""The entry point of tuning, which chooses the method by the number of settings."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from pipejax.base.checks import (
    ArgumentError,
    check_types,
    one_of,
    whole_number,
    wrong,
)
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, telling, to_nobody
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import System
from pipejax.schedules.table.links import Links
from pipejax.search.found import Found
from pipejax.search.tuning.joint_space import PARTS
from pipejax.search.tuning.problem import ScheduleFamily, price
from pipejax.search.tuning.ways import (
    FoundSetting,
    TuningTask,
    baselines_of,
    choose_method,
    way_of,
)

METHODS = ("gradient", "exhaustive")
NO_BASELINES: Mapping[str, float | None] = MappingProxyType({})


@short_repr
@dataclasses.dataclass(frozen=True)
class TunedSetting:
    """What makes a step the shortest.

    Attributes:
      over: what was tuned, with commas between.
      method: "gradient" or "exhaustive".
      reason: why this method.
      microbatch_size: b [sequences].
      microbatches: M.
      memory_bytes: need of the fullest worker, per accelerator [B].
      fits: whether the accelerators have so much.
      setting: what is set beside the microbatch size: `layers` and `recomputed` of each stage.
      relaxed: the optimum among real numbers, what it was rounded to (`tuned_step_time`), seconds
        and evaluations; None if no gradient was followed.
      exhaustive: the best of all candidates, seconds and evaluations, and all `sizes`; None if
        candidates were not all evaluated.
    """

    over: str
    method: str
    reason: str
    microbatch_size: int
    microbatches: int
    memory_bytes: float
    fits: bool
    setting: Mapping[str, Any]
    relaxed: Mapping[str, Any] | None
    exhaustive: Mapping[str, Any] | None


def tune(
    schedule: str,
    num_workers: int,
    workload: Workload,
    system: System,
    *,
    over: str | Sequence[str] = "size",
    method: str | None = None,
    link: str | Links = "delay",
    no_memory_limit: bool = False,
    microbatch_size: int | None = None,
    on_progress: OnProgress | None = None,
    on_best: Callable[[Found[TunedSetting]], object] | None = None,
    **schedule_options: Any,
) -> Found[TunedSetting]:
    """Find what makes a step the shortest: the microbatch size, or what else is asked for.

    The gradient way relaxes what is tuned to real numbers, descends along the exact gradient of the
    step time from many starts, rounds, and evaluates exactly what is left. The exhaustive way
    evaluates every legal candidate. In either case the answer is exact for what it names.

    Args:
      schedule: name of the schedule, as for `pj.schedules.build`.
      num_workers: P.
      workload: model, minibatch and parallelism.
      system: the machine.
      over: what is tuned: "size" of a microbatch; "layers" of each stage; or "recompute", how many
        layers of each stage are recomputed. Several of them are tuned together: a sequence, or
        names with commas.
      method: "gradient" or "exhaustive"; default: exhaustive up to 200,000 settings of one part
        or 1,000,000 of several, else gradient.
      link: link model, or `Links`.
      no_memory_limit: whether workers may need more than their accelerators have.
      microbatch_size: where it is not tuned; the one that is best alone if None [sequences].
      on_progress: called with how many settings are evaluated, None, and the best step time so far
        as a text; a bar in notebooks if None.
      on_best: called with what an interrupt would leave when something has been evaluated exactly:
        one more microbatch size, or all that a method finds.
      **schedule_options: what the schedule takes besides, such as stages_per_worker.

    Returns:
      The best setting, its exact step time and memory, and what each way found. The bound is the
      step time where all candidates were evaluated; what rounding costs at most where several parts
      were tuned by gradient; else 0. Baselines are what one would set without tuning, None where
      that does not fit.

    Raises:
      ValueError: if a name is unknown, the links have `eager_below`, an argument does not go with
        what is tuned, the microbatch size does not divide the minibatch, no setting fits
        (`NothingFitsError` where it is the microbatch size), or all candidates are asked for and
        there are too many.

    Example:
      >>> import pipejax as pj
      >>> workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=32, tensor_parallel=8)
      >>> found = pj.tune("1f1b", 4, workload, pj.load_system("h100"))
      >>> found.best.microbatch_size, found.best.microbatches, found.best.method
      (2, 16, 'exhaustive')
    """
    check_types(
        workload=(workload, Workload),
        system=(system, System),
        no_memory_limit=(no_memory_limit, bool),
    )
    num_workers = whole_number(num_workers, "num_workers")
    if microbatch_size is not None:
        microbatch_size = whole_number(microbatch_size, "microbatch_size")
    parts = _parts(over)
    over = ",".join(parts)
    method = None if method is None else one_of(method, METHODS, "method")
    if microbatch_size is not None and "size" in parts:
        raise wrong("microbatch_size", f"does not go with tuning {over}")
    if workload.pipeline_layout and "layers" in parts:
        raise wrong("pipeline_layout", "says the layers of each stage, which are to be tuned")
    if (least := Links.of(link).eager_below) > 0:
        raise ArgumentError(
            "eager_below",
            least,
            f"tune knows no eager_below, got {least:g}: what it tunes changes which messages are "
            "buffered",
        )
    family = ScheduleFamily(
        schedule, num_workers, schedule_options, link, functools.partial(price, workload, system)
    )
    if family.is_planned and over not in ("size", "recompute"):
        raise wrong(
            "over",
            f"{over} changes the times that {schedule} is planned for: tune size or recompute, or "
            "give slots",
        )
    task = TuningTask(family, workload, system, not no_memory_limit)
    with jax.enable_x64(True):
        if "size" not in parts:
            task = task._replace(microbatches=_microbatches(task, over, microbatch_size))
        with telling("tune", on_progress) as tell:
            return _tune(task, over, method, tell, on_best)


def _parts(over: str | Sequence[str]) -> tuple[str, ...]:
    """Names of what is tuned, in the order of `PARTS`."""
    check_types(over=(over, str, Sequence))
    given = over.split(",") if isinstance(over, str) else over
    names = [one_of(name, tuple(PARTS), "over") for name in given]
    if not names or len({*names}) < len(names):
        raise wrong("over", f"must name each part once, got {over!r}")
    return tuple(name for name in PARTS if name in names)


def _microbatches(task: TuningTask, over: str, size: int | None) -> int:
    """Number of microbatches for what is tuned at one microbatch size."""
    if size is None:
        # with what is recomputed still open, the size must fit with the most that can be
        recompute = "full" if "recompute" in over else task.workload.recompute
        workload = dataclasses.replace(task.workload, recompute=recompute)
        return _tune(task._replace(workload=workload), "size", None).best.microbatches
    count, rest = divmod(task.workload.minibatch, size)
    if rest:
        raise wrong(
            "microbatch_size", f"{size} does not divide the minibatch of {task.workload.minibatch}"
        )
    return count


def _tune(
    task: TuningTask,
    over: str,
    method: str | None,
    tell_progress: OnProgress = to_nobody,
    on_best: Callable[[Found[TunedSetting]], object] | None = None,
) -> Found[TunedSetting]:
    """Tune by one method."""
    reason = "as asked for"
    if method is None:
        method, reason = choose_method(task, over)
    start = time.perf_counter()

    def answer(
        result: FoundSetting, stopped: str, baselines: Mapping[str, float | None] = NO_BASELINES
    ) -> Found[TunedSetting]:
        summary = result.summary(task, time.perf_counter() - start)
        setting = TunedSetting(
            over=over,
            method=method,
            reason=reason,
            microbatch_size=task.workload.minibatch // result.microbatches,
            microbatches=result.microbatches,
            memory_bytes=result.memory_bytes,
            fits=result.memory_bytes <= float(task.system.memory_available),
            setting=result.setting,
            relaxed=summary if method == "gradient" else None,
            exhaustive=summary if method == "exhaustive" else None,
        )
        bound = result.lower_bound * (stopped != "interrupted")
        if bound >= result.step_time:
            stopped = "optimal"
        return Found(setting, result.step_time, bound, baselines, result.evaluated, stopped)

    def tell(result: FoundSetting) -> None:
        best = answer(result, "interrupted")
        tell_progress(best.evaluated, None, f"evaluated, best {best.value:.6g} s")
        if on_best is not None:
            on_best(best)

    result = way_of(over)(task._replace(tell=tell), method)
    tell(result)
    return answer(result, "iterations", baselines_of(task, over))
