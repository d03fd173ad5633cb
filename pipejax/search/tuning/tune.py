"""Entry point of tuning, which chooses the method by the number of settings."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pipejax.analysis.scenario import Scenario
from pipejax.base.checks import check_types, resolve_choice, whole_number, wrong
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, no_progress, telling
from pipejax.costs.edits import PairFactor, SlowWorkers
from pipejax.costs.model.launchers import find_launcher, machine_launches
from pipejax.costs.model.workload import StageLayers, Workload
from pipejax.search.found import Found
from pipejax.search.tuning.joint import (
    PARTS,
    BestSetting,
    JointProblem,
    NothingFitsError,
    Settings,
    count_settings,
    plain_best_settings,
    plain_settings,
    search_jointly,
    search_locally,
)
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem, price
from pipejax.search.tuning.rounding import MAX_EXHAUSTIVE

METHODS = ("local", "exhaustive")
MAX_JOINT_EXHAUSTIVE = 1_000_000  # if several parts have at most so many settings, try all


@short_repr
@dataclasses.dataclass(frozen=True)
class TunedSetting:
    """Setting with the shortest step.

    Attributes:
      over: the tuned parts, joined by commas.
      method: "local" or "exhaustive".
      reason: reason for this method.
      microbatch_size: b [sequences].
      microbatches: M.
      memory_bytes: memory need of the fullest worker, per accelerator [B].
      fits: whether this need fits in the accelerators' memory.
      workload: workload with this setting; None if no options express the setting.
      setting: `layers` and `recomputed` layers of each stage; empty if only the size is tuned.
      details: results, with the time and the number of evaluations. If only the size is tuned,
        `sizes` lists the results of all microbatch sizes.
    """

    over: str
    method: str
    reason: str
    microbatch_size: int
    microbatches: int
    memory_bytes: float
    fits: bool
    workload: Workload | None
    setting: Mapping[str, Any]
    details: Mapping[str, Any]


def tune(
    scenario: Scenario,
    over: str | Sequence[str] = "size",
    *,
    method: str | None = None,
    no_memory_limit: bool = False,
    microbatch_size: int | None = None,
    launcher: str | None = None,
    on_progress: OnProgress | None = None,
    on_best: Callable[[Found[TunedSetting]], object] | None = None,
) -> Found[TunedSetting]:
    """Tune settings of a workload for the shortest step: by default the microbatch size.

    The local method improves the best plain settings by moves of one layer, as long as that helps.
    Plain settings have even layers and equal numbers of recomputed layers. The exhaustive method
    evaluates every legal setting. Step times are exact in both cases.

    Args:
      scenario: a named schedule with the costs of a model on a system; its number of microbatches
        is not used.
      over: part to tune: "size" of a microbatch, "layers" of each stage, or "recompute", the number
        of recomputed layers of each stage. A sequence, or names with commas, tunes several parts
        together.
      method: "local" or "exhaustive"; default: exhaustive up to 200,000 settings of one part or
        1,000,000 settings of several parts, else local.
      no_memory_limit: whether workers may need more memory than their accelerators have.
      microbatch_size: size if it is not tuned [sequences]; default: the best size with even layers.
      launcher: name of a launcher that must run the setting; default: any setting.
      on_progress: called with the number of evaluated settings, None, and the best step time so far
        as a text; default: a bar in notebooks.
      on_best: called with the best result so far after each exact evaluation.

    Returns:
      The best setting, with its exact step time and memory. If all settings were evaluated, the
      lower bound is the step time, else 0. Baselines are plain settings; None if they do not fit.

    Raises:
      ValueError: if the scenario has no schedule or model, a name is unknown, the links have
        `eager_below`, an argument does not match the tuned parts, the microbatch size does not
        divide the minibatch, no setting fits (`NothingFitsError` for the microbatch size), or an
        exhaustive search is too large.

    Example:
      >>> import pipejax as pj
      >>> workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=32, tensor_parallel=8)
      >>> costs = pj.costing.ModelCosts(workload, pj.load_system("h100"))
      >>> result = pj.tune(pj.Scenario("1f1b", num_workers=4, costs=costs))
      >>> result.best.microbatch_size, result.best.microbatches, result.best.method
      (2, 16, 'exhaustive')
    """
    check_types(scenario=(scenario, Scenario), no_memory_limit=(no_memory_limit, bool))
    parts = _parts(over)
    schedule, workload, system = scenario.schedule, scenario.workload, scenario.system
    if workload is None or system is None or not isinstance(schedule, str):
        raise wrong("scenario", "must be a named schedule with the costs of a model on a system")
    for edit in scenario.edits:
        if not isinstance(edit, PairFactor | SlowWorkers):
            raise wrong("scenario", f"has an edit that tune does not support: {edit!r}")
    num_workers = whole_number(scenario.num_workers, "num_workers")
    if microbatch_size is not None:
        microbatch_size = whole_number(microbatch_size, "microbatch_size")
    over = ",".join(parts)
    method = None if method is None else resolve_choice(method, METHODS, "method")
    if microbatch_size is not None and "size" in parts:
        raise wrong("microbatch_size", f"is chosen by tuning {over}: leave it out")
    if workload.pipeline_layout and "layers" in parts:
        raise wrong("pipeline_layout", "sets the layers of each stage: leave it out to tune them")
    if (eager_below := scenario.links.eager_below) > 0:
        reason = "tuning changes which messages are buffered"
        raise wrong("eager_below", f"must be 0, got {eager_below:g}: {reason}", eager_below)
    family = ScheduleFamily(
        schedule=schedule,
        num_workers=num_workers,
        options=scenario.options,
        link=scenario.links,
        price=functools.partial(price, workload, system),
    )
    if family.is_planned and over not in ("size", "recompute"):
        raise wrong(
            "over",
            f"{over} changes the times that {schedule} is planned for: tune size or recompute, or "
            "give slots",
        )
    if method == "local" and (over == "size" or family.is_planned):
        raise wrong("method", f"must be exhaustive for {over}, got 'local'")
    launcher = None if launcher is None else find_launcher(launcher).name
    with jax.enable_x64(True):
        problem = TuningProblem.from_workload(
            family, workload, system, memory_limit=not no_memory_limit
        )
        joint = JointProblem(problem, parts, launcher=launcher, stack=scenario.source.stack)
        if "size" not in parts:
            joint = dataclasses.replace(joint, microbatches=_microbatches(joint, microbatch_size))
        with telling("tune", on_progress) as tell:
            return _tune(joint, method, tell, on_best)


def _parts(over: str | Sequence[str]) -> tuple[str, ...]:
    check_types(over=(over, str, Sequence))
    requested = over.split(",") if isinstance(over, str) else over
    names = [resolve_choice(name, tuple(PARTS), "over") for name in requested]
    if not names or len({*names}) < len(names):
        raise wrong("over", f"must name each part once, got {over!r}")
    return tuple(name for name in PARTS if name in names)


def _microbatches(joint: JointProblem, size: int | None) -> int:
    """Return the number of microbatches for a size; default: the best size with even layers."""
    problem, workload = joint.problem, joint.problem.workload
    if size is None:
        if "recompute" in joint.parts:
            # recomputation is tuned later, so the size must fit with full recomputation
            workload = dataclasses.replace(workload, recompute="full")
            problem = TuningProblem.from_workload(
                problem.family, workload, problem.system, memory_limit=problem.capacity < math.inf
            )
        size_problem = dataclasses.replace(joint, problem=problem, parts=("size",))
        return _tune(size_problem, method=None).best.microbatches
    count, remainder = divmod(workload.minibatch, size)
    if remainder:
        raise wrong("microbatch_size", f"{size} does not divide the minibatch {workload.minibatch}")
    return count


def _tune(
    joint: JointProblem,
    method: str | None,
    tell_progress: OnProgress = no_progress,
    on_best: Callable[[Found[TunedSetting]], object] | None = None,
) -> Found[TunedSetting]:
    """Tune one or several parts; if `method` is None, the number of settings decides."""
    over, problem = ",".join(joint.parts), joint.problem
    reason = "as asked for"
    if method is None:
        method, reason = _choose_method(joint)
    start = time.perf_counter()

    def to_found(
        result: BestSetting, stopped: str, baselines: Mapping[str, float | None]
    ) -> Found[TunedSetting]:
        size, layers, recomputed = (numbers.tolist() for numbers in result.setting)
        stages = {} if over == "size" else {"layers": layers, "recomputed": recomputed}
        count = problem.workload.minibatch // size
        details = {
            "microbatch_size": size,
            "microbatches": count,
            "step_time": result.step_time,
            "memory_bytes": result.memory_bytes,
            "evaluated": result.evaluated,
            **stages,
            **({"sizes": [*result.sizes]} if result.sizes else {}),
            "tuned_step_time": result.step_time,
            "seconds": time.perf_counter() - start,
        }
        setting = TunedSetting(
            over=over,
            method=method,
            reason=reason,
            microbatch_size=size,
            microbatches=count,
            memory_bytes=result.memory_bytes,
            fits=result.memory_bytes <= float(problem.system.memory_available),
            workload=result.workload,
            setting=stages,
            details=details,
        )
        bound = 0.0
        if result.is_proven and stopped != "interrupted":
            bound, stopped = result.step_time, "optimal"
        return Found(setting, result.step_time, bound, baselines, result.evaluated, stopped)

    def tell(result: BestSetting) -> None:
        best = to_found(result, "interrupted", {})
        tell_progress(best.evaluated, None, f"evaluated, best {best.value:.6g} s")
        if on_best is not None:
            on_best(best)

    if over == "size":
        result = _tune_size(joint, tell)
    elif problem.family.is_planned:
        result = _recompute_planned(joint)
    else:
        for plain in plain_best_settings(joint):
            tell(plain)
        result = search_jointly(joint) if method == "exhaustive" else search_locally(joint)
    tell(result)
    return to_found(result, "iterations", _baselines(joint))


def _choose_method(joint: JointProblem) -> tuple[str, str]:
    """Return "exhaustive" or "local", and the reason as a text."""
    family = joint.problem.family
    if joint.parts == ("recompute",) and family.is_planned:
        return "exhaustive", f"{family.schedule} is planned for each number of layers"
    count = count_settings(joint)
    limit = MAX_JOINT_EXHAUSTIVE if len(joint.parts) > 1 else MAX_EXHAUSTIVE
    if count <= limit:
        return "exhaustive", f"{count:.0f} settings: up to {limit} are all evaluated"
    return "local", f"{count:.3g} settings: more than {limit} are too many to evaluate all"


def _tune_size(joint: JointProblem, tell: Callable[[BestSetting], object]) -> BestSetting:
    """Evaluate all microbatch sizes; call `tell` with the best setting so far."""
    workload, system = joint.problem.workload, joint.problem.system
    plain, sizes = plain_settings(joint), list[dict[str, Any]]()
    best: BestSetting | None = None
    for row in reversed(range(len(plain.size))):
        (step_time,), (need,) = joint.times_and_needs(plain.at([row]))
        if not np.isfinite(step_time):
            continue
        size = plain.size[row].item()
        result = {
            "microbatch_size": size,
            "microbatches": workload.minibatch // size,
            "step_time": step_time.item(),
            "memory_bytes": need.item(),
            # compared with the machine, because the problem may have no memory limit
            "fits": need <= float(system.memory_available),
        }
        sizes.insert(0, result)
        if need <= joint.problem.capacity and (best is None or step_time <= best.step_time):
            setting, step_time, need = plain.at(row), step_time.item(), need.item()
            best = BestSetting(setting, step_time, need, len(sizes), workload=workload)
        if best is not None:
            best = best._replace(evaluated=len(sizes), sizes=[*sizes])
            tell(best)
    if best is None:
        joint.pick(plain, joint.times(plain), len(sizes))  # raises an error with the reason
        raise NothingFitsError
    return best._replace(is_proven=True)


def _recompute_planned(joint: JointProblem) -> BestSetting:
    """Try each number of recomputed layers, each with a schedule that is planned for it."""
    problem = joint.problem
    counts = range(int(problem.assigned.layers.max()) + 1)
    settings = [_planned_setting(joint, count) for count in counts]
    if joint.launcher is not None:
        table = problem.family.table(joint.microbatches)
        run = table, problem.system, joint.stack, joint.launcher
        settings = [  # those that the launcher can run
            setting
            for setting in settings
            if setting.workload and not machine_launches(setting.workload, *run)[0].lacks
        ]
    fitting = [setting for setting in settings if setting.memory_bytes <= problem.capacity]
    if not fitting:
        raise NothingFitsError("recompute: no number of recomputed layers fits in memory")
    best = min(fitting, key=lambda setting: setting.step_time)
    return best._replace(evaluated=len(settings))


def _planned_setting(joint: JointProblem, count: int) -> BestSetting:
    """Plan the schedule for `count` recomputed layers per stage, and evaluate the step."""
    recompute, system = "full" if count else "none", joint.problem.system
    fields: Any = {"recompute": recompute, "recompute_layers": count}
    workload = dataclasses.replace(joint.problem.workload, **fields)
    new_price = functools.partial(price, workload, system)
    family = dataclasses.replace(joint.problem.family, price=new_price)
    problem = TuningProblem.from_workload(family, workload, system)
    size = np.array(workload.minibatch // joint.microbatches)
    setting = Settings(size, *(np.asarray(stages, int) for stages in problem.assigned))
    step_time, need = problem.evaluate(joint.microbatches, problem.assigned)
    return BestSetting(setting, step_time, need, evaluated=1, workload=workload)


def _baselines(joint: JointProblem) -> dict[str, float | None]:
    """Return {name of a plain setting: step time [s], or None if it does not fit}."""
    if len(joint.parts) > 1 or joint.parts == ("size",):
        return {}
    (part,), problem, even = joint.parts, joint.problem, joint.problem.assigned
    results: dict[str, tuple[float, float]] = {}  # {name: (step time [s], memory need [B])}
    if problem.family.is_planned:
        for name, count in (("none", 0), ("full", int(even.layers.max()))):
            setting = _planned_setting(joint, count)
            results[name] = setting.step_time, setting.memory_bytes
    else:
        none, full = (StageLayers(even.layers, share * even.layers) for share in (0, 1))
        settings = {"layers": {"even": even}, "recompute": {"none": none, "full": full}}[part]
        for name, assigned in settings.items():
            results[name] = problem.evaluate(joint.microbatches, assigned)
    return {
        name: step_time if need <= problem.capacity else None
        for name, (step_time, need) in results.items()
    }
