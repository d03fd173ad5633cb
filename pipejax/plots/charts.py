"""Charts of placements, predictions, gradient delays, sensitivities and jitter samples."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.data_files import load_json
from pipejax.costs.topology import PlacedCosts, Seats
from pipejax.plots import palette, style

LEVEL_GAP = 0.9  # gap between nodes, and additional gap between racks, in widths of a place
# colours of links in a node, between nodes, and at all higher levels
LINK_COLOURS = (palette.GREY, palette.VERMILION, palette.VIOLET)
ARC_RISE = 0.3  # height of an arc, relative to its width
PLACEMENT_INCH = 1.4  # height of a placement


def machine_picture(placed: PlacedCosts, shown: Mapping[str, Seats]) -> Figure:
    """Draw named placements, one below the other: workers on nodes, messages as arcs."""
    paper = style.Paper()
    picture = style.Picture(paper, PLACEMENT_INCH * len(shown) + 0.4)
    with mpl.rc_context(paper.settings()):
        rows = picture.subplots(len(shown), squeeze=False, sharey=True)[:, 0]
        tops = [
            _draw_placement(axes, placed, np.asarray(places), name)
            for axes, (name, places) in zip(rows, shown.items(), strict=True)
        ]
        rows[0].set_ylim(-0.8, max(tops) + 0.15)
        names = ("messages in a node", "between nodes", "between racks")
        levels = range(int(placed.level.max()) + 1)
        entries = [
            Line2D([], [], color=colour, label=name)
            for colour, name, _ in zip(LINK_COLOURS, names, levels, strict=False)
        ]
        picture.legend(handles=entries, loc="outside lower center", ncols=len(entries))
    return picture


def _draw_placement(
    axes: Axes, placed: PlacedCosts, worker_places: Int[NumpyArray, " workers"], name: str
) -> float:
    """Draw workers at their places, and messages as arcs; return the height of the top arc."""
    # `placed.level` (places, places) is the level of the link between two places. Neighbours have
    # the distance 1, plus a gap for each level: levels 0, 1, 0 give x = 0, 1, 2.9, 3.9.
    neighbour_levels = placed.level.diagonal(offset=1)
    place_x = np.append(0.0, np.cumsum(1.0 + LEVEL_GAP * neighbour_levels))
    top = 0.5
    for level in range(int(placed.level.max())):
        is_near = placed.level <= level  # places within one node, or one rack
        for group in np.unique(is_near.argmax(axis=1)).tolist():  # its first place
            _frame(axes, place_x[is_near[group]], level)
    for (first, second), count in _message_counts(placed).items():
        start, end = sorted((place_x[worker_places[first]], place_x[worker_places[second]]))
        rise = 0.25 + ARC_RISE * (end - start)
        top = max(top, 0.3 + rise)
        bend = [(start, 0.3), ((start + end) / 2, 0.3 + 2 * rise), (end, 0.3)]
        level = int(placed.level[worker_places[first], worker_places[second]])
        arc = PathPatch(
            Curve(bend, [Curve.MOVETO, Curve.CURVE3, Curve.CURVE3]),
            fill=False,
            edgecolor=LINK_COLOURS[min(level, len(LINK_COLOURS) - 1)],
            linewidth=0.6 + 0.3 * min(count, 6),
        )
        axes.add_patch(arc)
    for worker, place in enumerate(worker_places.tolist()):
        axes.plot(place_x[place], 0, "o", markersize=12, color=palette.WHITE, mec="black", mew=0.6)
        axes.annotate(f"{worker}", (place_x[place], 0), ha="center", va="center_baseline")
    axes.set(xlim=(place_x[0] - 1.2, place_x[-1] + 1.2), yticks=[], xticks=[])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(name, loc="left")
    return float(top)


def _frame(axes: Axes, place_x: NumpyArray, level: int) -> None:
    """Draw a box around the places of a node (level 0) or of a rack (level 1)."""
    pad = 0.55 + 0.18 * level
    box = FancyBboxPatch(
        (place_x.min() - pad, -pad),
        np.ptp(place_x) + 2 * pad,
        2 * pad,
        boxstyle="round,pad=0,rounding_size=0.3",
        facecolor=palette.SKY if level == 0 else "none",
        alpha=0.35 if level == 0 else 1.0,
        edgecolor=palette.BLUE,
        linewidth=0.6,
        zorder=0,
    )
    axes.add_patch(box)


def _message_counts(placed: PlacedCosts) -> Mapping[tuple[int, int], int]:
    """Return {(worker, worker): number of stage boundaries between these workers}."""
    placement = placed.table.placement
    ends = np.sort(np.stack([placement[:, :-1].ravel(), placement[:, 1:].ravel()]), axis=0)
    pairs, counts = np.unique(ends[:, ends[0] != ends[1]], axis=1, return_counts=True)
    return {(a, b): n for (a, b), n in zip(pairs.T.tolist(), counts.tolist(), strict=True)}


# (marker, colour) of each group; more groups repeat them
_COLOURS = palette.BLUE, palette.VERMILION, palette.GREEN, palette.ORANGE, palette.PURPLE
GROUP_LOOKS = [*zip("os^DvPo", (*_COLOURS, palette.SKY, palette.BLACK), strict=True)]
EVEN_TICKS_RATIO = 10.0  # below this ratio of its ends, an axis has evenly spaced ticks


def draw_predictions(
    axes: Axes,
    measured: Float[NumpyArray, " rows"],
    predicted: Float[NumpyArray, " rows"],
    groups: Sequence[str],
) -> None:
    """Draw points of measured and predicted times [s], with the diagonal and a 10 % band."""
    times = np.concatenate([measured, predicted])
    ends = np.array([times.min() / 1.2, times.max() * 1.2])
    axes.plot(ends, ends, color=palette.BLACK, linewidth=0.6)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=palette.SILVER, linewidth=0, alpha=0.6)
    names = list(dict.fromkeys(groups))
    for name, (marker, colour) in zip(names, itertools.cycle(GROUP_LOOKS), strict=False):
        is_member = np.asarray(groups) == name
        axes.plot(
            measured[is_member],
            predicted[is_member],
            linestyle="none",
            marker=marker,
            markersize=3,
            markerfacecolor="none",
            markeredgewidth=0.7,
            color=colour,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="measured [s]", ylabel="predicted [s]")
    axes.set(xlim=ends, ylim=ends)
    is_short = ends[1] < EVEN_TICKS_RATIO * ends[0]  # ticks at powers of ten would be too few
    for axis in (axes.xaxis, axes.yaxis):
        if is_short:
            axis.set_major_locator(FixedLocator(MaxNLocator(5).tick_values(*ends)))
            axis.set_minor_locator(NullLocator())
        else:
            subs = (1.0, 3.0) if ends[1] < 100 * ends[0] else (1.0,)
            axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


MIN_AXIS_END = 3  # smallest right end of the axis of delays


def draw_delays(axes: Axes, histogram: Int[NumpyArray, " delays"], mean: float) -> None:
    """Draw a histogram of gradient delays with lines at the mean and at the largest delay."""
    share = 100 * histogram / histogram.sum()
    axes.bar(np.arange(len(share)), share, width=0.9, color=palette.BLUE)
    largest = len(share) - 1
    axes.axvline(largest, color=palette.VERMILION, label=f"largest {largest}", linestyle="-")
    axes.axvline(mean, color=palette.ORANGE, label=f"mean {mean:.4g}", linestyle="--")
    axes.set(xlabel="delay [block updates]", ylabel="share of (update, stage) [%]")
    axes.set_xlim(-0.6, max(largest, MIN_AXIS_END) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.legend(loc="outside lower center", ncols=2)  # outside: it covers no bars


SWING_COLOURS = (palette.BLUE, palette.ORANGE)
MIN_SWING = 1e-2  # smallest drawn swing, relative to the step time
PARAMETER_NAMES: Mapping[str, str] = load_json(Path(__file__).with_name("parameter_names.json"))
WORK = ("model.", "microbatch_size")  # prefixes of parameters of the work, not of the machine


def draw_tornado(
    axes: Axes, step_time: float, swings: Mapping[str, tuple[float | None, float | None]]
) -> None:
    """Draw how the step time changes with a smaller and a larger value of each parameter.

    Parameters of the machine are above those of the work, and larger swings above smaller ones.
    """

    def width(name: str) -> float:
        """Return the larger of a parameter's two relative changes of the step time."""
        times = [time for time in swings[name] if time]  # None: no run with such a value exists
        return max((abs(time / step_time - 1) for time in times), default=0.0)

    large = [name for name in swings if width(name) >= MIN_SWING]
    names = sorted(large, key=lambda name: (not name.startswith(WORK), width(name)))
    # from below: rows of the work, a free row for a label if both parts exist, rows of the machine
    num_work = sum(name.startswith(WORK) for name in names)
    has_label = 0 < num_work < len(names)
    places = np.arange(len(names), dtype=float)
    if has_label:
        places[num_work:] += 1
        axes.annotate(
            "machine above, work below",
            (0.5, num_work),
            xycoords=("axes fraction", "data"),
            ha="center",
            va="center",
            fontsize=style.LEAST_FONT,
        )
    ends = np.array([swings[name] for name in names], float).reshape(-1, 2)  # None is NaN
    changes = 100 * (np.nan_to_num(ends, nan=step_time) / step_time - 1)
    overlap = changes.prod(axis=1) > 0  # both changes have the same sign: draw two thin bars
    for values, side, colour in zip(changes.T, (1, -1), SWING_COLOURS, strict=True):
        rows = places + np.where(overlap, side * 0.175, 0.0)
        axes.barh(rows, values, height=np.where(overlap, 0.35, 0.7), color=colour)
        for row, value in zip(rows, values, strict=True):
            if abs(value) >= 1:
                offset = 3 if value > 0 else -3, 0
                style.write_beside(axes, f"{value:+.0f}", (value, row), offset)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.margins(x=0.12)
    axes.set_yticks(places, [PARAMETER_NAMES.get(name, name) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("change of the step time [%]")


def tornado_entries(factors: tuple[float, float]) -> list[Patch]:
    """Return the legend entries for the smaller and the larger value of a parameter."""
    return [
        Patch(color=colour, label=f"parameter x {factor:g}")
        for colour, factor in zip(SWING_COLOURS, factors, strict=True)
    ]


LEVELS = (0.05, 0.5, 0.95)
MARK: Mapping[str, Any] = {"linestyle": "", "color": palette.BLACK}
QUANTILE: Mapping[str, Any] = {**MARK, "marker": "|", "markersize": 7, "markeredgewidth": 0.8}
DIAMOND = {"marker": "D", "markersize": 3.5, "markerfacecolor": palette.WHITE}
WITHOUT_JITTER: Mapping[str, Any] = {**MARK, **DIAMOND}
MAX_QUANTILE = 0.95  # violins end at this quantile, because rare stalls would flatten them


def draw_violins(
    axes: Axes,
    samples: Mapping[str, Float[NumpyArray, " samples"]],
    without: Mapping[str, float],
    colours: Mapping[str, str],
) -> None:
    """Draw samples as violins, one for each name, with lines at quantiles.

    Args:
      axes: axes to draw on.
      samples: name -> (samples) values; the first name is on top.
      without: name -> value without jitter, drawn as a mark.
      colours: name -> colour.
    """
    for place, (name, values) in enumerate(samples.items()):
        if np.ptp(values) > 0:  # a violin of equal values has no width
            parts: dict[str, Any] = axes.violinplot(
                values[values <= np.quantile(values, MAX_QUANTILE)],
                positions=[place],
                orientation="horizontal",
                widths=0.85,
                showextrema=False,
                points=300,
            )
            colour = colours[name]
            parts["bodies"][0].set(facecolor=colour, edgecolor=colour, alpha=0.55)
        quantiles = np.quantile(values, LEVELS)
        axes.vlines(quantiles, place - 0.2, place + 0.2, color=palette.BLACK, linewidth=0.8)
        axes.plot(without[name], place, **WITHOUT_JITTER)
    axes.set_yticks(range(len(samples)), [*samples])
    axes.set_ylim(len(samples) - 0.5, -0.5)


def violin_entries() -> list[Line2D]:
    """Return the legend entries of the marks in a violin plot."""
    return [
        Line2D([], [], label="5th, 50th and 95th percentile, where a violin ends", **QUANTILE),
        Line2D([], [], label="without jitter", **WITHOUT_JITTER),
    ]
