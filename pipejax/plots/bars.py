"""Rows of workers on axes: ops as bars, messages as lines or bars, and what they hold as areas."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from pipejax.analysis.runs.activation_memory import ActivationMemory
from pipejax.analysis.runs.timeline import Arrow, Bar, bar_phases
from pipejax.base.array_types import Float, NumpyArray
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.plots import palette, style
from pipejax.schedules.cells.ops import COMPUTING, Op

MAX_LABELS = 2000  # more microbatch numbers than this are left out, nobody could read them
HATCH = "////"
TRANSFERS = "transfers"  # a lane of pictures alone
_ROW, _HEIGHT = 0.28, 0.8  # of a worker [inch], and of its bars relative to that
_ALONE, _SEVERAL, _GAP = 0.14, 0.1, 0.02  # what a lane below them adds, one or each [inch]
_FRAME, _EDGE, _TRANSFER_EDGE = 0.9, 0.4, 0.2  # widths of lines around ops [point]
MAX_SHAPES = 5000  # more than this are pixels in a pdf or svg, which would take long to show
_BEHIND = 0.8  # order: over the line of idle time, behind ops, so that no line crosses a number
_DIGIT = 0.66  # width of a digit, relative to the size of its font
Room = tuple[float, float]  # of a number: for each digit [s], and its height in rows


class Lane(NamedTuple):
    """Vertical range of bars in a row, relative to its middle."""

    top: float
    height: float


class DrawnOp(NamedTuple):
    """An op of a bar, where it is drawn: a fused pair has two, one above the other."""

    op: Op
    number: str  # text of its microbatch
    start: float  # [s]
    finish: float  # [s]
    top: float  # in rows
    height: float  # in rows
    depth: float = 0.0  # how deep the colour of its phase is, from 0 to 1


def lanes_below(shown_bars: Sequence[Bar], *, transfers: bool = False) -> list[str]:
    """List the lanes below the ops of a row, in the order of phases."""
    used = bar_phases([bar for bar in shown_bars if bar.worker != NO_WORKER])
    lanes = [phase.kind.lane for phase in used if phase.kind.lane != COMPUTING]
    return [*dict.fromkeys(lanes), *([TRANSFERS] if transfers else [])]


def row_height(below: Sequence[str]) -> float:
    """Height of a row with lanes below its ops [inch]."""
    return _ROW + len(below) * (_ALONE if len(below) == 1 else _SEVERAL)


def share_row(below: Sequence[str]) -> dict[str, Lane]:
    """Share a row among its ops, as "compute", and the lanes below them."""
    row, pitch = row_height(below), _ALONE if len(below) == 1 else _SEVERAL
    first = (1 + _HEIGHT) / 2 * _ROW  # where the ops end
    lanes = [
        ((first + k * pitch + _GAP) / row - 0.5, (pitch - _GAP) / row) for k in range(len(below))
    ]
    ops = Lane((1 - _HEIGHT) / 2 * _ROW / row - 0.5, _HEIGHT * _ROW / row)
    return {COMPUTING: ops} | {name: Lane(*place) for name, place in zip(below, lanes, strict=True)}


def draw_bars(
    axes: Axes,
    shown_bars: Sequence[Bar],
    *,
    workers: int,
    until: float,
    since: float = 0.0,
    hatched: Collection[Op] = (),
    depth: Sequence[float] = (),
    transfers: Sequence[Arrow] = (),
    looks: Mapping[str, palette.Look] | None = None,
) -> None:
    """Draw ops on given axes from one time to another, a row for each worker.

    Those on the critical path are framed, and those that belong to the second pipe are hatched.

    Args:
      axes: to draw on.
      shown_bars: the ops.
      workers: number of rows.
      until: end of what is seen [s].
      since: its start [s].
      hatched: ops of the second pipe.
      depth: (stages) how deep the colour of each is, from 0 to 1; all 0 if empty.
      transfers: messages that have a lane of their own below the ops of both workers.
      looks: of phases, by letters; those of what is drawn if None.
    """
    axes.set_xlim(since, until if until > since else since + 1)
    labels = [f"worker {worker}" for worker in range(workers)]
    has_collectives = any(bar.worker == NO_WORKER for bar in shown_bars)
    style.name_rows(axes, [*labels, "all-reduce"] if has_collectives else labels)
    seen = [bar for bar in shown_bars if bar.start < until and bar.finish > since]
    seen = seen if seen or not shown_bars else list(shown_bars)  # of a run that takes no time
    lanes = share_row(lanes_below(shown_bars, transfers=bool(transfers)))
    looks = palette.phase_looks(bar_phases(shown_bars)) if looks is None else looks
    parts = [part for bar in seen for part in _parts(bar, workers, lanes)]
    if len(depth):  # what is of no stage has the colour of the last ones
        shades = dict(enumerate(depth))
        parts = [part._replace(depth=shades.get(part.op.stage, 0.0)) for part in parts]
    groups: dict[tuple[str, bool, float], list[DrawnOp]] = {}
    for part in parts:
        groups.setdefault((part.op.phase.name, part.op in hatched, part.depth), []).append(part)
    is_dense = len(parts) > MAX_SHAPES
    shapes: dict[str, Any] = {"rasterized": is_dense}
    if is_dense:  # ops narrower than a pixel share it, where else they would hide each other
        shapes["snap"] = False
    for (phase, is_hatched, _), group in groups.items():
        _draw_group(axes, group, looks[phase], is_hatched, shapes)
    frames = [bar for bar in seen if bar.is_critical]
    outlines = [
        DrawnOp(bar.ops[0], "", bar.start, bar.finish, *_place(bar, workers, lanes))
        for bar in frames
    ]
    _outline(axes, outlines, palette.CRITICAL, _FRAME, zorder=3, **shapes)
    end = min(until, max((bar.finish for bar in seen), default=since))
    middle = lanes[COMPUTING].top + lanes[COMPUTING].height / 2  # idle is where a thin line shows
    axes.hlines(
        np.arange(workers) + middle, since, end, color=palette.IDLE, linewidth=0.5, zorder=0.5
    )
    if transfers:
        draw_transfers(axes, transfers, *lanes[TRANSFERS])
    if len(parts) <= MAX_LABELS:
        _draw_numbers(axes, [p for p in parts if p.top < workers - 0.5], looks, hatched)


def _place(bar: Bar, workers: int, lanes: Mapping[str, Lane]) -> tuple[float, float]:
    """Return the top of a bar and its height [rows]; an all-reduce has a row of its own."""
    if bar.worker == NO_WORKER:
        return workers + lanes[COMPUTING].top, lanes[COMPUTING].height
    return bar.worker + lanes[bar.lane].top, lanes[bar.lane].height


def _parts(bar: Bar, workers: int, lanes: Mapping[str, Lane]) -> list[DrawnOp]:
    top, whole = _place(bar, workers, lanes)
    height = whole / len(bar.ops)
    single_ops = [bar._replace(ops=(op,)) for op in bar.ops]
    return [
        DrawnOp(single.ops[0], single.number, bar.start, bar.finish, top + k * height, height)
        for k, single in enumerate(single_ops)
    ]


def _corners(parts: Iterable[DrawnOp]) -> Any:
    box = np.array([(p.start, p.finish, p.top, p.top + p.height) for p in parts]).reshape(-1, 4)
    return np.stack([box[:, [0, 2]], box[:, [1, 2]], box[:, [1, 3]], box[:, [0, 3]]], axis=1)


def _widths(axes: Axes, parts: Sequence[DrawnOp], widest: float) -> Any:
    lengths = np.array([part.finish - part.start for part in parts])
    return style.line_widths(axes, lengths, widest)


def _draw_group(
    axes: Axes,
    group: list[DrawnOp],
    look: palette.Look,
    is_hatched: bool,
    shapes: dict[str, Any],
) -> None:
    patch_style = style.rectangle(look, group[0].depth)
    strokes = patch_style.pop("hatch", None)
    corners = _corners(group)
    widths = _widths(axes, group, _EDGE)
    axes.add_collection(PolyCollection(corners, linewidths=widths, **patch_style, **shapes))
    if strokes or is_hatched:
        over: dict[str, Any] = {
            "facecolor": "none",
            "edgecolor": look.ink,
            "hatch": strokes or HATCH,
            "linewidth": 0.0,
        }
        axes.add_collection(PolyCollection(corners, **over, **shapes))


def _outline(axes: Axes, parts: Sequence[DrawnOp], colour: str, widest: float, **more: Any) -> None:
    if parts:
        frame = {"facecolor": "none", "edgecolor": colour, **more}
        widths = _widths(axes, parts, widest)
        axes.add_collection(PolyCollection(_corners(parts), linewidths=widths, **frame))


def bar_entries(bars: Sequence[Bar], hatched: str = "", deep: str = "") -> list[Patch | Line2D]:
    """List the legend entries for colours, strokes and frames of ops.

    `hatched` names what strokes mean, and `deep` what a deeper colour of a phase does.
    """
    used = bar_phases(bars)
    looks = palette.phase_looks(used)
    entries: list[Patch | Line2D] = [
        Patch(**style.rectangle(looks[phase.name]), label=looks[phase.name].name) for phase in used
    ]
    if deep:
        entries.append(Patch(**style.rectangle(looks[used[0].name], 1.0), label=deep))
    if below := lanes_below(bars):
        named = f"thin rows: {', '.join(below)}"
        entries.append(Line2D([], [], linestyle="none", label=named))
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
    if any(bar.is_critical for bar in bars):
        frame = Patch(facecolor="none", edgecolor=palette.CRITICAL, label="critical path")
        entries.append(frame)
    entries.append(Line2D([], [], color=palette.IDLE, linewidth=0.5, label="idle"))
    return entries


# Activation memory over time as a picture: an area for each worker.


_ROOM = 0.72  # of a row, for the largest peak
LIMIT: Mapping[str, Any] = {"color": palette.VERMILION, "linewidth": 0.8, "linestyle": "--"}


class Curves(NamedTuple):
    """Curves of an activation memory, with their limits and units.

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
    limits = [np.broadcast_to(limit, memory.peak.shape) for limit in shared]
    largest = max(peaks.max() for peaks in (memory.peak, *limits)) or 1
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


class _Number(Text):
    """A number that is drawn only where all of its row have room."""

    def __init__(self, axes: Axes, part: DrawnOp, room: Room, ends: Any, **look: Any) -> None:
        middle = sum(ends) / 2, part.top + part.height / 2
        super().__init__(*middle, part.number, ha="center", va="center", **look)
        self._digit, self._height = room
        self._axes = axes
        self.set_transform(axes.transData)
        self.set_in_layout(False)

    def get_visible(self) -> bool:
        """Return whether the numbers of the row fit the axes at their present size."""
        axes, size = self._axes, float(self.get_fontsize())
        box, limits = axes.bbox, (axes.get_xlim(), axes.get_ylim())
        (start, end), (low, high) = limits
        points = 72 / axes.figure.dpi
        width = self._digit / abs(end - start) * box.width * points
        height = self._height / abs(high - low) * box.height * points
        return bool(super().get_visible() and width >= _DIGIT * size and height >= 0.8 * size)


def _draw_numbers(
    axes: Axes,
    parts: Sequence[DrawnOp],
    looks: Mapping[str, palette.Look],
    hatched: Collection[Op],
) -> None:
    """Write microbatch numbers in the middle of the visible part of each op."""
    since, until = axes.get_xlim()
    size = style.small()
    numbered = [part for part in parts if part.number]
    rows: dict[tuple[int, str], list[DrawnOp]] = {}
    for part in numbered:
        rows.setdefault((round(part.top), part.op.phase.kind.lane), []).append(part)
    for row in rows.values():
        # an op that the window cuts speaks for itself only
        whole = [p for p in row if p.start >= since and p.finish <= until] or row
        digits, heights = zip(*(_room(p, p.start, p.finish) for p in whole), strict=True)
        for part in row:
            ends = max(part.start, since), min(part.finish, until)
            digit, height = _room(part, *ends)
            room = min(*digits, digit), min(*heights, height)
            look = looks[part.op.phase.name].deepened(part.depth)
            ground = {"facecolor": look.fill, "edgecolor": "none", "pad": 0.3}
            box: dict[str, Any] = {"bbox": ground} if part.op in hatched else {}
            more: dict[str, Any] = {"zorder": 4, "fontsize": size, "clip_on": True, **box}
            axes.add_artist(_Number(axes, part, room, ends, color=look.ink, **more))


def _room(part: DrawnOp, start: float, finish: float) -> Room:
    return (finish - start) / len(part.number), part.height


def draw_messages(axes: Axes, sent: Sequence[Arrow], *, top: float, bottom: float) -> None:
    """Lines from the edge of the sender's ops to the edge of the receiver's, behind other rows."""
    lines = []
    for a in sent:
        leaves, arrives = (bottom, top) if a.receiver > a.sender else (top, bottom)
        lines.append([(a.start, a.sender + leaves), (a.finish, a.receiver + arrives)])
    colours = [palette.CRITICAL if a.is_critical else palette.MESSAGE for a in sent]
    widths = [1.0 if a.is_critical else 0.5 for a in sent]
    look: dict[str, Any] = {
        "colors": colours,
        "linewidths": widths,
        "rasterized": len(lines) > MAX_SHAPES,
    }
    axes.add_collection(LineCollection(lines, zorder=_BEHIND, **look))


def draw_transfers(axes: Axes, sent: Sequence[Arrow], top: float, height: float) -> None:
    """Draw messages as bars in a lane of both workers, those of the critical path framed."""
    for critical in (False, True):
        boxes: Any = np.array(
            [
                (a.start, a.finish, worker + top, worker + top + height)
                for a in sent
                if a.is_critical is critical and a.finish > a.start
                for worker in (a.sender, a.receiver)
            ]
        ).reshape(-1, 4)
        corners = boxes[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]
        edge = {"edgecolor": palette.CRITICAL if critical else palette.WHITE}
        widest = _FRAME if critical else _TRANSFER_EDGE
        widths = style.line_widths(axes, boxes[:, 1] - boxes[:, 0], widest)
        look: dict[str, Any] = {"facecolor": palette.MESSAGE, "linewidths": widths, **edge}
        rasterized = len(boxes) > MAX_SHAPES
        axes.add_collection(
            PolyCollection(corners, zorder=3 if critical else 1, rasterized=rasterized, **look)
        )
