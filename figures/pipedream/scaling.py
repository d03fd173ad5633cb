"""End of each training scheme after a fixed time, by number of stages."""

from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import count_axis
from figures.kit.rules import describe
from figures.pipedream.cases import (
    QUANTITIES,
    as_published,
    log_axis,
    looks,
    panels,
    plot_seeds,
    range_of_seeds,
    scheme_label,
)
from pipejax.plots import palette, style

STORE = "pipedream_scaling"


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the objective at the end against S."""
    published = as_published(data)
    figure, (axes,) = panels(1, style.COLUMN, 3.2)
    for name, its in looks([str(name) for name in published.scheme.values]).items():
        _scheme(axes, published.sel(scheme=name), its)
    count_axis(axes, published.stages.values)
    axes.set(xlabel="stages S", ylabel=f"{QUANTITIES[published.attrs['quantity']]} at the end")
    log_axis(axes)
    handles = [*axes.get_legend_handles_labels()[0], range_of_seeds()]
    if bool(published.edge.any()):
        at_edge: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "linestyle": ""}
        handles.append(
            Line2D([], [], color=palette.BLACK, label="open: last size tried", **at_edge)
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    caption = (
        f"Logistic regression with noisy gradients after {float(published.time.max()):g} slots, by "
        f"number of stages: medians and ranges of {published.sizes['seed']} seeds, each scheme at "
        f"the step size that ends lowest. {_winners(published.sel(by='time'))}"
    )
    return {STORE: describe(figure, caption)}


def _winners(published: xr.Dataset) -> str:
    """Name the schemes that end lowest with every seed, and their depths."""
    won: dict[str, list[str]] = {}
    for stages in published.stages.values:
        at = published.sel(stages=stages)
        if int(at.wins) == published.sizes["seed"]:
            won.setdefault(scheme_label(str(at["first"].item())), []).append(str(stages))
    sentences = (
        f"{name} ends lowest with every seed at S = {', '.join(at)}" for name, at in won.items()
    )
    return f"{'; '.join(sentences) or 'At no S do the seeds agree who ends lowest'}."


def _scheme(axes: Axes, best: xr.Dataset, look: dict[str, Any]) -> None:
    end = best.shown.isel(sample=-1)
    plot_seeds(axes, best.stages, end, scheme_label(str(best.scheme.item())), look, spacing=1)
    at_edge = end.median("seed").where(best.edge)
    axes.plot(best.stages, at_edge, **look, linestyle="", markersize=3, markerfacecolor="white")
