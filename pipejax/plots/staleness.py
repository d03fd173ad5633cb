"""Charts of how stale the gradients of a table are."""

import numpy as np
from matplotlib.axes import Axes

from pipejax.base.array_types import Int, NumpyArray
from pipejax.plots import palette


def draw_delays(axes: Axes, histogram: Int[NumpyArray, " delays"], mean: float) -> None:
    """Draw how often each delay occurs, with the mean and the largest marked."""
    share = 100 * histogram / histogram.sum()
    axes.bar(np.arange(len(share)), share, width=0.9, color=palette.BLUE)
    largest = len(share) - 1
    for at, label, colour in (
        (mean, f"mean {mean:.4g}", palette.ORANGE),
        (largest, f"largest {largest}", palette.VERMILION),
    ):
        axes.axvline(at, color=colour, label=label)
    axes.set(xlabel="delay [block updates]", ylabel="share of (update, stage) [%]")
    axes.legend()
