"""Charts of training runs: the gap against time."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from pipejax import style
from pipejax.training.run import Run
from pipejax.training.summary import summarise


def draw_gaps(axes: Axes, runs: Run, step_sizes: Sequence[float], unit: str | None = None) -> None:
    """Draw the mean gap of each step size against time, the best one thick; diverged ones by name.

    Args:
      axes: where to draw.
      runs: with axes (step_sizes, seeds).
      step_sizes: (step_sizes) gamma.
      unit: of the time, "s" or "slots"; runs without a clock are drawn against their updates.

    Example:
      >>> import matplotlib.pyplot as plt
      >>> from pipejax.training import random_quadratic, sweep_randomized_pipedream
      >>> style.use()
      >>> figure, axes = plt.subplots()
      >>> runs = sweep_randomized_pipedream(
      ...     random_quadratic(4, dimension=8, seed=0), step_sizes=[40.0, 0.25], seeds=range(3),
      ...     updates=400, every=100,
      ... )
      >>> draw_gaps(axes, runs, [40.0, 0.25])
      >>> [text.get_text() for text in axes.get_legend().get_texts()]
      ['40: diverged', '0.25']
    """
    found = summarise(runs)
    at = runs.update if runs.time is None else runs.time
    colours = mpl.colormaps["viridis"](np.linspace(0.0, 0.9, len(step_sizes)))
    for place, (size, colour) in enumerate(zip(step_sizes, colours, strict=True)):
        if found.diverged[place]:
            axes.plot([], [], color=style.SILVER, label=f"{size:g}: diverged")
            continue
        gap = np.ma.masked_less_equal(found.gap[place], 0.0)  # rounding, below the axis
        width = 2.4 if place == found.best else 1.0
        axes.plot(at, gap, color=colour, linewidth=width, label=f"{size:g}")
    if found.best is not None:
        axes.set_yscale("log")
    axes.set_xlabel("block updates" if runs.time is None else f"time [{unit or 'slots'}]")
    axes.set_ylabel("gap")
    axes.legend(title="step size")
