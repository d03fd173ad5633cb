"""Quality of schedules against effort, by size of the problem."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.rules import describe
from pipejax.plots import palette, style

PANELS = {"excess_over_best": "the best known schedule", "excess_over_bound": "the bound"}
SHARES = {0.5: "half of the problems", 0.9: "nine tenths"}
COLOURS = (
    palette.SKY,
    palette.GREEN,
    palette.ORANGE,
    palette.VERMILION,
    palette.BLUE,
    palette.PURPLE,
)
MARKERS = "o^sDvP"
EVERY = 4  # points of time with a mark


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw how much longer schedules are than the best known one and than the bound."""
    figure, panels = plt.subplots(
        len(SHARES), len(PANELS), figsize=(style.PAGE, 3.9), sharex=True, sharey="row"
    )
    sizes = [int(size) for size in data.ops.values]
    for row, (share, how_many) in zip(panels, SHARES.items(), strict=True):
        for axes, (name, words) in zip(row, PANELS.items(), strict=True):
            for size, colour, marker in zip(sizes, COLOURS, MARKERS, strict=False):
                excess = 100 * data[name].sel(ops=size, share=share)
                look = {"color": colour, "marker": marker, "markevery": EVERY}
                axes.plot(data.solve_time, excess, **look)
            axes.set_xscale("log")
            axes.set_title(f"{how_many}, against {words}", loc="left")
        row[0].set_ylabel("longer by at most [%]")
        row[0].set_ylim(0)
    for axes in panels[-1]:
        axes.set_xlabel("effort of the search [s of one core]")
    handles = [
        Line2D([], [], color=c, marker=m, label=f"{size} ops ({int(data.problems.sel(ops=size))})")
        for size, c, m in zip(sizes, COLOURS, MARKERS, strict=False)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    end = 100 * data.excess_over_best.isel(solve_time=-1).sel(share=0.5)
    caption = (
        "Quality against the effort of a search, by size of the problem (how many of it in "
        f"brackets). At the end half of the problems are within {float(end.max()):.1f} % of the "
        "best known schedule at every size; what is left against the bound is mostly the bound's. "
        "The axes differ."
    )
    return {"optpipe_quality": describe(figure, caption)}
