"""Rows of workers on axes: their ops as bars, and what they hold as areas.

An op has the colour of its phase, and strokes if it is of the second pipe.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from pipejax.analysis.runs.activation_memory import ActivationMemory
from pipejax.analysis.runs.timeline import Arrow, Bar
from pipejax.base.array_types import Float, NumpyArray
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.plots import palette, style
from pipejax.schedules.cells.ops import Op, Phase

MAX_LABELS = 2000  # more microbatch numbers than this are left out, nobody could read them
MAX_SHAPES = 5000  # more ops than this are pixels in a pdf or svg, which would take long to show
HATCH = "////"
_HEIGHT = 0.8  # of a bar, relative to the distance of rows
_DIGIT = 0.66  # width of a digit, relative to the size of its font
_FRAME, _EDGE = 0.9, 0.4  # widths of lines around ops [point]
_LINE = 0.15  # the widest line around an op, relative to its length


class Lane(NamedTuple):
    """Where bars stand in a row, relative to its middle."""

    top: float
    height: float


class _DrawnOp(NamedTuple):
    """An op of a bar, where it is drawn: a fused pair has two, one above the other."""

    op: Op
    start: float
    finish: float
    top: float
    height: float


# ops, then those on the host link
_WHOLE_ROW = (Lane(-_HEIGHT / 2, _HEIGHT), Lane(_HEIGHT / 2, 0.0))
_SHARED_ROW = (Lane(-_HEIGHT / 2, 0.54), Lane(0.17, 0.25))


def draw_bars(
    axes: Axes,
    drawn: Sequence[Bar],
    *,
    workers: int,
    until: float,
    since: float = 0.0,
    hatched: Collection[Op] = (),
) -> None:
    """Draw ops on given axes from one time to another, a row for each worker.

    Those on the critical path are framed, and those that belong to the second pipe are hatched.
    """
    axes.set_xlim(since, until if until > since else since + 1)
    labels = [f"worker {worker}" for worker in range(workers)]
    has_collectives = any(bar.worker == NO_WORKER for bar in drawn)
    style.name_rows(axes, labels + ["all-reduce"] * has_collectives)
    seen = [bar for bar in drawn if bar.start < until and bar.finish > since]
    seen = seen if seen or not drawn else list(drawn)  # of a run that takes no time
    lanes = _lanes(any(bar.on_host_link for bar in drawn))
    parts = [part for bar in seen for part in _parts(bar, workers, lanes)]
    groups: dict[tuple[str, bool], list[_DrawnOp]] = {}
    for part in parts:
        groups.setdefault((part.op.phase.name, part.op in hatched), []).append(part)
    is_dense = len(parts) > MAX_SHAPES
    shapes: dict[str, Any] = {"rasterized": is_dense}
    if is_dense:  # ops narrower than a pixel share it, where else they would hide each other
        shapes["snap"] = False
    for (phase, is_hatched), group in groups.items():
        _draw_group(axes, group, phase, is_hatched, shapes)
    frames = [bar for bar in seen if bar.is_critical]
    outlines = [
        _DrawnOp(bar.ops[0], bar.start, bar.finish, _row(bar, workers) + lane.top, lane.height)
        for bar in frames
        for lane in [lanes[bar.on_host_link]]
    ]
    _outline(axes, outlines, palette.CRITICAL, _FRAME, zorder=3, **shapes)
    end = min(until, max((bar.finish for bar in seen), default=since))
    middle = lanes[0].top + lanes[0].height / 2  # idle is where a thin line shows
    axes.hlines(
        np.arange(workers) + middle, since, end, color=palette.IDLE, linewidth=0.5, zorder=0.5
    )
    if len(parts) <= MAX_LABELS:
        _number(axes, [p for p in parts if p.top < workers - 0.5], hatched)


def _lanes(has_host_link: bool) -> tuple[Lane, Lane]:
    return _SHARED_ROW if has_host_link else _WHOLE_ROW


def _row(bar: Bar, workers: int) -> int:
    return workers if bar.worker == NO_WORKER else bar.worker


def _parts(bar: Bar, workers: int, lanes: tuple[Lane, Lane]) -> list[_DrawnOp]:
    """Where the ops of a bar are drawn."""
    lane = lanes[bar.on_host_link]
    height = lane.height / len(bar.ops)
    top = _row(bar, workers) + lane.top
    return [
        _DrawnOp(op, bar.start, bar.finish, top + k * height, height)
        for k, op in enumerate(bar.ops)
    ]


def _corners(parts: Iterable[_DrawnOp]) -> Any:
    """Corners of rectangles (parts, 4, 2)."""
    box = np.array([(p.start, p.finish, p.top, p.top + p.height) for p in parts]).reshape(-1, 4)
    return np.stack([box[:, [0, 2]], box[:, [1, 2]], box[:, [1, 3]], box[:, [0, 3]]], axis=1)


def _widths(axes: Axes, parts: Sequence[_DrawnOp], widest: float) -> Any:
    """Widths of the lines around ops (parts) [point]: a short op is not all line."""
    low, high = axes.get_xlim()
    points = axes.bbox.width * 72 / axes.figure.dpi / (high - low)
    lengths = np.array([part.finish - part.start for part in parts])
    return np.minimum(widest, _LINE * points * lengths)


def _draw_group(
    axes: Axes, group: list[_DrawnOp], phase: str, is_hatched: bool, shapes: dict[str, Any]
) -> None:
    """Draw all ops of one look."""
    look = style.look(phase)
    strokes = look.pop("hatch", None)
    corners = _corners(group)
    widths = _widths(axes, group, _EDGE)
    axes.add_collection(PolyCollection(corners, linewidths=widths, **look, **shapes))
    if strokes or is_hatched:
        ink = palette.look(phase).ink
        over: dict[str, Any] = {
            "facecolor": "none",
            "edgecolor": ink,
            "hatch": strokes or HATCH,
            "linewidth": 0.0,
        }
        axes.add_collection(PolyCollection(corners, **over, **shapes))


def _outline(
    axes: Axes, parts: Sequence[_DrawnOp], colour: str, widest: float, **more: Any
) -> None:
    if parts:
        frame = {"facecolor": "none", "edgecolor": colour, **more}
        widths = _widths(axes, parts, widest)
        axes.add_collection(PolyCollection(_corners(parts), linewidths=widths, **frame))


class _Number(Text):
    """A number that is drawn only where its op has room for it."""

    def __init__(
        self, axes: Axes, part: _DrawnOp, start: float, finish: float, **look: Any
    ) -> None:
        middle = (start + finish) / 2, part.top + part.height / 2
        super().__init__(*middle, str(part.op.microbatch), ha="center", va="center", **look)
        self._sides = finish - start, part.height
        self._of = axes
        self.set_transform(axes.transData)
        self.set_in_layout(False)

    def get_visible(self) -> bool:
        """Whether it fits as the axes are now."""
        axes, size = self._of, float(self.get_fontsize())
        box, limits = axes.bbox, (axes.get_xlim(), axes.get_ylim())
        (left, right), (low, high) = limits
        points = 72 / axes.figure.dpi
        length = self._sides[0] / abs(right - left) * box.width * points
        height = self._sides[1] / abs(high - low) * box.height * points
        fits = length >= _DIGIT * size * len(self.get_text()) and height >= 0.8 * size
        return bool(super().get_visible() and fits)


def _number(axes: Axes, parts: Sequence[_DrawnOp], hatched: Collection[Op]) -> None:
    """Write microbatch numbers, in the middle of what is seen of an op."""
    since, until = axes.get_xlim()
    size = style.small()
    for part in parts:
        if part.op.microbatch < 0:
            continue
        look = palette.look(part.op.phase.name)
        ground = {"facecolor": look.fill, "edgecolor": "none", "pad": 0.3}
        seen = max(part.start, since), min(part.finish, until)
        box: dict[str, Any] = {"bbox": ground} if part.op in hatched else {}
        axes.add_artist(
            _Number(axes, part, *seen, zorder=4, fontsize=size, color=look.ink, clip_on=True, **box)
        )


def draw_messages(axes: Axes, sent: Sequence[Arrow], *, has_host_link: bool = False) -> None:
    """Lines from the edge of the sender's ops to the edge of the receiver's."""
    top, height = _lanes(has_host_link)[0]
    bottom = top + height
    lines = []
    for a in sent:
        leaves, arrives = (bottom, top) if a.receiver > a.sender else (top, bottom)
        lines.append([(a.start, a.sender + leaves), (a.finish, a.receiver + arrives)])
    colours = [palette.CRITICAL if a.is_critical else palette.MESSAGE for a in sent]
    widths = [1.0 if a.is_critical else 0.5 for a in sent]
    rasterized = len(lines) > MAX_SHAPES
    group = LineCollection(
        lines, colors=colours, linewidths=widths, zorder=5, rasterized=rasterized
    )
    axes.add_collection(group)


def bar_entries(drawn: Sequence[Bar], hatched: str = "") -> list[Patch | Line2D]:
    """List what the colours, strokes and frames of ops mean; `hatched` names what strokes do."""
    used = np.unique([op.phase for bar in drawn for op in bar.ops])
    entries: list[Patch | Line2D] = [
        Patch(**style.look(name), label=palette.look(name).name)
        for name in (Phase(int(code)).name for code in used)
    ]
    if hatched:
        entries.append(
            Patch(
                facecolor="none",
                edgecolor=palette.BLACK,
                linewidth=_EDGE,
                hatch=HATCH,
                label=hatched,
            )
        )
    if any(bar.is_critical for bar in drawn):
        frame = Patch(facecolor="none", edgecolor=palette.CRITICAL, label="critical path")
        entries.append(frame)
    entries.append(Line2D([], [], color=palette.IDLE, linewidth=0.5, label="idle"))
    return entries


# Activation memory over time as a picture: an area for each worker.


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
