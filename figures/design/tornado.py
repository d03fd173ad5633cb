"""Tornado charts: how far the step time moves when one parameter is halved or doubled."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.rules import describe
from pipejax.plots import PARAMETER_NAMES, draw_tornado, style, tornado_entries

COLUMNS = 2
WORK = ("model.", "microbatch_size")  # twice the work takes twice the time: not drawn


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one chart per setting."""
    rows = -(-data.sizes["setting"] // COLUMNS)
    figure, panels = plt.subplots(
        rows, COLUMNS, figsize=(style.PAGE, 0.4 + 1.9 * rows), sharex=True, squeeze=False
    )
    for axes in panels.flat[data.sizes["setting"] :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, data.setting.values, strict=False):
        at = data.sel(setting=name)
        swings = {
            str(parameter): (float(low), float(high))
            for parameter, (low, high) in zip(data.parameter.values, at.swing.values, strict=True)
            if not str(parameter).startswith(WORK)
            and not at.swing.sel(parameter=parameter).isnull().any()
        }
        draw_tornado(axes, float(at.step_time), swings)
        first = at.share.argmax("resource")
        axes.set_title(
            f"{name}\n{float(at.step_time):.3g} s per step\n"
            f"{100 * float(at.share[first]):.0f} % of its critical path: "
            f"{PARAMETER_NAMES[str(at.resource.values[int(first)])]}",
            loc="left",
            fontsize=style.LEAST_FONT,
        )
        axes.tick_params(labelbottom=True)
    low, high = map(float, data.factor.values)
    figure.legend(handles=tornado_entries((low, high)), loc="outside lower center", ncols=2)
    return {"tornado": describe(figure, _caption(data))}


def _caption(data: xr.Dataset) -> str:
    low, high = map(float, data.factor.values)
    return (
        f"Change of the step time if one parameter of the system is multiplied by {low:g} or by "
        f"{high:g}, the largest swing on top; those below 1 % are left out. What the critical path "
        "spends most of its time on moves the step time most."
    )
