"""The entry point of tuning, which takes the faster method unless one is given."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.checks import check_types, divisors, one_of, whole_number
from pipejax.base.short_repr import short_repr
from pipejax.costs.system import System
from pipejax.costs.workload import StageLayers, Workload
from pipejax.schedules.table.links import Links
from pipejax.search.tuning.layer_assignment import (
    LAYERS,
    RECOMPUTED,
    RECOMPUTED_ALIKE,
    StageChoice,
    search_stages,
    tune_stages,
)
from pipejax.search.tuning.microbatch import TunedSizes, search_microbatches, tune_microbatches
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem
from pipejax.search.tuning.rounding import MOST, TooManyError
from pipejax.search.tuning.system_design import PartPrices, design_systems, price_of

WHAT = ("microbatch_size", "layers", "recompute", "system")
METHODS = ("gradient", "exhaustive", "both")
# what decides which way is the faster: measured on two cores, compilation included
DESCENT_SECONDS = 6.0
SECONDS_PER_NEW_OP = 6e-5  # of a program that has yet to be built, lowered and run once
DIVISIONS = 40  # of a budget, where a grid is evaluated
SECONDS_PER_OP = 4e-9  # of one candidate more in the batch of a program


@short_repr
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
    what: str = "microbatch_size",
    method: str | None = None,
    link: str | Links = "delay",
    memory_limit: bool = True,
    microbatch_size: int | None = None,
    prices: PartPrices | tuple[float, ...] | None = None,
    budget: float | None = None,
    on_progress: "OnProgress | None" = None,
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
      method: "gradient", "exhaustive" or "both"; if None, the one that by the number of
        candidates and the cost of each is the faster. Shares of a budget are continuous: there
        the gradient is followed.
      link: link model, or `Links`.
      memory_limit: whether every worker must have room on its accelerators.
      microbatch_size: for the others than "microbatch_size"; the tuned one if None [sequences].
      prices: for "system": of a TFLOP/s, of GB/s of memory, inside a node and between nodes, and
        of a GB of capacity.
      budget: for "system": for one accelerator; what the system costs if None.
      on_progress: called with the best so far when something has been evaluated exactly: one
        more microbatch size, or all that a method finds.
      **schedule_options: what the schedule takes besides, such as stages_per_worker.

    Returns:
      The best setting, its exact step time and memory, and what each way found.

    Raises:
      ValueError: if a name is unknown, an argument does not go with what is tuned, the microbatch
        size does not divide the minibatch, no setting fits (`NothingFitsError` where it is the
        microbatch size), or all candidates are asked for and there are too many.

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
    what = one_of(what, WHAT, "what")
    method = None if method is None else one_of(method, METHODS, "method")
    for name, stray in (
        ("microbatch_size", microbatch_size is not None and what == "microbatch_size"),
        ("prices", prices is not None and what != "system"),
        ("budget", budget is not None and what != "system"),
    ):
        if stray:
            raise ValueError(f"{name} does not go with what={what!r}")
    if what == "system" and (prices is None or len(prices) != len(PartPrices._fields)):
        raise ValueError(f"what='system' needs prices of {', '.join(PartPrices._fields)}")
    family = ScheduleFamily(schedule, num_workers, schedule_options, link)
    paid = None if prices is None else PartPrices(*prices)
    task = _Task(family, workload, system, memory_limit, paid, budget)
    with jax.enable_x64(True):
        if what != "microbatch_size":
            task = task._replace(microbatches=_microbatches(task, what, microbatch_size))
        return _tune(task, what, method, on_progress)


OnProgress = Callable[[TuningResult], object]


class _Task(NamedTuple):
    """What is tuned under which schedule; M where it is given."""

    family: ScheduleFamily
    workload: Workload
    system: System
    memory_limit: bool
    prices: PartPrices | None
    budget: float | None
    microbatches: int = 0
    tell: "Callable[[_Found], object] | None" = None

    def problem(self) -> TuningProblem:
        """The pair, under a fresh family, so that no method reuses another's programs."""
        family = dataclasses.replace(self.family)
        return TuningProblem.of(
            family, [self.workload], [self.system], memory_limit=self.memory_limit
        )


class _Found(NamedTuple):
    """Result of one method, for the gradient with the point before rounding."""

    microbatches: int
    step_time: float
    memory_bytes: float
    evaluated: int
    setting: Mapping[str, Any] = {}
    relaxed: Mapping[str, Any] = {}
    more: Mapping[str, Any] = {}

    def told(self, task: _Task, seconds: float) -> dict[str, Any]:
        """What is told of the method, which took so long."""
        return {
            "microbatch_size": task.workload.minibatch // self.microbatches,
            **{name: getattr(self, name) for name in self._fields[:4]},
            **self.setting,
            **self.relaxed,
            **self.more,
            "tuned_step_time": self.step_time,  # where step_time is that of real numbers
            "seconds": seconds,
        }


def _microbatches(task: _Task, what: str, size: int | None) -> int:
    """Number of microbatches for what is tuned at one microbatch size."""
    if size is None:
        # with what is recomputed still open, the size must fit with the most that can be
        recompute = "full" if what == "recompute" else task.workload.recompute
        workload = dataclasses.replace(task.workload, recompute=recompute)
        task = task._replace(workload=workload)
        return _tune(task, "microbatch_size", None).microbatches
    count, rest = divmod(task.workload.minibatch, size)
    if rest:
        raise ValueError(
            f"microbatch_size {size} does not divide the minibatch of {task.workload.minibatch}"
        )
    return count


def _tune(
    task: _Task, what: str, method: str | None, on_progress: OnProgress | None = None
) -> TuningResult:
    """Take the ways that are asked for, and put together what they find."""
    reason = "as asked for"
    if method is None:
        method, reason = _faster(task, what)
    found: dict[str, _Found] = {}
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

        def tell(own: _Found, way: str = way, start: float = start) -> None:
            found[way], told[way] = own, own.told(task, time.perf_counter() - start)
            if on_progress is not None:
                on_progress(result(_price(task)))

        try:
            tell(_WAYS[what](task._replace(tell=tell), way))
        except TooManyError as error:
            if method != "both":
                raise
            told[way] = {"refused": str(error)}
    return result(_baseline(task, what) | _price(task))


def _faster(task: _Task, what: str) -> tuple[str, str]:
    """Choose the faster method for this size, and say why."""
    if what == "system":
        return "gradient", "shares of a budget are continuous: there are no candidates to count"
    layers = task.problem().pairs.assigned.layers[0].astype(int)
    ops = 2 * len(layers)  # of one microbatch
    if what == "microbatch_size":
        minibatch = task.workload.minibatch
        counts = divisors(minibatch)
        candidates, seconds = len(counts), SECONDS_PER_NEW_OP * ops * sum(counts)
    else:
        split = math.comb(layers.sum() - 1, len(layers) - 1)
        candidates = split if what == "layers" else math.prod((layers + 1).tolist())
        one = ops * task.microbatches
        seconds = SECONDS_PER_NEW_OP * one + SECONDS_PER_OP * one * candidates
    if candidates > MOST:
        return "gradient", f"{candidates:.3g} candidates are too many to try them all"
    about = f"{candidates} candidates take about {seconds:.1g} s, a descent {DESCENT_SECONDS:g} s"
    return ("exhaustive" if seconds <= DESCENT_SECONDS else "gradient"), about


def _size(task: _Task, way: str) -> _Found:
    """The microbatch size."""
    tune_ = tune_microbatches if way == "gradient" else search_microbatches
    problem = task.problem()

    def found_of(found: TunedSizes) -> _Found:
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
        return _Found(count, step, need, len(sizes), {}, relaxed, {"sizes": sizes})

    def tell(found: TunedSizes) -> None:
        if task.tell is not None:
            task.tell(found_of(found))

    how: dict[str, Any] = {"memory_limit": task.memory_limit, "on_progress": tell}
    return found_of(tune_(problem.family, [task.workload], [task.system], **how))


def _stages(task: _Task, way: str, choice: StageChoice) -> _Found:
    """Whole numbers for each stage."""
    tune_ = tune_stages if way == "gradient" else search_stages
    found = tune_(task.problem(), task.microbatches, choice)
    setting = {name: getattr(found, name)[0].tolist() for name in ("layers", "recomputed")}
    relaxed: dict[str, Any] = {}
    if found.relaxed is not None and found.relaxed_step_time is not None:
        relaxed = {name: each[0].tolist() for name, each in found.relaxed._asdict().items()}
        relaxed["step_time"] = found.relaxed_step_time[0].item()
    step, need = found.step_time[0].item(), found.memory_bytes[0].item()
    return _Found(task.microbatches, step, need, found.evaluated, setting, relaxed)


def _recompute(task: _Task, way: str) -> _Found:
    """The recomputed layers of each stage: where there are too many ways, as many on each."""
    try:
        return _stages(task, way, RECOMPUTED)
    except TooManyError as error:
        note = f"{error}; as many on every stage instead"
        return _stages(task, way, RECOMPUTED_ALIKE)._replace(more={"note": note})


def _system(task: _Task, way: str) -> _Found:
    """Shares of a budget for one accelerator."""
    assert task.prices is not None
    budget = price_of(task.system, task.prices) if task.budget is None else task.budget
    found = design_systems(
        task.problem(),
        task.microbatches,
        task.prices,
        [budget],
        divisions=None if way == "gradient" else DIVISIONS,
    )
    setting: dict[str, Any] = {
        name: dict(zip(PartPrices._fields, getattr(found, name)[0].tolist(), strict=True))
        for name in ("shares", "quantities")
    }
    memory, setting["budget"] = setting["quantities"]["memory_capacity"], budget
    return _Found(task.microbatches, found.step_time[0].item(), memory, found.evaluated, setting)


def _baseline(task: _Task, what: str) -> dict[str, float | None]:
    """Step times of what one would set without tuning."""
    if what == "microbatch_size":
        return {}
    problem = task.problem()
    even = problem.pairs.assigned
    none, full = (StageLayers(even.layers, share * even.layers) for share in (0, 1))
    settings = {
        "layers": {"even": even},
        "recompute": {"none": none, "full": full},
        "system": {task.system.name: even},
    }[what]
    times: dict[str, float | None] = {}
    for name, assigned in settings.items():
        (step,), (need,) = problem.evaluate(task.microbatches, assigned, np.zeros(1, int))
        times[name] = float(step) if need <= problem.capacity[0] else None
    return times


def _price(task: _Task) -> dict[str, float | None]:
    return {} if task.prices is None else {"price": price_of(task.system, task.prices)}


_WAYS: Mapping[str, Callable[[_Task, str], _Found]] = {
    "microbatch_size": _size,
    "layers": functools.partial(_stages, choice=LAYERS),
    "recompute": _recompute,
    "system": _system,
}
