"""Common style of all drawings: paper sizes, fonts and legends.

A drawing is saved at its printed size, so a font of 7 points is 7 points high on paper. A drawing
stores its style, and does not change the settings, the backend or the figures of matplotlib.
"""

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ticker import FuncFormatter, NullFormatter, StrMethodFormatter

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import number, wrong
from pipejax.base.data_files import load_json
from pipejax.plots import palette

SCREEN_DPI = 100.0  # resolution at which axes are measured before a drawing is saved
COLUMN, PAGE = 3.33, 7.0  # widths of a column and of a page in a scientific paper [inch]
LEAST_FONT = 7.0  # smallest size of a font [point]
INCHES: Mapping[str, float] = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
MAX_WIDTH = 100.0  # largest width of a drawing [inch]
EDGE_SHARE = 0.15  # largest width of the line around a bar, relative to the bar's length
DECADES_RATIO = 100.0  # above this ratio of its ends, a logarithmic axis labels only decades
LOG_RATIO = 20.0  # above this ratio of largest to least value, an axis is logarithmic
LEGEND_INCH = 0.6  # height that a figure reserves for a legend
LETTER = 0.6  # width of a letter, relative to the size of the font
FONT, FONT_SIZE = "DejaVu Sans", 8.0


class Paper(NamedTuple):
    """Printed size and fonts of a drawing."""

    width: float = PAGE  # [inch]
    font: str = FONT  # font family
    font_size: float = FONT_SIZE  # of titles and labels [point]; ticks are a point smaller

    @property
    def small(self) -> float:
        """Font size of ticks, legends and numbers [point]."""
        return self.font_size - 1

    def wrapped(self, text: str) -> list[str]:
        """Break a text into lines that fit the width of the paper."""
        return textwrap.wrap(text, max(20, int(self.width * 72 / (LETTER * self.font_size))))

    def settings(self) -> dict[Any, Any]:
        """Return the matplotlib settings for this paper."""
        sizes = dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), self.font_size)
        small = ("legend.fontsize", "legend.title_fontsize", "xtick.labelsize", "ytick.labelsize")
        return _SETTINGS | sizes | dict.fromkeys(small, self.small) | {"font.family": self.font}


# fonttype 42: PDF and PS embed fonts as TrueType
_SETTINGS: dict[Any, Any] = {
    **load_json(Path(__file__).with_name("matplotlib_settings.json")),
    "figure.dpi": SCREEN_DPI,
}


def paper(
    size: str | float = "page", font: str | None = None, font_size: float = FONT_SIZE
) -> Paper:
    """Return a paper with this size, font family and font size, after a check of all three."""
    if not 4.0 <= number(font_size, "font_size") <= 40.0:
        raise wrong("font_size", f"must be from 4 to 40 points, got {font_size!r}")
    family = FONT if font is None else font
    try:
        findfont(FontProperties(family=family), fallback_to_default=False)
    except ValueError:
        raise wrong(
            "font",
            "must be a family that is installed, or serif, sans-serif or monospace, got "
            f"{family!r}",
        ) from None
    return Paper(_inches(size), family, float(font_size))


def _inches(size: str | float) -> float:
    """Convert a width to inches: "column", "page", a number [inch], or a text as "8.5cm"."""
    named = {"column": COLUMN, "page": PAGE}
    if size in named:
        return named[str(size)]
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(in|cm|mm|pt)?", str(size))
    width = float(match[1]) * INCHES[match[2] or "in"] if match else 0.0
    if not 1.0 <= width <= MAX_WIDTH:
        raise wrong(
            "size",
            f"must be column, page or a width from 1 to {MAX_WIDTH:g} inches, as 8.5cm or 5in, "
            f"got {size!r}",
        )
    return width


class Picture(Figure):
    """Figure that is always drawn in the style of its paper."""

    def __init__(self, paper: Paper, height: float) -> None:
        self._settings = paper.settings()
        with mpl.rc_context(self._settings):
            super().__init__(figsize=(paper.width, height), layout="constrained")

    def draw(self, renderer: Any) -> None:
        """Draw the figure in its style."""
        with mpl.rc_context(self._settings):
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save the figure in its style; a pdf embeds fonts."""
        with mpl.rc_context(self._settings):
            super().savefig(fname, **options)

    def _repr_svg_(self) -> str:
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        self.savefig(file, format="svg", metadata=metadata)
        return file.getvalue()[file.getvalue().index("<svg") :]


def rectangle(look: palette.Look, depth: float = 0.0) -> dict[str, Any]:
    """Return matplotlib options for a rectangle; `depth` from 0 to 1 makes its colour darker."""
    fill = look.deepened(depth).fill
    if fill == palette.WHITE:
        return {"facecolor": fill, "edgecolor": palette.BLACK, "hatch": "////"}
    return {"facecolor": fill, "edgecolor": palette.WHITE}


def line_widths(
    axes: Axes, lengths: Float[NumpyArray, " bars"], widest: float
) -> Float[NumpyArray, " bars"]:
    """Return the width of the line around each bar [point]; short bars get thin lines."""
    low, high = axes.get_xlim()
    points = axes.bbox.width * 72 / axes.figure.dpi / (high - low)
    return np.minimum(widest, EDGE_SHARE * points * lengths)


def small() -> float:
    """Return the font size of ticks and legends in matplotlib's present settings [point]."""
    return float(mpl.rcParams["xtick.labelsize"])


def write_beside(
    axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float]
) -> None:
    """Write a text beside a point, on the side to which the offset [point] leads."""
    x, y = offset
    axes.annotate(
        text,
        point,
        xytext=offset,
        textcoords="offset points",
        ha="left" if x > 0 else "right",
        va="bottom" if y > 0 else "top" if y < 0 else "center",
        fontsize=LEAST_FONT,
        zorder=4,
    )


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows of a chart, the first on top; if labels do not fit, write only some."""
    row_points = axes.bbox.height * 72 / axes.figure.dpi / len(names)
    step = max(1, -int(-1.1 * small() // row_points))
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def name_ticks(axis: Axis) -> None:
    """Label ticks with plain numbers; a short logarithmic axis also labels 2 and 5 of a decade."""
    axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    if axis.get_scale() == "log":
        low, high = sorted(axis.get_view_interval())
        minors = FuncFormatter(_two_and_five) if high < DECADES_RATIO * low else NullFormatter()
        axis.set_minor_formatter(minors)


def _two_and_five(value: float, position: int | None) -> str:
    """Write the label of a tick whose first digit is 2 or 5, and "" for other ticks."""
    digit = round(value / 10 ** math.floor(math.log10(value)))
    return f"{value:.3g}" if digit in (2, 5) else ""


def legend(
    figure: Figure,
    where: str,
    entries: tuple[Sequence[Any], Sequence[str]],
    *,
    title: str = "",
    columns: int = 2,
) -> None:
    """Add a legend outside the axes with as many columns as fit; if needed, grow the figure."""
    handles, names = entries
    letters_per_line = int(figure.get_figwidth() * 72 / (LETTER * small())) - 6
    *labels, heading = (
        "\n".join(textwrap.wrap(text, letters_per_line)) for text in (*names, title)
    )
    for count in range(columns, 0, -1):
        look: Any = {"title": heading or None, "loc": f"outside {where}", "ncols": count}
        drawn_legend = figure.legend(handles, labels, alignment="left", **look)
        box = drawn_legend.get_window_extent()
        if count == 1 or box.width <= figure.bbox.width:
            break
        drawn_legend.remove()
    missing_height = box.height / figure.dpi - LEGEND_INCH
    if missing_height > 0:
        figure.set_figheight(figure.get_figheight() + missing_height)


def use() -> None:
    """Apply the common style to all drawings of a program without a screen."""
    mpl.use("Agg")
    mpl.rcParams.update(Paper().settings())
