"""Staleness of PipeDream: delays by depth, their distribution, and what messages change."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.cases import POINTS, count_axis
from pipejax.plots import style

KINDS = (("max_delay", "largest", style.VERMILION, "o"), ("mean_delay", "mean", style.BLUE, "s"))
SHOWN = (style.ORANGE, style.BLACK)  # colours of the distributions
LINKS: Mapping[str, Mapping[str, Any]] = {
    "delay": {"color": style.BLACK, "marker": "o", "linestyle": "-"},
    "queued": {"color": style.SKY, "marker": "x", "linestyle": "--"},
    "blocking": {"color": style.GREEN, "marker": "^", "linestyle": "-"},
    "rendezvous": {"color": style.PURPLE, "marker": "s", "linestyle": "-"},
}
BINS = 20


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw counted delays on their law, two distributions, and mean delays under messages."""
    figure, panels = plt.subplots(1, 3, figsize=(style.PAGE, 3.0))
    _by_depth(panels[0], data)
    _distribution(panels[1], data)
    _under_messages(panels[2], data)
    return {"staleness": figure}


def _by_depth(axes: Axes, data: xr.Dataset) -> None:
    for name, label, colour, marker in KINDS:
        law = data[f"{name}_law"]
        axes.plot(data.stages, law, color=colour, linewidth=0.8, label=f"{label}: ${law.law}$")
        axes.plot(data.stages, data[name], color=colour, marker=marker, **POINTS)
    axes.set(yscale="log", xlabel="stages S", ylabel="delay [block updates]")
    count_axis(axes, [s for s in (2, 4, 8, 16, 32, 64, 150) if s in data.stages])
    axes.legend(loc="upper left")
    axes.set_title("(a) delays grow with $S^2$:\ncounted (points), law (lines)", loc="left")


def _distribution(axes: Axes, data: xr.Dataset) -> None:
    delay = np.arange(data.sizes["delay"])
    for stages, colour in zip(data.shown.values, SHOWN, strict=True):
        share = data.share.sel(shown=stages).values
        axes.hist(
            delay / (stages**2 - stages / 2),
            bins=BINS,
            range=(0, 1),
            weights=share,
            histtype="step",
            color=colour,
            linewidth=1.1,
            label=f"S = {stages}",
        )
    axes.set(xlabel="delay / largest, $S^2 - S/2$", ylabel="share of reads", xlim=(0, 1))
    axes.legend(loc="upper left")
    axes.set_title("(b) delays gather about\nhalf of the largest one", loc="left")


def _under_messages(axes: Axes, data: xr.Dataset) -> None:
    place = np.arange(data.sizes["message"])
    for name in data.link.values:
        axes.plot(place, data.mean_delay_under_messages.sel(link=name), label=name, **LINKS[name])
    first = int(data.shown[0])
    backward = data.attrs["backward / forward under messages"]
    law = float(data.mean_delay_law.sel(stages=first))
    axes.axhline(law, color=style.GREY, linewidth=0.8, linestyle=":")
    axes.annotate(
        "law of equal slots",
        (0, law),
        xytext=(0, -3),
        textcoords="offset points",
        fontsize=7,
        color=style.GREY,
        va="top",
        ha="left",
    )
    axes.set_xticks(place, [f"{value:g}" for value in data.message.values])
    axes.set(xlabel="message / forward", ylabel="mean delay [block updates]")
    axes.legend(loc="lower left")
    axes.set_title(
        f"(c) messages change the mean little:\nS = {first}, backward = {backward:g} forwards",
        loc="left",
    )
