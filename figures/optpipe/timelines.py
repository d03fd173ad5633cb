"""Timelines of three schedules under one memory limit, with the memory that each worker holds."""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import pipejax as pj
from figures.kit.rules import describe
from figures.optpipe.cases import LOOK
from pipejax.plots import LIMIT, Curves, bar_entries, draw_bars, draw_memory, palette, style
from pipejax.results import ActivationMemory, Bar

HEIGHTS = (1.3, 0.72)  # of a timeline and of its memory [inch]
COLUMNS = ("worker", "start", "finish", "phase", "stage", "microbatch", "is_critical")


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw a timeline and the memory under it for each schedule, on one time axis."""
    until = float(data.makespan.max())
    names = [str(name) for name in data.schedule.values]
    figure, panels = plt.subplots(
        2 * len(names),
        1,
        figsize=(style.PAGE, sum(HEIGHTS) * len(names) + 0.9),
        sharex=True,
        height_ratios=HEIGHTS * len(names),
    )
    all_bars = []
    for k, name in enumerate(names):
        bars = _bars(data.isel(op=np.flatnonzero((data.case_of_op == name).values)))
        all_bars += bars
        _timeline(panels[2 * k], data.sel(schedule=name), bars, until)
        _memory(panels[2 * k + 1], data, name, until)
    panels[-1].set_xlabel("time [s]")
    entries = [
        *bar_entries(all_bars),
        Line2D([], [], color=palette.BLACK, marker="o", markersize=2.5, linestyle="", label="peak"),
        Line2D([], [], color=palette.BLUE, linewidth=0.8, label="held"),
        Line2D([], [], label="limit", **LIMIT),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=5)
    return {"optpipe_timelines": describe(figure, _caption(data))}


def _timeline(axes: Axes, run: xr.Dataset, bars: list[Bar], until: float) -> None:
    draw_bars(axes, bars, workers=int(run.attrs["workers"]), until=until)
    axes.axvline(float(run.makespan), color=palette.BLACK, linewidth=0.6, linestyle=":")
    limit = run.attrs["activations"]
    over = float(run.peak.max()) > limit * (1 + 1e-9)
    note = f"; out of memory: it holds {float(run.peak.max()):g} of {limit:g}" if over else ""
    axes.set_title(
        f"{LOOK[str(run.schedule.item())]['label']}: {float(run.makespan):.4g} s, "
        f"idle for {1e3 * float(run.idle_time):.3g} ms{note}",
        loc="left",
    )


def _memory(axes: Axes, data: xr.Dataset, name: str, until: float) -> None:
    """Draw the memory of each worker; the largest peak of all fills its row."""
    run = data.sel(schedule=name)
    changes = data.isel(change=np.flatnonzero((data.case_of_change == name).values))
    held = ActivationMemory(
        changes.holder.values,
        changes.time.values,
        changes.held.values,
        run.peak.values,
        run.peak_at.values,
        np.ones(data.attrs["workers"]),
        np.zeros(data.attrs["workers"]),
        np.ones(data.attrs["workers"]),
    )
    limit = float(data.attrs["activations"])
    draw_memory(axes, Curves(held, "activations held", "{:.3g}".format, limit), until=until)


def _bars(ops: xr.Dataset) -> list[Bar]:
    columns = (ops[name].values.tolist() for name in COLUMNS)
    return [
        Bar(worker, start, finish, (pj.Op(pj.Phase[phase], stage, microbatch),), critical)
        for worker, start, finish, phase, stage, microbatch, critical in zip(*columns, strict=True)
    ]


def _caption(data: xr.Dataset) -> str:
    times = ", ".join(f"{letter} {data.attrs[f'{letter} [ms]']:.3g} ms" for letter in "FIW")
    return (
        f"{data.attrs['model']} on {data.attrs['workers']} workers, {data.attrs['microbatches']} "
        "microbatches (numbers, where they fit); every worker may hold "
        f"{data.attrs['activations']:g} activations (dashed). {times}, an offload or a load "
        f"{data.attrs['offload [ms]']:.3g} ms: thin bars. 1F1B does not fit; AdaOffload does, and "
        "the optimised schedule fills the gaps that it leaves."
    )
