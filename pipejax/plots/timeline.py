"""Timelines of one or several runs with a common time axis, optionally with memory curves."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pipejax.analysis.runs.evaluate import Evaluation, activation_memory, evaluate
from pipejax.analysis.runs.timeline import (
    Bar,
    Window,
    arrows,
    bar_phases,
    bars,
    depths,
    name_of_deep,
    name_of_second,
    second_pipe,
    time_window,
)
from pipejax.base.display import abbreviated
from pipejax.base.files import atomic_write
from pipejax.costs.measured.costs_file import slot_costs
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.plots import palette, style
from pipejax.plots.bars import (
    Curves,
    bar_entries,
    draw_bars,
    draw_memory,
    draw_messages,
    lane_ranges,
    lanes_below,
    row_height,
)
from pipejax.plots.caption import SLOTS, TimeUnit, caption_of_runs, choose_unit, headlines, named
from pipejax.schedules.cells.ops import COMPUTING, WAITS
from pipejax.schedules.table.table import ScheduleTable

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
        runs_by_name = named(
            (getattr(run, "schedule", getattr(run, "name", "")), run) for run in all_runs
        )
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
    columns = _columns([str(entry.get_label()) for entry in entries], drawing.paper)
    title, caption = drawing.paper.wrapped(drawing.title), drawing.paper.wrapped(drawing.caption)
    legend_lines = -(-len(entries) // columns)
    text_lines = 2.5 + len(title) + len(caption) + legend_lines + 1.5 * len(heights)
    text_height = text_lines * _LINE_PITCH * drawing.paper.font_size / 72  # [inch]
    rows_height = min(_MAX_ROWS_INCH, sum(heights))
    window = drawing.window or Window(0.0, max(panel.run.makespan for panel in panels))
    with mpl.rc_context(drawing.paper.settings()):
        figure = style.Picture(drawing.paper, rows_height + text_height)
        axes = figure.subplots(
            len(heights), sharex=True, height_ratios=heights, squeeze=False
        ).ravel()
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
    entries = bar_entries(bars, name_of_second(tables), name_of_deep(tables))
    if drawing.transfers:
        entries.append(Patch(color=palette.MESSAGE, label="transfer"))
    if drawing.messages:
        entries.append(Line2D([], [], color=palette.MESSAGE, linewidth=0.8, label="message"))
    return entries


def _columns(labels: Sequence[str], paper: style.Paper) -> int:
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
