"""Traces of evaluated runs; exports of traces as xarray dataset, costs file and Perfetto file."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import check_types, whole_number
from pipejax.base.files import provenance
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.schedules.cells.ops import Phase
from pipejax.traces.findings.analysis import Analysis
from pipejax.traces.findings.op_times import measured_costs
from pipejax.traces.record import NONE, OPS, Trace
from pipejax.traces.replaying.pipelines import PipelineOps
from pipejax.traces.replaying.replay import Replay

if TYPE_CHECKING:
    import xarray as xr


def dataset(analysis: Analysis) -> "xr.Dataset":
    """Return times of ops, pipelines and steps as an xarray dataset.

    Args:
      analysis: analysis of a trace.

    Returns:
      A dataset with these variables [s]: start, duration and residual by step, replica, phase,
      stage and microbatch (NaN if there is no such op, or its pipeline is left out); span and error
      by step and replica; recorded and replayed step times by step; time that a place saves and
      adds, by place.

    Raises:
      ModuleNotFoundError: if xarray, from the extra `sweeps`, is not installed.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> result = pj.traces.analyse(pj.traces.record_runs([run]), schedules=["gpipe"])
      >>> data = pj.traces.dataset(result)
      >>> dict(data.duration.sizes)
      {'step': 1, 'replica': 1, 'phase': 2, 'stage': 2, 'microbatch': 4}
      >>> float(data.duration.sel(phase="B").mean())
      2.0
    """
    import pandas as pd
    import xarray as xr

    check_types(analysis=(analysis, Analysis))
    pipelines, replayed, attribution = analysis.pipelines, analysis.replay, analysis.attribution
    trace, shares = pipelines.trace, attribution.shares
    slices = np.concatenate([pipeline.slices for pipeline in pipelines.pipelines])
    phases = np.array(trace.phases)[trace.phase]
    fields = {
        **{name: getattr(trace, name) for name in ("step", "replica", "stage", "microbatch")},
        **{"phase": phases, "start": trace.start, "duration": trace.end - trace.start},
        "residual": replayed.residuals,
    }
    tables: dict[tuple[str, ...], dict[str, Any]] = {  # {axes that index the rows: columns}
        ("step", "replica", "phase", "stage", "microbatch"): {
            name: values[slices] for name, values in fields.items()
        },
        ("step", "replica"): {
            "step": [pipeline.step for pipeline in pipelines.pipelines],
            "replica": [pipeline.replica for pipeline in pipelines.pipelines],
            "span": pipelines.spans,
            "error": replayed.errors,
        },
        ("step",): {
            "step": attribution.steps,
            "recorded": attribution.recorded,
            "replayed": attribution.replayed,
        },
        ("place",): {
            "place": [f"{share.kind} {share.name}" for share in shares],
            "saves": [share.saves for share in shares],
            "adds": [np.nan if share.adds is None else share.adds for share in shares],
        },
    }
    frames = (pd.DataFrame(columns).set_index([*axes]) for axes, columns in tables.items())
    data = xr.merge([frame.to_xarray() for frame in frames])
    data = data.sel(phase=[name for name in OPS if name in phases[slices]])
    data = data.assign_coords({name: data[name].astype(str) for name in ("phase", "place")})
    for name, values in data.items():
        values.attrs["units"] = "1" if name == "error" else "s"
    return data.assign_attrs(source=trace.source, **provenance())


def costs_text(replayed: Replay, *, stragglers: Mapping[int, float] | None = None) -> str:
    """Return the mean times of a trace as the text of a costs file, which `--costs` reads.

    Phases that were not recorded are missing; the reader of the file then takes half of B for I and
    for W.

    Args:
      replayed: a replayed trace.
      stragglers: factors of slow workers, whose ops in the replay are as fast as those of others.

    Returns:
      Text of a .json file: times of ops by stage, of messages by stage boundary and direction.

    Example:
      >>> import json, pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=2.0, transmit=0.5))
      >>> replayed = pj.traces.replay(pj.traces.find_pipelines(pj.traces.record_runs([run])))
      >>> json.loads(pj.traces.costs_text(replayed))["F"]
      [1.0, 1.5]
    """
    check_types(replayed=(replayed, Replay))
    costs, pipelines = measured_costs(replayed), replayed.pipelines
    ops = PipelineOps.select(pipelines.trace, pipelines.pipelines)
    recorded = {name for name, _ in ops.by_kind()}  # phases outside fused pairs
    content: dict[str, Any] = {"unit": "seconds", "recorded": True}
    for letter in OPS:
        if letter in recorded:
            content[letter] = np.asarray(getattr(costs, PHASE_FIELDS[letter])).tolist()
    if costs.pair is not None:
        content["pair"] = np.asarray(costs.pair).tolist()
    if pipelines.table.num_stages > 1:
        forward, back = np.asarray(costs.transmit)[:, 0].tolist()
        content |= {"message": {"transmit": forward}, "message_back": {"transmit": back}}
    content |= {"stragglers": {**stragglers}} if stragglers else {}
    return json.dumps(content, indent=1)


MICROSECONDS = 1e6  # in a second; the unit of the Trace Event Format


def perfetto(replayed: Replay, *, step: int | None = None) -> str:
    """Return a step as a JSON text in the Trace Event Format, which Perfetto shows.

    A replica is a process. Each worker has two tracks, for the recorded slices and for the replay.
    Arguments of a slice are stage, microbatch, and recorded start minus replayed start.

    Args:
      replayed: a replayed trace.
      step: number of the step; default: the first.

    Returns:
      Text of a .json file.

    Raises:
      ValueError: if the trace has no such step.

    Example:
      >>> import json, pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> replayed = pj.traces.replay(pj.traces.find_pipelines(pj.traces.record_runs([run])))
      >>> events = json.loads(pj.traces.perfetto(replayed))["traceEvents"]
      >>> sum(event["ph"] == "X" for event in events)
      16
    """
    check_types(replayed=(replayed, Replay))
    trace, pipelines = replayed.pipelines.trace, replayed.pipelines.pipelines
    steps = sorted({pipeline.step for pipeline in pipelines})
    step = steps[0] if step is None else step
    if step not in steps:
        raise ValueError(f"step must be one of {', '.join(map(str, steps[:8]))}, .., got {step}")
    events: list[dict[str, Any]] = []
    for pipeline in [pipeline for pipeline in pipelines if pipeline.step == step]:
        begin = trace.start[pipeline.slices].min()
        slices = np.flatnonzero((trace.step == step) & (trace.replica == pipeline.replica))
        is_op = np.isin(slices, pipeline.slices)
        place = {"pid": pipeline.replica}
        for worker in range(trace.workers):
            for tid, title in ((2 * worker, "as it ran"), (2 * worker + 1, "replayed")):
                events.append(_name("thread", f"worker {worker} {title}", place | {"tid": tid}))
        events.append(_name("process", f"replica {pipeline.replica}, step {step}", place))
        for row, has_replay in zip(slices.tolist(), is_op.tolist(), strict=True):
            tid = 2 * int(trace.worker[row])
            start = trace.start[row] - begin
            events.append(_slice(replayed, row, pipeline.replica, tid, start))
            if has_replay:
                start -= replayed.residuals[row]
                events.append(_slice(replayed, row, pipeline.replica, tid + 1, start))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, name: str, place: Mapping[str, int]) -> dict[str, Any]:
    """Return the Perfetto event that names a thread or a process, which `place` identifies."""
    return {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}


def _slice(replayed: Replay, row: int, pid: int, tid: int, start: float) -> dict[str, Any]:
    """Return slice `row` of the trace as an event of a process (replica) and thread (track)."""
    trace = replayed.pipelines.trace
    stage, microbatch = int(trace.stage[row]), int(trace.microbatch[row])
    name = trace.phases[trace.phase[row]]
    label = name if NONE in (stage, microbatch) else f"{stage}{name}{microbatch}"
    return {
        "ph": "X",
        "name": label,
        "cat": name,
        "pid": pid,
        "tid": tid,
        "ts": float(start) * MICROSECONDS,
        "dur": float(trace.end[row] - trace.start[row]) * MICROSECONDS,
        "args": {
            "stage": stage,
            "microbatch": microbatch,
            "later_than_replayed_us": float(replayed.residuals[row]) * MICROSECONDS,
        },
    }


def record_runs(runs: Sequence[Evaluation], *, replicas: int = 1) -> Trace:
    """Return a trace of evaluated runs.

    Args:
      runs: evaluated tables: all replicas of the first step, then all of the second step, ...
      replicas: number of replicas that run side by side in a step.

    Returns:
      A trace with the ops of the runs; every step begins at 0.

    Raises:
      ValueError: if the number of runs is no multiple of the replicas.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> trace = pj.traces.record_runs([run, run], replicas=2)
      >>> len(trace), trace.replicas, float(trace.end.max())
      (16, [0, 1], 9.0)
    """
    check_types(runs=(runs, Sequence))
    whole_number(replicas, "replicas")
    if not runs or len(runs) % replicas:
        raise ValueError(f"runs must be a multiple of {replicas} replicas, got {len(runs)}")
    parts = [_run_ops(run, *divmod(number, replicas)) for number, run in enumerate(runs)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    source = ", ".join(dict.fromkeys(run.table.name for run in runs))
    return Trace.from_columns(columns, OPS, source=source)


def _run_ops(run: Evaluation, step: int, replica: int) -> dict[str, NumpyArray]:
    """Return the ops of a run as columns of a trace, {column: (ops) values}."""
    ops = run.table.ops
    position = {Phase[name]: k for k, name in enumerate(OPS)}
    code = np.array([position.get(Phase(phase), NONE) for phase in ops.phase.tolist()])
    is_op = code != NONE
    cell = ops.cell[is_op]
    return {
        "step": np.full(len(cell), step),
        "replica": np.full(len(cell), replica),
        "worker": cell // run.table.num_slots,
        "stage": ops.stage[is_op],
        "phase": code[is_op],
        "microbatch": ops.microbatch[is_op],
        "start": run.start.ravel()[cell],
        "end": run.finish.ravel()[cell],
    }
