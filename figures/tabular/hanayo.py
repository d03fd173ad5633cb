"""Hanayo against Chimera at S = B = 8, on every system, with the published points."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.cases import LOOK, main_setting, setting_words, system_title
from figures.kit.rules import describe
from pipejax.plots import palette, style

WAVES = ("hanayo, 1 wave", "hanayo, 2 waves", "hanayo, 4 waves")
PUBLISHED = {"slow_nw_fast_cp": -12.32, "slow_nw_mid_cp": 2.33}  # arXiv:2605.24006
PUBLISHED_MEAN = (12, 14)  # of the systems with fast and mid networks
STAR: Mapping[str, Any] = {
    "marker": "*",
    "markersize": 10,
    "linestyle": "",
    "color": palette.VERMILION,
    "markeredgecolor": palette.BLACK,
    "markeredgewidth": 0.6,
    "label": "published point",
}
RANGE: Mapping[str, Any] = {
    "marker": "_",
    "markersize": 8,
    "color": palette.VERMILION,
    "label": "published mean",
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw how much faster each number of waves is than Chimera, by system and on average."""
    data = main_setting(data)
    at = data.sel(workers=8, microbatches=8)
    gain = 100 * (1 - at.makespan / at.makespan.sel(schedule="chimera")).sel(schedule=list(WAVES))
    systems = [str(s) for s in data.system.values]
    averaged = [not s.startswith("slow_nw") for s in systems]
    mean = gain.isel(system=np.flatnonzero(averaged)).mean("system")
    figure, axes = plt.subplots(figsize=(style.PAGE, 3.2))
    last = len(systems)
    axes.axhline(0, color=palette.BLACK, linewidth=0.6)
    axes.plot([last + 0.2] * 2, PUBLISHED_MEAN, **RANGE)
    for name in WAVES:
        values = np.append(gain.sel(schedule=name), mean.sel(schedule=name))
        axes.plot(range(last + 1), values, **{**LOOK[name], "linestyle": "", "markersize": 6})
    places = [systems.index(s) + 0.2 for s in PUBLISHED]
    axes.plot(places, list(PUBLISHED.values()), **STAR)
    axes.axvline(last - 0.5, color=palette.GREY, linewidth=0.6)
    axes.set_xticks(range(last + 1), [*_names(systems), "mean of\nmid and fast\nnetworks"])
    axes.grid(axis="y", color=palette.SILVER, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("faster than Chimera [%]")
    figure.legend(loc="outside lower center", ncols=5)
    return {"hanayo": describe(figure, _caption(data, gain, mean))}


def _names(systems: list[str]) -> list[str]:
    """Compute of each system, the network below the middle one of its three."""
    names = []
    for place, system in enumerate(systems):
        network, compute = system_title(system).split(", ")
        names.append(f"{compute}\n{network if place % 3 == 1 else ''}".replace(" c", "\nc"))
    return names


def _caption(data: xr.Dataset, gain: xr.DataArray, mean: xr.DataArray) -> str:
    two, average = (values.sel(schedule=WAVES[1]) for values in (gain, mean))
    points = "; ".join(
        f"{float(two.sel(system=name)):+.2f} % against {value:+.2f} % at {system_title(name)}"
        for name, value in PUBLISHED.items()
    )
    return (
        f"Hanayo against Chimera, 8 workers and 8 microbatches. {setting_words(data)} With two "
        f"waves {points}; mean of mid and fast networks {float(average):.1f} % against "
        f"{PUBLISHED_MEAN[0]} to {PUBLISHED_MEAN[1]} % (published values from secondary sources; "
        f"e_c is fitted: {data.attrs['fitted to']})."
    )
