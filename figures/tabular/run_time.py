"""Run time and idle share against microbatches: the systems that differ."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.cases import (
    LOOK,
    MAIN,
    count_axis,
    main_setting,
    plain_numbers,
    setting_words,
    system_title,
)
from figures.kit.rules import describe
from pipejax.plots import style

# messages weigh less from one to the next; the last stands for all others, where they weigh least
SHOWN = ("slow_nw_fast_cp", "slow_nw_mid_cp", "mid_nw_fast_cp", "slow_nw_slow_cp")


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw run time relative to GPipe's with the fewest microbatches, and idle share."""
    data = main_setting(data)
    relative = data.makespan / data.makespan.sel(schedule="gpipe").isel(microbatches=0)
    times = _panels(data, relative, "step time")
    for axes in times.axes:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis, (1, 1.5, 2, 3, 5, 6, 7))
    shares = _panels(data, 100 * data.bubble_ratio, "idle share [%]")
    for axes in shares.axes:
        axes.set_ylim(bottom=0)
    return {
        "run_time": describe(times, _times_caption(data, relative)),
        "idle_share": describe(shares, _shares_caption(data)),
    }


def _panels(at: xr.Dataset, values: xr.DataArray, label: str) -> Figure:
    """One row per pipeline depth, all on the same axes."""
    figure, panels = plt.subplots(
        at.sizes["workers"], len(SHOWN), figsize=(style.PAGE, 4.2), sharex=True, sharey=True
    )
    for row, workers in zip(panels, at.workers.values, strict=True):
        for axes, system in zip(row, SHOWN, strict=True):
            for name in MAIN:
                line = values.sel(schedule=name, system=system, workers=workers)
                axes.plot(at.microbatches, line, **{**LOOK[name], "linestyle": "-"})
            count_axis(axes, at.microbatches.values)
        row[0].set_ylabel(f"{label}, {int(workers)} workers")
    for axes, system in zip(panels[0], SHOWN, strict=True):
        axes.set_title(system_title(system).replace(", ", ",\n"), loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("microbatches")
    handles, _ = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure


def _others(values: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Values of the systems that are not drawn, and of the one that stands for them."""
    others = [name for name in values.system.values if name not in SHOWN]
    shown = values.sel(schedule=list(MAIN))
    return shown.sel(system=others), shown.sel(system=SHOWN[-1])


def _times_caption(at: xr.Dataset, relative: xr.DataArray) -> str:
    others, shown = _others(relative)
    apart = 100 * float(abs(others / shown - 1).max())
    return (
        "Step time over GPipe's with the fewest microbatches. On the five systems that are not "
        f"drawn it is within {apart:.1f} % of the last panel's. {setting_words(at)} 1F1B runs on "
        "GPipe's broad line. On a slow network Chimera's time rises with its exchanges where "
        "compute is not slow too; steps in the lines of Chimera and Hanayo are those of our orders."
    )


def _shares_caption(at: xr.Dataset) -> str:
    others, shown = _others(at.bubble_ratio)
    apart = 100 * float(abs(others - shown).max())
    return (
        "Idle share of the runs. On the five systems that are not drawn it is within "
        f"{apart:.1f} points of the last panel's. {setting_words(at)} GPipe and 1F1B coincide. On "
        "a slow network Chimera idles while it exchanges gradients, Hanayo while its messages pass."
    )
