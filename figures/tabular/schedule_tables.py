"""The schedule tables themselves: workers by slots, as the tabular-schedule paper draws them."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.design.timelines import UPWARD, draw_run, read_run, schedule_label
from figures.kit.rules import describe
from pipejax.plots import bar_entries, palette, style

COLUMNS = 2


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one table per schedule, on one scale of slots, the legend behind the last."""
    names = [str(name) for name in data.schedule.values]
    rows = len(names) // COLUMNS + 1
    figure, panels = plt.subplots(
        rows, COLUMNS, figsize=(style.PAGE, 1.2 * rows), sharex=True, sharey=True
    )
    all_bars = []
    for axes, name in zip(panels.flat, names, strict=False):
        run = read_run(data, name)
        bars = [bar._replace(is_critical=False) for bar in run.bars]
        draw_run(axes, data, name, run._replace(bars=bars))
        all_bars += bars
        table = data.sel(schedule=name)
        axes.set_title(
            f"{schedule_label(name)}: {table.makespan:.4g} slots, "
            f"idle {100 * table.bubble_ratio:.1f} %",
            loc="left",
        )
        axes.grid(axis="x", color=palette.SILVER, linewidth=0.4)
        axes.set_axisbelow(True)
        axes.tick_params(labelbottom=True)
    for axes in panels.flat[len(names) - COLUMNS : len(names)]:  # the last of each column
        axes.set_xlabel("slot")
    first, *rest = panels.flat[len(names) :]
    first.legend(
        handles=bar_entries(all_bars, UPWARD),
        loc="center",
        title=f"numbers: {data.microbatches} microbatches",
    )
    for axes in (first, *rest):
        axes.set_axis_off()
    return {"schedule_tables": describe(figure, _caption(data))}


def _caption(data: xr.Dataset) -> str:
    return (
        f"Schedule tables of {data.workers} workers and {data.microbatches} microbatches "
        "(numbers), drawn with equal slots for forward and backward, as published for as many "
        "microbatches as workers. One slot is the forward of a microbatch on a worker; stages of "
        "Hanayo take half of it, those of asymmetric Chimera 2/3 and 4/3. Strokes mark what runs "
        "from the last worker to the first. White is idle."
    )
