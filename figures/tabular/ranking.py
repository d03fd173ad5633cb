"""Which schedule is best at each level: a map over systems and microbatches, ties as ties."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from figures.kit.cases import LOOK, main_setting, setting_words, system_title
from figures.kit.rules import describe
from pipejax.plots import palette, style

SLOTS = "F=1, B=2"
TIE = 0.01  # values closer than this, relative to the best, are a tie
# those with a published formula in the paper: letter and colour
LOOKS: Mapping[str, tuple[str, str]] = {
    "gpipe": ("G", palette.SILVER),
    "1f1b": ("1", palette.SKY),
    "chimera": ("C", palette.VERMILION),
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one map per pipeline depth, side by side."""
    data = main_setting(data).sel(schedule=list(LOOKS))
    figure, panels = plt.subplots(1, data.sizes["workers"], figsize=(style.PAGE, 3.3), sharey=True)
    for axes, workers in zip(panels, data.workers.values, strict=True):
        _map(axes, _levels(data.sel(workers=workers)), data.microbatches.values)
        axes.set_title(f"{workers} workers", loc="left")
    figure.legend(
        handles=[
            Patch(color=colour, label=f"{letter}: {LOOK[name]['label']}")
            for name, (letter, colour) in LOOKS.items()
        ],
        loc="outside lower center",
        ncols=3,
    )
    return {"ranking": describe(figure, _caption(data))}


def _levels(at: xr.Dataset) -> dict[str, xr.DataArray]:
    """What is compared at each level, by the name of its row."""
    return {
        "formula": at.formula_bubble_ratio,
        "table": at.table_bubble_ratio.sel(measured=SLOTS),
        **{system_title(str(name)): at.makespan.sel(system=name) for name in at.system.values},
    }


def _map(axes: Axes, rows: dict[str, xr.DataArray], counts: np.ndarray) -> None:
    """A row per level, a cell per number of microbatches: as many parts as schedules tie."""
    for row, values in enumerate(rows.values()):
        is_best = values <= (1 + TIE) * values.min("schedule")
        for column, count in enumerate(counts):
            tied = [name for name in LOOKS if is_best.sel(schedule=name, microbatches=count)]
            for k, name in enumerate(tied):
                _part(axes, column + k / len(tied), row, 1 / len(tied), *LOOKS[name])
    axes.set(xlim=(0, len(counts)), xlabel="microbatches")
    axes.set_xticks(np.arange(len(counts)) + 0.5, [str(int(count)) for count in counts])
    style.name_rows(axes, list(rows))
    for edge in (0.5, 1.5):  # between the levels
        axes.axhline(edge, color=palette.BLACK, linewidth=1.2)
    axes.tick_params(length=0)


def _part(axes: Axes, left: float, row: int, width: float, letter: str, colour: str) -> None:
    corner = (left, row - 0.5)
    axes.add_patch(Rectangle(corner, width, 1, facecolor=colour, edgecolor="white", linewidth=0.6))
    ink = palette.ink(colour)
    centre: Any = {"ha": "center", "va": "center", "fontsize": style.LEAST_FONT}
    axes.text(left + width / 2, row, letter, color=ink, **centre)


def _caption(data: xr.Dataset) -> str:
    return (
        "Best schedule at each of the three levels: smallest bubble ratio by published formula "
        f"and of the table (run with {SLOTS} slots), shortest step of the run on each system. "
        f"Schedules within {100 * TIE:g} % of the best tie and share a cell. "
        f"{setting_words(data)} By formula Chimera always wins; in tables and runs it wins alone "
        "only while microbatches are few, beyond that schedules tie, not everywhere the same ones."
    )
