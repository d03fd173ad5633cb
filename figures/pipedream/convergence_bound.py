"""Randomized PipeDream against its bound: all runs, the terms by step size, the law S^4/K."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import POINTS, count_axis
from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import palette, style

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "random quadratic": {"label": "quadratic", "marker": "o", "color": palette.BLUE},
    "logistic regression": {"label": "logistic", "marker": "s", "color": palette.ORANGE},
}
TERMS: Mapping[str, Mapping[str, Any]] = {
    "start": {"color": palette.SKY, "linestyle": "--"},
    "noise": {"color": palette.GREEN, "linestyle": "-."},
    "delay": {"color": palette.VERMILION, "linestyle": ":"},
    "total": {"color": palette.BLACK, "linestyle": "-", "label": "bound"},
}
CASE = {"objective": "random quadratic", "delta": 60}
LAW_COLOURS = (palette.ORANGE, palette.BLUE, palette.BLACK)  # by K
BELOW: Mapping[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.42, -0.2),
    "columnspacing": 0.8,
    "handlelength": 1.6,
    "ncols": 2,
}
GRADIENT = r"mean $|\nabla f|^2$"


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw measured gradients on their bound, the terms of one case, and the delay term's law."""
    figure, panels = plt.subplots(1, 3, figsize=(style.PAGE, 3.3))
    _scatter(panels[0], data)
    _terms(panels[1], data)
    _law(panels[2], data)
    return {"convergence_bound": describe(figure, _caption(data))}


def _caption(data: xr.Dataset) -> str:
    return (
        f"Randomized PipeDream against its bound, {data.attrs['stages']} stages ({AXES_DIFFER}). "
        f"(a) Mean squared gradients of all settings that did not diverge, means of "
        f"{data.sizes['seed']} seeds. Runs whose blocks are always late lie above the bound "
        f"without its delay term (open) and below the whole one (full). (b) The terms of the bound "
        f"on the {CASE['objective']}: runs bear larger step sizes than that of the least bound. "
        "(c) The delay term of PipeDream is Θ(S⁴/K) at the step size that is best without delays."
    )


def _scatter(axes: Axes, data: xr.Dataset) -> None:
    """Every setting; runs of late blocks also on the bound without its delay term."""
    handles = []
    for name in map(str, data.objective.values):
        at, look = data.sel(objective=name), {**OBJECTIVES[name], **POINTS}
        axes.plot(at.total.values.ravel(), at.measured.values.ravel(), **look)
        handles.append(Line2D([], [], **look))
    late: dict[str, Any] = {
        "marker": "D",
        "markersize": 4,
        "color": palette.VERMILION,
        "linestyle": "",
    }
    axes.plot(data.late_total, data.late_measured, **late)
    axes.plot(data.late_total_without_delay, data.late_measured, markerfacecolor="white", **late)
    for measured, full, cut in zip(
        data.late_measured.values,
        data.late_total.values,
        data.late_total_without_delay.values,
        strict=True,
    ):
        axes.plot([cut, full], [measured] * 2, color=palette.VERMILION, linewidth=0.6, zorder=0)
    axes.set(
        xscale="log", yscale="log", xlabel=f"bound on the {GRADIENT}", ylabel=f"measured {GRADIENT}"
    )
    low, high = data.measured.min() / 3, data.total.max() * 2
    axes.plot([low, high], [low, high], color=palette.GREY, linewidth=0.8, zorder=0)
    axes.set(xlim=(low, high), ylim=(low, data.measured.max() * 30))
    axes.set_title("(a) measured against the bound", loc="left")
    top = float(data.measured.max()) * 6
    axes.text(1.6 * top, top, "measured = bound", color=palette.GREY, fontsize=7)
    others = [
        Line2D([], [], **late, label="late blocks"),
        Line2D([], [], **late, markerfacecolor="white", label="no delay term"),
    ]
    axes.legend(handles=[*handles, *others], **BELOW)


def _terms(axes: Axes, data: xr.Dataset) -> None:
    at = data.sel(CASE)
    for name, look in TERMS.items():
        axes.plot(at.step_size, at[name], **{"label": name, **look})
    axes.plot(
        at.step_size,
        at.measured,
        marker="o",
        markersize=3,
        linestyle="",
        color=palette.BLACK,
        label="measured",
    )
    best: dict[str, Any] = {
        "markersize": 8,
        "linestyle": "",
        "marker": "*",
        "markeredgecolor": palette.BLACK,
        "markeredgewidth": 0.5,
    }
    axes.plot(at.best_step_size, at.least_bound, color=palette.YELLOW, label="least bound", **best)
    axes.plot(
        at.best_measured,
        at.measured.sel(step_size=at.best_measured),
        color=palette.VERMILION,
        label="least measured",
        **best,
    )
    axes.set(xscale="log", yscale="log", xlabel=r"step size $\gamma$", ylabel=GRADIENT)
    measured_sizes = at.step_size.where(at.measured.notnull(), drop=True)
    axes.set(
        xlim=(measured_sizes.min() / 1.5, measured_sizes.max() * 1.5),
        ylim=(at.measured.min() / 5, 5 * at.total.max()),
    )
    axes.set_title(rf"(b) its terms, $\delta$ = {CASE['delta']}", loc="left")
    axes.legend(**BELOW)


def _law(axes: Axes, data: xr.Dataset) -> None:
    stages = data.law_stages.values
    for updates, colour in zip(data.law_updates.values, LAW_COLOURS, strict=True):
        at = data.sel(law_updates=updates)
        power = f"$K = 10^{{{round(np.log10(updates))}}}$"
        axes.plot(stages, at.law_delay, color=colour, marker="o", markersize=3, label=power)
        axes.plot(stages, at.law_delay_tuned, color=colour, linestyle="--", linewidth=0.9)
    axes.set(yscale="log", xlabel="stages S", ylabel=r"delay term / $L(f_0 - f^*)$")
    count_axis(axes, stages)
    axes.set_title("(c) delay term of PipeDream", loc="left")
    entries, _ = axes.get_legend_handles_labels()
    kinds = [
        Line2D([], [], color=palette.GREY, marker="o", markersize=3, label="best without delays"),
        Line2D([], [], color=palette.GREY, linestyle="--", linewidth=0.9, label="best with delays"),
    ]
    axes.legend(handles=[*entries, *kinds], **BELOW)
