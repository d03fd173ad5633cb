"""Predicted against measured step times."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from pipejax.base.array_types import Float, NumpyArray
from pipejax.plots import palette

LOOKS = [  # of groups, told apart in grey too; more groups begin anew
    (marker, colour)
    for marker, colour in zip(
        cycle("os^DvP"),
        (
            palette.BLUE,
            palette.VERMILION,
            palette.GREEN,
            palette.ORANGE,
            palette.PURPLE,
            palette.SKY,
            palette.BLACK,
        ),
        strict=False,
    )
]


def draw_predictions(
    axes: Axes,
    measured: Float[NumpyArray, " rows"],
    predicted: Float[NumpyArray, " rows"],
    groups: Sequence[str],
) -> None:
    """Draw each row as a point, around the diagonal and what is 10 % off [s].

    Groups have labels for a legend.
    """
    both = np.concatenate([measured, predicted])
    ends = np.array([both.min() / 1.2, both.max() * 1.2])
    axes.plot(ends, ends, color=palette.BLACK, linewidth=0.6)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=palette.SILVER, linewidth=0, alpha=0.6)
    names = list(dict.fromkeys(groups))
    for name, (marker, colour) in zip(names, cycle(LOOKS), strict=False):
        which = np.asarray(groups) == name
        axes.plot(
            measured[which],
            predicted[which],
            linestyle="none",
            marker=marker,
            markersize=3,
            markerfacecolor="none",
            markeredgewidth=0.7,
            color=colour,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="measured [s]", ylabel="predicted [s]")
    axes.set(xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if ends[1] < 30 * ends[0] else (1.0,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
