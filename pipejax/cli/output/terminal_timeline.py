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
    held_memory: HeldMemory | None  # memory of all workers, if it is shown
    window: "Window"  # part of the time axis that is shown [s]
    messages: bool  # whether messages are shown
    critical: bool  # whether the critical path is marked

    @functools.cached_property
    def bars(self) -> "list[Bar]":
        """Return the bars that take time, without waits."""
        from pipejax.analysis.runs.timeline import bars

        timed_bars = (bar for bar in bars(self.run, untimed=False) if bar.ops[0].phase not in WAITS)
        return [bar if self.critical else bar._replace(is_critical=False) for bar in timed_bars]


def looks_of_runs(shown: Sequence[ShownRun]) -> Looks:
    """Colours of the phases of runs that are shown together."""
    from pipejax.analysis.runs.timeline import bar_phases

    return palette.phase_looks(bar_phases(bar for shown_run in shown for bar in shown_run.bars))


class _Line(NamedTuple):
    """Time axis of a line in the terminal."""

    columns: int  # number of columns
    window: "Window"  # times of its ends [s]
    in_colour: bool  # whether the terminal has colours

    def place(self, start: float, finish: float) -> tuple[int, int]:
        """Return the first column of a part of the time axis, and its width: at least one."""
        # divide by the length first: the columns over a length of 1e-310 s are beyond a float
        length = (self.window.stop - self.window.start) or 1.0
        low, high = ((time - self.window.start) / length * self.columns for time in (start, finish))
        first = min(max(round(low), 0), self.columns - 1)
        return first, min(max(round(high), first + 1), self.columns) - first

    def shows(self, start: float, finish: float) -> bool:
        """Return whether a part of the time from start to finish [s] lies in the window."""
        low, high = self.window
        return (start < high and finish > low) or (start == finish and low <= start <= high)


def label_width(shown: Sequence[ShownRun]) -> int:
    """Return the width of the labels before lines: workers, lanes and peaks."""
    from pipejax.analysis.runs.timeline import phases_beside

    labels: list[str] = []
    for shown_run in shown:
        run = shown_run.run
        labels += [f"worker {run.workers - 1}", *phases_beside(run.table)]
        labels += _peaks(shown_run.held_memory)
    return max(map(len, labels))


def _peaks(held: HeldMemory | None) -> list[str]:
    return [] if held is None else [f"peak {held.stages.text(peak)}" for peak in held.memory.peak]


def print_run(
    out: Console, shown: ShownRun, label: int, columns: int, looks: Looks | None = None
) -> None:
    """Print the lines of a run, each after a label that is `label` columns wide."""
    from pipejax.analysis.runs.timeline import arrows, phases_beside, second_pipe

    run, held = shown.run, shown.held_memory
    looks = looks_of_runs([shown]) if looks is None else looks
    line = _Line(columns, shown.window, out.color_system is not None)
    second = second_pipe(run.table)
    for worker in range(run.workers):
        row = [bar for bar in shown.bars if bar.worker == worker]
        lanes = {f"worker {worker}": COMPUTING} | {lane: lane for lane in phases_beside(run.table)}
        lines = {
            name: _op_row([bar for bar in row if bar.lane == lane], line, run, second, looks)
            for name, lane in lanes.items()
        }
        if held is not None:
            lines[_peaks(held)[worker]] = _memory_row(held.memory, worker, line)
        if shown.messages:
            sent = [arrow for arrow in arrows(run) if arrow.sender == worker]
            lines[""] = _message_row(sent, line)
        for name, cells in lines.items():
            text = name.ljust(label) if name.startswith("worker") else name.rjust(label)
            out.print(Text(f"{text} ").append_text(cells), no_wrap=True)


def print_legend(out: Console, shown: Sequence[ShownRun]) -> None:
    """Print the meaning of colours, letters and lines."""
    from pipejax.analysis.runs.timeline import second_pipe_name

    in_colour = out.color_system is not None
    mark = "underlined" if in_colour else f"{CRITICAL_EDGE} before an op"
    path = [Text(f"{mark}: critical path")] if shown[0].critical else []
    legend = [Text("number: microbatch"), *path, Text(f"{IDLE} idle")]
    looks = looks_of_runs(shown)
    for name in sorted(looks, key=lambda name: ("FBIW" + name).index(name)):
        look = looks[name]
        letter = (f" {name} ", f"{look.ink} on {look.fill}") if in_colour else name
        legend.append(Text.assemble(letter, f" {look.name}"))
    if any(shown_run.run.table.is_fused.any() for shown_run in shown):
        legend.append(Text("+ fused pair"))
    if second := second_pipe_name(shown_run.run.table for shown_run in shown):
        legend.append(Text(f"{STROKE} {second}"))
    if shown[0].messages:
        legend.append(Text("─ message under its sender"))
    if shown[0].held_memory is not None:
        unit = shown[0].held_memory.stages.unit
        count = "" if unit == "bytes" else ", in microbatches of one stage"
        if "I" in looks and isinstance(share := shown[0].held_memory.weight_share, float):
            # the part of an activation that I does not free
            count += f"; W still needs {share:.3g} of each after I"
        legend.append(Text(f"▃ {NAMES[unit]}{count}"))
    lines = [legend[0]]  # no entry is broken at the end of a line
    for entry in legend[1:]:
        longer = Text("  ").join([lines[-1], entry])
        lines[-1:] = [longer] if longer.cell_len <= out.width else [lines[-1], entry]
    out.print(*lines, sep="\n")


def print_limit(out: Console, held: HeldMemory) -> None:
    """Print which workers hold more than they may, if a limit is given."""
    if held.limits is None:
        return
    text = held.stages.text
    ends = " to ".join(dict.fromkeys(map(text, (held.limits.min(), held.limits.max()))))
    excess = [f"worker {worker} holds {text(held.memory.peak[worker])}" for worker in held.over]
    verdict = ", ".join(["exceeded", *excess]) if excess else "kept"
    out.print(f"memory limit {ends}: {verdict}")


def _op_row(
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
        widths = [size - size // 2, size // 2] if len(bar.ops) == 2 else [size]
        edge = CRITICAL_EDGE if bar.is_critical else EDGE
        for op, width in zip(bar.ops, widths, strict=True):
            single = bar._replace(ops=(op,))
            look = looks[op.phase.name] if line.in_colour else None
            texts = _op_cells(single, look, width, edge, op in second, with_stage)
            cells[first : first + width] = texts
            first, edge = first + width, "+"
    return Text.assemble(*cells)


def _op_cells(
    bar: "Bar", look: palette.Look | None, width: int, edge: str, second: bool, with_stage: bool
) -> list[tuple[str, str]]:
    """Return (text, style) of each cell of an op; without colours the letter shows the phase."""
    phase, number = bar.ops[0].phase.name, bar.number
    labels = [f"{phase}{number}", phase if look is None else number] if number else [phase]
    if number and with_stage:
        labels.insert(0, bar.label)
    # "+" joins the two ops of a fused pair; in colour a thin white line separates all others
    is_joined, stroke = edge == "+", STROKE if second else " "
    edge = (edge if look is None or is_joined else BORDER)[: width - 1]
    text = next((label for label in labels if len(label) <= width - len(edge)), "")
    if look is None:
        return [(letter, "") for letter in (edge + text).ljust(width, stroke)]
    ground = look.shade if second else look.fill
    style = f"{look.ink} on {ground}" + (" underline" if bar.is_critical else "")
    edge_style = f"{look.ink if is_joined else palette.WHITE} on {ground}"
    inside = text.center(width - len(edge), stroke)
    return [(sign, edge_style) for sign in edge] + [(letter, style) for letter in inside]


def _memory_row(memory: "ActivationMemory", worker: int, line: _Line) -> Text:
    """Return the largest memory of a worker in each column, over the largest peak of all."""
    time, held = memory.curve(worker)  # from time[k] on the worker holds held[k]
    low, high = line.window
    edges = low + np.arange(line.columns + 1) / line.columns * ((high - low) or 1.0)
    # steps of the curve that overlap each column: from the last before its left edge on
    first = np.searchsorted(time, edges[:-1], side="right") - 1
    end = np.maximum(np.searchsorted(time, edges[1:], side="left"), first + 1)
    steps = zip(np.maximum(first, 0).tolist(), end.tolist(), strict=True)
    largest = np.array([held[a:b].max(initial=0) for a, b in steps])
    size = np.ceil(largest / (memory.peak.max() or 1) * (len(BLOCKS) - 1)).astype(int)
    return Text("".join(BLOCKS[k] for k in size), palette.HELD)


def _message_row(sent: "list[Arrow]", line: _Line) -> Text:
    """Return messages of one sender as thin lines, from departure to arrival."""
    cells = [(" ", "")] * line.columns
    for arrow in sent:
        if line.shows(arrow.start, arrow.finish):
            first, size = line.place(arrow.start, arrow.finish)
            style = "bold" if arrow.is_critical else palette.MESSAGE
            cells[first : first + size] = [("─", style)] * size
    return Text.assemble(*cells)
