"""Ends of logistic regression by gradient noise and depth, and where the winner changes."""

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.kit.rules import describe
from figures.pipedream.cases import (
    log_axis,
    looks,
    panels,
    plot_seeds,
    range_of_seeds,
    scheme_label,
)
from pipejax.plots import palette, style

SHOWN = (8, 16, 64)  # stages
READ = "last model"


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the ends of both schemes against the noise, with the noise at which they cross."""
    at = data.sel(read=READ)
    figure, axes_row = panels(len(SHOWN), style.PAGE, 2.7)
    for axes, stages in zip(axes_row, SHOWN, strict=True):
        _panel(axes, at.sel(stages=stages))
    log_axis(axes_row[0])
    axes_row[0].set_ylabel(f"objective $f$ after {data.attrs['slots']:g} slots")
    handles = [*axes_row[0].get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    crossing = at.crossing.dropna("stages")
    caption = (
        "Logistic regression: PipeDream against LocalSGD by the noise of a gradient (standard "
        "deviation of every coordinate; the published experiment has the largest). Medians "
        f"and ranges of {data.sizes['seed']} seeds, each scheme at the step size that ends lowest. "
        f"They cross at a noise of {float(crossing.min()):.2g} to {float(crossing.max()):.2g} "
        f"(dotted) at {crossing.size} depths from S = {int(crossing.stages.min())} to "
        f"{int(crossing.stages.max())}."
    )
    return {"finding_gradient_noise": describe(figure, caption)}


def _panel(axes: Axes, depth: xr.Dataset) -> None:
    for name, look in looks([str(name) for name in depth.scheme.values]).items():
        plot_seeds(
            axes, depth.noise, depth.end.sel(scheme=name), scheme_label(name), look, spacing=1
        )
    axes.axvline(
        float(depth.crossing),
        color=palette.GREY,
        linewidth=0.8,
        linestyle=":",
        label="both end alike",
    )
    axes.set_xscale("symlog", linthresh=0.05)
    axes.set_xticks(depth.noise.values)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="gradient noise", xlim=(0, float(depth.noise[-1]) * 1.05))
    axes.set_title(f"S = {int(depth.stages)}", loc="left")
