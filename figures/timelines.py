"""Timelines of schedules on one time axis: which op runs where and when."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.cases import LOOK
from pipejax.analysis.timeline import Bar
from pipejax.plots import style
from pipejax.plots.timeline import bar_entries, draw_bars
from pipejax.schedules.cells.ops import Op, Phase

HEIGHT = 1.1  # of a panel [inch]


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per schedule, the shortest run last."""
    until = float(data.makespan.max())
    order = data.makespan.sortby(data.makespan, ascending=False).schedule.values
    figure, panels = plt.subplots(
        len(order), 1, figsize=(style.PAGE, HEIGHT * len(order) + 0.6), sharex=True, squeeze=False
    )
    drawn = {name: _bars(data.isel(op=(data.case == name).values)) for name in order}
    for axes, (name, bars) in zip(panels[:, 0], drawn.items(), strict=True):
        draw_bars(axes, bars, workers=data.workers, until=until)
        run = data.sel(schedule=name)
        label = LOOK.get(name, {"label": name})["label"]
        axes.set_title(
            f"{label}: {run.makespan:.4g} s, idle {100 * run.bubble_ratio:.1f} %", loc="left"
        )
        axes.axvline(float(run.makespan), color=style.BLACK, linewidth=0.6, linestyle=":")
    panels[-1, 0].set_xlabel("time [s]")
    figure.legend(
        handles=bar_entries([bar for bars in drawn.values() for bar in bars]),
        loc="outside lower center",
        ncols=9,
        title=_caption(data),
        title_fontsize=7,
    )
    return {"timelines": figure}


def _caption(data: xr.Dataset) -> str:
    forward, backward, message = (
        data.attrs[f"{name} [s]"] for name in ("forward", "backward", "message")
    )
    return (
        f"{data.workers} workers; numbers are those of the {data.microbatches} microbatches. "
        f"On a worker a microbatch\ntakes {forward:g} s forward and {backward:g} s backward, "
        f"a message between workers {message:g} s."
    )


def _bars(ops: xr.Dataset) -> list[Bar]:
    """Ops as bars; those of a fused pair stand one after the other."""
    bars: list[Bar] = []
    for k in range(ops.sizes["op"]):
        at = ops.isel(op=k)
        op = Op(Phase[str(at.phase.item())], int(at.stage), int(at.microbatch))
        if int(at.part):
            bars[-1] = bars[-1]._replace(ops=(*bars[-1].ops, op))
        else:
            bars.append(
                Bar(int(at.worker), float(at.start), float(at.finish), (op,), bool(at.is_critical))
            )
    return bars
