"""Charts of training runs: the gap, the objective or the training loss against time."""

import itertools
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.plots import palette


def draw_curves(
    axes: Axes,
    times: Float[NumpyArray, " samples"],
    curves: Float[NumpyArray, "step_sizes samples"],
    step_sizes: Sequence[float],
    *,
    diverged: Bool[NumpyArray, " step_sizes"],
    best: int | None,
    time_label: str,
    label: str,
) -> None:
    """Draw the mean curve of each step size against time, the best thick; diverged ones by name."""
    styles = itertools.cycle(("-", "--", "-.", ":"))  # neighbours are told apart in grey
    colours = mpl.colormaps["viridis"](np.linspace(0.0, 0.9, len(step_sizes)))
    for place, (size, colour) in enumerate(zip(step_sizes, colours, strict=True)):
        if diverged[place]:
            axes.plot([], [], color=palette.SILVER, label=f"{size:.4g}: diverged")
            continue
        curve = np.ma.masked_less_equal(curves[place], 0.0)  # rounding, below the axis
        width = 2.4 if place == best else 1.0
        axes.plot(
            times, curve, color=colour, linewidth=width, linestyle=next(styles), label=f"{size:.4g}"
        )
    if best is not None:
        axes.set_yscale("log")
    axes.set(xlabel=time_label, ylabel=label)
    axes.figure.legend(title="step size, the best thick", loc="outside lower center", ncols=3)
