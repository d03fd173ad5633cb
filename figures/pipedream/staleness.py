"""Staleness of PipeDream: delays by depth, their distribution, and what messages change."""

from collections.abc import Mapping
from fractions import Fraction
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

KINDS = (
    ("max_delay", "largest", palette.VERMILION, "o"),
    ("mean_delay", "mean", palette.BLUE, "s"),
)
SHOWN: tuple[Mapping[str, Any], ...] = (  # of the distributions
    {"color": palette.ORANGE, "linestyle": "-"},
    {"color": palette.BLACK, "linestyle": "--"},
)
LINKS: Mapping[str, Mapping[str, Any]] = {
    "delay": {"color": palette.BLACK, "marker": "o", "linestyle": "-"},
    "queued": {"color": palette.SKY, "marker": "x", "linestyle": "--"},
    "blocking": {"color": palette.GREEN, "marker": "^", "linestyle": "-"},
    "rendezvous": {"color": palette.PURPLE, "marker": "s", "linestyle": "-"},
}
BINS = 20
BELOW: Mapping[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.28)}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw counted delays on their law, two distributions, and mean delays under messages."""
    figure, panels = plt.subplots(1, 3, figsize=(style.PAGE, 3.0))
    _by_depth(panels[0], data)
    _distribution(panels[1], data)
    _under_messages(panels[2], data)
    return {"staleness": describe(figure, _caption(data))}


def _by_depth(axes: Axes, data: xr.Dataset) -> None:
    handles = []
    for name, label, colour, marker in KINDS:
        law = data[f"{name}_law"]
        axes.plot(data.stages, law, color=colour, linewidth=0.8)
        axes.plot(data.stages, data[name], color=colour, marker=marker, **POINTS)
        look: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "markersize": 3,
            "markerfacecolor": "none",
        }
        handles.append(Line2D([], [], linewidth=0.8, label=f"{label}: ${law.law}$", **look))
    axes.set(yscale="log", xlabel="stages S", ylabel="delay [block updates]")
    count_axis(axes, [s for s in (2, 4, 8, 16, 32, 64, 150) if s in data.stages])
    axes.legend(handles=handles, **BELOW)
    axes.set_title("(a) by depth", loc="left")


def _distribution(axes: Axes, data: xr.Dataset) -> None:
    delay = np.arange(data.sizes["delay"])
    for stages, look in zip(data.shown.values, SHOWN, strict=True):
        share, edges = np.histogram(
            delay / (stages**2 - stages / 2),
            bins=BINS,
            range=(0, 1),
            weights=data.share.sel(shown=stages).values,
        )
        axes.stairs(share, edges, label=f"S = {stages}", linewidth=1.1, **look)
    axes.set(xlabel="delay / largest, $S^2 - S/2$", ylabel="share of reads", xlim=(0, 1))
    axes.legend(ncols=2, **BELOW)
    axes.set_title("(b) distribution", loc="left")


def _under_messages(axes: Axes, data: xr.Dataset) -> None:
    place = np.arange(data.sizes["message"])
    for name in data.link.values:
        axes.plot(place, data.mean_delay_under_messages.sel(link=name), label=name, **LINKS[name])
    law = float(data.mean_delay_law.sel(stages=int(data.shown[0])))
    axes.axhline(law, color=palette.GREY, linewidth=0.8, linestyle=":", label="equal slots")
    fractions = [str(Fraction(float(value))) for value in data.message.values]
    axes.set_xticks(place, fractions)
    axes.set(xlabel="message / forward", ylabel="mean delay [block updates]")
    axes.set_ylim(0, 1.15 * max(law, float(data.mean_delay_under_messages.max())))
    axes.legend(ncols=2, columnspacing=0.8, **BELOW)
    axes.set_title(f"(c) under messages, S = {int(data.shown[0])}", loc="left")


def _caption(data: xr.Dataset) -> str:
    changed = data.mean_delay_under_messages
    backward = data.attrs["backward / forward under messages"]
    return (
        f"Delays of PipeDream ({AXES_DIFFER}). (a) Counted in the steady state (points) and their "
        "laws (lines): they grow as S². (b) Delays gather about half of the largest one, the more "
        f"so the deeper the pipe. (c) With a backward of {backward:g} forwards, messages move the "
        f"mean delay to {float(changed.min()):.3g} to {float(changed.max()):.3g} block updates, by "
        "link model; the dotted line is the mean in equal slots."
    )
