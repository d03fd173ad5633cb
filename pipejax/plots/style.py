"""House style of all drawings: paper sizes and fonts; its colours are those of the palette.

A drawing is saved at its printed size: what is 7 points here is 7 points on paper. What the library
draws keeps its style by itself: no setting of matplotlib changes for anybody else, and pyplot, its
backend and its list of figures are not used.
"""

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
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
from pipejax.plots import palette

SCREEN_DPI = 100.0  # resolution in which axes are measured before saving
COLUMN, PAGE = 3.33, 7.0  # widths of a paper's column and of its page [inch]
LEAST_FONT = 7.0  # [point]
INCHES: Mapping[str, float] = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
WIDEST = 100.0  # [inch]
LINE = 0.15  # the widest line around a bar, relative to its length
DECADES = 100.0  # ratio of the ends of a logarithmic axis, from which only decades have numbers
LEGEND = 0.6  # height of a legend that a figure has room for [inch]
LETTER = 0.6  # width of a letter, relative to the size of its font
FONT, FONT_SIZE = "DejaVu Sans", 8.0


class Paper(NamedTuple):
    """Size and fonts of a drawing."""

    width: float = PAGE  # of the drawing [inch]
    font: str = FONT  # family
    # of titles and labels; ticks, legends and numbers have a point less
    font_size: float = FONT_SIZE

    @property
    def small(self) -> float:
        """Size of ticks, legends and numbers [point]."""
        return self.font_size - 1

    def wrapped(self, text: str) -> list[str]:
        """Break a text into lines that are no wider than the paper."""
        return textwrap.wrap(text, max(20, int(self.width * 72 / (LETTER * self.font_size))))

    def settings(self) -> dict[Any, Any]:
        """Settings of matplotlib."""
        sizes = dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), self.font_size)
        small = ("legend.fontsize", "legend.title_fontsize", "xtick.labelsize", "ytick.labelsize")
        return _SETTINGS | sizes | dict.fromkeys(small, self.small) | {"font.family": self.font}


_SETTINGS: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "figure.dpi": SCREEN_DPI,
    "svg.fonttype": "none",
    "svg.hashsalt": "pipejax",
    "pdf.fonttype": 42,  # embedded, as TrueType
    "ps.fonttype": 42,
    "hatch.linewidth": 0.4,
    "figure.constrained_layout.use": True,
}


def paper(
    size: str | float = "page", font: str | None = None, font_size: float = FONT_SIZE
) -> Paper:
    """Read the size of a drawing."""
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
    named = {"column": COLUMN, "page": PAGE}
    if size in named:
        return named[str(size)]
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(in|cm|mm|pt)?", str(size))
    width = float(match[1]) * INCHES[match[2] or "in"] if match else 0.0
    if not 1.0 <= width <= WIDEST:
        raise wrong(
            "size",
            f"must be column, page or a width from 1 to {WIDEST:g} inches, as 8.5cm or 5in, "
            f"got {size!r}",
        )
    return width


class Picture(Figure):
    """A figure that keeps its style wherever it is drawn, and shows itself in notebooks."""

    def __init__(self, paper: Paper, height: float) -> None:
        self._settings = paper.settings()
        with mpl.rc_context(self._settings):
            super().__init__(figsize=(paper.width, height), layout="constrained")

    def draw(self, renderer: Any) -> None:  # for files a proxy, which is no RendererBase
        """Draw it in its style."""
        with mpl.rc_context(self._settings):
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save it in its style: fonts are embedded in a pdf."""
        with mpl.rc_context(self._settings):
            super().savefig(fname, **options)

    def _repr_svg_(self) -> str:
        text = io.StringIO()
        self.savefig(
            text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
        return text.getvalue()[text.getvalue().index("<svg") :]


def rectangle(look: palette.Look, depth: float = 0.0) -> dict[str, Any]:
    """Return the style of a rectangle; the first stage of a worker has depth 1."""
    fill = look.deepened(depth).fill
    if fill == palette.WHITE:
        return {"facecolor": fill, "edgecolor": palette.BLACK, "hatch": "////"}
    return {"facecolor": fill, "edgecolor": palette.WHITE}


def line_widths(
    axes: Axes, lengths: Float[NumpyArray, " bars"], widest: float
) -> Float[NumpyArray, " bars"]:
    """Return line widths around bars [point]; short bars get thin lines."""
    low, high = axes.get_xlim()
    points = axes.bbox.width * 72 / axes.figure.dpi / (high - low)
    return np.minimum(widest, LINE * points * lengths)


def small() -> float:
    """Return the size of ticks, legends and numbers in the style that is in use [point]."""
    return float(mpl.rcParams["xtick.labelsize"])


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a chart, the first on top, without marks beside them."""
    points = axes.bbox.height * 72 / axes.figure.dpi / len(names)  # of a row
    step = max(1, -int(-1.1 * small() // points))
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def name_ticks(axis: Axis) -> None:
    """Write numbers as they are; of a logarithmic axis of few decades also 2 and 5 of each."""
    axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    if axis.get_scale() == "log":
        low, high = sorted(axis.get_view_interval())
        minors = FuncFormatter(_two_and_five) if high < DECADES * low else NullFormatter()
        axis.set_minor_formatter(minors)


def _two_and_five(value: float, position: int | None) -> str:
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
    """Put a legend above or below all, with as many columns as fit the figure."""
    handles, names = entries
    room = figure.get_figwidth() * 72 / (LETTER * small())
    long = ["\n".join(textwrap.wrap(name, int(room) - 6)) for name in (*names, title)]
    for count in range(columns, 0, -1):
        look: Any = {"title": long[-1] or None, "loc": f"outside {where}", "ncols": count}
        drawn_legend = figure.legend(handles, long[:-1], alignment="left", **look)
        box = drawn_legend.get_window_extent()
        if count == 1 or box.width <= figure.bbox.width:
            break
        drawn_legend.remove()
    more = box.height / figure.dpi - LEGEND
    if more > 0:
        figure.set_figheight(figure.get_figheight() + more)


def use() -> None:
    """Apply the house style to all that a program of its own draws; drawing needs no screen."""
    mpl.use("Agg")
    mpl.rcParams.update(Paper().settings())
