"""Runs of experiments: spread over the cores, kept one by one, put together at the end."""

import concurrent.futures
import multiprocessing
import multiprocessing.sharedctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xarray as xr
from rich.console import Console
from rich.progress import track

from pipejax.files import checksum
from sweeps.kit.command import save
from sweeps.pipedream import convergence_bound, schedules, staleness
from sweeps.pipedream.schemes import collected, train
from sweeps.pipedream.settings import EXPERIMENTS, Scheme, Setting

ALONE: Mapping[str, Callable[[], xr.Dataset]] = {  # datasets that are made in one go
    "staleness": staleness.sweep,
    "convergence_bound": convergence_bound.sweep,
    "pipedream_schedules": schedules.sweep,
}


class Run(NamedTuple):
    """Work of one process at a time.

    Attributes:
      label: for people.
      path: store that it writes.
      make: makes the dataset.
      given: arguments of `make`.
    """

    label: str
    path: Path
    make: Callable[..., xr.Dataset]
    arguments: tuple[Setting, Scheme] | tuple[()] = ()


def along(settings: Sequence[Setting]) -> list[dict[str, str | int]]:
    """Coordinates that tell the settings of an experiment apart.

    Args:
      settings: of one experiment.

    Returns:
      Of each: objective, setting and stages, as far as they differ.
    """
    places: list[dict[str, str | int]] = [
        {"objective": s.problem.kind, "setting": s.column, "stages": s.stages} for s in settings
    ]
    return [
        {name: value for name, value in place.items() if len({other[name] for other in places}) > 1}
        for place in places
    ]


def list_runs(name: str, folder: Path, context: str) -> list[Run]:
    """List what the dataset of an experiment is put together from.

    Args:
      name: of the experiment.
      folder: of the runs.
      context: what else decides the numbers.

    Returns:
      The runs, those of one setting after the other.
    """
    if name in ALONE:
        return [Run(name, folder / f"{name}_{checksum(context)[:16]}.zarr", ALONE[name])]
    runs = []
    for setting, place in zip(EXPERIMENTS[name], along(EXPERIMENTS[name]), strict=True):
        for scheme in setting.schemes:
            same = (setting._replace(schemes=(), column=""), scheme._replace(label=""))
            path = folder / f"{checksum(f'{same} {context}')[:16]}.zarr"
            label = ", ".join([name, *map(str, place.values()), scheme.label])
            runs.append(Run(label, path, train, (setting, scheme)))
    return runs


def together(name: str, runs: Sequence[Run]) -> xr.Dataset:
    """Put an experiment together from its runs.

    Args:
      name: of the experiment.
      runs: as from `list_runs`, all of them kept.

    Returns:
      Its dataset; what the runs of one setting lack and others have is missing there.
    """
    stores = iter([_read(run.path) for run in runs])
    if name in ALONE:
        return next(stores)
    settings = EXPERIMENTS[name]
    parts = [
        collected([next(stores) for _ in setting.schemes], setting.schemes) for setting in settings
    ]
    return _joined(list(zip(along(settings), parts, strict=True)))


def _joined(parts: Sequence[tuple[dict[str, str | int], xr.Dataset]]) -> xr.Dataset:
    """Join datasets along the axes of their places, the first axis outermost."""
    axis = next(iter(parts[0][0]), None)
    if axis is None:
        return parts[0][1]
    groups: dict[str | int, list[tuple[dict[str, str | int], xr.Dataset]]] = {}
    for place, part in parts:
        rest = {name: value for name, value in place.items() if name != axis}
        groups.setdefault(place[axis], []).append((rest, part))
    return xr.concat(
        [_joined(group) for group in groups.values()],
        xr.Variable(axis, list(groups)),
        join="outer",
        data_vars="all",
        fill_value={"diverged": False},
    )


def _read(path: Path) -> xr.Dataset:
    with xr.open_zarr(path) as store:
        return store.load()


def _pinned(
    cores: Sequence[int], counter: "multiprocessing.sharedctypes.Synchronized[int]"
) -> None:
    """Give each process a core of its own: arrays are small, threads would wait for each other."""
    with counter.get_lock():
        core = cores[counter.value % len(cores)]
        counter.value += 1
    os.sched_setaffinity(0, {core})


def keep(run: Run) -> tuple[str, float]:
    """Do a run and keep it; return its label and how long it took [s]."""
    begun = time.monotonic()
    run.path.parent.mkdir(exist_ok=True)
    save(run.make(*run.arguments), run.path)
    return run.label, time.monotonic() - begun


def make(runs: Sequence[Run], shown: Console) -> None:
    """Make the runs that are not kept yet, on all cores.

    Args:
      runs: longest first.
      shown: where progress goes.
    """
    missing = {run.path: run for run in runs if not run.path.exists()}
    shown.print(f"{len(missing)} of {len({run.path for run in runs})} runs to do")
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    initial = (cores, context.Value("i", 0))
    with concurrent.futures.ProcessPoolExecutor(
        min(len(cores), max(1, len(missing))), context, _pinned, initial
    ) as pool:
        futures = [pool.submit(keep, run) for run in missing.values()]
        for label, seconds in track(_results(futures), "runs", len(futures), console=shown):
            shown.print(f"{label}: {seconds:.0f} s", highlight=False)


def _results(
    futures: Sequence["concurrent.futures.Future[tuple[str, float]]"],
) -> Iterator[tuple[str, float]]:
    for future in concurrent.futures.as_completed(futures):
        yield future.result()
