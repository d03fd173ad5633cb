"""Six schedules against the message time by link model, and 1F1B against GPipe by all of them."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.kit.cases import LOOK
from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import palette, style

AT = {"workers": 8, "rounds": 2}
BACKWARD = 2.0
LINKS: Mapping[str, Mapping[str, Any]] = {
    "delay": {"color": palette.BLUE, "marker": "o", "linestyle": "-"},
    "queued": {"color": palette.SKY, "marker": "s", "linestyle": "--", "markerfacecolor": "none"},
    "rendezvous, a queue per pair": {"color": palette.PURPLE, "marker": "P", "linestyle": ":"},
    "blocking": {"color": palette.BLACK, "marker": "v", "linestyle": "-"},
    "rendezvous, a queue per worker": {"color": palette.VERMILION, "marker": "^", "linestyle": "-"},
    "rendezvous, a queue per direction": {
        "color": palette.ORANGE,
        "marker": "D",
        "linestyle": "--",
    },
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw three link models, and the ratio of step times under all."""
    figure, panels = plt.subplots(2, 2, figsize=(style.PAGE, 5.2))
    *bubbles, last = panels.flat
    for axes, letter, link in zip(bubbles, "abc", data.drawn_link.values, strict=True):
        _bubbles(axes, data.sel(drawn_link=link))
        axes.set_title(f"({letter}) {link}", loc="left")
    _ratios(last, data.sel(AT).sel(backward=BACKWARD))
    handles, _ = bubbles[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside upper center", ncols=6, title="(a) to (c)")
    figure.legend(handles=last.lines[1:], loc="outside lower center", ncols=3, title="(d)")
    return {"finding_links": describe(figure, _caption(data))}


def _bubbles(axes: Axes, at: xr.Dataset) -> None:
    spacing = len(at.curve) // 8
    for name in at.case.values:
        look = {**LOOK[str(name)], "markevery": spacing}
        axes.plot(at.curve, 100 * at.bubble_ratio.sel(case=name), **look)
    axes.set(xlabel="message / forward, c / F", ylabel="bubble ratio [%]", ylim=(0, 100))


def _ratios(axes: Axes, at: xr.Dataset) -> None:
    axes.axhline(0, color=palette.GREY, linewidth=0.6)
    for name, look in LINKS.items():
        longer = 100 * (at.ratio.sel(link=name) - 1)
        axes.plot(at.message, longer, label=name, markevery=3, **look)
    axes.set(xscale="log", xlabel="message / forward, c / F")
    axes.set_ylabel("1F1B longer than GPipe [%]")
    axes.set_title("(d) 1F1B against GPipe", loc="left")


def _caption(data: xr.Dataset) -> str:
    at = data.sel(AT).sel(backward=BACKWARD).sel(message=1.0, method="nearest")
    shown = ", ".join(
        f"{100 * (float(at.ratio.sel(link=link)) - 1):+.1f} % by {link}"
        for link in data.drawn_link.values
    )
    largest = np.max(data.workers.values)
    return (
        "Whether GPipe and 1F1B take equally long is a property of the link: 8 workers, 16 "
        f"microbatches, B = 2F; {AXES_DIFFER} in (d). (a-c) Bubble ratio by message time. (d) 1F1B "
        f"against GPipe by all link models; at c = F {shown}. Which of them is never the slower "
        f"one is proven by exact forms, up to {largest} workers."
    )
