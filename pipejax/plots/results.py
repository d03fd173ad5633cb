"""Points of a sweep in two of their measures, with the front that none beats in both."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.plots import palette
from pipejax.plots.plan import COLOURS, MARKERS

WIDE = 20.0  # ratio of the largest to the least value from which an axis is logarithmic
MANY = 5000  # points, from which they are small
SCALES = {  # what a measure is shown in
    "step_time": (1.0, "step time [s]"),
    "memory_bytes": (1e9, "most memory of an accelerator [GB]"),
    "bubble_ratio": (1.0, "bubble ratio"),
    "tokens_per_second": (1.0, "tokens per second"),
}


class Shown(NamedTuple):
    """What is drawn along one side.

    Attributes:
      name: of the measure or axis.
      values: (points) in SI units.
      unit: of the values.
    """

    name: str
    values: NumpyArray
    unit: str

    @property
    def scaled(self) -> NumpyArray:
        """(points) as it is drawn."""
        return np.asarray(self.values, float) / SCALES.get(self.name, (1.0, ""))[0]

    @property
    def label(self) -> str:
        """What is written along the side."""
        unit = f" [{self.unit}]" if self.unit not in ("", "1") else ""
        return SCALES.get(self.name, (1.0, f"{self.name}{unit}"))[1]


def draw_results(
    axes: Axes,
    sides: Sequence[Shown],
    groups: Mapping[str, Bool[NumpyArray, " points"]],
    front: Int[NumpyArray, " found"],
    best: Int[NumpyArray, " found"],
) -> None:
    """Draw points by group, the front as steps, and the best points ringed.

    Args:
      axes: to draw on.
      sides: what lies across and what lies up.
      groups: points by name of their group; of more groups than there are colours, all are grey.
      front: points that no other beats, in the order of the first side.
      best: points that are ringed.
    """
    x, y = (side.scaled for side in sides)
    size = 3 if len(x) <= MANY else 1
    plain: dict[str, Any] = {"linestyle": "", "markersize": size, "rasterized": True, "zorder": 2}
    if len(groups) > len(COLOURS):
        groups = {"points": np.logical_or.reduce([*groups.values()])}
    looks = [(palette.GREY, "o")] if len(groups) == 1 else zip(COLOURS, MARKERS, strict=True)
    for (name, own), (colour, marker) in zip(groups.items(), looks, strict=False):
        axes.plot(x[own], y[own], marker=marker, color=colour, label=name, **plain)
    if len(front):
        axes.step(
            x[front], y[front], where="post", color=palette.BLACK, linewidth=0.9, label="front"
        )
    if len(best):
        ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.BLACK}
        axes.plot(x[best], y[best], "o", markersize=7, label="best", zorder=3, **ring)
    for side, values, axis in zip("xy", (x, y), (axes.xaxis, axes.yaxis), strict=True):
        shown = values[np.logical_or.reduce([*groups.values()])]
        if len(shown) and shown.min() > 0 and shown.max() > WIDE * shown.min():
            getattr(axes, f"set_{side}scale")("log")
        axis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
        if axis.get_scale() == "log":
            axis.set_minor_formatter(StrMethodFormatter("{x:.3g}"))
    axes.set_xlabel(sides[0].label)
    axes.set_ylabel(sides[1].label)
    figure: Any = axes.figure
    figure.legend(loc="outside upper left", ncols=2)  # beside the points, wherever they lie
