"""Idle time against the speed of the host link, and what sharing one costs."""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.rules import describe
from figures.optpipe.cases import UNIT, UNIT_SAID, draw_methods, entries, log_axis
from pipejax.plots import palette, style


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per pipe and limit, of the problems that were solved at every speed."""
    unshared = data.sel(sharing="own")
    whole = unshared.solved.all("host_link")
    counts = [m for m in data.microbatches.values if bool(whole.sel(microbatches=m).any())]
    at = _with_shared(data.sel(microbatches=counts[-1]))
    limits = [
        v for v in data.limit.values if bool(whole.sel(microbatches=counts[-1], limit=v).all())
    ]
    figure, panels = plt.subplots(
        len(limits),
        data.sizes["model"],
        figsize=(style.PAGE, 1.9 * len(limits) + 1.1),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for row, limit in enumerate(limits):
        for column in range(data.sizes["model"]):
            axes, panel = panels[row, column], at.sel(limit=limit).isel(model=column)
            draw_methods(axes, panel.place, panel)
            axes.axvline(at.sizes["place"] - 1.5, color=palette.BLACK, linewidth=0.6, linestyle=":")
            axes.set_title(f"{panel.model.item()},\nlimit {limit:g}", loc="left")
        panels[row, 0].set_ylabel(UNIT)
    log_axis(panels[0, 0])
    for axes in panels[-1]:
        axes.set_xlabel("offload takes [F]")
        axes.set_xticks(at.place.values, list(map(str, at.tick.values)))
    figure.legend(handles=entries(), loc="outside lower center", ncols=3)
    caption = (
        f"Idle time by the speed of the host link, {int(counts[-1])} microbatches. {UNIT_SAID}. "
        "Behind the dotted line (s) two neighbours share a link that takes a forward. A line is "
        "missing where its schedule does not fit. At half of 1F1B's memory every speed-up of the "
        "link pays."
    )
    return {"optpipe_links": describe(figure, caption)}


def _with_shared(data: xr.Dataset) -> xr.Dataset:
    """Put links of one's own and the shared one along one axis of places."""
    unshared = data.sel(sharing="own", drop=True)
    shared = data.sel(sharing="pairs", drop=True)
    solved = np.flatnonzero(shared.solved.any(("model", "limit")))
    names = ["idle_time", "bound_idle_time", "solved"]
    parts = [unshared[names], shared[names].isel(host_link=solved)]
    both = xr.concat(parts, "host_link", data_vars="all").rename(host_link="place")
    ticks = [f"{link:g}" if np.isfinite(link) else "no" for link in unshared.host_link.values]
    ticks += [f"{link:g} s" for link in shared.host_link.values[solved]]
    return both.assign_coords(place=np.arange(len(ticks)), tick=("place", ticks))
