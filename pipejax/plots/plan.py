"""Plans: step time against memory of all layouts, and the front that no layout beats in both."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from pipejax.plots import palette, style

COLOURS = (
    palette.BLUE,
    palette.ORANGE,
    palette.GREEN,
    palette.PURPLE,
    palette.SKY,
    palette.VERMILION,
)
MARKERS = "osD^vP"
SLOWEST = 4.0  # times the best step: what takes longer is not drawn
WIDEST = 1.5  # times the capacity: what needs more is not drawn


def draw_plan(axes: Axes, columns: Mapping[str, Any], front: Any, *, capacity: float) -> None:
    """Draw layouts as points: grey where only a bound is known, by schedule where it is exact.

    Args:
      axes: to draw on.
      columns: of all layouts: schedule, memory_bytes, lower_bound, step_time and degrees.
      front: (layouts) whether a layout is on the front of step time against memory.
      capacity: memory of an accelerator [B].
    """
    memory, exact = np.asarray(columns["memory_bytes"]) / 1e9, np.asarray(columns["step_time"])
    bound, is_known = np.asarray(columns["lower_bound"]), ~np.isnan(exact)
    best = int(np.nanargmin(exact))
    near = (memory <= WIDEST * capacity / 1e9) & (bound <= SLOWEST * exact[best])
    rest = near & ~is_known
    axes.plot(
        memory[rest],
        bound[rest],
        ".",
        color=palette.SILVER,
        markersize=1.5,
        markeredgewidth=0,
        rasterized=True,
        zorder=1,
    )
    axes.plot([], [], ".", color=palette.SILVER, markersize=4, label="lower bound")
    names = np.asarray(columns["schedule"])
    for name, colour, marker in zip(dict.fromkeys(names.tolist()), COLOURS, MARKERS, strict=False):
        own = near & is_known & (names == name)
        if own.any():
            axes.plot(
                memory[own], exact[own], marker, color=colour, markersize=3, label=name, zorder=2
            )
    order = np.flatnonzero(front)
    order = order[np.argsort(memory[order])]
    axes.step(
        np.append(memory[order], capacity / 1e9),
        np.append(exact[order], exact[best]),
        where="post",
        color=palette.BLACK,
        linewidth=0.9,
        label="front",
        zorder=3,
    )
    axes.axvline(capacity / 1e9, color=palette.VERMILION, linewidth=0.8, linestyle="--")
    axes.annotate(
        _label(columns, best),
        (memory[best], exact[best]),
        xytext=(-6, -12),
        textcoords="offset points",
        ha="right",
        fontsize=style.LEAST_FONT,
    )
    axes.annotate(
        "does not fit",
        (capacity / 1e9, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color=palette.VERMILION,
        fontsize=style.LEAST_FONT,
    )
    axes.set_yscale("log")
    for axis in ("major", "minor"):
        getattr(axes.yaxis, f"set_{axis}_formatter")(StrMethodFormatter("{x:.3g}"))
    axes.set_xlim(0, min(WIDEST * capacity / 1e9, 1.05 * max(capacity / 1e9, memory[near].max())))
    axes.set_ylim(0.85 * exact[best], SLOWEST * exact[best])
    axes.set_xlabel("memory of the fullest accelerator [GB]")
    axes.set_ylabel("step time [s]")
    axes.legend(loc="upper right")


def _label(columns: Mapping[str, Any], place: int) -> str:
    """Name a layout in short, as t8 p16 v4 d16 b1."""
    letters = {
        "tensor": "t",
        "context": "c",
        "expert": "e",
        "pipeline": "p",
        "stages_per_worker": "v",
        "data": "d",
        "microbatch_size": "b",
    }
    shown = (f"{letter}{int(columns[name][place])}" for name, letter in letters.items())
    return " ".join(each for each in shown if each not in ("c1", "e1", "v1"))
