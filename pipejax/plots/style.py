"""House style of all drawings: paper sizes, fonts, one colour per phase.

Colours are Okabe and Ito's palette, which stays distinct for colour-blind readers and in grey.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

SCREEN_DPI = 100.0  # resolution in which axes are measured before saving
PAGE = 7.2  # width of a paper's page [inch]

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#999999", "#000000"
SILVER = "#CCCCCC"

PHASE_COLOUR: Mapping[str, str] = {
    "F": SKY,
    "B": ORANGE,
    "I": GREEN,
    "W": YELLOW,
    "R": PURPLE,
    "U": GREY,
    "A": SILVER,
    "O": BLUE,
    "L": VERMILION,
}
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
    "savefig.bbox": "tight",
    "savefig.dpi": 200,
    "figure.dpi": SCREEN_DPI,
    "svg.fonttype": "none",
    "svg.hashsalt": "pipejax",
    "pdf.fonttype": 42,
    "figure.constrained_layout.use": True,
}


def colour(phase: str) -> str:
    """Return the colour of a phase."""
    return PHASE_COLOUR.get(phase, GREY)


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
