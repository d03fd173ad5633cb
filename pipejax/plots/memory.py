"""Activation memory over time as a picture: an area for each worker."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from pipejax.analysis.runs.activation_memory import ActivationMemory
from pipejax.base.array_types import Float, NumpyArray
from pipejax.plots import palette, style

_ROOM = 0.72  # of a row, for the largest peak
LIMIT: Mapping[str, Any] = {"color": palette.VERMILION, "linewidth": 0.8, "linestyle": "--"}


class Curves(NamedTuple):
    """What is drawn of an activation memory.

    Attributes:
      memory: the steps and peaks.
      name: what the sizes are, for the legend.
      text: prints a level.
      limit: of every worker, or (workers) of each; none if None.
    """

    memory: ActivationMemory
    name: str
    text: Callable[[float], str]
    limit: float | Float[NumpyArray, " workers"] | None = None


def draw_memory(axes: Axes, curves: Curves, *, until: float) -> None:
    """Draw the activation memory of each worker on given axes, its peak marked with the number.

    The largest peak, or the largest limit where it is higher, fills a row.
    """
    memory = curves.memory
    shared = [] if curves.limit is None else [curves.limit]
    limits = [np.broadcast_to(each, memory.peak.shape) for each in shared]
    largest = max(each.max() for each in (memory.peak, *limits)) or 1
    for worker, (peak, at) in enumerate(zip(memory.peak, memory.peak_at, strict=True)):
        time, held = memory.curve(worker)
        base = worker + 0.5
        level = base - _ROOM * np.append(held, 0.0) / largest
        ends = np.append(time, until)
        axes.fill_between(ends, base, level, step="post", color=palette.SKY, alpha=0.6, linewidth=0)
        axes.step(ends, level, where="post", color=palette.BLUE, linewidth=0.8)
        for limit in limits:
            axes.hlines(base - _ROOM * limit[worker] / largest, 0, until, **LIMIT)
        top = base - _ROOM * peak / largest
        is_late = at > 0.9 * until
        axes.plot([at], [top], "o", color=palette.BLACK, markersize=2.5, zorder=4)
        axes.annotate(
            curves.text(peak),
            (at, top),
            textcoords="offset points",
            xytext=(-2 if is_late else 2, 1),
            ha="right" if is_late else "left",
            va="bottom",
            fontsize=style.LEAST_FONT,
            zorder=4,
        )
    style.name_rows(axes, [f"worker {worker}" for worker in range(len(memory.peak))])
    title = f"{curves.name}, peak {curves.text(memory.peak.max())}"
    for limit in limits:
        names = dict.fromkeys(map(curves.text, (limit.min(), limit.max())))
        title += f", dashed: limit {' to '.join(names)}"
    axes.set_title(title, loc="left")
