"""House style of all drawings: paper sizes, fonts, one colour per phase.

A drawing is saved at its printed size: what is 7 points here is 7 points on paper. Lines have the
colours of Okabe and Ito, which colour-blind readers tell apart; in grey their markers do that.
Phases touch each other and have no markers: their colours are a ladder of lightness.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

SCREEN_DPI = 100.0  # resolution in which axes are measured before saving
COLUMN, PAGE = 3.33, 7.0  # widths of a paper's column and of its page [inch]
LEAST_FONT = 7.0  # [point]

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#999999", "#000000"
SILVER, VIOLET = "#CCCCCC", "#5B2A86"

PHASE_COLOUR: Mapping[str, str] = {  # from light to dark, also for a colour-blind reader
    "A": "#FFFFFF",  # white is also where nothing runs: hatched
    "W": "#F9F08F",
    "F": "#A6D4F5",
    "R": "#D9A2CB",
    "B": "#D87C00",
    "I": "#00875F",
    "L": "#A83200",
    "O": "#003C78",
    "U": "#1C1C1C",
}
HATCHED = "A"
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
    if phase == HATCHED:
        return {"facecolor": PHASE_COLOUR[phase], "edgecolor": BLACK, "hatch": "////"}
    return {"facecolor": PHASE_COLOUR.get(phase, GREY), "edgecolor": "white"}


def ink(background: str) -> str:
    """Return the colour in which text is read best on a background: black or white."""
    red, green, blue = to_rgb(background)
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"


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
