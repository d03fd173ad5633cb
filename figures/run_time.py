"""Run time and idle share against microbatches, one panel per system."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.cases import LOOK, MAIN, count_axis, main_setting, system_title
from pipejax.plots import style


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw run time, run time relative to GPipe, and idle share for each pipeline depth."""
    data = main_setting(data)
    relative = data.makespan / data.makespan.sel(schedule="gpipe")
    drawings = {}
    for workers in data.workers.values:
        for name, values, label in (
            ("run_time", data.makespan, "step time [s]"),
            ("run_time_relative", relative, "step time / that of GPipe"),
            ("idle_share", 100 * data.bubble_ratio, "idle share of the run [%]"),
        ):
            drawings[f"{name}_s{workers}"] = _panels(
                values.sel(workers=workers),
                label,
                f"{workers} workers",
                from_zero=values is not relative,
            )
    return drawings


def _panels(values: xr.DataArray, label: str, title: str, *, from_zero: bool) -> Figure:
    figure, panels = plt.subplots(3, 3, figsize=(style.PAGE, 6.2), sharex=True)
    for axes, system in zip(panels.flat, values.system.values, strict=True):
        for name in MAIN:
            line = values.sel(schedule=name, system=system)
            axes.plot(values.microbatches, line, **LOOK[name])
        axes.set_title(system_title(str(system)), loc="left")
        axes.set_ylim(bottom=0 if from_zero else None)
        count_axis(axes, values.microbatches.values)
    for axes in panels[-1]:
        axes.set_xlabel("microbatches")
    for axes in panels[:, 0]:
        axes.set_ylabel(label)
    handles, _ = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=6, title=title)
    return figure
