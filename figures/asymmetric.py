"""Asymmetric Chimera (shares 1:2) against Chimera: run time and largest memory."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.cases import count_axis, main_setting
from pipejax.plots import style

SYSTEMS = {
    "slow_nw_mid_cp": ("slow network", ":"),
    "mid_nw_mid_cp": ("mid network", "--"),
    "fast_nw_mid_cp": ("fast network", "-"),
}
COLOURS = (style.SKY, style.VERMILION)


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw run time and memory of the asymmetric relative to the equal placement."""
    data = main_setting(data)
    pair = {"asymmetric": "chimera-asymmetric", "equal": "chimera"}
    time = {k: data.makespan.sel(schedule=v) for k, v in pair.items()}
    total = (data.static_bytes + data.activation_bytes).max("worker")
    memory = {k: total.sel(schedule=v) for k, v in pair.items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 2.9))
    for workers, colour in zip(data.workers.values, COLOURS, strict=True):
        for system, (label, dashes) in SYSTEMS.items():
            ratio = (time["asymmetric"] / time["equal"]).sel(workers=workers, system=system)
            left.plot(
                data.microbatches,
                100 * (ratio - 1),
                color=colour,
                linestyle=dashes,
                marker="o",
                label=f"S={workers}, {label}",
            )
        ratio = (memory["asymmetric"] / memory["equal"]).sel(workers=workers)
        right.plot(data.microbatches, 100 * (ratio - 1), color=colour, marker="o")
    left.set_ylabel("step time against equal stages [%]")
    right.set_ylabel("largest memory of a worker [%]")
    left.set_title("below 0: asymmetric is faster (mid compute)", loc="left")
    right.set_title("above 0: asymmetric needs more", loc="left")
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xlabel("microbatches")
        count_axis(axes, data.microbatches.values)
    figure.legend(loc="outside lower center", ncols=6, columnspacing=1.0)
    return {"asymmetric": figure}
