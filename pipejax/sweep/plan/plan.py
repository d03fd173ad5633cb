"""`pj.plan`: search for the layout of a training job with the shortest step."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.analysis.scenario import Scenario
from pipejax.analysis.step.evidence import Evidence, Regime, are_tied, find_evidence, operand_bits
from pipejax.analysis.step.step_report import bands
from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import MAX_COUNT, as_tuple, check_types, whole_number, wrong
from pipejax.base.files import is_dataset, refuse_existing
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.layers.formulas import model_flop
from pipejax.costs.model.launchers import find_launcher, launcher_defaults
from pipejax.costs.model.model import Model, load_model
from pipejax.costs.model.stack import Stack
from pipejax.costs.model.workload_fields import PRECISIONS
from pipejax.costs.sources import ModelCosts
from pipejax.costs.system.parts import HEADROOM
from pipejax.costs.system.system import System, load_system
from pipejax.schedules.table.links import Links
from pipejax.sweep.plan.layouts import (
    SCHEDULES,
    SHARED,
    Layouts,
    PlanRequest,
    enumerate_layouts,
    layout_workload,
    program_shape,
)
from pipejax.sweep.plan.result import (
    PlannedLayout,
    PlanResult,
    break_even_factors,
    layout_columns,
    limiting_resources,
    save_columns,
    stored_step_times,
    under_launchers,
)
from pipejax.sweep.plan.search import Estimates, Evaluator, Rows, Times, estimate

RUNNERS_UP = 9
SAVE_INTERVAL = 10.0  # seconds of work that an interruption may cost


def plan(
    model: Model | str | Path,
    system: System | str | Path,
    *,
    gpus: int,
    minibatch: int,
    schedules: Sequence[str] | None = None,
    choices: Mapping[str, Any] | None = None,
    link: str | Links = "delay",
    runners_up: int = RUNNERS_UP,
    exhaustive: bool = False,
    front: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    replace: bool = False,
    on_progress: OnProgress | None = None,
    stack: Stack | str | Path | None = None,
    launcher: str | None = None,
    memory_limit: float | None = None,
    headroom: float | None = None,
    **shared: Any,
) -> PlanResult:
    """Find the layout of a training job with the shortest step.

    The search enumerates all legal layouts: tensor, context, expert, data and pipeline parallelism,
    stages per worker, microbatch size, schedule, recomputation, ZeRO, and whether embedding and
    head count as layers. It evaluates layouts that fit in memory exactly, in the order of a lower
    bound, until no other layout can be among the best. So best and runners-up are exact. Layouts
    are one idea if they have equal tensor, pipeline and expert parallelism, and equal use of ZeRO
    3. Only the fastest layout of an idea is reported, with layouts within 1 % of it (`also`).

    Args:
      model: the transformer, or its name.
      system: the machine, or its name.
      gpus: number of accelerators, all of which are used.
      minibatch: sequences per step of the whole job.
      schedules: names of schedules whose order of ops is fixed; default: schedules that the
        launcher builds by name; without a launcher, 1f1b, interleaved-1f1b and zb-h1.
      choices: {axis: allowed value or values}. Axes are tensor, context, expert, data, pipeline,
        stages_per_worker, microbatch_size, recompute, zero and edge_units. Default: all legal
        values, with some limits. Tensor parallelism stays inside a node, and an accelerator has at
        least 1024 tokens of a sequence. A worker has at most 16 stages, and no stage has over 10 %
        more layers than the mean. recompute is none, selective, full, or parts of latent attention.
      link: link model, or `Links`.
      runners_up: number of reported layouts after the best.
      exhaustive: whether to evaluate all layouts that fit exactly.
      front: whether to find the exact Pareto front of step time and memory, too.
      out: Zarr store for all layouts, written regularly; or CSV file, written at the end.
      resume: whether to continue an existing store.
      replace: whether to replace an existing store or file.
      on_progress: called with the number of finished layouts, the number of all layouts, and a
        text.
      stack: the software (kernels and default exchanges), or its name; default: software of the
        runs that calibrated the system, or of the system's file.
      launcher: launcher that must run the layouts; it sets defaults of gradients and exchanges.
      memory_limit: memory for the tensors of an accelerator [B], instead of headroom.
      headroom: share of an accelerator's memory reserved for fragmentation and buffers; default
        0.1.
      **shared: fields of `Workload` that all layouts have in common, such as `precision`. The error
        about a wrong field lists the allowed fields.

    Returns:
      The best layout, runners-up, and estimates of all layouts.

    Raises:
      ValueError: if a name is unknown, no layout is legal, or no layout fits in memory; the message
        then names the layout of least memory.
      OSError: if the store cannot be written.

    Example:
      >>> import pipejax as pj
      >>> pj.plan("gpt-22b", "h100", gpus=64, minibatch=1,
      ...         choices={"tensor": [4], "pipeline": [4]})
      Traceback (most recent call last):
      ...
      ValueError: no layout of gpt-22b on 64 accelerators is legal: a minibatch of 1 is divided by
      none of the possible numbers of replicas, 2, 4
    """
    began = time.perf_counter()
    check_types(exhaustive=(exhaustive, bool), front=(front, bool), resume=(resume, bool))
    runners_up = whole_number(runners_up, "runners_up", minimum=0)
    if memory_limit is not None and headroom is not None:
        raise wrong("headroom", "has no effect beside memory_limit: choose one")
    machine = system if isinstance(system, System) else load_system(system)
    transformer = model if isinstance(model, Model) else load_model(model)
    transformer, software, defaults = launcher_defaults(launcher, transformer, machine, stack)
    default_schedules = SCHEDULES if launcher is None else find_launcher(launcher).schedules
    request = PlanRequest(
        model=transformer,
        system=software.on(machine),
        gpus=gpus,
        minibatch=minibatch,
        schedules=as_tuple(default_schedules if schedules is None else schedules),
        choices={name: as_tuple(values) for name, values in (choices or {}).items()},
        links=Links.resolve(link),
        shared={name: defaults[name] for name in SHARED if name in defaults} | shared,
        stack=software.name,
        memory_limit=memory_limit,
        headroom=HEADROOM if headroom is None else headroom,
        launcher=launcher or "",
    )
    stored_times = None if out is None else _stored_times(Path(out), request, resume, replace)
    with telling("plan", on_progress) as tell:
        layouts = enumerate_layouts(request)
        estimates = estimate(request, layouts, tell)
        _check_memory(request, layouts, estimates)
        if stored_times is not None:
            estimates.step_time[:] = stored_times
        after_program = _progress_saver(request, layouts, estimates, tell, out)
        evaluator = Evaluator(request, layouts, estimates, after_program)
        if exhaustive:
            evaluator.evaluate_all()
        is_outside, rows, planned = _find_layouts(evaluator, 1 + runners_up)
        on_front = evaluator.find_front() if front else None
    ranked = [layout for row, layout in zip(rows, planned, strict=True) if not is_outside[row]]
    ties = are_tied([layout.step_time for layout in ranked], [layout.evidence for layout in ranked])
    result = PlanResult(
        best=ranked[0],
        runners_up=tuple(ranked[1:]),
        outside=tuple(sorted(planned[len(ranked) :], key=lambda layout: layout.step_time)),
        tied=int(ties.sum()),
        under_launchers=under_launchers(request, ranked[0].scenario),
        break_even_factors=break_even_factors(request, layouts, rows[: len(ranked)][:2]),
        enumerated=len(layouts),
        fitting=int(estimates.fits.sum()),
        evaluated=int((~np.isnan(estimates.step_time)).sum()),
        programs=evaluator.num_evaluated,
        seconds=time.perf_counter() - began,
        request=request,
        layouts=layouts,
        estimates=estimates,
        place=int(rows[0]),
        apart=is_outside,
        front=on_front,
    )
    if out is not None:
        result.save(out, replace=True)
    return result


def _stored_times(out: Path, request: PlanRequest, resume: bool, replace: bool) -> Times | None:
    """Return the step times [s] of an earlier run that this run resumes, or None."""
    if not os.path.lexists(out):
        return None
    if replace:
        if out.is_dir() and not is_dataset(out):
            raise ValueError(f"{out} is not a dataset that was written here: it is never replaced")
        return None
    if not resume:
        refuse_existing(out)
    return stored_step_times(out, request)


def _progress_saver(
    request: PlanRequest,
    layouts: Layouts,
    estimates: Estimates,
    tell: OnProgress,
    out: str | Path | None,
) -> Callable[[], None]:
    """Return a function that reports progress, and regularly saves the results so far."""
    last_save = time.perf_counter()

    def after_program() -> None:
        nonlocal last_save
        done = int((~np.isnan(estimates.step_time)).sum())
        tell(done, int(estimates.fits.sum()), "layouts evaluated")
        is_late = time.perf_counter() - last_save > SAVE_INTERVAL
        if out is not None and Path(out).suffix == ".zarr" and is_late:
            columns = layout_columns(request, layouts, estimates)
            save_columns(Path(out), request, columns, replace=True)
            last_save = time.perf_counter()

    return after_program


def _find_layouts(
    evaluator: Evaluator, count: int
) -> tuple[Bool[NumpyArray, " layouts"], Rows, list[PlannedLayout]]:
    """Return for each layout whether it is outside, then rows and records of the best layouts."""
    # A layout is outside if another regime is measured better than its regime, or if it may not fit
    # in memory. First come the `count` best layouts that are not outside. Then comes the best
    # outside layout of each regime; one that may not fit only if it is faster than the best layout.
    request, layouts = evaluator.request, evaluator.layouts
    regimes = layout_regimes(request, layouts)
    by_row = evidence_by_row(request, regimes)
    levels = evidence_levels(regimes, by_row)
    fits, times = evaluator.estimates.fits, evaluator.estimates.step_time
    is_safe = fits & (evaluator.estimates.memory_bytes <= request.safe_memory)
    is_safe = is_safe if is_safe.any() else fits
    is_outside = (levels > levels[is_safe].min()) | (fits & ~is_safe)
    best_rows = [evaluator.find_best(count, ~is_outside)]
    for regime in sorted({regimes[row] for row in np.flatnonzero(is_outside)}):
        is_regime = np.array([other == regime for other in regimes])
        best_rows.append(evaluator.find_best(1, is_outside & is_regime))
    rows = np.concatenate(best_rows)
    rows = rows[is_safe[rows] | (times[rows] < times[rows[0]])]
    resources = limiting_resources(request, layouts, rows)
    planned = [
        _describe_layout(evaluator, row, resource, regimes[row], by_row[row])
        for row, resource in zip(rows.tolist(), resources, strict=True)
    ]
    return is_outside, rows, planned


def evidence_by_row(request: PlanRequest, regimes: Sequence[Regime]) -> list[Evidence | None]:
    """Return the evidence of each layout's regime; None if the regime has no evidence."""
    evidence = {
        regime: find_evidence(regime, request.system, request.stack, request.launcher)
        for regime in {*regimes}
    }
    return [evidence[regime] for regime in regimes]


def layout_regimes(request: PlanRequest, layouts: Layouts) -> list[Regime]:
    """Return the regime of each layout, from ZeRO, experts and precision."""
    bits = operand_bits(request.shared.get("precision", PRECISIONS[0]))
    # 0 without experts, 1 with experts inside a node, 2 with experts on several nodes
    crosses_nodes = layouts.expert > float(request.system.gpus_per_node)
    experts = np.where(request.model.moe is None, 0, 1 + crosses_nodes)
    columns = zip((layouts.zero >= 3).tolist(), experts.tolist(), strict=True)  # 3: split weights
    return [Regime(split, expert, bits) for split, expert in columns]


def evidence_levels(
    regimes: Sequence[Regime], by_row: Sequence[Evidence | None]
) -> Int[NumpyArray, " layouts"]:
    """Return how far each layout's regime is from measured runs: 0, 1 and more."""
    # 0: many runs of the regime, predicted well. 1: many runs of the regime, predicted badly.
    # Otherwise: 1 plus the number of facts in which the nearest runs differ, or `MAX_COUNT` if
    # there are no such runs.
    levels = {}
    for regime, record in zip(regimes, by_row, strict=True):
        if record is None:
            levels[regime] = MAX_COUNT  # no run is near
        elif record.regime == regime and record.is_many:
            levels[regime] = int(not record.is_enough)
        else:
            levels[regime] = 1 + max(1, len(record.differs))
    return np.array([levels[regime] for regime in regimes])


def _describe_layout(
    evaluator: Evaluator, row: int, bound_by: str, regime: Regime, evidence: Evidence | None
) -> PlannedLayout:
    """Return the record of one layout, with the widest error band of the calibration."""
    request, layouts, estimates = evaluator.request, evaluator.layouts, evaluator.estimates
    step, memory_bytes = float(estimates.step_time[row]), float(estimates.memory_bytes[row])
    step_bands = {} if evidence is None else bands(request.system, step)
    percent = max(step_bands, key=float, default=None)
    flop = model_flop(request.model, request.minibatch)
    peak = request.system.peak(request.shared.get("precision", "bf16"))
    layout = layouts.described(request, row)
    return PlannedLayout(
        layout=layout,
        step_time=step,
        band=None if percent is None else step_bands[percent],
        band_percent=None if percent is None else float(percent),
        mfu=float(flop / (step * request.gpus * peak)),
        tokens_per_second=request.minibatch * float(request.model.sequence) / step,
        memory_bytes=memory_bytes,
        memory_left=request.usable_memory - memory_bytes,
        bound_by=bound_by,
        regime=str(regime),
        evidence=evidence,
        also=tuple(  # fields that differ, and the step time
            dict(layouts.described(request, tied_row).items() - layout.items())
            | {"step_time": float(estimates.step_time[tied_row])}
            for tied_row in evaluator.ties(row).tolist()
        ),
        scenario=_layout_scenario(request, layouts, row),
    )


def _layout_scenario(request: PlanRequest, layouts: Layouts, row: int) -> Scenario:
    """Return the scenario of one layout, with the machine and links of the request."""
    workload, shape = layout_workload(request, layouts, row), program_shape(request, layouts, row)
    return Scenario(
        schedule=shape.schedule,
        num_workers=shape.workers,
        num_microbatches=int(layouts.microbatches[row]),
        options=shape.options,
        costs=ModelCosts(workload, request.system, stack=request.stack),
        link=request.links,
    )


def _check_memory(request: PlanRequest, layouts: Layouts, estimates: Estimates) -> None:
    """Refuse a job if no layout fits in memory; the error names the layout of least memory."""
    if estimates.fits.any():
        return
    row = int(estimates.memory_bytes.argmin())
    needed_gb, limit_gb = estimates.memory_bytes[row] / 1e9, request.usable_memory / 1e9
    source = f"of {request.system.name}"
    if request.memory_limit is not None:
        source = "of memory_limit"
    elif request.headroom:
        source = f"that headroom {request.headroom:g} leaves {source}"
    fields = layouts.described(request, row).items()
    layout = ", ".join(f"{name.replace('_', ' ')} {v}" for name, v in fields if v not in (0, 1))
    raise ValueError(
        f"none of {len(layouts)} layouts of {request.model.name} on {request.gpus} accelerators "
        f"fits the memory: the nearest ({layout}) needs {needed_gb:.1f} GB per accelerator, "
        f"more than the {limit_gb:.1f} GB {source}"
    )
