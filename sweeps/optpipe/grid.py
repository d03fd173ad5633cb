"""Idle time of every method by memory limit and by speed of the host link.

All limits are solved without a host link and with one that takes a forward for an offload. With 16
microbatches there are also other speeds at half of 1F1B's memory and at all of it, links that two
neighbours share, and optima with two stages per worker.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

from sweeps.kit.journal import Journal, Record
from sweeps.optpipe.cases import (
    METHODS,
    NO_LINK,
    OPTIMA,
    OPTIMUM,
    OWN,
    SHARED,
    Pipe,
    Setting,
    by_method,
    optimum,
)
from sweeps.optpipe.quality import quality

PIPES = (Pipe("1.5B", 4, 24), Pipe("1.5B", 8, 24), Pipe("6.2B", 8, 24), Pipe("14.6B", 16, 48))
MICROBATCHES = (8, 16, 32)
LIMITS = (0.5, 0.75, 1.0, 1.5, 2.0)
HOST_LINKS = (NO_LINK, 4.0, 2.0, 1.0, 0.5)  # slowest first: what fits one fits the next
EVERYWHERE = (NO_LINK, 1.0)  # the other host links are looked at only with these:
FEW_LIMITS, FEW_MICROBATCHES = (0.5, 1.0), (16,)
DIMENSIONS = ("model", "microbatches", "limit", "host_link", "sharing")
SHARINGS = (SHARED, OWN)  # what runs on a shared link runs on one's own
UNITS = {
    "makespan": "s",
    "peak": "activations",
    "offloaded": "activations",
    "lower_bound": "s",
    "seconds": "s",
}


def settings(small: bool = False) -> Iterator[Setting]:
    """List the problems.

    Args:
      small: whether to keep two limits of the smallest pipe.

    Yields:
      The problems.
    """
    pipes, counts = (PIPES[:1], MICROBATCHES[:1]) if small else (PIPES, MICROBATCHES)
    limits = FEW_LIMITS if small else LIMITS
    for pipe, count, limit, link in itertools.product(pipes, counts, limits, HOST_LINKS):
        is_few = limit in FEW_LIMITS and count in FEW_MICROBATCHES
        if link in EVERYWHERE or is_few:
            yield Setting(pipe, count, limit, link)
        if link in EVERYWHERE and link != NO_LINK and (count in FEW_MICROBATCHES or small):
            yield Setting(pipe, count, limit, link, SHARED)


def solved_with(setting: Setting, small: bool = False) -> Mapping[str, int]:
    """Stages per worker of the optima that are looked for."""
    is_interleaved = setting.sharing == OWN and setting.host_link in EVERYWHERE
    if is_interleaved and (small or setting.microbatches in FEW_MICROBATCHES):
        return OPTIMA
    return {OPTIMUM: 1}


def sweep(journal: Journal, effort: float, small: bool = False) -> xr.Dataset:
    """Solve every problem that is not in the journal, one on each processor.

    Args:
      journal: results so far.
      effort: of each solve.
      small: whether to keep to a few tiny problems.

    Returns:
      The dataset: makespan, idle_time, peak, offloaded and out_of_memory by method; what is known
      of the optimum; `solve_` variables are those of each solve by itself; how good schedules are
      by when, by size of the problem.
    """
    asked = list(settings(small))

    def records(setting: Setting) -> dict[str, Record]:
        optima = solved_with(setting, small)
        makers = {name: partial(by_method, setting, name) for name in METHODS}
        makers |= {name: partial(optimum, setting, effort, v) for name, v in optima.items()}
        return {
            name: journal.once(f"{setting.words}, {name}", make) for name, make in makers.items()
        }

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # solvers run beside each other in threads
        results = pool.map(records, asked)
        shown = track(results, "problems", len(asked), console=Console(stderr=True))
        records_by_setting = dict(zip(asked, shown, strict=True))
    data = with_bounds(dataset(records_by_setting))
    return data.assign(quality(records_by_setting, data, effort))


def dataset(records_by_setting: Mapping[Setting, Mapping[str, Record]]) -> xr.Dataset:
    """Put results on the grid; what was not asked is missing.

    Args:
      records_by_setting: records of each problem by method.

    Returns:
      The dataset, before `with_bounds`.
    """
    pipes = list(dict.fromkeys(setting.pipe for setting in records_by_setting))
    coordinates: dict[str, Any] = {
        "model": [pipe.label for pipe in pipes],
        **{
            name: sorted({getattr(setting, name) for setting in records_by_setting})
            for name in DIMENSIONS[1:4]
        },
        "sharing": list(SHARINGS),
        "schedule": [*METHODS, *OPTIMA],
    }
    coordinates["host_link"] = sorted(coordinates["host_link"], reverse=True)
    shape = [len(labels) for labels in coordinates.values()]
    columns = {name: np.full(shape, np.nan) for name in ("makespan", "peak", "offloaded")}
    proven = np.full(shape, np.nan)  # of optima alone
    no_memory = np.zeros(shape, bool)
    solve = {name: np.full(shape[:-1], np.nan) for name in ("makespan", "lower_bound", "seconds")}
    solve["best_seconds"] = np.full(shape[:-1], np.nan)
    words = {name: np.full(shape[:-1], "", object) for name in ("status", "source")}
    work, solved = np.full(shape[:-1], np.nan), np.zeros(shape[:-1], bool)
    for setting, records in records_by_setting.items():
        at = (
            pipes.index(setting.pipe),
            *(coordinates[name].index(getattr(setting, name)) for name in DIMENSIONS[1:]),
        )
        for method, record in records.items():
            k = coordinates["schedule"].index(method)
            no_memory[*at, k] = record["out_of_memory"]
            proven[*at, k] = record.get("lower_bound", np.nan)
            for name, values in columns.items():
                values[*at, k] = record[name]
        best = records[OPTIMUM]
        for name, values in (solve | words).items():
            values[at] = best["news"][-1][0] if name == "best_seconds" else best[name]
        work[at], solved[at] = setting.work, True
    dimensions = (*DIMENSIONS, "schedule")
    return xr.Dataset(
        {
            **{name: (dimensions, values, _unit(name)) for name, values in columns.items()},
            "out_of_memory": (dimensions, no_memory),
            "proven": (dimensions, proven, {"units": "s", "long_name": "bound of each solve"}),
            **{f"solve_{name}": (DIMENSIONS, v, _unit(name)) for name, v in solve.items()},
            **{f"solve_{name}": (DIMENSIONS, v.astype(str)) for name, v in words.items()},
            "work": (DIMENSIONS, work, {"units": "s", "long_name": "compute of every worker"}),
            "solved": (DIMENSIONS, solved),
        },
        coords={
            **coordinates,
            "workers": ("model", [pipe.workers for pipe in pipes]),
            "forward": ("model", [pipe.times["F"] for pipe in pipes], {"units": "s"}),
        },
        attrs={
            "title": "Idle time by memory limit and host link",
            "limit": "activations that a worker may hold, in peaks of 1F1B (P activations)",
            "host_link": "time of an offload and of a load, in forwards; inf: no host link",
            "sharing": "own: a host link for each worker; pairs: two neighbours share one",
            "idle time": "makespan minus the work of a worker",
        },
    )


def _unit(name: str) -> dict[str, str]:
    return {"units": UNITS.get(name, "s")}


def with_bounds(data: xr.Dataset) -> xr.Dataset:
    """Add what the solves together know of each problem.

    A schedule that fits also fits where there is more memory, a faster host link or one that
    nobody shares; and a bound for any of these is one for less.

    Args:
      data: as from `dataset`.

    Returns:
      The same with idle times, bounds and gaps.
    """
    makespan, proven = data.makespan.copy(), data.proven.copy()
    asked = data.proven.sel(schedule=list(OPTIMA)).notnull()
    for axis in ("limit", "host_link", "sharing"):
        for name in OPTIMA:
            at = {"schedule": name}
            best, bound = (
                _without_link(values.sel(at, drop=True)) for values in (makespan, proven)
            )
            along = best.get_axis_num(axis)
            makespan.loc[at] = np.fmin.accumulate(best.values, along)
            proven.loc[at] = np.flip(np.fmax.accumulate(np.flip(bound.values, along), along), along)
    asked = asked.reindex(schedule=data.schedule, fill_value=True)
    makespan, proven = makespan.where(asked), proven.where(asked)
    lower = proven.sel(schedule=OPTIMUM, drop=True)

    def idle(time: xr.DataArray) -> xr.DataArray:
        return (time - data.work).assign_attrs(units="s")

    def gap(low: xr.DataArray, high: xr.DataArray) -> xr.DataArray:
        return (1 - low / high).clip(0).assign_attrs(units="1")

    return data.assign(
        makespan=makespan,
        proven=proven.assign_attrs(data.proven.attrs),
        out_of_memory=data.out_of_memory & (makespan.isnull() | (data.schedule != OPTIMUM)),
        idle_time=idle(makespan),
        lower_bound=lower.assign_attrs(units="s"),
        bound_idle_time=idle(lower),
        gap=gap(lower, makespan.sel(schedule=OPTIMUM, drop=True)),
        solve_gap=gap(data.solve_lower_bound, data.solve_makespan),
    )


def _without_link(values: xr.DataArray) -> xr.DataArray:
    """Say of shared links too what holds where there is none: it is the same problem."""
    filled = values.copy()
    if NO_LINK in values.host_link:
        filled.loc[{"host_link": NO_LINK, "sharing": SHARED}] = values.sel(
            host_link=NO_LINK, sharing=OWN
        )
    return filled
