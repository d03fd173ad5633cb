"""The entry point of tuning, which takes the faster method unless one is given."""

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
    is_lifted,
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
from pipejax.search.tuning.rounding import TooManyError
from pipejax.search.tuning.system_design import PartPrices
from pipejax.search.tuning.ways import (
    FoundSetting,
    TuningTask,
    baselines_of,
    faster,
    price_of_system,
    way_of,
)

METHODS = ("gradient", "exhaustive", "both")
NO_BASELINES: Mapping[str, float | None] = MappingProxyType({})


@short_repr
@dataclasses.dataclass(frozen=True)
class TunedSetting:
    """What makes a step the shortest.

    Attributes:
      over: what was tuned, with commas between.
      method: "gradient", "exhaustive" or "both".
      reason: why this method.
      microbatch_size: b [sequences].
      microbatches: M.
      memory_bytes: need of the fullest worker, per accelerator [B].
      fits: whether the accelerators have so much.
      setting: what is set beside the microbatch size: `layers` and `recomputed` of each stage, or
        `shares` of the budget and the `quantities` that they buy, and the `price` of the system.
      relaxed: the optimum among real numbers, what it was rounded to (`tuned_step_time`), seconds
        and evaluations; None if no gradient was followed.
      exhaustive: the best of all candidates, seconds and evaluations, and all `sizes`; or that it
        was `refused`; None if candidates were not all evaluated.
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
    prices: PartPrices | tuple[float, ...] | None = None,
    budget: float | None = None,
    on_progress: OnProgress | None = None,
    on_best: Callable[[Found[TunedSetting]], object] | None = None,
    memory_limit: bool | None = None,
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
      over: what is tuned: "size" of a microbatch; "layers" of each stage; "recompute", how many
        layers of each stage are recomputed; or "system", how a budget is best spent on the parts of
        an accelerator. Several of them are tuned together: a sequence, or names with commas.
      method: "gradient", "exhaustive" or "both"; if None, the one that by the number of
        candidates and the cost of each is the faster. Shares of a budget are continuous: there
        the gradient is followed.
      link: link model, or `Links`.
      no_memory_limit: whether workers may need more than their accelerators have.
      microbatch_size: where it is not tuned; the one that is best alone if None [sequences].
      prices: for "system": of a TFLOP/s, of GB/s of memory, inside a node and between nodes, and
        of a GB of capacity.
      budget: for "system": for one accelerator; what the system costs if None.
      on_progress: called with how many settings are evaluated, None, and the best step time so far
        as a text; a bar in notebooks if None.
      on_best: called with what an interrupt would leave when something has been evaluated exactly:
        one more microbatch size, or all that a method finds.
      memory_limit: the opposite of `no_memory_limit`, as it was called before.
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
    check_types(workload=(workload, Workload), system=(system, System))
    lifted = is_lifted(no_memory_limit, memory_limit)
    num_workers = whole_number(num_workers, "num_workers")
    if microbatch_size is not None:
        microbatch_size = whole_number(microbatch_size, "microbatch_size")
    parts = _parts(over)
    over = ",".join(parts)
    method = None if method is None else one_of(method, METHODS, "method")
    for name, stray in (
        ("microbatch_size", microbatch_size is not None and "size" in parts),
        ("prices", prices is not None and "system" not in parts),
        ("budget", budget is not None and "system" not in parts),
    ):
        if stray:
            raise wrong(name, f"does not go with tuning {over}")
    if workload.pipeline_layout and "layers" in parts:
        raise wrong("pipeline_layout", "says the layers of each stage, which are to be tuned")
    if "system" in parts and (prices is None or len(prices) != len(PartPrices._fields)):
        raise wrong(
            "prices", f"must be those of {', '.join(PartPrices._fields)} to tune the system"
        )
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
    paid = None if prices is None else PartPrices(*prices)
    task = TuningTask(family, workload, system, not lifted, paid, budget)
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
    """Take the ways that are asked for, and put together what they find."""
    reason = "as asked for"
    if method is None:
        method, reason = faster(task, over)
    found: dict[str, FoundSetting] = {}
    ways: dict[str, Mapping[str, Any]] = {}
    price = price_of_system(task)

    def answer(
        stopped: str = "interrupted", baselines: Mapping[str, float | None] = NO_BASELINES
    ) -> Found[TunedSetting]:
        best = min(found.values(), key=lambda each: each.step_time)
        bound = max(each.lower_bound for each in found.values()) * (stopped != "interrupted")
        setting = TunedSetting(
            over=over,
            method=method,
            reason=reason,
            microbatch_size=task.workload.minibatch // best.microbatches,
            microbatches=best.microbatches,
            memory_bytes=best.memory_bytes,
            # a budget buys as much memory as is needed
            fits=over == "system" or best.memory_bytes <= float(task.system.memory_available),
            setting={**best.setting, **price},
            relaxed=ways.get("gradient"),
            exhaustive=ways.get("exhaustive"),
        )
        evaluated = sum(each.evaluated for each in found.values())
        if bound >= best.step_time:
            stopped = "optimal"
        return Found(setting, best.step_time, bound, baselines, evaluated, stopped)

    for way in ("gradient", "exhaustive") if method == "both" else (method,):
        start = time.perf_counter()

        def tell(own: FoundSetting, way: str = way, start: float = start) -> None:
            found[way], ways[way] = own, own.summary(task, time.perf_counter() - start)
            now = answer()
            tell_progress(now.evaluated, None, f"evaluated, best {now.value:.6g} s")
            if on_best is not None:
                on_best(now)

        try:
            tell(way_of(over)(task._replace(tell=tell), way))
        except TooManyError as error:
            if method != "both":
                raise
            ways[way] = {"refused": str(error)}
    return answer("iterations", baselines_of(task, over))
