"""One stage per worker against interleaved PipeOffload under a limit; AdaOffload and the best."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import palette, style

TIGHT = 1.0  # peaks of 1F1B: tight is below
NEAR = 1.0  # [%]
MARKS: Mapping[str, Mapping[str, Any]] = {
    "best": {"color": palette.VERMILION, "marker": "o", "label": "best found"},
    "proven": {"color": palette.BLACK, "marker": "_", "label": "bound of the search"},
    "fill": {"color": palette.BLUE, "marker": "^", "label": "bound: filling the pipe"},
    "rounds": {"color": palette.GREEN, "marker": "s", "label": "bound: rounds of activations"},
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the tight problems in order of their bound, and AdaOffload at all problems."""
    figure, (problems_axes, ada_axes) = plt.subplots(
        1, 2, figsize=(style.PAGE, 3.2), gridspec_kw={"width_ratios": (1.6, 1)}
    )
    _problems(problems_axes, data)
    _ada(ada_axes, data)
    figure.legend(loc="outside lower center", ncols=4)
    return {"finding_offload": describe(figure, _caption(data))}


def _sorted(data: xr.Dataset, by: xr.DataArray) -> xr.Dataset:
    """Problems in one row, those without a value left out."""
    flat = data.assign(by=by).stack(problem=by.dims).dropna("problem", subset=["by"])
    return flat.isel(problem=np.argsort(flat.by.values, kind="stable"))


def _problems(axes: Axes, data: xr.Dataset) -> None:
    at = data.sel(limit=data.limit < TIGHT)
    at = at[list(MARKS)] / at.interleaved
    at = _sorted(at.where(at > 0), at.proven)
    axes.axhline(1, color=palette.GREY, linewidth=0.8)
    for name, look in MARKS.items():
        axes.plot(np.arange(at.sizes["problem"]) + 1, at[name], linestyle="", **look)
    axes.set_ylim(0.8, 1.55)
    axes.set_xlabel("problems by their bound")
    axes.set_ylabel("time / interleaved PipeOffload")
    axes.set_title("(a) one stage per worker, tight memory", loc="left")


def _ada(axes: Axes, data: xr.Dataset) -> None:
    excess = 100 * (data.ada / data.best - 1)
    at = _sorted(data, excess)
    axes.axhline(NEAR, color=palette.GREY, linewidth=0.8)
    axes.plot(np.arange(at.sizes["problem"]) + 1, at.by, color=palette.BLACK)
    axes.set_xlabel("problems by excess")
    axes.set_ylabel("longer than the best found [%]")
    axes.set_title("(b) AdaOffload", loc="left")


def _caption(data: xr.Dataset) -> str:
    at = data.sel(limit=data.limit < TIGHT)
    ratio = at.proven / at.interleaved
    excess = data.ada / data.best - 1
    return (
        f"{int(ratio.notnull().sum())} problems below the memory of 1F1B; {AXES_DIFFER}. (a) Above "
        "1 a bound shows that no schedule with one stage per worker, however optimised, reaches "
        f"interleaved PipeOffload: {int((ratio > 1).sum())} of them. (b) AdaOffload is within 1 % "
        f"of the best found at {int((excess <= NEAR / 100).sum())} of "
        f"{int(excess.notnull().sum())} problems."
    )
