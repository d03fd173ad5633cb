"""`pj.plan`: search for the layout of a training job with the shortest step."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.analysis.scenario import Scenario
from pipejax.analysis.step.evidence import Evidence, Regime, are_tied, find_evidence, operand_bits
from pipejax.analysis.step.step_report import bands, mfu
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
    choices: Mapping[str, Sequence[Any]] | None = None,
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

    All legal layouts are enumerated: tensor, context, expert, data and pipeline parallelism, stages
    per worker, microbatch size, schedule, recomputation, ZeRO, and whether embedding and head count
    as layers. Those that fit in memory are evaluated exactly, in the order of a lower bound, until
    no other can be among the best. So best and runners-up are exact. They are different ideas: of
    layouts with equal tensor, pipeline and expert parallelism, with or without ZeRO 3, only the
    fastest is reported, with those within 1 % of it (`also`).

    Args:
      model: the transformer, or its name.
      system: the machine, or its name.
      gpus: accelerators, all of which are used.
      minibatch: sequences per step of the whole job.
      schedules: names of schedules whose order of ops is fixed; default: those that the launcher
        builds by name, without one 1f1b, interleaved-1f1b and zb-h1.
      choices: allowed values by axis: tensor, context, expert, data, pipeline, stages_per_worker,
        microbatch_size, recompute, zero, edge_units. Default: all legal values, with tensor
        parallelism inside a node, at least 1024 tokens of a sequence on an accelerator, at most 16
        stages per worker, none of which has over 10 % more layers than their mean, and recompute
        none, selective, full, and parts of latent attention.
      link: link model, or `Links`.
      runners_up: number of reported layouts after the best.
      exhaustive: whether all layouts that fit are evaluated exactly.
      front: whether to find the Pareto front of step time and memory exactly, too.
      out: Zarr store for all layouts, written regularly; or a CSV, written at the end.
      resume: whether to continue an existing store.
      replace: whether to replace an existing store or file.
      on_progress: called with the layouts done, all layouts, and a text.
      stack: the software, or its name, with its kernels and default exchanges; default: that of the
        runs on which the system was calibrated, or of its file.
      launcher: only layouts that it runs, with its defaults of gradients and exchanges.
      memory_limit: memory for the tensors of an accelerator [B], in place of headroom.
      headroom: share of an accelerator's memory reserved for fragmentation and buffers; default
        0.1.
      **shared: fields of `Workload` that all layouts have in common, such as `precision`; the error
        about another field lists them.

    Returns:
      The best layout, runners-up, and estimates of all layouts.

    Raises:
      ValueError: if a name is unknown, no layout is legal, or none fits the memory; the message
        names the nearest one, and what it lacks.
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
    """Return the step times of an earlier run, if this run resumes that one [s]."""
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
    """Return a function that reports the progress, and saves to a .zarr store now and then."""
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
    """Find `count` best layouts in the best measured regimes, and the best in each other one."""
    # A regime is a kind of layout with its own accuracy. A layout is outside if other regimes are
    # measured better than its own, or if it may not fit in memory; the latter is listed only if it
    # is faster than the best. The result is whether each layout is outside, then rows and records
    # of the best layouts: those that are not outside, then the best of each regime outside.
    request, layouts = evaluator.request, evaluator.layouts
    regimes = layout_regimes(request, layouts)
    by_row = evidence_by_row(request, regimes)
    levels = evidence_levels(regimes, by_row)
    fits, times = evaluator.estimates.fits, evaluator.estimates.step_time
    is_sure = fits & (evaluator.estimates.memory_bytes <= request.sure_room)
    is_sure = is_sure if is_sure.any() else fits
    is_outside = (levels > levels[is_sure].min()) | (fits & ~is_sure)
    best_rows = [evaluator.find_best(count, ~is_outside)]
    for regime in sorted({regimes[row] for row in np.flatnonzero(is_outside)}):
        is_regime = np.array([other == regime for other in regimes])
        best_rows.append(evaluator.find_best(1, is_outside & is_regime))
    rows = np.concatenate(best_rows)
    rows = rows[is_sure[rows] | (times[rows] < times[rows[0]])]
    resources = limiting_resources(request, layouts, rows)
    planned = [
        _describe_layout(evaluator, row, resource, regimes[row], by_row[row])
        for row, resource in zip(rows.tolist(), resources, strict=True)
    ]
    return is_outside, rows, planned


def evidence_by_row(request: PlanRequest, regimes: Sequence[Regime]) -> list[Evidence | None]:
    """Return the evidence of each layout's regime; None for a regime without evidence."""
    evidence = {
        regime: find_evidence(regime, request.system, request.stack, request.launcher)
        for regime in {*regimes}
    }
    return [evidence[regime] for regime in regimes]


def layout_regimes(request: PlanRequest, layouts: Layouts) -> list[Regime]:
    """Return the regime of each layout: whether ZeRO splits weights, experts, and precision."""
    bits = operand_bits(request.shared.get("precision", PRECISIONS[0]))
    # 0 without experts, 1 with experts inside a node, 2 with experts on several nodes
    crosses_nodes = layouts.expert > float(request.system.gpus_per_node)
    experts = np.where(request.model.moe is None, 0, 1 + crosses_nodes)
    splits_weights = layouts.zero >= 3
    columns = zip(splits_weights.tolist(), experts.tolist(), strict=True)
    return [Regime(split, expert, bits) for split, expert in columns]


def evidence_levels(
    regimes: Sequence[Regime], by_row: Sequence[Evidence | None]
) -> Int[NumpyArray, " layouts"]:
    """Return for each layout how far its regime is from measured runs: 0, 1 and more."""
    # 0: many runs of the regime, which are predicted well. 1: many runs, predicted badly. Else the
    # number of facts by which the nearest runs differ, plus 1; `MAX_COUNT` without such runs.
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
    """Return the record of one layout; its error band is the widest that the calibration has."""
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
        mfu=float(mfu(flop, step, request.gpus, peak)),
        tokens_per_second=request.minibatch * float(request.model.sequence) / step,
        memory_bytes=memory_bytes,
        memory_left=request.room - memory_bytes,
        bound_by=bound_by,
        regime=str(regime),
        evidence=evidence,
        also=tuple(  # fields that differ
            dict(layouts.described(request, place).items() - layout.items())
            | {"step_time": float(estimates.step_time[place])}
            for place in evaluator.ties(row).tolist()
        ),
        scenario=_layout_scenario(request, layouts, row),
    )


def _layout_scenario(request: PlanRequest, layouts: Layouts, row: int) -> Scenario:
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
    """Refuse a job without a layout that fits; name the nearest layout and its missing bytes."""
    if estimates.fits.any():
        return
    row = int(estimates.memory_bytes.argmin())
    needed_gb, limit_gb = estimates.memory_bytes[row] / 1e9, request.room / 1e9
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
