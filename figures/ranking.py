"""Which schedule is fastest at each level: a map over microbatches."""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures.cases import LOOK, main_setting, system_title
from pipejax.plots import style

NAMES = ("gpipe", "1f1b", "chimera")  # those with a published formula in the paper
COLOURS = ("#BBBBBB", style.SKY, style.VERMILION)
SLOTS = "F=1, B=2"
TIE = 1e-3  # relative difference that counts as a tie


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one map per pipeline depth."""
    data = main_setting(data)
    return {f"ranking_s{w}": _map(data.sel(workers=w), int(w)) for w in data.workers.values}


def _map(data: xr.Dataset, workers: int) -> Figure:
    chosen = data.sel(schedule=list(NAMES))
    in_table = chosen.table_bubble_ratio.sel(measured=SLOTS)
    rows = {"formula": chosen.formula_bubble_ratio, f"table, {SLOTS} slots": in_table}
    rows |= {system_title(str(s)): chosen.makespan.sel(system=s) for s in data.system.values}
    values = np.stack([row.transpose("schedule", "microbatches").values for row in rows.values()])
    winner = values.argmin(axis=1)
    tied = values <= values.min(axis=1, keepdims=True) * (1 + TIE)
    figure, axes = plt.subplots(figsize=(style.PAGE, 3.6))
    axes.imshow(winner, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(NAMES) - 1, aspect="auto")
    for row in range(len(rows)):
        for column in range(data.sizes["microbatches"]):
            best = [LOOK[n]["label"] for k, n in enumerate(NAMES) if tied[row, k, column]]
            text = " = ".join(best) if len(best) < len(NAMES) else "all equal"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5)
    axes.axhline(0.5, color="white", linewidth=3)
    axes.axhline(1.5, color="white", linewidth=3)
    axes.set_xticks(
        range(data.sizes["microbatches"]), [str(int(m)) for m in data.microbatches.values]
    )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("microbatches")
    axes.set_title(
        f"{workers} workers: smallest bubble (formula, table) and shortest step (runs)", loc="left"
    )
    axes.tick_params(length=0)
    handles = [Patch(color=c, label=LOOK[n]["label"]) for c, n in zip(COLOURS, NAMES, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure
