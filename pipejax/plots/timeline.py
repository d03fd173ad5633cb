"""Timelines of one or several runs with a common time axis, optionally with memory curves.

A drawing has a row for each worker: ops as bars, messages as lines or bars, memory as areas.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from pipejax.analysis.runs.evaluate import ActivationMemory, Evaluation, activation_memory, evaluate
from pipejax.analysis.runs.timeline import (
    Arrow,
    Bar,
    Window,
    arrows,
    bar_phases,
    bars,
    deep_stage_name,
    depths,
    second_pipe,
    second_pipe_name,
    time_window,
)
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.display import abbreviated
from pipejax.base.files import atomic_write
from pipejax.costs.measured.costs_file import slot_costs
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.plots import palette, style
from pipejax.plots.caption import SLOTS, TimeUnit, caption_of_runs, choose_unit, headlines, named
from pipejax.schedules.cells.ops import COMPUTING, WAITS, Op
from pipejax.schedules.table.table import ScheduleTable

MAX_LABELS = 2000  # largest number of ops that show their microbatch
HATCH = "////"
TRANSFERS = "transfers"  # a lane that exists only in pictures
_ROW_INCH, _OPS_SHARE = 0.28, 0.8  # height of a worker's row, and share of the height for ops
# height that a lane below the ops adds if it is the only one, or one of several; gap between lanes
_LONE_LANE_INCH, _LANE_INCH, _GAP_INCH = 0.14, 0.1, 0.02
_FRAME_POINTS, _EDGE_POINTS, _TRANSFER_POINTS = 0.9, 0.4, 0.2  # widths of lines around bars
MAX_SHAPES = 5000  # a pdf or svg with more shapes stores them as pixels
_MESSAGE_ZORDER = 0.8  # messages cover the line of idle time, and ops cover messages
_DIGIT_WIDTH = 0.66  # relative to the size of the font
Space = tuple[float, float]  # free space for a number: width per digit [s], height [rows]


class Lane(NamedTuple):
    """Vertical range of the bars of a lane, relative to the middle of the row [rows]."""

    top: float
    height: float


class DrawnOp(NamedTuple):
    """Rectangle of an op; a fused pair has two rectangles, one above the other."""

    op: Op
    number: str  # number of its microbatch, as text
    start: float  # [s]
    finish: float  # [s]
    top: float  # in rows
    height: float  # in rows
    depth: float = 0.0  # from 0 (the colour of its phase) to 1 (the darkest shade of it)


def lanes_below(shown_bars: Sequence[Bar], *, transfers: bool = False) -> list[str]:
    """List the lanes below the compute ops of a row, in the order of their phases."""
    used = bar_phases([bar for bar in shown_bars if bar.worker != NO_WORKER])
    lanes = [phase.kind.lane for phase in used if phase.kind.lane != COMPUTING]
    return [*dict.fromkeys(lanes), *([TRANSFERS] if transfers else [])]


def row_height(below: Sequence[str]) -> float:
    """Return the height of a worker's row, including the lanes below its ops [inch]."""
    return _ROW_INCH + len(below) * (_LONE_LANE_INCH if len(below) == 1 else _LANE_INCH)


def lane_ranges(below: Sequence[str]) -> dict[str, Lane]:
    """Return {lane: vertical range in a worker's row} for compute and for the lanes `below`."""
    row = row_height(below)
    pitch = _LONE_LANE_INCH if len(below) == 1 else _LANE_INCH
    ops_top, ops_bottom = (1 - _OPS_SHARE) / 2 * _ROW_INCH, (1 + _OPS_SHARE) / 2 * _ROW_INCH
    lanes = {COMPUTING: Lane(ops_top / row - 0.5, (ops_bottom - ops_top) / row)}
    for k, name in enumerate(below):
        top = ops_bottom + k * pitch + _GAP_INCH  # [inch] from the top of the row
        lanes[name] = Lane(top / row - 0.5, (pitch - _GAP_INCH) / row)
    return lanes


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
    """Draw the ops of each worker in a row, with frames around critical ops.

    Args:
      axes: axes to draw on.
      shown_bars: bars of the ops.
      workers: number of rows.
      until: right end of the time axis [s].
      since: left end of the time axis [s].
      hatched: ops with hatching: those of the second pipe.
      depth: (stages) depth of the colour of each stage, from 0 to 1; all 0 if empty.
      transfers: messages, drawn in an extra lane below the ops of sender and receiver.
      looks: looks of phases by letter; None: distinct looks for the drawn phases.
    """
    axes.set_xlim(since, until if until > since else since + 1)
    labels = [f"worker {worker}" for worker in range(workers)]
    has_collectives = any(bar.worker == NO_WORKER for bar in shown_bars)
    style.name_rows(axes, [*labels, "all-reduce"] if has_collectives else labels)
    visible = [bar for bar in shown_bars if bar.start < until and bar.finish > since]
    visible = visible or list(shown_bars)  # if the run takes no time, no bar overlaps the window
    lanes = lane_ranges(lanes_below(shown_bars, transfers=bool(transfers)))
    looks = palette.phase_looks(bar_phases(shown_bars)) if looks is None else looks
    ops = [op for bar in visible for op in _drawn_ops(bar, workers, lanes)]
    if len(depth):  # depth 0 for ops without a stage
        shades = dict(enumerate(depth))
        ops = [op._replace(depth=shades.get(op.op.stage, 0.0)) for op in ops]
    groups: dict[tuple[str, bool, float], list[DrawnOp]] = {}
    for op in ops:
        groups.setdefault((op.op.phase.name, op.op in hatched, op.depth), []).append(op)
    is_dense = len(ops) > MAX_SHAPES
    shapes: dict[str, Any] = {"rasterized": is_dense}
    if is_dense:  # ops narrower than a pixel blend instead of hiding each other
        shapes["snap"] = False
    for (phase, is_hatched, _), group in groups.items():
        _draw_group(axes, group, looks[phase], is_hatched, shapes)
    outlines = [
        DrawnOp(bar.ops[0], "", bar.start, bar.finish, *_vertical_range(bar, workers, lanes))
        for bar in visible
        if bar.is_critical
    ]
    if outlines:
        frame = {"facecolor": "none", "edgecolor": palette.CRITICAL, "zorder": 3, **shapes}
        widths = _widths(axes, outlines, _FRAME_POINTS)
        axes.add_collection(PolyCollection(_op_corners(outlines), linewidths=widths, **frame))
    end = min(until, max((bar.finish for bar in visible), default=since))
    middles = np.arange(workers) + lanes[COMPUTING].top + lanes[COMPUTING].height / 2
    idle: dict[str, Any] = {"color": palette.IDLE, "linewidth": 0.5, "zorder": 0.5}
    axes.hlines(middles, since, end, **idle)
    if transfers:
        draw_transfers(axes, transfers, *lanes[TRANSFERS])
    if len(ops) <= MAX_LABELS:
        numbered = [op for op in ops if op.top < workers - 0.5]  # not in the row of all-reduces
        _draw_numbers(axes, numbered, looks, hatched)


def _vertical_range(bar: Bar, workers: int, lanes: Mapping[str, Lane]) -> tuple[float, float]:
    """Return (top, height) of a bar [rows]; all-reduces have a row below all workers."""
    if bar.worker == NO_WORKER:
        return workers + lanes[COMPUTING].top, lanes[COMPUTING].height
    return bar.worker + lanes[bar.lane].top, lanes[bar.lane].height


def _drawn_ops(bar: Bar, workers: int, lanes: Mapping[str, Lane]) -> list[DrawnOp]:
    """Return the rectangles of the ops in a bar, one above the other."""
    top, bar_height = _vertical_range(bar, workers, lanes)
    height = bar_height / len(bar.ops)
    drawn_ops = []
    for k, op in enumerate(bar.ops):
        number = bar._replace(ops=(op,)).number
        drawn_ops.append(DrawnOp(op, number, bar.start, bar.finish, top + k * height, height))
    return drawn_ops


def _corners(sides: Sequence[tuple[float, ...]]) -> Any:
    """Return the corners (boxes, 4, 2) of boxes; a side is (start, end, top, bottom)."""
    start, end, top, bottom = np.array(sides, float).reshape(-1, 4).T
    return np.stack([start, top, end, top, end, bottom, start, bottom], axis=1).reshape(-1, 4, 2)


def _op_corners(ops: Iterable[DrawnOp]) -> Any:
    return _corners([(op.start, op.finish, op.top, op.top + op.height) for op in ops])


def _widths(axes: Axes, ops: Sequence[DrawnOp], widest: float) -> Any:
    lengths = np.array([op.finish - op.start for op in ops])
    return style.line_widths(axes, lengths, widest)


def _draw_group(
    axes: Axes, group: list[DrawnOp], look: palette.Look, is_hatched: bool, shapes: dict[str, Any]
) -> None:
    """Draw ops with the same phase and depth; `shapes` has options for matplotlib."""
    patch_style = style.rectangle(look, group[0].depth)
    strokes = patch_style.pop("hatch", None)
    corners = _op_corners(group)
    widths = _widths(axes, group, _EDGE_POINTS)
    axes.add_collection(PolyCollection(corners, linewidths=widths, **patch_style, **shapes))
    if strokes or is_hatched:
        hatch: dict[str, Any] = {"edgecolor": look.ink, "hatch": strokes or HATCH, "linewidth": 0.0}
        axes.add_collection(PolyCollection(corners, facecolor="none", **hatch, **shapes))


def bar_entries(bars: Sequence[Bar], hatched: str = "", deep: str = "") -> list[Patch | Line2D]:
    """List legend entries of bars, with texts for hatching and for darker colours, if any."""
    used = bar_phases(bars)
    looks = palette.phase_looks(used)
    entries: list[Patch | Line2D] = [
        Patch(**style.rectangle(looks[phase.name]), label=looks[phase.name].name) for phase in used
    ]
    if deep:
        entries.append(Patch(**style.rectangle(looks[used[0].name], 1.0), label=deep))
    if below := lanes_below(bars):
        label = f"thin rows: {', '.join(below)}"
        entries.append(Line2D([], [], linestyle="none", label=label))
    if hatched:
        strokes: dict[str, Any] = {"edgecolor": palette.BLACK, "linewidth": _EDGE_POINTS}
        entries.append(Patch(facecolor="none", hatch=HATCH, label=hatched, **strokes))
    if any(bar.is_critical for bar in bars):
        entries.append(Patch(facecolor="none", edgecolor=palette.CRITICAL, label="critical path"))
    entries.append(Line2D([], [], color=palette.IDLE, linewidth=0.5, label="idle"))
    return entries


_PEAK_SHARE = 0.72  # share of a row's height that the largest peak takes
LIMIT: Mapping[str, Any] = {"color": palette.VERMILION, "linewidth": 0.8, "linestyle": "--"}


class Curves(NamedTuple):
    """Activation memory of each worker over time, with limits and unit."""

    memory: ActivationMemory  # memory over time and peak memory of each worker
    name: str  # name of the quantity, for the title
    text: Callable[[float], str]  # formats a size
    # limit of every worker, or (workers) limits; None if there is no limit
    limit: float | Float[NumpyArray, " workers"] | None = None


def draw_memory(axes: Axes, curves: Curves, *, until: float) -> None:
    """Draw the activation memory of each worker over time as a row, and mark the peak.

    All rows have the same scale, up to the largest peak or limit.
    """
    memory = curves.memory
    limits = [] if curves.limit is None else [np.broadcast_to(curves.limit, memory.peak.shape)]
    scale = _PEAK_SHARE / (max(sizes.max() for sizes in (memory.peak, *limits)) or 1)
    for worker, (peak, peak_time) in enumerate(zip(memory.peak, memory.peak_at, strict=True)):
        times, sizes = memory.curve(worker)
        base = worker + 0.5  # lower edge of the row; the axis points down: higher is smaller
        heights, times = base - scale * np.append(sizes, 0.0), np.append(times, until)
        area: dict[str, Any] = {"color": palette.SKY, "alpha": 0.6, "linewidth": 0}
        axes.fill_between(times, base, heights, step="post", **area)
        axes.step(times, heights, where="post", color=palette.BLUE, linewidth=0.8)
        for limit in limits:
            axes.hlines(base - scale * limit[worker], 0, until, **LIMIT)
        peak_height = base - scale * peak
        axes.plot([peak_time], [peak_height], "o", color=palette.BLACK, markersize=2.5, zorder=4)
        offset = -2 if peak_time > 0.9 * until else 2, 1
        style.write_beside(axes, curves.text(peak), (peak_time, peak_height), offset)
    style.name_rows(axes, [f"worker {worker}" for worker in range(len(memory.peak))])
    title = f"{curves.name}, peak {curves.text(memory.peak.max())}"
    for limit in limits:
        names = dict.fromkeys(map(curves.text, (limit.min(), limit.max())))
        title += f", dashed: limit {' to '.join(names)}"
    axes.set_title(title, loc="left")


class _Number(Text):
    """Number of the microbatch of an op; it is drawn only if the numbers of its row fit."""

    def __init__(self, axes: Axes, op: DrawnOp, space: Space, ends: Any, **look: Any) -> None:
        middle = sum(ends) / 2, op.top + op.height / 2
        super().__init__(*middle, op.number, ha="center", va="center", **look)
        self._digit, self._height = space
        self._axes = axes
        self.set_transform(axes.transData)
        self.set_in_layout(False)

    def get_visible(self) -> bool:
        """Return whether the number fits into its space at the present zoom."""
        axes, font_points = self._axes, float(self.get_fontsize())
        box, (start, end), (low, high) = axes.bbox, axes.get_xlim(), axes.get_ylim()
        points_per_pixel = 72 / axes.figure.dpi
        digit_points = self._digit / abs(end - start) * box.width * points_per_pixel
        height_points = self._height / abs(high - low) * box.height * points_per_pixel
        fits = digit_points >= _DIGIT_WIDTH * font_points and height_points >= 0.8 * font_points
        return bool(super().get_visible() and fits)


def _draw_numbers(
    axes: Axes, ops: Sequence[DrawnOp], looks: Mapping[str, palette.Look], hatched: Collection[Op]
) -> None:
    """Write the microbatch number of each op in the middle of the op's visible part."""
    since, until = axes.get_xlim()
    rows: dict[tuple[int, str], list[DrawnOp]] = {}
    for op in ops:
        if op.number:
            rows.setdefault((round(op.top), op.op.phase.kind.lane), []).append(op)
    for row in rows.values():
        # The narrowest op of a row decides whether all numbers of the row are visible. An op that
        # the window cuts has less space, and may hide its own number alone.
        uncut = [op for op in row if op.start >= since and op.finish <= until] or row
        row_digit_width = min((op.finish - op.start) / len(op.number) for op in uncut)
        row_height = min(op.height for op in uncut)
        for op in row:
            start, finish = max(op.start, since), min(op.finish, until)
            digit_width = min(row_digit_width, (finish - start) / len(op.number))
            space = digit_width, min(row_height, op.height)
            look = looks[op.op.phase.name].deepened(op.depth)
            text: dict[str, Any] = {"zorder": 4, "fontsize": style.small(), "clip_on": True}
            if op.op in hatched:
                text["bbox"] = {"facecolor": look.fill, "edgecolor": "none", "pad": 0.3}
            axes.add_artist(_Number(axes, op, space, (start, finish), color=look.ink, **text))


def draw_messages(axes: Axes, messages: Sequence[Arrow], *, top: float, bottom: float) -> None:
    """Draw messages as lines from the row of the sender to the row of the receiver."""
    # `top` and `bottom` are the edges of ops, relative to the middle of a row
    lines = []
    for message in messages:
        is_down = message.receiver > message.sender
        start_edge, end_edge = (bottom, top) if is_down else (top, bottom)
        start = message.start, message.sender + start_edge
        lines.append([start, (message.finish, message.receiver + end_edge)])
    look: dict[str, Any] = {
        "colors": [palette.CRITICAL if m.is_critical else palette.MESSAGE for m in messages],
        "linewidths": [1.0 if m.is_critical else 0.5 for m in messages],
        "rasterized": len(lines) > MAX_SHAPES,
    }
    axes.add_collection(LineCollection(lines, zorder=_MESSAGE_ZORDER, **look))


def draw_transfers(axes: Axes, messages: Sequence[Arrow], top: float, height: float) -> None:
    """Draw messages as bars in the rows of sender and receiver, critical messages with frames."""
    for is_critical in (False, True):
        bars = [
            (message.start, message.finish, worker + top, worker + top + height)
            for message in messages
            if message.is_critical is is_critical and message.finish > message.start
            for worker in (message.sender, message.receiver)
        ]
        lengths = np.array([finish - start for start, finish, _, _ in bars])
        widest = _FRAME_POINTS if is_critical else _TRANSFER_POINTS
        look: dict[str, Any] = {
            "facecolor": palette.MESSAGE,
            "edgecolor": palette.CRITICAL if is_critical else palette.WHITE,
            "linewidths": style.line_widths(axes, lengths, widest),
            "rasterized": len(bars) > MAX_SHAPES,
        }
        axes.add_collection(PolyCollection(_corners(bars), zorder=3 if is_critical else 1, **look))


Run = Evaluation | ScheduleTable
_OPS_SCALE = 0.7  # factor of the height of a row if memory curves are drawn below
_MEMORY_ROW_INCH = 0.2  # height of a worker's memory curve
_MAX_ROWS_INCH = 8.5  # largest height of all rows together
_LINE_PITCH = 1.35  # distance between lines of text, relative to the font size


class Panel(NamedTuple):
    """Panel of a picture: a run and, optionally, its memory curves."""

    name: str  # title of the panel
    run: Evaluation
    memory: Curves | None = None  # memory curves below the run, if any

    def bars(self, critical: bool) -> list[Bar]:
        """Return the bars of all ops that take time, except waits."""
        shown_bars = (bar for bar in bars(self.run, untimed=False) if bar.ops[0].phase not in WAITS)
        return [bar if critical else bar._replace(is_critical=False) for bar in shown_bars]


class Drawing(NamedTuple):
    """Options of a drawing of runs."""

    unit: TimeUnit  # unit of the time axis
    paper: style.Paper = style.Paper()
    window: Window | None = None  # drawn part of the time axis; None: the longest run
    messages: bool = False  # whether messages are drawn as lines
    critical: bool = True  # whether the critical path is framed
    caption: str = ""  # text below the picture, if any
    transfers: bool = False  # whether messages are drawn as bars below ops
    title: str = ""  # title above all panels, if any
    # looks of phases by letter; None: each run chooses its own
    looks: Mapping[str, palette.Look] | None = None


def plot(
    runs: Run | Sequence[Run] | Mapping[str, Run],
    *,
    messages: bool = False,
    transfers: bool = False,
    memory: bool = False,
    critical: bool = True,
    start: float | None = None,
    stop: float | None = None,
    part: str | None = None,
    unit: str | None = None,
    size: str | float = "page",
    font: str | None = None,
    font_size: float = style.FONT_SIZE,
    caption: bool | str = False,
    title: str = "",
) -> Figure:
    """Draw runs as timelines, one below the other, with a common time axis.

    Settings and backend of matplotlib stay as they are. Save the figure with `savefig`, or let a
    notebook show it.

    Args:
      runs: evaluations or tables; a table is drawn in its slots. The keys of a mapping are names.
      messages: draw messages as lines.
      transfers: draw messages as bars below the ops of sender and receiver.
      memory: draw the activation memory of the workers below each run.
      critical: frame the critical path.
      start: left end of the time axis [s]; None: 0.
      stop: right end of the time axis [s]; None: the end of the longest run.
      part: segment "warmup", "steady" or "cooldown", instead of start and stop.
      unit: unit of the time axis: "s", "ms", "us", "ns" or "slots"; None: by the makespan.
      size: width: "column" or "page" of a paper, a number [inch], or a text as "8.5cm".
      font: font family.
      font_size: size of titles and labels [point]; numbers and ticks are a point smaller.
      caption: text below the picture, or True for a caption with the parameters of the runs.
      title: title above all runs.

    Returns:
      The figure; its label is the caption.

    Raises:
      TypeError: if a run is neither an evaluation nor a table.
      ValueError: if there is no run, if tables and evaluations are mixed, or if an argument is
        wrong.

    Example:
      >>> import pipejax as pj
      >>> tables = [pj.schedules.build(name, num_workers=2, num_microbatches=4)
      ...           for name in ("gpipe", "1f1b")]
      >>> costs = pj.Costs(forward=1.0, backward=2.0)
      >>> figure = pj.plot([pj.evaluate(table, costs) for table in tables], size="column")
      >>> [axes.get_title(loc="left") for axes in figure.axes]
      ['gpipe: 15 s, idle 20.0 %', '1f1b: 15 s, idle 20.0 %']
    """
    runs_by_name = _name_runs(runs)
    are_tables = {isinstance(run, ScheduleTable) for run in runs_by_name.values()}
    if len(are_tables) > 1:
        raise ValueError(
            "tables are drawn in slots and evaluations in seconds: evaluate the tables"
        )
    evaluated = {
        name: evaluate(run, slot_costs(run)) if isinstance(run, ScheduleTable) else run
        for name, run in runs_by_name.items()
    }
    evaluations = list(evaluated.values())
    scale = choose_unit(evaluations, unit or (SLOTS if are_tables == {True} else None))
    window = time_window(evaluations, start, stop, part)
    text = caption_of_runs(evaluated, scale, window=window) if caption is True else caption or ""
    page = style.paper(size, font, font_size)
    drawing = Drawing(scale, page, window, messages, critical, text, transfers, title)
    panels = [Panel(name, run) for name, run in evaluated.items()]
    if memory:
        sizes = "activations held", "{:.4g}".format
        panels = [p._replace(memory=Curves(activation_memory(p.run), *sizes)) for p in panels]
    return draw_panels(panels, drawing)


def _name_runs(runs: Run | Sequence[Run] | Mapping[str, Run]) -> dict[str, Run]:
    """Return {name: run}; the name is that of the schedule, with a number if it repeats."""
    if isinstance(runs, Mapping):
        runs_by_name = {str(name): run for name, run in runs.items()}
    else:
        is_single = isinstance(runs, Run) or not isinstance(runs, Iterable)
        all_runs: Any = [runs] if is_single else runs
        pairs = ((getattr(run, "schedule", getattr(run, "name", "")), run) for run in all_runs)
        runs_by_name = named(pairs)
    for run in runs_by_name.values():
        if not isinstance(run, Run):
            raise TypeError(
                f"runs must be evaluations or tables, or several of them, got {abbreviated(run)}, "
                f"a {type(run).__name__}"
            )
    if not runs_by_name:
        raise ValueError("runs must be at least one evaluation or table, got none")
    return runs_by_name


def draw_panels(panels: Sequence[Panel], drawing: Drawing) -> style.Picture:
    """Draw runs one below the other, with a common legend and time axis."""
    panel_bars = [panel.bars(drawing.critical) for panel in panels]
    heights: list[float] = []  # heights of axes [inch]; a run with memory curves has two axes
    for panel, run_bars in zip(panels, panel_bars, strict=True):
        heights += _heights(panel, run_bars, drawing)
    all_bars = list(itertools.chain.from_iterable(panel_bars))
    drawing = drawing._replace(looks=palette.phase_looks(bar_phases(all_bars)))
    entries = _legend(panels, all_bars, drawing)
    columns = _legend_columns([str(entry.get_label()) for entry in entries], drawing.paper)
    title, caption = drawing.paper.wrapped(drawing.title), drawing.paper.wrapped(drawing.caption)
    legend_lines = -(-len(entries) // columns)
    text_lines = 2.5 + len(title) + len(caption) + legend_lines + 1.5 * len(heights)
    text_height = text_lines * _LINE_PITCH * drawing.paper.font_size / 72  # [inch]
    rows_height = min(_MAX_ROWS_INCH, sum(heights))
    window = drawing.window or Window(0.0, max(panel.run.makespan for panel in panels))
    with mpl.rc_context(drawing.paper.settings()):
        figure = style.Picture(drawing.paper, rows_height + text_height)
        rows: Any = {"sharex": True, "height_ratios": heights, "squeeze": False}
        axes = figure.subplots(len(heights), **rows).ravel()
        next_axes = iter(axes)
        for panel, run_bars in zip(panels, panel_bars, strict=True):
            _draw_panel(next(next_axes), panel, run_bars, drawing, window)
            if panel.memory is not None:
                draw_memory(next(next_axes), panel.memory, until=panel.run.makespan)
        axes[-1].set_xlim(window.start, window.stop or 1.0)
        unit = drawing.unit
        axes[-1].xaxis.set_major_formatter(lambda time, _: f"{time / unit.seconds:.6g}")
        axes[-1].set_xlabel(f"time [{unit.name}]")
        if title:
            size = drawing.paper.font_size
            figure.suptitle("\n".join(title), fontsize=size, fontweight="bold", parse_math=False)
        _write_below(figure, entries, columns, caption)
    runs = {panel.name: panel.run for panel in panels}
    figure.set_label(drawing.caption or caption_of_runs(runs, drawing.unit, window=drawing.window))
    return figure


def _write_below(
    figure: Figure, entries: Sequence[Patch | Line2D], columns: int, lines: Sequence[str]
) -> None:
    """Put the legend below the axes, and lines of text below the legend."""
    # all positions are shares of the height of the figure
    pitch = _LINE_PITCH * float(mpl.rcParams["font.size"]) / 72 / figure.get_figheight()
    low = pitch * (len(lines) + 0.6 if lines else 0)
    figure.text(0.01, 0.4 * pitch, "\n".join(lines), linespacing=1.1)
    legend = figure.legend(
        handles=entries, loc="lower center", ncols=columns, bbox_to_anchor=(0.5, low)
    )
    low += legend.get_window_extent().height / figure.bbox.height
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.set(rect=(0, low, 1, 1 - low))  # type: ignore[call-arg]  # of a constrained layout


def _heights(panel: Panel, panel_bars: Sequence[Bar], drawing: Drawing) -> list[float]:
    workers = panel.run.workers
    rows = workers + any(bar.worker == NO_WORKER for bar in panel_bars)  # a row for all-reduces
    row = row_height(lanes_below(panel_bars, transfers=drawing.transfers))
    if not panel.memory:
        return [row * rows]
    return [_OPS_SCALE * row * rows, _MEMORY_ROW_INCH * workers]


def _draw_panel(
    axes: Axes, panel: Panel, panel_bars: Sequence[Bar], drawing: Drawing, window: Window
) -> None:
    """Draw the part of a run in a window of time, with messages and a title that fits."""
    run = panel.run
    messages = arrows(run)
    if not drawing.critical:
        messages = [message._replace(is_critical=False) for message in messages]
    draw_bars(
        axes,
        panel_bars,
        workers=run.workers,
        since=window.start,
        until=window.stop,
        hatched=second_pipe(run.table),
        depth=depths(run.table),
        transfers=messages if drawing.transfers else (),
        looks=drawing.looks,
    )
    if drawing.messages:
        lanes = lane_ranges(lanes_below(panel_bars, transfers=drawing.transfers))
        top, height = lanes[COMPUTING]
        draw_messages(axes, messages, top=top, bottom=top + height)
    title_paper = drawing.paper._replace(width=drawing.paper.width - 0.8)  # without row names
    candidates = [title_paper.wrapped(text) for text in headlines(panel.name, run, drawing.unit)]
    lines = min(candidates, key=len)  # the first, longest text among those with the fewest lines
    axes.set_title("\n".join(lines), loc="left", parse_math=False)  # names may have a $


def _legend(panels: Sequence[Panel], bars: Sequence[Bar], drawing: Drawing) -> list[Patch | Line2D]:
    """List the legend entries for colours, hatching and lines of all runs."""
    tables = [panel.run.table for panel in panels]
    entries = bar_entries(bars, second_pipe_name(tables), deep_stage_name(tables))
    if drawing.transfers:
        entries.append(Patch(color=palette.MESSAGE, label="transfer"))
    if drawing.messages:
        entries.append(Line2D([], [], color=palette.MESSAGE, linewidth=0.8, label="message"))
    return entries


def _legend_columns(labels: Sequence[str], paper: style.Paper) -> int:
    """Return the largest number of columns in which a legend with these labels fits."""
    widest = [(style.LETTER * len(label) + 5.0) * paper.small / 72 for label in labels]
    for count in range(len(labels), 1, -1):
        columns = [max(widest[k::count]) for k in range(count)]
        if sum(columns) <= paper.width - 0.2:
            return count
    return 1


def save(picture: Figure, path: Path) -> None:
    """Write a picture in the format of the file's suffix; equal pictures give equal files."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    with atomic_write(path) as draft:
        picture.savefig(draft, metadata=metadata)
