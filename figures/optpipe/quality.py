"""How good schedules are by when: quality against solving time, by size of the problem."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.rules import describe
from pipejax.plots import palette, style

PANELS = {"excess_over_best": "the best known schedule", "excess_over_bound": "the bound"}
COLOURS = (
    palette.SKY,
    palette.GREEN,
    palette.ORANGE,
    palette.VERMILION,
    palette.BLUE,
    palette.PURPLE,
)
MARKERS = "o^sDvP"
DASHES = {0.5: "-", 0.9: ":"}
EVERY = 4  # points of time with a mark


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw how much longer schedules are than the best known one and than the bound."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(style.PAGE, 2.9), sharey=True)
    sizes = [int(size) for size in data.ops.values]
    for axes, (name, words) in zip(panels, PANELS.items(), strict=True):
        for size, colour, marker in zip(sizes, COLOURS, MARKERS, strict=False):
            for share, dashes in DASHES.items():
                excess = 100 * data[name].sel(ops=size, share=share)
                look = {"color": colour, "linestyle": dashes, "marker": marker, "markevery": EVERY}
                axes.plot(data.solve_time, excess, **look)
        axes.set(xscale="log", xlabel="time of the search [s]")
        axes.set_title(f"against {words}", loc="left")
    panels[0].set_ylabel("longer by [%]")
    panels[0].set_ylim(0)
    handles = [
        Line2D([], [], color=c, marker=m, label=f"{size} ops ({int(data.problems.sel(ops=size))})")
        for size, c, m in zip(sizes, COLOURS, MARKERS, strict=False)
    ]
    handles += [
        Line2D([], [], color=palette.BLACK, linestyle="-", label="half of the problems"),
        Line2D([], [], color=palette.BLACK, linestyle=":", label="nine tenths"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    limit = f"{data.attrs['effort of a solve']:g} s of one core"
    end = 100 * data.excess_over_best.isel(solve_time=-1).sel(share=0.5)
    caption = (
        f"Quality against solving time, solves of at most {limit}: what half and nine tenths of "
        "the problems of a size (their number in brackets) are below. After the whole time half "
        f"of the problems are within {float(end.max()):.1f} % of the best known schedule at every "
        "size; what is left against the bound is mostly the bound's."
    )
    return {"optpipe_quality": describe(figure, caption)}
