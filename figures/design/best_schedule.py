"""The fastest schedule on every network, its lead over the next one, and what bounds it."""

import itertools
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures.kit.cases import LOOK, network_axes
from figures.kit.rules import describe
from pipejax.plots import PARAMETER_NAMES, palette, style
from pipejax.results import STATUS

# edges in the colour of the faces: without them viewers show gaps between the cells
CELLS: Any = {"shading": "nearest", "edgecolors": "face", "linewidth": 0.3}
HATCHES = ("", "////", "....", "xxxx", "----")
PLAN = ("schedule", "microbatch_size", "recompute")  # what may be chosen on a network
RESOURCE_COLOUR = {
    "compute.peak": palette.ORANGE,
    "compute.latency": palette.YELLOW,
    "memory.bandwidth": palette.BLUE,
    "memory.latency": palette.SKY,
    "node.bandwidth": palette.GREEN,
    "node.latency": palette.GREY,
    "network.bandwidth": palette.PURPLE,
    "network.latency": palette.SILVER,
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw three maps over bandwidth and latency."""
    best = fastest(data)
    figure, panels = plt.subplots(1, 3, figsize=(style.PAGE, 3.1), sharex=True, sharey=True)
    schedules = {str(name): LOOK[name]["label"] for name in data.schedule.values}
    _categories(
        panels[0], best.schedule, schedules, {name: LOOK[name]["color"] for name in schedules}
    )
    panels[0].set_title("fastest schedule", loc="left")
    _lead(figure, panels[1], 100 * best.lead)
    panels[1].set_title("lead over the next [%]", loc="left")
    _categories(panels[2], best.bound_by, PARAMETER_NAMES, RESOURCE_COLOUR)
    panels[2].set_title("largest share of its critical path", loc="left")
    for axes in panels:
        network_axes(axes)
        axes.label_outer()
    return {"best_schedule": describe(figure, _caption(data))}


def _caption(data: xr.Dataset) -> str:
    return (
        f"{data.title}, minibatch {int(data.minibatch)}: the fastest schedule on every network, "
        "how much longer the next schedule takes, and the resource with the largest share of the "
        "critical path. All microbatch sizes, with and without recomputation, that fit the memory "
        "were tried; white: none does."
    )


def fastest(data: xr.Dataset) -> xr.Dataset:
    """Pick the feasible plan with the least step time at every point of the network.

    Args:
      data: dataset of a sweep over `PLAN` and the network.

    Returns:
      Its step time [s], lead (by which share the next schedule takes longer), names of `PLAN` and
      of the resource that bounds it; where no plan is feasible the numbers are NaN and the names
      empty.
    """
    times = data.step_time.where(data.status == STATUS.index("feasible")).stack(plan=PLAN)
    chosen = times.fillna(np.inf).argmin("plan")
    is_there = times.notnull().any("plan")
    meanings = np.array(data.bound_by.attrs["flag_meanings"].split())
    bounds = data.bound_by.stack(plan=PLAN).isel(plan=chosen)
    at = times.plan.isel(plan=chosen)
    names = {name: at[name].astype(str) for name in PLAN}
    names["bound_by"] = xr.apply_ufunc(lambda code: meanings[code], bounds)
    named = {
        name: values.drop_vars(("plan", *PLAN), errors="ignore").where(is_there, "")
        for name, values in names.items()
    }
    by_schedule = np.sort(times.unstack("plan").min(PLAN[1:]).transpose("schedule", ...).values, 0)
    step_time = times.min("plan")
    lead = step_time.copy(data=by_schedule[1] / by_schedule[0] - 1)  # NaN is sorted last
    return xr.Dataset({"step_time": step_time, "lead": lead, **named})


def _categories(
    axes: Axes, values: xr.DataArray, labels: Mapping[str, str], colours: Mapping[str, str]
) -> None:
    """Map of names, with those that occur in a legend."""
    shown = values.transpose("network.latency", "network.bandwidth")
    used = [name for name in colours if (shown == name).any()]
    codes = np.full(shown.shape, np.nan)
    for code, name in enumerate(used):
        codes[(shown == name).values] = code
    axes.pcolormesh(
        *_centres(shown),
        codes,
        cmap=ListedColormap([colours[name] for name in used]),
        vmin=-0.5,
        vmax=len(used) - 0.5,
        **CELLS,
    )
    looks: dict[str, dict[str, Any]] = {
        name: {"facecolor": colours[name], "edgecolor": palette.ink(colours[name]), "hatch": hatch}
        for name, hatch in zip(used, itertools.cycle(HATCHES), strict=False)
    }
    for code, look in enumerate(looks.values()):
        if look["hatch"]:  # over the cells: neighbours are told apart in grey
            at = np.ma.masked_where(codes != code, codes)
            axes.pcolor(*_centres(shown), at, **{**look, "facecolor": "none", "linewidth": 0.0})
    axes.legend(
        handles=[Patch(**look, label=labels[name]) for name, look in looks.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
    )


def _lead(figure: Figure, axes: Axes, values: xr.DataArray) -> None:
    shown = values.transpose("network.latency", "network.bandwidth")
    mesh = axes.pcolormesh(*_centres(shown), shown, cmap="cividis_r", vmin=0, **CELLS)
    below = axes.inset_axes((0.0, -0.4, 1.0, 0.06))
    figure.colorbar(mesh, cax=below, orientation="horizontal")


def _centres(shown: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Bandwidths [GB/s] and latencies [us]."""
    return shown["network.bandwidth"] / 1e9, shown["network.latency"] * 1e6
