"""`pipejax show`: the timeline, in the terminal or drawn."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from pipejax.cli.options import JsonFlag, Links, Pricing, or_slots
from pipejax.cli.report import console, percent, print_json, seconds
from pipejax.evaluate import Evaluation, evaluate
from pipejax.ops import Phase
from pipejax.table import ScheduleTable
from pipejax.timeline import Arrow, Bar, arrows, bars

FORMATS = (".png", ".pdf", ".svg", ".html")
TERMINAL = {
    Phase.F: "black on bright_blue",
    Phase.B: "black on bright_green",
    Phase.I: "black on bright_cyan",
    Phase.W: "black on bright_yellow",
    Phase.R: "black on bright_magenta",
    Phase.U: "black on bright_red",
}
OTHER = "black on white"
PAIR = "black on bright_magenta"


def show(
    table: ScheduleTable,
    pricing: Pricing | None,
    links: Links,
    out: Annotated[
        Path | None, typer.Option(help="Draw to this file (.png, .pdf, .svg or .html).")
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="Show messages as thin lines.")
    ] = False,
    width: Annotated[
        int | None, typer.Option(help="Columns of the terminal's timeline.", min=20)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show the timeline of a schedule; without times, in the table's own slots."""
    if out is not None and out.suffix not in FORMATS:
        raise ValueError(f"--out must end in one of {', '.join(FORMATS)}, got {str(out)!r}")
    costs = or_slots(pricing, table)
    evaluation = evaluate(table, costs, **links._asdict())
    unit = "s" if pricing is not None else "slots"
    if out is not None:
        try:
            from pipejax.drawing import draw_timeline  # matplotlib is an extra, slow to import
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--out {out}: drawing needs {error.name}: pip install 'pipejax[figures]'"
            ) from None
        draw_timeline(evaluation, out, messages=messages, unit=unit)
    if json:
        print_json(_as_json(evaluation, out))
    elif out is not None:
        console().print(f"drawn to {out}", markup=False, soft_wrap=True)
    else:
        _print(evaluation, messages, unit, width)


def _as_json(evaluation: Evaluation, out: Path | None) -> dict[str, object]:
    return {
        "schedule": evaluation.schedule,
        "makespan": evaluation.makespan,
        "out": None if out is None else str(out),
        "ops": [
            {"op": bar.label, "worker": bar.worker, "start": bar.start, "finish": bar.finish,
             "critical": bar.is_critical}
            for bar in bars(evaluation)
        ],
        "messages": [
            {"op": str(arrow.op), "sender": arrow.sender, "receiver": arrow.receiver,
             "start": arrow.start, "finish": arrow.finish, "critical": arrow.is_critical}
            for arrow in arrows(evaluation)
        ],
    }  # fmt: skip


def _print(evaluation: Evaluation, messages: bool, unit: str, width: int | None) -> None:
    out = console()
    columns = (width or out.width) - len(f"worker {evaluation.workers - 1} ") - 2
    scale = columns / (evaluation.makespan or 1)
    total = seconds(evaluation.makespan) if unit == "s" else f"{evaluation.makespan:g} slots"
    out.print(
        f"[bold]{escape(evaluation.schedule)}[/] on {evaluation.workers} workers: {total}, idle "
        f"{percent(evaluation.bubble_ratio)}, {evaluation.link} links"
    )
    drawn, sent = bars(evaluation), arrows(evaluation)
    for worker in range(evaluation.workers):
        row = [bar for bar in drawn if bar.worker == worker and not bar.on_host_link]
        name = f"worker {worker}".ljust(len(f"worker {evaluation.workers - 1}"))
        out.print(Text(f"{name} ").append_text(_row(row, columns, scale)), no_wrap=True)
        if messages:
            lines = [arrow for arrow in sent if arrow.sender == worker]
            out.print(Text(" " * (len(name) + 1)).append_text(_lines(lines, columns, scale)),
                      no_wrap=True)  # fmt: skip
    legend = Text("number: microbatch, underlined: critical path  ")
    for phase, style in TERMINAL.items():
        if any(op.phase is phase for bar in drawn for op in bar.ops):
            legend.append(f" {phase.name} ", style).append(" ")
    if any(len(bar.ops) == 2 for bar in drawn):
        legend.append(" F+B ", PAIR).append(" ")
    if messages:
        legend.append(" ─ message under its sender")
    out.print(legend)


def _row(row: list[Bar], columns: int, scale: float) -> Text:
    """One worker's ops as coloured cells; each at least one column while there is room."""
    cells = [(" ", "")] * columns
    for bar in row:
        first = min(round(bar.start * scale), columns - 1)
        size = min(max(round(bar.finish * scale), first + 1), columns) - first
        style = PAIR if len(bar.ops) == 2 else TERMINAL.get(bar.ops[0].phase, OTHER)
        style += " underline" if bar.is_critical else ""
        held = [op for op in bar.ops if op.microbatch >= 0]
        number = "+".join(str(op.microbatch) for op in held)
        lettered = "+".join(f"{op.phase.name}{op.microbatch}" for op in held)
        label = next((text for text in (lettered, number) if len(text) <= size), "").center(size)
        for k, letter in enumerate(label):
            cells[first + k] = (letter, style)
    return Text.assemble(*cells)


def _lines(lines: list[Arrow], columns: int, scale: float) -> Text:
    """Messages of one sender as thin lines, from leaving to arriving."""
    cells = [(" ", "")] * columns
    for arrow in lines:
        first = min(round(arrow.start * scale), columns - 1)
        for k in range(first, max(first + 1, min(round(arrow.finish * scale), columns))):
            cells[k] = ("─", "bold red" if arrow.is_critical else "dim")
    return Text.assemble(*cells)
