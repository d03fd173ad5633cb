"""A replayed trace as a labelled dataset: ops, pipelines, steps."""

from typing import TYPE_CHECKING

import numpy as np

from pipejax.base.checks import check_types
from pipejax.base.provenance import provenance
from pipejax.traces.findings.analysis import Analysis
from pipejax.traces.record import OPS

if TYPE_CHECKING:
    import xarray as xr


def dataset(analysis: Analysis) -> "xr.Dataset":
    """Return all that is known of ops, pipelines and steps as an xarray dataset.

    Args:
      analysis: of a trace.

    Returns:
      start, duration and residual by step, replica, phase, stage and microbatch [s] (NaN where
      there is no such op, or its pipeline is left out), span and error by step and replica,
      recorded and replayed step times by step [s], and what every place saves and adds [s].

    Raises:
      ModuleNotFoundError: without xarray, which the extra `sweeps` brings.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> found = pj.traces.analyse(pj.traces.of_runs([run]), schedules=["gpipe"])
      >>> data = pj.traces.dataset(found)
      >>> dict(data.duration.sizes)
      {'step': 1, 'replica': 1, 'phase': 2, 'stage': 2, 'microbatch': 4}
      >>> float(data.duration.sel(phase="B").mean())
      2.0
    """
    import xarray as xr

    check_types(analysis=(analysis, Analysis))
    pipelines, replayed, shares = analysis.pipelines, analysis.replay, analysis.attribution
    trace = pipelines.trace
    slices = np.concatenate([one.slices for one in pipelines.pipelines])
    seen = {trace.phases[code] for code in np.unique(trace.phase[slices]).tolist()}
    phases = [name for name in OPS if name in seen]
    code_of = np.array([phases.index(name) if name in seen else 0 for name in trace.phases])
    steps = np.array(sorted({one.step for one in pipelines.pipelines}))
    replicas = np.array(sorted({one.replica for one in pipelines.pipelines}))
    where = (
        np.searchsorted(steps, trace.step[slices]),
        np.searchsorted(replicas, trace.replica[slices]),
        code_of[trace.phase[slices]],
        trace.stage[slices],
        trace.microbatch[slices],
    )
    shape = (len(steps), len(replicas), len(phases), trace.stages, trace.microbatch.max() + 1)
    of_ops = {
        "start": trace.start,
        "duration": trace.end - trace.start,
        "residual": replayed.residuals,
    }
    data: dict[str, tuple[object, ...]] = {}
    for name, value in of_ops.items():
        found = np.full(shape, np.nan)
        found[where] = value[slices]
        dims = ("step", "replica", "phase", "stage", "microbatch")
        data[name] = (dims, found, {"units": "s"})
    rows = np.searchsorted(steps, [one.step for one in pipelines.pipelines])
    columns = np.searchsorted(replicas, [one.replica for one in pipelines.pipelines])
    for name, value, unit in (("span", pipelines.spans, "s"), ("error", replayed.errors, "1")):
        table = np.full(shape[:2], np.nan)
        table[rows, columns] = value
        data[name] = (("step", "replica"), table, {"units": unit})
    for name, value in (("recorded", shares.recorded), ("replayed", shares.replayed)):
        each = np.full(len(steps), np.nan)
        each[np.searchsorted(steps, shares.steps)] = value
        data[name] = ("step", each, {"units": "s"})
    data["saves"] = ("place", [share.saves for share in shares.shares], {"units": "s"})
    adds = [np.nan if share.adds is None else share.adds for share in shares.shares]
    data["adds"] = ("place", adds, {"units": "s"})
    labels = {
        "step": steps,
        "replica": replicas,
        "phase": phases,
        "place": [f"{share.of} {share.name}" for share in shares.shares],
    }
    return xr.Dataset(data, labels, {"source": trace.source} | provenance())
