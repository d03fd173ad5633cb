"""Step time against the number of microbatches, without and with recomputation."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import LOOK, count_axis, network_label, plain_numbers
from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import palette, style
from pipejax.results import STATUS

BANDWIDTHS = (5e9, 50e9, 400e9)  # the nearest ones of the grid are drawn [B/s]
LATENCY = 20e-6  # likewise [s]
LEFT_OUT = ("hanayo waves=1",)  # lies between the others


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one column per bandwidth, one row per kind of recomputation."""
    near = data.sel(
        {"network.bandwidth": list(BANDWIDTHS), "network.latency": LATENCY}, method="nearest"
    ).drop_duplicates("network.bandwidth")
    rows, columns = near.recompute.values, near["network.bandwidth"].values
    figure, panels = plt.subplots(
        len(rows),
        len(columns),
        figsize=(style.PAGE, 0.8 + 2.1 * len(rows)),
        sharex=True,
        sharey="col",
        squeeze=False,
    )
    for row, recompute in zip(panels, rows, strict=True):
        for axes, bandwidth in zip(row, columns, strict=True):
            at = near.sel({"recompute": recompute, "network.bandwidth": bandwidth})
            _lines(axes, at)
            axes.set_title(f"{network_label(at)}\nrecompute: {recompute}", loc="left")
        row[0].set_ylabel("step time [s]")
    for axes in panels[-1]:
        axes.set_xlabel("microbatches")
    handles, _ = panels[0, 0].get_legend_handles_labels()
    lost = Line2D(
        [],
        [],
        color=palette.BLACK,
        marker="o",
        markerfacecolor="white",
        linestyle="",
        label="hollow: out of memory",
    )
    figure.legend(
        handles=[*handles, lost],
        loc="outside lower center",
        ncols=4,
    )
    return {"design_run_time": describe(figure, _caption(data))}


def _caption(data: xr.Dataset) -> str:
    return (
        f"Step time of {data.title}, minibatch {int(data.minibatch)}, against the number of "
        f"microbatches, on three networks, without and with recomputation. The vertical "
        f"{AXES_DIFFER} between columns. On the slowest network schedules with many messages "
        "(Hanayo, V=5) are the slowest; on the fastest V=5, with the shortest bubble, is the "
        "fastest."
    )


def _lines(axes: Axes, at: xr.Dataset) -> None:
    """One line per schedule; what does not fit the memory has hollow markers."""
    counts = at.minibatch // at.microbatch_size
    for name in (name for name in at.schedule.values if name not in LEFT_OUT):
        look = LOOK[name]
        points = at.sel(schedule=name)
        axes.plot(counts, points.step_time, **{**look, "linestyle": "-"})
        lost = points.step_time.where(points.status == STATUS.index("out of memory"))
        axes.plot(
            counts, lost, **{**look, "linestyle": "", "markerfacecolor": "white", "label": ""}
        )
    count_axis(axes, counts.values)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
