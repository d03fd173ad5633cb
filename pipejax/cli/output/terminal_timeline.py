"""A run in the terminal: a line of cells for each worker, in the colours of the figures."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

import pipejax as pj
from pipejax.cli.options.memory import HeldMemory
from pipejax.plots import palette
from pipejax.schedules.cells.ops import COMPUTING, WAITS, Op

if TYPE_CHECKING:
    from pipejax.analysis.runs.evaluate import ActivationMemory
    from pipejax.analysis.runs.timeline import Arrow, Bar, Window

Looks = Mapping[str, palette.Look]

BLOCKS = " ▁▂▃▄▅▆▇█"
NAMES = {"activations": "activations held", "bytes": "activation memory"}
IDLE, STROKE, EDGE, CRITICAL_EDGE, BORDER = "·", "/", "│", "┃", "▏"


@dataclasses.dataclass(frozen=True)
class ShownRun:
    """A run as the terminal shows it."""

    run: "pj.Evaluation"
    held: HeldMemory | None  # its memory, if that is shown
    window: "Window"  # part of the time axis that is shown [s]
    messages: bool  # whether messages are shown
    critical: bool  # whether the critical path is marked

    @functools.cached_property
    def bars(self) -> "list[Bar]":
        """Return the bars that take time, without waits."""
        from pipejax.analysis.runs.timeline import bars

        timed_bars = (bar for bar in bars(self.run, untimed=False) if bar.ops[0].phase not in WAITS)
        return [bar if self.critical else bar._replace(is_critical=False) for bar in timed_bars]

    @property
    def lanes(self) -> dict[str, str]:
        """Lanes beside compute, each named as its line."""
        from pipejax.analysis.runs.timeline import phases_beside

        return {lane: lane for lane in phases_beside(self.run.table)}


def looks_of_runs(shown: Sequence[ShownRun]) -> Looks:
    """Colours of the phases of runs that are shown together."""
    from pipejax.analysis.runs.timeline import bar_phases

    return palette.phase_looks(bar_phases(bar for shown_run in shown for bar in shown_run.bars))


class _Line(NamedTuple):
    """The columns of a line, and the styles of its cells."""

    columns: int  # how many there are
    window: "Window"  # times of its ends [s]
    in_colour: bool  # whether the terminal has colours

    def place(self, start: float, finish: float) -> tuple[int, int]:
        """First column of a part of the time axis, and how many it takes: at least one."""
        # times over the length first: columns over a length of 1e-310 s are beyond a float
        length = (self.window.stop - self.window.start) or 1.0
        low, high = ((time - self.window.start) / length * self.columns for time in (start, finish))
        first = min(max(round(low), 0), self.columns - 1)
        return first, min(max(round(high), first + 1), self.columns) - first

    def shows(self, start: float, finish: float) -> bool:
        """Return whether a part of it lies in the window."""
        low, high = self.window
        return (start < high and finish > low) or (start == finish and low <= start <= high)


def label_width(shown: Sequence[ShownRun]) -> int:
    """Return the width of the labels before lines: workers, lanes and peaks."""
    names = [f"worker {shown_run.run.workers - 1}" for shown_run in shown]
    names += [lane for shown_run in shown for lane in shown_run.lanes]
    return max(
        map(len, [*names, *(peak for shown_run in shown for peak in _peaks(shown_run.held))])
    )


def _peaks(held: HeldMemory | None) -> list[str]:
    return [] if held is None else [held.stages.text(peak) for peak in held.memory.peak]


def print_run(
    out: Console, shown: ShownRun, label: int, columns: int, looks: Looks | None = None
) -> None:
    """Print the lines of a run, each behind a label of one width."""
    from pipejax.analysis.runs.timeline import arrows, second_pipe

    run, held = shown.run, shown.held
    looks = looks_of_runs([shown]) if looks is None else looks
    line = _Line(columns, shown.window, out.color_system is not None)
    second = second_pipe(run.table)
    for worker in range(run.workers):
        row = [bar for bar in shown.bars if bar.worker == worker]
        lanes = {f"worker {worker}": COMPUTING} | shown.lanes
        lines = {
            name: _row([bar for bar in row if bar.lane == lane], line, run, second, looks)
            for name, lane in lanes.items()
        }
        if held is not None:
            lines[_peaks(held)[worker]] = _curve(held.memory, worker, line)
        if shown.messages:
            lines[""] = _messages([a for a in arrows(run) if a.sender == worker], line)
        for name, cells in lines.items():
            text = name.ljust(label) if name.startswith("worker") else name.rjust(label)
            out.print(Text(f"{text} ").append_text(cells), no_wrap=True)


def print_legend(out: Console, shown: Sequence[ShownRun]) -> None:
    """Print the meaning of colours, letters and lines."""
    from pipejax.analysis.runs.timeline import name_of_second

    in_colour = out.color_system is not None
    mark = "underlined: critical path  " if in_colour else f"{CRITICAL_EDGE} critical path  "
    number = "number: microbatch  " if in_colour else ""  # else it stands behind its letter
    legend = Text(f"{number}{mark if shown[0].critical else ''}{IDLE} idle  ")
    looks = looks_of_runs(shown)
    for name in sorted(looks, key=lambda name: -palette.lightness(looks[name].fill)):
        look = looks[name]
        letter = f" {name} " if in_colour else name
        legend.append(letter, f"{look.ink} on {look.fill}" if in_colour else "").append(
            f" {look.name}  "
        )
    if any(shown_run.run.table.is_fused.any() for shown_run in shown):
        legend.append("+ fused pair  ")
    if second := name_of_second(shown_run.run.table for shown_run in shown):
        legend.append(f"{STROKE} {second}  ")
    if shown[0].messages:
        legend.append("─ message under its sender  ")
    if shown[0].held is not None:
        legend.append(f"▃ {NAMES[shown[0].held.stages.unit]}; at the left the peak")
    out.print(legend)


def print_limit(out: Console, held: HeldMemory) -> None:
    """Print which workers hold more than they may, if a limit is given."""
    if held.limits is None:
        return
    text = held.stages.text
    ends = " to ".join(dict.fromkeys(map(text, (held.limits.min(), held.limits.max()))))
    over = [f"worker {worker} holds {text(held.memory.peak[worker])}" for worker in held.over]
    out.print(f"memory limit {ends}: {', '.join(['exceeded', *over]) if over else 'kept'}")


def _row(
    row: "list[Bar]", line: _Line, run: "pj.Evaluation", second: "frozenset[Op]", looks: Looks
) -> Text:
    """Return one worker's ops as cells, each at least one column wide if there is room."""
    cells = [(" ", "")] * line.columns
    if run.makespan > line.window.start:
        first, size = line.place(line.window.start, run.makespan)
        cells[first : first + size] = [(IDLE, "dim")] * size
    with_stage = run.stages > run.workers or bool(second)  # a worker has several
    for bar in row:
        if not line.shows(bar.start, bar.finish):
            continue
        first, size = line.place(bar.start, bar.finish)
        left_width = size - size // 2 if len(bar.ops) == 2 else size
        for op, begin, width in zip(
            bar.ops, (0, left_width), (left_width, size - left_width), strict=False
        ):
            edge = "+" if begin else CRITICAL_EDGE if bar.is_critical else EDGE
            single = bar._replace(ops=(op,))
            op_cells = _OpCells(single, looks[op.phase.name], width, edge, op in second, with_stage)
            shown = op_cells.coloured() if line.in_colour else op_cells.plain()
            cells[first + begin : first + begin + width] = shown
    return Text.assemble(*cells)


class _OpCells(NamedTuple):
    """An op as cells."""

    bar: "Bar"  # the op
    look: palette.Look  # colours of its phase
    width: int  # how many cells
    edge: str  # what parts it from the op before it
    is_second: bool  # whether it belongs to the second pipe
    with_stage: bool  # whether its stage does not follow from its worker

    def coloured(self) -> list[tuple[str, str]]:
        """Return (text, style) of the edge and the inside: the colour tells the phase."""
        look = self.look
        ground = look.shade if self.is_second else look.fill
        # "+" joins the two ops of a fused pair, a thin white line parts all others
        edge = (self.edge if self.edge == "+" else BORDER)[: self.width - 1]
        text = self._label(self.width - len(edge), self.bar.number)
        style = f"{look.ink} on {ground}" + " underline" * self.bar.is_critical
        inside = text.center(self.width - len(edge), self._stroke)
        edge_style = f"{look.ink if self.edge == '+' else palette.WHITE} on {ground}"
        return [(edge, edge_style)] * len(edge) + [(letter, style) for letter in inside]

    def plain(self) -> list[tuple[str, str]]:
        """Its letter tells the phase."""
        edge = self.edge[: self.width - 1]
        text = edge + self._label(self.width - len(edge), self.bar.ops[0].phase.name)
        return [(letter, "") for letter in text.ljust(self.width, self._stroke)]

    @property
    def _stroke(self) -> str:
        return STROKE if self.is_second else " "

    def _label(self, room: int, shortest: str) -> str:
        phase, number = self.bar.ops[0].phase.name, self.bar.number
        texts = [self.bar.label] * self.with_stage + [f"{phase}{number}", shortest]
        texts = texts if number else [phase]
        return next((text for text in texts if len(text) <= room), "")


def _curve(memory: "ActivationMemory", worker: int, line: _Line) -> Text:
    """The most that a worker holds in each column, relative to the largest peak of all."""
    time, held = memory.curve(worker)
    low, high = line.window
    edges = low + np.arange(line.columns + 1) / line.columns * ((high - low) or 1.0)
    first = np.searchsorted(time, edges[:-1], side="right") - 1
    after = np.maximum(np.searchsorted(time, edges[1:], side="left"), first + 1)
    steps = zip(first.tolist(), after.tolist(), strict=True)
    largest = np.array([held[max(a, 0) : b].max(initial=0) for a, b in steps])
    size = np.ceil(largest / (memory.peak.max() or 1) * (len(BLOCKS) - 1)).astype(int)
    return Text("".join(BLOCKS[k] for k in size), palette.HELD)


def _messages(sent: "list[Arrow]", line: _Line) -> Text:
    """Return messages of one sender as thin lines, from departure to arrival."""
    cells = [(" ", "")] * line.columns
    for arrow in sent:
        if line.shows(arrow.start, arrow.finish):
            first, size = line.place(arrow.start, arrow.finish)
            cells[first : first + size] = [
                ("─", "bold" if arrow.is_critical else palette.MESSAGE)
            ] * size
    return Text.assemble(*cells)
