"""House style of all drawings: paper sizes and fonts; its colours are those of the palette.

A drawing is saved at its printed size: what is 7 points here is 7 points on paper.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from pipejax.plots import palette

SCREEN_DPI = 100.0  # resolution in which axes are measured before saving
COLUMN, PAGE = 3.33, 7.0  # widths of a paper's column and of its page [inch]
LEAST_FONT = 7.0  # [point]

_SETTINGS: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.title_fontsize": 7,
    "savefig.dpi": 200,
    "figure.dpi": SCREEN_DPI,
    "svg.fonttype": "none",
    "svg.hashsalt": "pipejax",
    "pdf.fonttype": 42,  # embedded, as TrueType
    "ps.fonttype": 42,
    "hatch.linewidth": 0.4,
    "figure.constrained_layout.use": True,
}


def look(phase: str) -> dict[str, Any]:
    """Return how a rectangle of a phase is drawn."""
    fill = palette.look(phase).fill
    if fill == palette.WHITE:
        return {"facecolor": fill, "edgecolor": palette.BLACK, "hatch": "////"}
    return {"facecolor": fill, "edgecolor": palette.WHITE}


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a chart, the first on top, without marks beside them."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def use() -> None:
    """Apply the house style; drawing needs no screen."""
    mpl.use("Agg")
    mpl.rcParams.update(_SETTINGS)
