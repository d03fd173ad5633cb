"""Idle share of every method by memory limit and by speed of the host link.

All limits are solved without a host link and with one that takes a forward for an offload; the
other speeds only at half of 1F1B's memory and at all of it, with 16 microbatches.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

from sweeps.journal import Journal, Record
from sweeps.optpipe_cases import METHODS, NO_LINK, OPTIMUM, Pipe, Setting, by_method, optimum

PIPES = (Pipe("1.5B", 4, 24), Pipe("1.5B", 8, 24), Pipe("6.2B", 8, 24), Pipe("14.6B", 16, 48))
MICROBATCHES = (8, 16, 32)
LIMITS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
HOST_LINKS = (NO_LINK, 4.0, 2.0, 1.0, 0.5)  # slowest first: what fits one fits the next
EVERYWHERE = (NO_LINK, 1.0)  # the other host links are looked at only with these:
FEW_LIMITS, FEW_MICROBATCHES = (0.5, 1.0), (16,)
DIMENSIONS = ("model", "microbatches", "limit", "host_link")
UNITS = {
    "makespan": "s",
    "peak": "activations",
    "offloaded": "activations",
    "lower_bound": "s",
    "seconds": "s",
    "best_seconds": "s",
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
        if link in EVERYWHERE or (limit in FEW_LIMITS and count in FEW_MICROBATCHES):
            yield Setting(pipe, count, limit, link)


def sweep(journal: Journal, seconds: float, small: bool = False) -> xr.Dataset:
    """Solve every problem that is not in the journal.

    Args:
      journal: results so far.
      seconds: of each solve, at most.
      small: whether to keep to a few tiny problems.

    Returns:
      The dataset: makespan, bubble_ratio, peak, offloaded and out_of_memory by method; what is
      known of the optimum; `solve_` variables are those of each solve by itself.
    """
    asked = list(settings(small))
    found = {}
    for setting in track(asked, "problems", console=Console(stderr=True)):
        found[setting] = {
            method: journal.once(
                f"{setting.words}, {method}", partial(_result, setting, method, seconds)
            )
            for method in (*METHODS, OPTIMUM)
        }
    return _known(_dataset(found))


def _result(setting: Setting, method: str, seconds: float) -> Record:
    return optimum(setting, seconds) if method == OPTIMUM else by_method(setting, method)


def _dataset(found: dict[Setting, dict[str, Record]]) -> xr.Dataset:
    """Put results on the grid; what was not asked is missing."""
    pipes = list(dict.fromkeys(setting.pipe for setting in found))
    coordinates: dict[str, Any] = {
        "model": [pipe.label for pipe in pipes],
        **{name: sorted({getattr(setting, name) for setting in found}) for name in DIMENSIONS[1:]},
        "schedule": [*METHODS, OPTIMUM],
    }
    coordinates["host_link"] = sorted(coordinates["host_link"], reverse=True)
    shape = [len(labels) for labels in coordinates.values()]
    columns = {name: np.full(shape, np.nan) for name in ("makespan", "peak", "offloaded")}
    no_memory = np.zeros(shape, bool)
    solve = {
        name: np.full(shape[:-1], np.nan)
        for name in ("makespan", "lower_bound", "seconds", "best_seconds")
    }
    words = {name: np.full(shape[:-1], "", object) for name in ("status", "source")}
    work, solved = np.full(shape[:-1], np.nan), np.zeros(shape[:-1], bool)
    for setting, records in found.items():
        rest = DIMENSIONS[1:]
        at = (
            pipes.index(setting.pipe),
            *(coordinates[name].index(getattr(setting, name)) for name in rest),
        )
        for k, record in enumerate(records.values()):
            no_memory[*at, k] = record["out_of_memory"]
            for name, values in columns.items():
                values[*at, k] = record[name]
        for name, values in (solve | words).items():
            values[at] = records[OPTIMUM][name]
        work[at], solved[at] = setting.work, True
    every, each = DIMENSIONS, (*DIMENSIONS, "schedule")
    return xr.Dataset(
        {
            **{name: (each, values, _unit(name)) for name, values in columns.items()},
            "out_of_memory": (each, no_memory),
            **{f"solve_{name}": (every, values, _unit(name)) for name, values in solve.items()},
            **{f"solve_{name}": (every, values.astype(str)) for name, values in words.items()},
            "work": (every, work, {"units": "s", "long_name": "compute of every worker"}),
            "solved": (every, solved),
        },
        coords={**coordinates, "workers": ("model", [pipe.workers for pipe in pipes])},
        attrs={
            "title": "Idle share by memory limit and host link",
            "limit": "activations that a worker may hold, in peaks of 1F1B (P activations)",
            "host_link": "time of an offload and of a load, in forwards; inf: no host link",
        },
    )


def _unit(name: str) -> dict[str, str]:
    return {"units": UNITS[name]}


def _known(data: xr.Dataset) -> xr.Dataset:
    """Add what the solves together know of each problem.

    A schedule that fits also fits where there is more memory or a faster host link, and a bound
    for more memory or a faster link is one for less.
    """
    own = data.makespan.sel(schedule=OPTIMUM)
    axes = own.get_axis_num("limit"), own.get_axis_num("host_link")
    best, bound = own.values, data.solve_lower_bound.values
    for axis in axes:
        best = np.fmin.accumulate(best, axis)
        bound = np.flip(np.fmax.accumulate(np.flip(bound, axis), axis), axis)
    makespan = data.makespan.copy()
    makespan.loc[{"schedule": OPTIMUM}] = np.where(data.solved, best, np.nan)
    proven = own.drop_vars("schedule").copy(data=np.where(data.solved, bound, np.nan))

    def idle(time: xr.DataArray) -> xr.DataArray:
        return 1 - data.work / time

    def gap(low: xr.DataArray, high: xr.DataArray) -> xr.DataArray:
        return (1 - low / high).clip(0).assign_attrs(units="1")

    return data.assign(
        makespan=makespan,
        out_of_memory=data.out_of_memory & (makespan.isnull() | (data.schedule != OPTIMUM)),
        bubble_ratio=idle(makespan).assign_attrs(units="1"),
        lower_bound=proven.assign_attrs(units="s"),
        bound_bubble_ratio=idle(proven).assign_attrs(units="1"),
        gap=gap(proven, makespan.sel(schedule=OPTIMUM, drop=True)),
        solve_gap=gap(data.solve_lower_bound, data.solve_makespan),
    )
