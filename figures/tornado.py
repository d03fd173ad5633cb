"""Tornado charts: how far the step time moves when one parameter is halved or doubled."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from pipejax.plots import style
from pipejax.plots.tornado import NAMES, draw_tornado, legend_entries

COLUMNS = 2


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one chart per setting."""
    rows = -(-data.sizes["setting"] // COLUMNS)
    figure, panels = plt.subplots(
        rows, COLUMNS, figsize=(style.PAGE, 0.4 + 2.9 * rows), squeeze=False
    )
    for axes in panels.flat[data.sizes["setting"] :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, data.setting.values, strict=False):
        at = data.sel(setting=name)
        swings = {
            str(parameter): (float(low), float(high))
            for parameter, (low, high) in zip(data.parameter.values, at.swing.values, strict=True)
            if not at.swing.sel(parameter=parameter).isnull().any()
        }
        draw_tornado(axes, float(at.step_time), swings)
        first = at.share.argmax("resource")
        axes.set_title(
            f"{name}\n{float(at.step_time):.3g} s per step\n"
            f"{100 * float(at.share[first]):.0f} % of its critical path: "
            f"{NAMES[str(at.resource.values[int(first)])]}",
            loc="left",
            fontsize=7,
        )
    low, high = map(float, data.factor.values)
    figure.legend(handles=legend_entries((low, high)), loc="outside lower center", ncols=2)
    return {"tornado": figure}
