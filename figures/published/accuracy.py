"""Predicted against measured step times, a panel for each table."""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import draw_predictions, style

COLUMNS = 4


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw every row of every table."""
    tables = list(dict.fromkeys(data.table.values.tolist()))
    lines = -(-len(tables) // COLUMNS)
    figure, panels = plt.subplots(lines, COLUMNS, figsize=(style.PAGE, 1.9 * lines))
    for axes, name in zip(panels.flat, tables, strict=False):
        rows = data.isel(row=data.table.values == name)
        rows = rows.isel(row=np.isfinite(rows.measured.values))
        draw_predictions(
            axes, rows.measured.values, rows.predicted.values, ["a run"] * rows.sizes["row"]
        )
        mean = 100 * float(np.abs(rows.predicted / rows.measured - 1).mean())
        axes.set_title(f"{name.replace('_', ' ')}\n{mean:.1f} %", loc="left")
    panels.flat[0].legend()
    for axes in panels.flat[len(tables) :]:
        axes.set_visible(False)
    return {"accuracy": describe(figure, _caption(data, len(tables)))}


def _caption(data: xr.Dataset, tables: int) -> str:
    return (
        f"Step times of {data.sizes['row']} measured runs in {tables} tables, predicted by the "
        f"machines' files as they come ({AXES_DIFFER}). Below the name of each table its mean "
        "error. On the line a prediction is right, in the grey band within 10 %."
    )
