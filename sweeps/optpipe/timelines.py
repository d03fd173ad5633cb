"""Timelines and activation memory of 1F1B, AdaOffload and the optimum under a tight limit."""

from typing import Any

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.analysis import activation_memory, bars
from pipejax.results import ActivationMemory
from sweeps.kit.journal import Journal
from sweeps.optpipe.cases import METHODS, OPTIMUM, Pipe, Setting, run, solutions

SETTING = Setting(Pipe("1.5B", 4, 24), 8, 0.75, 1.0)
SHOWN = ("1f1b", "ada-offload", OPTIMUM)
LONGER = 8.0  # than a solve of the grid, at most
COLUMNS = ("worker", "start", "finish", "phase", "stage", "microbatch", "is_critical")


def sweep(journal: Journal, effort: float, small: bool = False) -> xr.Dataset:
    """Run the three schedules.

    Args:
      journal: not needed: there is little to do.
      effort: of each solve of the grid; this one lasts `LONGER` times as long.
      small: whether it lasts no longer.

    Returns:
      The dataset: one entry along `op` for every op, one along `change` for every step of what a
      worker holds.
    """
    runs = {}
    for name in track(SHOWN, "timelines", console=Console(stderr=True)):
        runs[name] = run(SETTING, _table(name, effort if small else LONGER * effort))
    held = {
        name: activation_memory(evaluation, weight_share=SETTING.pipe.weight_share)
        for name, evaluation in runs.items()
    }
    ops = [(name, *row) for name, evaluation in runs.items() for row in _ops(evaluation)]
    changes = [(name, *row) for name, memory in held.items() for row in _changes(memory)]
    times = {f"{letter} [ms]": 1e3 * duration for letter, duration in SETTING.pipe.times.items()}
    return xr.Dataset(
        {
            **_columns("op", ("case_of_op", *COLUMNS), ops),
            **_columns("change", ("case_of_change", "holder", "time", "held"), changes),
            "makespan": (
                "schedule",
                [evaluation.makespan for evaluation in runs.values()],
                {"units": "s"},
            ),
            "idle_time": (
                "schedule",
                [evaluation.makespan - SETTING.work for evaluation in runs.values()],
                {"units": "s"},
            ),
            "peak": (("schedule", "worker_index"), [memory.peak for memory in held.values()]),
            "peak_at": (("schedule", "worker_index"), [memory.peak_at for memory in held.values()]),
        },
        coords={"schedule": list(runs)},
        attrs={
            "title": "Three schedules, op by op",
            "setting": SETTING.words,
            "activations": SETTING.activations,
            "workers": SETTING.pipe.workers,
            "microbatches": SETTING.microbatches,
            "model": SETTING.pipe.model,
            "offload [ms]": 1e3 * (SETTING.offload or 0.0),
            **times,
        },
    )


def _table(name: str, effort: float) -> pj.ScheduleTable:
    if name == OPTIMUM:
        *_, last = solutions(SETTING, effort)
        return last.best.table
    return next(METHODS[name](SETTING))


def _columns(dimension: str, names: tuple[str, ...], rows: list[Any]) -> dict[str, Any]:
    return {
        name: (dimension, np.array(column))
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def _ops(evaluation: pj.Evaluation) -> list[tuple[Any, ...]]:
    """One row per op, in the order of `COLUMNS`; waits for offloads have no length."""
    return [
        (bar.worker, bar.start, bar.finish, op.phase.name, op.stage, op.microbatch, bar.is_critical)
        for bar in bars(evaluation)
        for op in bar.ops
        if op.phase is not pj.Phase.WAIT_O
    ]


def _changes(memory: ActivationMemory) -> list[tuple[Any, ...]]:
    """One row per step: worker, time, what it holds from then on."""
    return list(
        zip(memory.worker.tolist(), memory.time.tolist(), memory.held.tolist(), strict=True)
    )
