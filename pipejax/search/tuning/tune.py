"""The entry point of tuning, which chooses the method by the number of settings."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.checks import ArgumentError, check_types, resolve_choice, whole_number, wrong
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, telling, to_nobody
from pipejax.costs.model.workload import StageLayers, Workload
from pipejax.costs.system.system import System
from pipejax.schedules.table.links import Links
from pipejax.search.found import Found
from pipejax.search.tuning.joint import (
    PARTS,
    JointProblem,
    NothingFitsError,
    TunedJointly,
    count_settings,
    plain_answers,
    plain_settings,
    search_jointly,
    tune_jointly,
)
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem, price
from pipejax.search.tuning.rounding import MOST

METHODS = ("gradient", "exhaustive")
JOINT_MOST = 1_000_000  # settings of several parts up to which all are evaluated unless asked
NO_BASELINES: Mapping[str, float | None] = MappingProxyType({})


class TuningTask(NamedTuple):
    """Model, machine and schedule to tune, with M if it is fixed."""

    family: ScheduleFamily
    workload: Workload
    system: System
    memory_limit: bool
    microbatches: int = 0
    tell: "Callable[[FoundSetting], object]" = id  # nobody is told

    def problem(self) -> TuningProblem:
        """The input of a method, under a fresh family: no method reuses another's programs."""
        family = dataclasses.replace(self.family)
        return TuningProblem.from_workload(
            family, self.workload, self.system, memory_limit=self.memory_limit
        )

    def joint(self, what: str) -> JointProblem:
        """The problem of one part, or of several with commas between them."""
        return JointProblem(self.problem(), tuple(what.split(",")), self.microbatches)


class FoundSetting(NamedTuple):
    """The best setting; `details` are what only one method or part has to say."""

    microbatches: int
    step_time: float
    memory_bytes: float
    evaluated: int
    setting: Mapping[str, Any] = {}
    details: Mapping[str, Any] = {}
    lower_bound: float = 0.0  # no candidate has a shorter step [s]


@short_repr
@dataclasses.dataclass(frozen=True)
class TunedSetting:
    """Setting with the shortest step.

    Attributes:
      over: what was tuned, with commas between.
      method: "gradient" or "exhaustive".
      reason: why this method.
      microbatch_size: b [sequences].
      microbatches: M.
      memory_bytes: need of the fullest worker, per accelerator [B].
      fits: whether the accelerators have so much.
      setting: what is set beside the microbatch size: `layers` and `recomputed` of each stage.
      details: what the method found, its seconds and evaluations: by gradient the optimum among
        real numbers and what it was rounded to (`tuned_step_time`); all `sizes` of a microbatch.
    """

    over: str
    method: str
    reason: str
    microbatch_size: int
    microbatches: int
    memory_bytes: float
    fits: bool
    setting: Mapping[str, Any]
    details: Mapping[str, Any]


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
      The best setting, its exact step time and memory, and what the method found. The bound is the
      step time where all candidates were evaluated, else 0. Baselines are what one would set
      without tuning, None where that does not fit.

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
    check_types(no_memory_limit=(no_memory_limit, bool))
    num_workers = whole_number(num_workers, "num_workers")
    if microbatch_size is not None:
        microbatch_size = whole_number(microbatch_size, "microbatch_size")
    parts = _parts(over)
    over = ",".join(parts)
    method = None if method is None else resolve_choice(method, METHODS, "method")
    if microbatch_size is not None and "size" in parts:
        raise wrong("microbatch_size", f"does not go with tuning {over}")
    if workload.pipeline_layout and "layers" in parts:
        raise wrong("pipeline_layout", "says the layers of each stage, which are to be tuned")
    if (least := Links.resolve(link).eager_below) > 0:
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
    """Return the names of the tuned parts in the order of `PARTS`."""
    check_types(over=(over, str, Sequence))
    requested = over.split(",") if isinstance(over, str) else over
    names = [resolve_choice(name, tuple(PARTS), "over") for name in requested]
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
    reason = "as asked for"
    if method is None:
        method, reason = _choose_method(task, over)
    start = time.perf_counter()

    def answer(
        result: FoundSetting, stopped: str, baselines: Mapping[str, float | None] = NO_BASELINES
    ) -> Found[TunedSetting]:
        size = task.workload.minibatch // result.microbatches
        details = {
            "microbatch_size": size,
            **{name: getattr(result, name) for name in result._fields[:4]},
            **result.setting,
            **result.details,
            "tuned_step_time": result.step_time,  # where step_time is that of real numbers
            "seconds": time.perf_counter() - start,
        }
        setting = TunedSetting(
            over=over,
            method=method,
            reason=reason,
            microbatch_size=size,
            microbatches=result.microbatches,
            memory_bytes=result.memory_bytes,
            fits=result.memory_bytes <= float(task.system.memory_available),
            setting=result.setting,
            details=details,
        )
        bound = 0.0 if stopped == "interrupted" else result.lower_bound
        if bound >= result.step_time:
            stopped = "optimal"
        return Found(setting, result.step_time, bound, baselines, result.evaluated, stopped)

    def tell(result: FoundSetting) -> None:
        best = answer(result, "interrupted")
        tell_progress(best.evaluated, None, f"evaluated, best {best.value:.6g} s")
        if on_best is not None:
            on_best(best)

    search = {"size": _tune_size, "recompute": _tune_recompute}.get(over, _tune_parts)
    result = search(task._replace(tell=tell), method, over)
    tell(result)
    return answer(result, "iterations", _baselines(task, over))


def _choose_method(task: TuningTask, what: str) -> tuple[str, str]:
    """Choose the method by the number of settings; return it with the reason."""
    if what == "recompute" and task.family.is_planned:
        return "exhaustive", f"{task.family.schedule} is planned for each number of layers"
    settings, limit = count_settings(task.joint(what)), JOINT_MOST if "," in what else MOST
    if settings <= limit:
        return "exhaustive", f"{settings:.0f} settings: up to {limit} are all evaluated"
    return "gradient", f"{settings:.3g} settings: more than {limit} are too many to evaluate all"


def _tune_size(task: TuningTask, way: str, what: str) -> FoundSetting:
    """Tune the microbatch size: every legal one is evaluated, fewest microbatches first."""
    joint = task.joint(what)
    plain, sizes = plain_settings(joint), list[dict[str, Any]]()
    best: dict[str, Any] | None = None
    for row in reversed(range(len(plain.size))):
        (step,), (need,) = joint.exact(plain.at([row]))
        if not np.isfinite(step):
            continue
        size = plain.size[row].item()
        sizes.insert(0, {"microbatch_size": size, "microbatches": task.workload.minibatch // size})
        sizes[0] |= {"step_time": step.item(), "memory_bytes": need.item()}
        sizes[0]["fits"] = need <= float(task.system.memory_available)  # also if that is no limit
        if need <= joint.problem.capacity and (best is None or step <= best["step_time"]):
            best = sizes[0]
        if best is not None:
            task.tell(_found_size(best, sizes))
    if best is None:  # which says why
        joint.pick(plain, joint.times(plain), len(sizes))
        raise NothingFitsError
    if way == "exhaustive":
        return _found_size(best, sizes)._replace(lower_bound=best["step_time"])
    relaxed = tune_jointly(joint)
    return _found_size(best, sizes, _relaxed(task, relaxed), relaxed.evaluated)


def _found_size(
    best: Mapping[str, Any],
    sizes: list[dict[str, Any]],
    relaxed: Mapping[str, Any] = MappingProxyType({}),
    evaluated: int = 0,
) -> FoundSetting:
    count, step, need = (best[name] for name in ("microbatches", "step_time", "memory_bytes"))
    details = {**relaxed, "sizes": [*sizes]}
    return FoundSetting(count, step, need, evaluated or len(sizes), {}, details)


def _tune_recompute(task: TuningTask, way: str, what: str) -> FoundSetting:
    if task.family.is_planned:
        if way == "gradient":
            raise wrong("method", "is exhaustive where a schedule is planned for the times")
        return _recompute_planned(task)
    return _tune_parts(task, way, what)


def _recompute_planned(task: TuningTask) -> FoundSetting:
    """As many recomputed layers on every stage, each number with the schedule planned for it."""
    layers = task.problem().pair.assigned.layers
    answers = [_planned_anew(task, count) for count in range(int(layers.max()) + 1)]
    capacity = float(task.system.memory_available) if task.memory_limit else math.inf
    fitting = [answer for answer in answers if answer.memory_bytes <= capacity]
    if not fitting:
        raise NothingFitsError("recompute: no number of recomputed layers fits in memory")
    best = min(fitting, key=lambda answer: answer.step_time)
    return best._replace(evaluated=len(answers))


def _planned_anew(task: TuningTask, count: int) -> FoundSetting:
    """Evaluate a step with this many recomputed layers per stage, and its planned schedule."""
    recompute = "full" if count else "none"
    workload = dataclasses.replace(task.workload, recompute=recompute, recompute_layers=count)
    anew = functools.partial(price, workload, task.system)
    family = dataclasses.replace(task.family, price=anew)
    problem = task._replace(workload=workload, family=family).problem()
    even = problem.pair.assigned
    step, need = problem.evaluate(task.microbatches, even)
    setting = {name: stages.astype(int).tolist() for name, stages in even._asdict().items()}
    return FoundSetting(task.microbatches, step, need, 1, setting)


def _tune_parts(task: TuningTask, way: str, what: str) -> FoundSetting:
    joint = task.joint(what)
    for plain in plain_answers(joint):
        task.tell(_found_setting(task, plain))
    if way == "exhaustive":
        best = _found_setting(task, search_jointly(joint))
        return best._replace(lower_bound=best.step_time)
    return _found_setting(task, tune_jointly(joint))


def _found_setting(task: TuningTask, tuned: TunedJointly) -> FoundSetting:
    best = tuned.setting
    setting = {"layers": best.layers.tolist(), "recomputed": best.recomputed.tolist()}
    numbers = tuned.step_time, tuned.memory_bytes, tuned.evaluated
    count = task.workload.minibatch // int(best.size)
    return FoundSetting(count, *numbers, setting, _relaxed(task, tuned))


def _relaxed(task: TuningTask, tuned: TunedJointly) -> Mapping[str, Any]:
    """The optimum among real numbers; nothing after an exhaustive search."""
    if tuned.relaxed is None:
        return {}
    step_time, size, layers = tuned.relaxed
    return {
        "microbatch_size": size,
        "microbatches": task.workload.minibatch / size,
        "step_time": step_time,
        **{name: stages.tolist() for name, stages in layers._asdict().items()},
    }


def _baselines(task: TuningTask, what: str) -> dict[str, float | None]:
    if what == "size" or "," in what:
        return {}
    problem = task.problem()
    even = problem.pair.assigned
    none, full = (StageLayers(even.layers, share * even.layers) for share in (0, 1))
    settings = {
        "layers": {"even": even},
        "recompute": {"none": none, "full": full},
    }[what]
    times: dict[str, float | None] = {}
    if task.family.is_planned:
        all_layers = int(even.layers.max())
        answers = {"none": _planned_anew(task, 0), "full": _planned_anew(task, all_layers)}
        capacity = problem.capacity
        return {k: v.step_time if v.memory_bytes <= capacity else None for k, v in answers.items()}
    for name, assigned in settings.items():
        step, need = problem.evaluate(task.microbatches, assigned)
        times[name] = step if need <= problem.capacity else None
    return times
