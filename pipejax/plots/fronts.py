"""Points in two measures, with the front that none beats in both: layouts of a plan, of a sweep."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.plots import palette, style

# Plans: step time against memory of all layouts.

COLOURS = palette.SERIES
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


# Points of a sweep in two of their measures.


FAR = 2.5  # times the most of the front: what lies beyond is not drawn, but counted
WIDE = 20.0  # ratio of the largest to the least value from which an axis is logarithmic
MANY = 5000  # points, from which they are small
SCALES = {  # what a measure is shown in
    "step_time": (1.0, "step time [s]"),
    "memory_bytes": (1e9, "most memory of an accelerator [GB]"),
    "bubble_ratio": (1.0, "bubble ratio"),
    "tokens_per_second": (1.0, "tokens per second"),
}


class Shown(NamedTuple):
    """What is drawn along one side.

    Attributes:
      name: of the measure or axis.
      values: (points) in SI units.
      unit: of the values.
    """

    name: str
    values: NumpyArray
    unit: str

    @property
    def scaled(self) -> NumpyArray:
        """(points) as it is drawn."""
        return np.asarray(self.values, float) / SCALES.get(self.name, (1.0, ""))[0]

    @property
    def label(self) -> str:
        """What is written along the side."""
        unit = f" [{self.unit}]" if self.unit not in ("", "1") else ""
        return SCALES.get(self.name, (1.0, f"{self.name}{unit}"))[1]


def draw_results(
    axes: Axes,
    sides: Sequence[Shown],
    groups: Mapping[str, Bool[NumpyArray, " points"]],
    front: Int[NumpyArray, " found"],
    best: Int[NumpyArray, " found"],
) -> None:
    """Draw points by group, the front as steps, and the best points ringed.

    Args:
      axes: to draw on.
      sides: what lies across and what lies up.
      groups: points by name of their group; of more groups than there are colours, all are grey.
      front: points that no other beats, in the order of the first side.
      best: points that are ringed.
    """
    x, y = (side.scaled for side in sides)
    among = np.logical_or.reduce([*groups.values()])
    size = 3 if len(x) <= MANY else 1
    plain: dict[str, Any] = {"linestyle": "", "markersize": size, "rasterized": True, "zorder": 2}
    plain |= {"markerfacecolor": "none", "markeredgewidth": 0.6}  # those behind are seen through
    if len(groups) > len(COLOURS):
        groups = {"points": among}
    looks = [(palette.GREY, "o")] if len(groups) == 1 else zip(COLOURS, MARKERS, strict=True)
    for (name, own), (colour, marker) in zip(groups.items(), looks, strict=False):
        axes.plot(x[own], y[own], marker=marker, color=colour, label=name, **plain)
    if len(best):
        ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.BLACK}
        axes.plot(x[best], y[best], "o", markersize=7, label="best", zorder=3, **ring)
    for side, values, axis in zip("xy", (x, y), (axes.xaxis, axes.yaxis), strict=True):
        shown = values[among]
        if len(front):
            shown = shown[shown <= FAR * values[front].max()] if np.all(shown > 0) else shown
        if len(shown) and shown.min() > 0 and shown.max() > WIDE * shown.min():
            getattr(axes, f"set_{side}scale")("log")
        if len(shown) < among.sum():
            getattr(axes, f"set_{side}lim")(*_with_margin(shown, axis.get_scale()))
        axis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
        if axis.get_scale() == "log":
            axis.set_minor_formatter(StrMethodFormatter("{x:.3g}"))
    if len(front):
        _draw_front(axes, x[front], y[front])
        out = among & ((x > axes.get_xlim()[1]) | (y > axes.get_ylim()[1]))
        if out.any():
            axes.set_title(f"{out.sum():,} of {among.sum():,} points lie further out", loc="left")
    axes.set_xlabel(sides[0].label)
    axes.set_ylabel(sides[1].label)
    figure: Any = axes.figure
    figure.legend(loc="outside upper left", ncols=2)  # beside the points, wherever they lie


def _with_margin(values: NumpyArray, scale: str) -> tuple[float, float]:
    """Ends of an axis around values."""
    low, high = float(values.min()), float(values.max())
    if scale == "log":
        more = (high / low) ** 0.05
        return low / more, high * more
    more = 0.05 * (high - low)
    return low - more, high + more


def _draw_front(axes: Axes, x: NumpyArray, y: NumpyArray) -> None:
    """Draw the edge of what the front beats, up to the edges of the picture."""
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    limits = axes.get_xlim(), axes.get_ylim()
    axes.step(
        [x[0], *x, right],
        [top, *y, y[-1]],
        where="post",
        color=palette.BLACK,
        linewidth=0.9,
        label="front",
        zorder=3,
    )
    axes.set(xlim=limits[0], ylim=limits[1])
