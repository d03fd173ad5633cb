"""Best schedule at each level: a map over systems and microbatches, ties as ties."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from figures.kit.cases import LOOK, main_setting, setting_words
from figures.kit.rules import describe
from pipejax.plots import palette, style

SLOTS = "F=1, B=2"
TIE = 0.01  # values closer than this, relative to the best, are a tie
HANAYO = "hanayo, 2 waves"
BEYOND: Mapping[str, Any] = {
    "marker": "D",
    "markersize": 3,
    "linestyle": "",
    "color": palette.GREEN,
    "markeredgecolor": "white",
    "markeredgewidth": 0.4,
}
# those with a published formula in the paper: letter and colour
LOOKS: Mapping[str, tuple[str, str]] = {
    "gpipe": ("G", palette.SILVER),
    "1f1b": ("1", palette.SKY),
    "chimera": ("C", palette.VERMILION),
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one map per pipeline depth, side by side."""
    data = main_setting(data)
    maps = [_levels(data.sel(workers=workers)) for workers in data.workers.values]
    groups = _groups(maps)
    figure, panels = plt.subplots(1, len(maps), figsize=(style.PAGE, 3.0), sharey=True)
    for axes, levels, workers in zip(panels, maps, data.workers.values, strict=True):
        _map(axes, [levels[names[0]] for names in groups], data.microbatches.values)
        style.name_rows(axes, [_title(names) for names in groups])
        axes.set_title(f"{int(workers)} workers", loc="left")
    figure.legend(
        handles=[
            *(
                Patch(color=colour, label=f"{letter}: {LOOK[name]['label']}")
                for name, (letter, colour) in LOOKS.items()
            ),
            Line2D([], [], **BEYOND, label=f"{LOOK[HANAYO]['label']} are faster still"),
        ],
        loc="outside lower center",
        ncols=4,
    )
    return {"ranking": describe(figure, _caption(data))}


class Level(NamedTuple):
    """Best schedules of a level, by microbatches.

    Attributes:
      best: names of `LOOKS` that tie.
      is_beaten: whether Hanayo is better than all of them.
    """

    best: tuple[tuple[str, ...], ...]
    is_beaten: tuple[bool, ...]


def _levels(at: xr.Dataset) -> dict[str, Level]:
    """Read the levels, by the name of a level or system."""
    values = {
        "formula": at.formula_bubble_ratio,
        "table": at.table_bubble_ratio.sel(measured=SLOTS),
        **{str(name): at.makespan.sel(system=name) for name in at.system.values},
    }
    return {name: _level(times) for name, times in values.items()}


def _level(values: xr.DataArray) -> Level:
    three = values.sel(schedule=list(LOOKS))
    least = three.min("schedule")
    ties = (three <= (1 + TIE) * least).transpose("microbatches", "schedule").values
    best = tuple(tuple(np.array(list(LOOKS))[row].tolist()) for row in ties)
    beaten = values.sel(schedule=HANAYO) < (1 - TIE) * least
    return Level(best, tuple(beaten.values.tolist()))


def _groups(maps: list[dict[str, Level]]) -> list[list[str]]:
    """Put systems whose rows are equal at every depth into one row."""
    groups: dict[Any, list[str]] = {}
    for name in maps[0]:
        shared_by = "" if "_nw_" in name else name
        groups.setdefault((shared_by, *(levels[name] for levels in maps)), []).append(name)
    return list(groups.values())


def _title(names: list[str]) -> str:
    """Name a row: a level, or systems by network and compute."""
    short = [name.replace("_nw_", "/").replace("_cp", "") for name in names]
    return "\n".join(", ".join(short[k : k + 3]) for k in range(0, len(short), 3))


def _map(axes: Axes, rows: list[Level], counts: np.ndarray) -> None:
    """A row per level, a cell per number of microbatches: as many parts as schedules tie."""
    for row, level in enumerate(rows):
        for column, (tied, beaten) in enumerate(zip(level.best, level.is_beaten, strict=True)):
            for k, name in enumerate(tied):
                _part(axes, column + k / len(tied), row, 1 / len(tied), *LOOKS[name])
            if beaten:
                axes.plot(column + 0.87, row - 0.28, **BEYOND)
    axes.set(xlim=(0, len(counts)), xlabel="microbatches")
    axes.set_xticks(np.arange(len(counts)) + 0.5, [str(int(count)) for count in counts])
    for edge in (0.5, 1.5):  # between the levels
        axes.axhline(edge, color=palette.BLACK, linewidth=1.2)
    axes.tick_params(length=0)


def _part(axes: Axes, start: float, row: int, width: float, letter: str, colour: str) -> None:
    corner = (start, row - 0.5)
    axes.add_patch(Rectangle(corner, width, 1, facecolor=colour, edgecolor="white", linewidth=0.6))
    ink = palette.ink(colour)
    centre: Any = {"ha": "center", "va": "center", "fontsize": style.LEAST_FONT}
    axes.text(start + width / 2, row, letter, color=ink, **centre)


def _caption(data: xr.Dataset) -> str:
    return (
        "Best of the schedules with a published formula at each of the three levels: smallest "
        f"bubble ratio by formula and of the table (run with {SLOTS} slots), shortest step of the "
        f"run. Systems whose rows are equal are one row, named network/compute. Schedules within "
        f"{100 * TIE:g} % of the best tie and share a cell. {setting_words(data)}"
    )
