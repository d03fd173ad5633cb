"""Hanayo against Chimera at S = B = 8, on every system, with the published points."""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from figures.cases import LOOK, main_setting, system_title
from pipejax.plots import style

WAVES = ("hanayo, 1 wave", "hanayo, 2 waves", "hanayo, 4 waves")
PUBLISHED = {"slow_nw_fast_cp": -12.32, "slow_nw_mid_cp": 2.33}  # arXiv:2605.24006
PUBLISHED_BAND = (12, 14)  # on fast and mid networks
LOWEST = -60.0  # bars below are cut and labelled


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw how much faster each number of waves is than Chimera."""
    data = main_setting(data)
    at = data.sel(workers=8, microbatches=8)
    gain = 100 * (1 - at.makespan / at.makespan.sel(schedule="chimera"))
    figure, axes = plt.subplots(figsize=(style.PAGE, 3.2))
    place = np.arange(data.sizes["system"])
    for k, name in enumerate(WAVES):
        values = gain.sel(schedule=name).values
        x = place + 0.25 * (k - 1)
        axes.bar(
            x,
            np.maximum(values, LOWEST),
            0.23,
            color=LOOK[name]["color"],
            label=LOOK[name]["label"],
        )
        for position, value in zip(x, values, strict=True):
            if value < LOWEST:
                axes.text(
                    position,
                    LOWEST + 2,
                    f"{value:.0f}",
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=6,
                )
    systems = [str(s) for s in data.system.values]
    axes.scatter(
        [systems.index(s) for s in PUBLISHED],
        list(PUBLISHED.values()),
        marker="*",
        s=60,
        color="black",
        zorder=3,
        label="published point",
    )
    axes.fill_between(
        [2.5, len(systems) - 0.5],
        *PUBLISHED_BAND,
        color=style.GREY,
        alpha=0.4,
        linewidth=0,
        label="published, mid and fast networks",
    )
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(place, [system_title(s).replace(", ", "\n") for s in systems], fontsize=6)
    axes.set_ylim(LOWEST, 30)
    axes.set_ylabel("faster than Chimera [%]")
    axes.set_title("8 workers, 8 microbatches", loc="left")
    figure.legend(loc="outside lower center", ncols=5)
    return {"hanayo": figure}
