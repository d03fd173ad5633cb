"""Randomized PipeDream at the delay of PipeDream: do the two curves match?"""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.kit.rules import AXES_DIFFER, describe
from figures.pipedream.cases import (
    QUANTITIES,
    X_LABELS,
    label_of,
    log_axis,
    looks,
    panels,
    plot_seeds,
    range_of_seeds,
    said,
)
from pipejax.plots import palette, style

BAND = 10.0  # factor that the band reaches to either side


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw both curves for each number of stages, with an order of magnitude to either side."""
    figure, drawn = panels(data.sizes["stages"], style.PAGE, 3.0)
    words = []
    for axes, stages in zip(drawn, data.stages.values, strict=True):
        one = data.sel(stages=stages)
        _panel(axes, one)
        axes.set_xlabel(X_LABELS["updates"])
        worst = float(one.apart)
        title = f"S = {int(stages)}, δ = {int(one.delta.sel(scheme='rpd'))}"
        axes.set_title(
            f"{title}:\nat most {worst:.2g} times apart"
            if np.isfinite(worst)
            else f"{title}:\none of them diverges",
            loc="left",
        )
        words.append(f"S = {int(stages)}: {said(one, 'updates')}.")
    log_axis(drawn[0])
    drawn[0].set_ylabel(QUANTITIES["gap"])
    handles = [*drawn[0].get_legend_handles_labels()[0], range_of_seeds()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    caption = (
        f"PipeDream and Randomized PipeDream with δ, the largest delay of PipeDream, on the random "
        f"quadratic: medians and ranges of {data.sizes['seed']} seeds at step size 1/(2S), the "
        f"published one at S = 8; {AXES_DIFFER}, for deeper pipes do more updates. At the end, "
    )
    return {"pipedream_match": describe(figure, caption + " ".join(words))}


def _panel(axes: Axes, best: xr.Dataset) -> None:
    one = best.sel(scheme="pipedream")
    median = one.shown.median("seed", skipna=False)
    label = f"PipeDream times 1/{BAND:g} to {BAND:g}"
    band: dict[str, Any] = {"color": palette.SKY, "alpha": 0.2, "linewidth": 0, "label": label}
    axes.fill_between(one.updates, median / BAND, median * BAND, **band)
    for name, look in looks([str(name) for name in best.scheme.values]).items():
        at = best.sel(scheme=name)
        plot_seeds(axes, at.updates, at.shown, label_of(name), look)
