"""Ways to tune each part, by gradient or exhaustively, and the choice between both."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.checks import wrong
from pipejax.costs.model.workload import StageLayers, Workload
from pipejax.costs.system.system import System
from pipejax.search.tuning.joint import (
    plain_answers,
    search_jointly,
    tune_jointly,
)
from pipejax.search.tuning.joint_space import JointProblem, TunedJointly, count_settings
from pipejax.search.tuning.microbatch import (
    NothingFitsError,
    TunedSizes,
    search_microbatches,
    tune_microbatches,
)
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem, price
from pipejax.search.tuning.rounding import MOST, TooManyError
from pipejax.search.tuning.rounding_bound import bound_rounding

JOINT_MOST = 1_000_000  # settings of several parts up to which all are evaluated unless asked


class TuningTask(NamedTuple):
    """What is tuned under which schedule; M where it is given."""

    family: ScheduleFamily
    workload: Workload
    system: System
    memory_limit: bool
    microbatches: int = 0
    tell: "Callable[[FoundSetting], object] | None" = None

    def problem(self) -> TuningProblem:
        """The pair, under a fresh family, so that no method reuses another's programs."""
        family = dataclasses.replace(self.family)
        return TuningProblem.of(
            family, [self.workload], [self.system], memory_limit=self.memory_limit
        )


class FoundSetting(NamedTuple):
    """Result of one method, for the gradient with the point before rounding."""

    microbatches: int
    step_time: float
    memory_bytes: float
    evaluated: int
    setting: Mapping[str, Any] = {}
    relaxed: Mapping[str, Any] = {}
    more: Mapping[str, Any] = {}
    lower_bound: float = 0.0  # nothing that was to be chosen has a shorter step [s]

    def summary(self, task: TuningTask, seconds: float) -> dict[str, Any]:
        """What the method found, which took so long."""
        return {
            "microbatch_size": task.workload.minibatch // self.microbatches,
            **{name: getattr(self, name) for name in self._fields[:4]},
            **self.setting,
            **self.relaxed,
            **self.more,
            "tuned_step_time": self.step_time,  # where step_time is that of real numbers
            "seconds": seconds,
        }


def choose_method(task: TuningTask, what: str) -> tuple[str, str]:
    """Choose the method by the number of settings, and say why."""
    if what == "recompute" and task.family.is_planned:
        return "exhaustive", f"{task.family.schedule} is planned for each number of layers"
    settings, limit = count_settings(_joint(task, what), 0), JOINT_MOST if "," in what else MOST
    if settings <= limit:
        return "exhaustive", f"{settings:.0f} settings: up to {limit} are all evaluated"
    return "gradient", f"{settings:.3g} settings: more than {limit} are too many to evaluate all"


def _joint(task: TuningTask, what: str) -> JointProblem:
    """Return the problem of one part or several, with commas between them."""
    return JointProblem(task.problem(), tuple(what.split(",")), task.microbatches)


def _size(task: TuningTask, way: str) -> FoundSetting:
    """The microbatch size."""
    tune_ = tune_microbatches if way == "gradient" else search_microbatches
    problem = task.problem()

    def found_of(found: TunedSizes) -> FoundSetting:
        known, legal = found.sizes, found.sizes.is_legal
        names = ("size", "microbatches", "step_time", "memory_bytes")
        columns = (getattr(known, name)[legal].tolist() for name in names)
        keys = ("microbatch_size", *names[1:])
        sizes = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
        for one in sizes:  # also where the limit was lifted
            one["fits"] = one["memory_bytes"] <= float(task.system.memory_available)
        count, step, need = (getattr(found, name)[0].item() for name in names[1:])
        relaxed = {} if found.relaxed is None else found.relaxed._asdict()
        relaxed = {name: each[0].item() for name, each in relaxed.items()}
        is_all = way == "exhaustive" and known.is_known.all()
        bound = step if is_all else 0.0
        return FoundSetting(count, step, need, len(sizes), {}, relaxed, {"sizes": sizes}, bound)

    def tell(found: TunedSizes) -> None:
        if task.tell is not None:
            task.tell(found_of(found))

    how: dict[str, Any] = {"memory_limit": task.memory_limit, "on_progress": tell}
    return found_of(tune_(problem.family, [task.workload], [task.system], **how))


def _recompute(task: TuningTask, way: str, over: str) -> FoundSetting:
    """The recomputed layers of each stage: where there are too many ways, as many on each."""
    if task.family.is_planned:
        if way == "gradient":
            raise wrong("method", "is exhaustive where a schedule is planned for the times")
        return _recompute_planned(task)
    try:
        return _jointly(task, way, over)
    except TooManyError as error:
        note = f"{error}; as many on every stage instead"
        alike = _jointly(task, way, over, alike=True)
        return alike._replace(more={"note": note}, lower_bound=0.0)


def _recompute_planned(task: TuningTask) -> FoundSetting:
    """As many recomputed layers on every stage, each number with the schedule planned for it."""
    layers = task.problem().pairs.assigned.layers
    answers = [_planned_anew(task, count) for count in range(int(layers.max()) + 1)]
    capacity = float(task.system.memory_available) if task.memory_limit else math.inf
    fitting = [answer for answer in answers if answer.memory_bytes <= capacity]
    if not fitting:
        raise NothingFitsError("recompute: no number of recomputed layers fits in memory")
    best = min(fitting, key=lambda answer: answer.step_time)
    return best._replace(evaluated=len(answers))


def _planned_anew(task: TuningTask, count: int) -> FoundSetting:
    """The step with so many recomputed layers on each stage, and the schedule planned for it."""
    recompute = "full" if count else "none"
    workload = dataclasses.replace(task.workload, recompute=recompute, recompute_layers=count)
    anew = functools.partial(price, workload, task.system)
    family = dataclasses.replace(task.family, price=anew)
    problem = task._replace(workload=workload, family=family).problem()
    even = problem.pairs.assigned
    (step,), (need,) = problem.evaluate(task.microbatches, even, np.zeros(1, int))
    setting = {name: rows[0].astype(int).tolist() for name, rows in even._asdict().items()}
    return FoundSetting(task.microbatches, float(step), float(need), 1, setting)


def _jointly(task: TuningTask, way: str, what: str, *, alike: bool = False) -> FoundSetting:
    """Several parts together, and by gradient the bound on what rounding them costs."""
    joint = dataclasses.replace(_joint(task, what), alike=alike)

    def tell(found: TunedJointly) -> None:
        if task.tell is not None:
            task.tell(_found_jointly(task, joint, found))

    for plain in plain_answers(joint):
        tell(plain)
    if way == "exhaustive":
        found = search_jointly(joint)
        return _found_jointly(task, joint, found)._replace(lower_bound=found.step_time[0].item())
    found = tune_jointly(joint)
    if len(joint.parts) == 1:
        return _found_jointly(task, joint, found)
    tell(found)  # the bound takes as long again
    return _found_jointly(task, joint, found, bound_rounding(joint, found).lower_bound[0].item())


def _found_jointly(
    task: TuningTask, joint: JointProblem, found: TunedJointly, least: float = math.nan
) -> FoundSetting:
    """What is said of the best setting; no whole layers have a shorter step than the least [s]."""
    own, step, need = found.settings.at(0), found.step_time[0].item(), found.memory_bytes[0].item()
    setting: dict[str, Any] = {"layers": own.layers.tolist(), "recomputed": own.recomputed.tolist()}
    relaxed: dict[str, Any] = {}
    if found.relaxed is not None and found.relaxed_step_time is not None:
        (size,), layers = found.relaxed
        relaxed = {
            "microbatch_size": float(size),
            "microbatches": task.workload.minibatch / float(size),
            "step_time": found.relaxed_step_time[0].item(),
            **{name: each[0].tolist() for name, each in layers._asdict().items()},
            "lower_bound": None if math.isnan(least) else least,
        }
    count = joint.count(0, int(own.size))
    bound = 0.0 if math.isnan(least) else least
    return FoundSetting(count, step, need, found.evaluated, setting, relaxed, lower_bound=bound)


def baselines_of(task: TuningTask, what: str) -> dict[str, float | None]:
    """Step times of what one would set without tuning."""
    if what == "size" or "," in what:
        return {}
    problem = task.problem()
    even = problem.pairs.assigned
    none, full = (StageLayers(even.layers, share * even.layers) for share in (0, 1))
    settings = {
        "layers": {"even": even},
        "recompute": {"none": none, "full": full},
    }[what]
    times: dict[str, float | None] = {}
    if task.family.is_planned:
        most = int(even.layers.max())
        answers = {"none": _planned_anew(task, 0), "full": _planned_anew(task, most)}
        capacity = problem.capacity[0]
        return {k: v.step_time if v.memory_bytes <= capacity else None for k, v in answers.items()}
    for name, assigned in settings.items():
        (step,), (need,) = problem.evaluate(task.microbatches, assigned, np.zeros(1, int))
        times[name] = float(step) if need <= problem.capacity[0] else None
    return times


_WAYS: Mapping[str, Callable[[TuningTask, str], FoundSetting]] = {
    "size": _size,
    "layers": functools.partial(_jointly, what="layers"),
    "recompute": functools.partial(_recompute, over="recompute"),
}


def way_of(what: str) -> Callable[[TuningTask, str], FoundSetting]:
    """Return how one part is tuned, or several with commas between them."""
    return functools.partial(_jointly, what=what) if "," in what else _WAYS[what]
