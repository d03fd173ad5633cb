"""Timelines of schedules on one time axis: which op runs where and when."""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import pipejax as pj
from figures.kit.cases import LOOK
from figures.kit.rules import describe
from pipejax.plots import bar_entries, draw_bars, palette, style
from pipejax.results import Bar

HEIGHT = 1.1  # of a panel [inch]
UPWARD = "from the last worker to the first"


class Run(NamedTuple):
    """A schedule as it is drawn.

    Attributes:
      bars: ops; those of a fused pair are one.
      upward: those whose microbatch moves towards the first worker.
    """

    bars: list[Bar]
    upward: set[pj.Op]


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per schedule, the shortest run last."""
    order = data.makespan.sortby(data.makespan, ascending=False).schedule.values
    runs = {str(name): read_run(data, name) for name in order}
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(style.PAGE, HEIGHT * len(runs) + 0.5), sharex=True, squeeze=False
    )
    for axes, (name, run) in zip(panels[:, 0], runs.items(), strict=True):
        draw_run(axes, data, name, run)
        ends = data.sel(schedule=name)
        axes.axvline(float(ends.makespan), color=palette.BLACK, linewidth=0.8, linestyle=":")
        axes.set_title(
            f"{schedule_label(name)}: {ends.makespan:.4g} s, idle {100 * ends.bubble_ratio:.1f} %",
            loc="left",
        )
    panels[-1, 0].set_xlabel("time [s]")
    bars = [bar for run in runs.values() for bar in run.bars]
    figure.legend(handles=bar_entries(bars, UPWARD), loc="outside lower center", ncols=3)
    return {"timelines": describe(figure, _caption(data, order))}


def read_run(data: xr.Dataset, name: str) -> Run:
    """Read the ops of a schedule."""
    ops = data.isel(op=np.flatnonzero((data.case == name).values))
    bars: list[Bar] = []
    upward: set[pj.Op] = set()
    for k in range(ops.sizes["op"]):
        at = ops.isel(op=k)
        op = pj.Op(pj.Phase[str(at.phase.item())], int(at.stage), int(at.microbatch))
        if bool(at.is_upward):
            upward.add(op)
        if int(at.part):
            bars[-1] = bars[-1]._replace(ops=(*bars[-1].ops, op))
        else:
            bars.append(
                Bar(int(at.worker), float(at.start), float(at.finish), (op,), bool(at.is_critical))
            )
    return Run(bars, upward)


def draw_run(axes: Axes, data: xr.Dataset, name: str, run: Run) -> None:
    """Draw a schedule on given axes, as long as the longest of the dataset."""
    until = float(data.makespan.max())
    draw_bars(axes, run.bars, workers=data.workers, until=until, hatched=run.upward)


def schedule_label(name: str) -> str:
    """Name a schedule."""
    return str(LOOK.get(name, {"label": name})["label"])


def _caption(data: xr.Dataset, order: np.ndarray) -> str:
    forward, backward, message = (
        data.attrs[f"{name} [s]"] for name in ("forward", "backward", "message")
    )
    return (
        f"{len(order)} schedules on {data.workers} workers, {data.microbatches} microbatches "
        f"(numbers), from the longest run to the shortest. On a worker a microbatch takes "
        f"{forward:g} s forward and {backward:g} s backward, a message between workers "
        f"{message:g} s. Dotted lines: end of the run. Every message on the critical path "
        "(framed) makes a run longer by its time: that, not its bubble, is what 1F1B pays beyond "
        "GPipe, and Hanayo, whose microbatches cross the workers twice each way, pays most."
    )
