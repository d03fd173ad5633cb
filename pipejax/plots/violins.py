"""Draw samples of several schedules as violins, with quantiles and the value without jitter."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pipejax.base.array_types import Float, NumpyArray
from pipejax.plots import palette

LEVELS = (0.05, 0.5, 0.95)
MARK: Mapping[str, Any] = {"linestyle": "", "color": palette.BLACK}
QUANTILE: Mapping[str, Any] = {**MARK, "marker": "|", "markersize": 7, "markeredgewidth": 0.8}
DIAMOND = {"marker": "D", "markersize": 3.5, "markerfacecolor": palette.WHITE}
WITHOUT_JITTER: Mapping[str, Any] = {**MARK, **DIAMOND}
MAX_QUANTILE = 0.95  # quantile up to which violins are drawn; rare stalls would flatten them


def draw_violins(
    axes: Axes,
    samples: Mapping[str, Float[NumpyArray, " samples"]],
    without: Mapping[str, float],
    colours: Mapping[str, str],
) -> None:
    """Draw a violin for each name, the first on top, with quantiles as lines.

    Args:
      axes: to draw on.
      samples: (samples) of each name.
      without: value of each name without jitter, drawn as a mark.
      colours: colour of each name.
    """
    for place, (name, values) in enumerate(samples.items()):
        if np.ptp(values) > 0:  # a violin of equal values has no width
            parts: dict[str, Any] = axes.violinplot(
                values[values <= np.quantile(values, MAX_QUANTILE)],
                positions=[place],
                orientation="horizontal",
                widths=0.85,
                showextrema=False,
                points=300,
            )
            colour = colours[name]
            parts["bodies"][0].set(facecolor=colour, edgecolor=colour, alpha=0.55)
        quantiles = np.quantile(values, LEVELS)
        axes.vlines(quantiles, place - 0.2, place + 0.2, color=palette.BLACK, linewidth=0.8)
        axes.plot(without[name], place, **WITHOUT_JITTER)
    axes.set_yticks(range(len(samples)), [*samples])
    axes.set_ylim(len(samples) - 0.5, -0.5)


def violin_entries() -> list[Line2D]:
    """Return the legend entries of the marks."""
    return [
        Line2D([], [], label="5th, 50th and 95th percentile, where a violin ends", **QUANTILE),
        Line2D([], [], label="without jitter", **WITHOUT_JITTER),
    ]
