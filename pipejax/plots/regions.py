"""Draw maps of the best choice over two axes: coloured areas, also distinct in grey by strokes."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.plots import palette, style

COLOURS = (*palette.SERIES[:-1], palette.YELLOW, palette.VERMILION, palette.SILVER)
HATCHES = ("", "////", "....", "xxxx", "----")
LOG_RATIO = 20.0  # ratio of the largest to the least value from which an axis is logarithmic
STEP_TOLERANCE = 1e-6  # relative difference of steps that count as equal
CONTOURS = 6  # number of lines of equal values, about
MAX_TICKS = 12  # largest number of values that all get a tick


class Side(NamedTuple):
    """Axis of a map, across or up."""

    label: str  # written along the side
    values: Sequence[str] | NumpyArray  # numbers in ascending order, or names

    @property
    def is_named(self) -> bool:
        """Return whether the values are names."""
        return len(self.values) > 0 and isinstance(self.values[0], str)

    @property
    def is_log(self) -> bool:
        """Return whether the values are positive, spread widely and in unequal steps."""
        values = self.positions
        if self.is_named or values.min() <= 0 or values.max() <= LOG_RATIO * values.min():
            return False
        return bool(np.ptp(np.diff(values)) > STEP_TOLERANCE * np.ptp(values))

    @property
    def positions(self) -> NumpyArray:
        """Positions of the values along the axis."""
        return np.arange(len(self.values)) if self.is_named else np.asarray(self.values, float)

    @property
    def edges(self) -> NumpyArray:
        """Edges of the cells (values + 1), half way between the values."""
        x = np.log(self.positions) if self.is_log else self.positions
        inner = (x[1:] + x[:-1]) / 2
        edges = np.concatenate([[2 * x[0] - inner[0]], inner, [2 * x[-1] - inner[-1]]])
        return np.exp(edges) if self.is_log else edges


class Height(NamedTuple):
    """Values whose contours are drawn."""

    label: str  # of the values, with their unit
    values: Float[NumpyArray, "up across"]  # (up, across) numbers, NaN where there is none


def draw_regions(
    axes: Axes,
    across: Side,
    up: Side,
    codes: Int[NumpyArray, "up across"],
    names: Sequence[str],
    height: Height | None = None,
) -> None:
    """Draw a map of codes, which are positions in `names` or -1, with contours of `height`."""
    colours = [colour for _, colour in zip(names, itertools.cycle(COLOURS), strict=False)]
    hatches = [HATCHES[k % len(HATCHES)] for k in range(len(names))]
    edges = across.edges, up.edges
    axes.pcolormesh(
        *edges,
        np.where(codes < 0, np.nan, codes),
        cmap=ListedColormap(colours or [palette.WHITE]),
        vmin=-0.5,
        vmax=max(len(names), 1) - 0.5,
        edgecolors="face",  # without it viewers show gaps between the cells
        linewidth=0.3,
        rasterized=True,
    )
    for code, (colour, hatch) in enumerate(zip(colours, hatches, strict=True)):
        if hatch:  # strokes over the cells, for prints in grey
            cells = np.ma.masked_where(codes != code, codes)
            look: Any = {"facecolor": "none", "linewidth": 0.0, "hatch": hatch}
            axes.pcolor(*edges, cells, edgecolor=palette.ink(colour), **look)
    if height is not None:
        _draw_height(axes, across, up, height)
    for side, name in ((across, "x"), (up, "y")):
        _name_axis(axes, side, name)
    handles = [
        Patch(facecolor=colour, edgecolor=palette.ink(colour), hatch=hatch)
        for colour, hatch in zip(colours, hatches, strict=True)
    ]
    figure: Any = axes.figure
    style.legend(figure, "upper left", (handles, names))


def _draw_height(axes: Axes, across: Side, up: Side, height: Height) -> None:
    """Draw contours with their numbers, unless all values are equal."""
    if min(height.values.shape) < 2 or not np.nanmax(height.values) > np.nanmin(height.values):
        return
    outline: Any = [withStroke(linewidth=2, foreground=palette.WHITE)]  # readable over strokes
    lines = axes.contour(
        across.positions,
        up.positions,
        np.ma.masked_invalid(height.values),
        levels=CONTOURS,
        colors=palette.BLACK,
        linewidths=0.7,
    )
    lines.set_path_effects(outline)
    for text in lines.clabel(fontsize=style.LEAST_FONT, fmt="%.4g"):
        text.set_path_effects(outline)
    axes.set_title(f"lines: {height.label}", loc="left")


def _name_axis(axes: Axes, side: Side, name: str) -> None:
    """Set label, scale and ticks of the axis "x" or "y"; few values get a tick each."""
    getattr(axes, f"set_{name}label")(side.label)
    axis, values = getattr(axes, f"{name}axis"), side.positions
    if side.is_named:
        axis.set_ticks(values, side.values)
        return
    if side.is_log:
        getattr(axes, f"set_{name}scale")("log")
    style.name_ticks(axis)
    if len(values) <= MAX_TICKS and np.all(values == np.round(values)):
        axis.set_ticks(values, [f"{value:g}" for value in values])
