"""Charts of how stale the gradients of a table are."""

import numpy as np
from matplotlib.axes import Axes

from pipejax import style
from pipejax.shapes import Int, NumpyArray


def draw_delays(axes: Axes, histogram: Int[NumpyArray, " delays"], mean: float) -> None:
    """Draw how often each delay occurs, with the mean and the largest marked.

    Args:
      axes: where to draw.
      histogram: (delays) how many updates and stages have each delay, from 0 on.
      mean: mean delay.

    Example:
      >>> import matplotlib.pyplot as plt
      >>> style.use()
      >>> figure, axes = plt.subplots()
      >>> draw_delays(axes, np.array([0, 40, 80, 40]), 2.0)
      >>> axes.get_xlabel()
      'delay [block updates]'
    """
    share = 100 * histogram / histogram.sum()
    axes.bar(np.arange(len(share)), share, width=0.9, color=style.BLUE)
    largest = len(share) - 1
    for at, label, colour in ((mean, f"mean {mean:.4g}", style.ORANGE),
                              (largest, f"largest {largest}", style.VERMILION)):  # fmt: skip
        axes.axvline(at, color=colour, label=label)
    axes.set_xlabel("delay [block updates]")
    axes.set_ylabel("share of (update, stage) [%]")
    axes.legend()
