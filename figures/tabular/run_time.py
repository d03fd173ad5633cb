"""Run time relative to GPipe, and idle share, against microbatches: one panel per system."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.cases import LOOK, MAIN, count_axis, main_setting, setting_words, system_title
from figures.kit.rules import describe
from pipejax.plots import style

ROWS, COLUMNS = 3, 3  # networks by computes


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw run time relative to GPipe, and idle share, for each pipeline depth."""
    data = main_setting(data)
    drawings = {}
    for workers in data.workers.values:
        at = data.sel(workers=workers)
        relative = at.makespan / at.makespan.sel(schedule="gpipe")
        figure = _panels(at, relative, "step time / that of GPipe")
        drawings[f"run_time_s{workers}"] = describe(figure, _of_times(at, relative))
        figure = _panels(at, 100 * at.bubble_ratio, "idle share [%]")
        for axes in figure.axes:
            axes.set_ylim(bottom=0)
        drawings[f"idle_share_s{workers}"] = describe(figure, _of_shares(at))
    return drawings


def _panels(at: xr.Dataset, values: xr.DataArray, label: str) -> Figure:
    """One panel per system, all on the same axes; the time of GPipe says what one is."""
    figure, panels = plt.subplots(
        ROWS, COLUMNS, figsize=(style.PAGE, 6.0), sharex=True, sharey=True
    )
    for axes, system in zip(panels.flat, at.system.values, strict=True):
        for name in MAIN:
            one = values.sel(schedule=name, system=system)
            axes.plot(at.microbatches, one, **{**LOOK[name], "linestyle": "-"})
        first, last = at.makespan.sel(schedule="gpipe", system=system).values[[0, -1]]
        axes.set_title(
            f"{system_title(str(system))}\nGPipe: {first:.4g} to {last:.4g} s", loc="left"
        )
        count_axis(axes, at.microbatches.values)
    for axes in panels[-1]:
        axes.set_xlabel("microbatches")
    for axes in panels[:, 0]:
        axes.set_ylabel(label)
    handles, _ = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _of_times(at: xr.Dataset, relative: xr.DataArray) -> str:
    apart = float(100 * abs(relative.sel(schedule="1f1b") - 1).max())
    names = [name for name in MAIN if name not in ("gpipe", "1f1b")]
    best = relative.sel(schedule=names).isel(microbatches=0).min("schedule")
    return (
        f"Step time relative to GPipe on nine systems, {int(at.workers)} workers; titles: time of "
        f"GPipe from the fewest to the most microbatches. {setting_words(at)} Below 1 a schedule "
        f"is faster than GPipe. 1F1B is within {apart:.1f} % of GPipe: the black line on the broad "
        "grey one. With the fewest microbatches the best of the others saves "
        f"{100 * (1 - float(best.max())):.0f} to {100 * (1 - float(best.min())):.0f} %; with many "
        "they come together, but for Hanayo and interleaved 1F1B on a slow network, where their "
        "messages bind."
    )


def _of_shares(at: xr.Dataset) -> str:
    first, last = at.bubble_ratio.sel(schedule="gpipe").mean("system").values[[0, -1]]
    return (
        f"Idle share of the runs on nine systems, {int(at.workers)} workers. {setting_words(at)} "
        f"GPipe and 1F1B coincide; on average over the systems they fall from {100 * first:.0f} to "
        f"{100 * last:.0f} % from the fewest to the most microbatches. On a slow network with fast "
        "compute Hanayo idles most, while its messages pass."
    )
