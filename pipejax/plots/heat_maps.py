"""Maps of the best schedule over two quantities, and heat maps of times in a measured run."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.data_files import time_unit
from pipejax.plots import palette, style

REGION_COLOURS = (*palette.SERIES[:-1], palette.YELLOW, palette.VERMILION, palette.SILVER)
HATCHES = ("", "////", "....", "xxxx", "----")
STEP_TOLERANCE = 1e-6  # relative difference up to which steps between values count as equal
CONTOURS = 6  # approximate number of contours
MAX_TICKS = 12  # if an axis has more values, not all get a tick


class Side(NamedTuple):
    """Quantity on the x axis or y axis of a map."""

    label: str  # label of the axis
    values: Sequence[str] | NumpyArray  # numbers in ascending order, or names

    @property
    def is_named(self) -> bool:
        """Return whether the values of the axis are names instead of numbers."""
        return len(self.values) > 0 and isinstance(self.values[0], str)

    @property
    def is_log(self) -> bool:
        """Return whether the axis is logarithmic: positive values, far apart, in unequal steps."""
        values = self.positions
        if self.is_named or values.min() <= 0 or values.max() <= style.LOG_RATIO * values.min():
            return False
        return bool(np.ptp(np.diff(values)) > STEP_TOLERANCE * np.ptp(values))

    @property
    def positions(self) -> NumpyArray:
        """Positions of the values along the axis."""
        return np.arange(len(self.values)) if self.is_named else np.asarray(self.values, float)

    @property
    def edges(self) -> NumpyArray:
        """Edges of the cells (values + 1), in the middle between neighbouring values."""
        x = np.log(self.positions) if self.is_log else self.positions
        inner = (x[1:] + x[:-1]) / 2
        edges = np.concatenate([[2 * x[0] - inner[0]], inner, [2 * x[-1] - inner[-1]]])
        return np.exp(edges) if self.is_log else edges


class Height(NamedTuple):
    """Quantity whose contours are drawn on a map."""

    label: str  # name of the quantity, with its unit
    values: Float[NumpyArray, "y x"]  # (y, x) numbers; NaN where there is none


def draw_regions(
    axes: Axes,
    x_side: Side,
    y_side: Side,
    codes: Int[NumpyArray, "y x"],
    names: Sequence[str],
    height: Height | None = None,
) -> None:
    """Draw a map of codes, with contours of `height`; a code is an index of `names`, or -1."""
    colours = [colour for _, colour in zip(names, itertools.cycle(REGION_COLOURS), strict=False)]
    hatches = [HATCHES[k % len(HATCHES)] for k in range(len(names))]
    edges = x_side.edges, y_side.edges
    axes.pcolormesh(
        *edges,
        np.where(codes < 0, np.nan, codes),
        cmap=ListedColormap(colours or [palette.WHITE]),
        vmin=-0.5,
        vmax=max(len(names), 1) - 0.5,
        edgecolors="face",  # otherwise viewers show gaps between the cells
        linewidth=0.3,
        rasterized=True,
    )
    for code, (colour, hatch) in enumerate(zip(colours, hatches, strict=True)):
        if hatch:  # hatching over the cells distinguishes colours in grey print
            cells = np.ma.masked_where(codes != code, codes)
            look: Any = {"facecolor": "none", "linewidth": 0.0, "hatch": hatch}
            axes.pcolor(*edges, cells, edgecolor=palette.ink(colour), **look)
    if height is not None:
        _draw_height(axes, x_side, y_side, height)
    for side, name in ((x_side, "x"), (y_side, "y")):
        _name_axis(axes, side, name)
    handles = [
        Patch(facecolor=colour, edgecolor=palette.ink(colour), hatch=hatch)
        for colour, hatch in zip(colours, hatches, strict=True)
    ]
    figure: Any = axes.figure
    style.legend(figure, "upper left", (handles, names))


def _draw_height(axes: Axes, x_side: Side, y_side: Side, height: Height) -> None:
    """Draw labelled contours of a quantity, unless all values are equal."""
    if min(height.values.shape) < 2 or not np.nanmax(height.values) > np.nanmin(height.values):
        return
    outline: Any = [withStroke(linewidth=2, foreground=palette.WHITE)]  # readable over hatching
    lines = axes.contour(
        x_side.positions,
        y_side.positions,
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
    """Set label, scale and ticks of the axis "x" or "y"; few whole values all get a tick."""
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


_DARK = palette.SECONDS[-1]
COLOURS = LinearSegmentedColormap.from_list("more", (palette.WHITE, palette.SKY, _DARK))
BOTH = LinearSegmentedColormap.from_list(  # for positive and negative seconds; 0 is white
    "both", ("#8A2B00", palette.ORANGE, palette.WHITE, palette.SKY, _DARK)
)
MIN_NEGATIVE = 0.25  # negative values are white if smaller than this share of the largest value
_ROW_INCH, _TITLE_INCH = 0.2, 0.62
_MAX_ROWS_INCH = 8.5  # largest height of all rows together
_MAX_CELLS = 4000  # a file with more cells stores them as pixels
_MAX_SCALE_RATIO = 4.0  # maps share a colour scale if the ratio of their largest values is less


class HeatMap(NamedTuple):
    """Heat map of times [s] by row and column."""

    title: str  # meaning of the times
    x_label: str  # label of the x axis, such as "step"
    columns: Sequence[str]  # names of the columns
    rows: Sequence[str]  # names of the rows
    seconds: Float[NumpyArray, "rows columns"]  # (rows, columns) times [s]; NaN: no time


def heat_picture(maps: Sequence[HeatMap]) -> style.Picture:
    """Draw heat maps one below the other."""
    paper = style.Paper()
    heights = [_TITLE_INCH + _ROW_INCH * len(heat_map.rows) for heat_map in maps]
    groups = _scale_groups(maps)
    with mpl.rc_context(paper.settings()):
        picture = style.Picture(paper, min(_MAX_ROWS_INCH, sum(heights)) + 0.3)
        all_axes = picture.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
        # draw colour bars first, because they make the axes narrower
        scales = []
        for group in groups:
            scale, (unit, name) = _scale(np.concatenate([maps[k].seconds.ravel() for k in group]))
            _add_bar(picture, all_axes[group].tolist(), scale, f"of the step [{name}]", unit)
            scales.append((scale, unit))
        picture.draw_without_rendering()
        for group, (scale, unit) in zip(groups, scales, strict=True):
            for k in group:
                _draw_map(all_axes[k], maps[k], scale, unit)
    return picture


def _scale_groups(maps: Sequence[HeatMap]) -> list[list[int]]:
    """Return groups of map indices with the same colour scale: one group, or one for each map."""
    largest = [float(np.nanmax(np.abs(heat_map.seconds), initial=0.0)) for heat_map in maps]
    if max(largest) <= _MAX_SCALE_RATIO * min(largest):
        return [[*range(len(maps))]]
    return [[k] for k in range(len(maps))]


def _scale(seconds: Float[NumpyArray, " values"]) -> tuple[ScalarMappable, tuple[float, str]]:
    """Return (colour scale in which 0 is white, (seconds of its unit, name of the unit))."""
    low, high = float(np.nanmin(seconds, initial=0.0)), float(np.nanmax(seconds, initial=0.0))
    largest = max(high, -low) or 1e-9
    is_signed = -low > MIN_NEGATIVE * largest
    norm = Normalize(-largest if is_signed else 0.0, largest)
    return ScalarMappable(norm, BOTH if is_signed else COLOURS), time_unit(largest)


def _add_bar(
    picture: Figure, axes: list[Axes], scale: ScalarMappable, label: str, unit: float
) -> None:
    """Draw a colour bar beside axes; `unit` is the unit of its numbers [s]."""
    bar = picture.colorbar(
        scale, ax=axes, aspect=30, pad=0.01, format=lambda value, _: f"{value / unit:.4g}"
    )
    bar.set_label(label)
    bar.outline.set_visible(False)


def _draw_map(axes: Axes, cells: HeatMap, scale: ScalarMappable, unit: float) -> None:
    """Draw the cells of a heat map; if all numbers fit, write them in the unit [s]."""
    rows, columns = cells.seconds.shape
    axes.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        cells.seconds,
        norm=Normalize(*scale.get_clim()),
        cmap=scale.cmap,
        edgecolors="face",  # otherwise viewers show gaps between the cells
        linewidth=0.2,
        rasterized=cells.seconds.size > _MAX_CELLS,
    )
    style.name_rows(axes, cells.rows)
    points_per_pixel = 72 / axes.figure.dpi
    width = axes.bbox.width * points_per_pixel / columns  # width of a cell [point]
    height = axes.bbox.height * points_per_pixel / rows
    step = max(1, -int(-_text_widths([max(cells.columns, key=len)])[0] // width))
    axes.set_xticks(range(0, columns, step), cells.columns[::step])
    axes.set(xlabel=cells.x_label, xlim=(-0.5, columns - 0.5))
    axes.tick_params(axis="x", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_title(cells.title, loc="left")
    texts = _cell_texts(cells.seconds / unit)
    widest = _text_widths([max(texts.values(), key=len, default="")])[0]
    if width > widest and height >= style.small():
        for (row, column), text in texts.items():
            _write(axes, column, row, text, scale, cells.seconds[row, column])


def _cell_texts(cells: Float[NumpyArray, "rows columns"]) -> dict[tuple[int, ...], str]:
    """Return {(row, column): text} of all finite numbers; the largest has three digits."""
    largest = float(np.nanmax(np.abs(cells), initial=0.0))
    places = max(0, 2 - int(np.floor(np.log10(largest or 1.0))))
    rounded = np.round(cells, places) + 0.0  # -0.0 becomes 0
    is_finite = np.isfinite(rounded)
    numbers = np.ndenumerate(rounded)
    return {cell: f"{value:.{places}f}" for cell, value in numbers if is_finite[cell]}


def _write(axes: Axes, x: float, y: float, text: str, scale: ScalarMappable, value: float) -> None:
    """Write a text in black or white, so that it is readable on the colour of a value."""
    ink = palette.ink(to_hex(scale.to_rgba(np.array([value]))[0].tolist()))
    size = style.small()
    axes.text(x, y, text, ha="center", va="center_baseline", color=ink, fontsize=size)


def _text_widths(labels: Sequence[str]) -> Float[NumpyArray, " ops"]:
    """Estimate the widths of texts, including a margin [point]."""
    return np.array([style.LETTER * style.small() * (len(label) + 1) for label in labels])
