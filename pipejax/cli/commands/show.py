"""`pipejax show`: the timeline, in the terminal or drawn."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
from rich.markup import escape
from rich.text import Text

import pipejax as pj
from pipejax.cli.options.activations import ActivationOptions, HeldMemory
from pipejax.cli.options.declared import CountIfGiven, JsonFlag
from pipejax.cli.options.pricing import Pricing, or_slots
from pipejax.cli.output.explored import save_page
from pipejax.cli.output.files import NO_OUTPUT, TIMELINE, Output
from pipejax.cli.output.numbers import console, percent, print_json, seconds
from pipejax.cli.output.report import pick, print_written
from pipejax.schedules.cells.ops import WAITS

if TYPE_CHECKING:
    from pipejax.analysis.activation_memory import ActivationMemory
    from pipejax.analysis.timeline import Arrow, Bar


TERMINAL = {
    pj.Phase.F: "black on bright_blue",
    pj.Phase.B: "black on bright_green",
    pj.Phase.I: "black on bright_cyan",
    pj.Phase.W: "black on bright_yellow",
    pj.Phase.R: "black on bright_magenta",
    pj.Phase.U: "black on bright_red",
    pj.Phase.O: "white on blue",
    pj.Phase.L: "white on magenta",
}
OTHER = "black on white"
BLOCKS = " ▁▂▃▄▅▆▇█"
NAMES = {"activations": "activations held", "bytes": "activation memory"}
PAIR = "black on bright_magenta"


def show(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    activations: ActivationOptions,
    out: Annotated[Output, TIMELINE] = NO_OUTPUT,
    messages: bool = False,
    memory: bool = False,
    width: CountIfGiven = None,
    json: JsonFlag = False,
) -> None:
    """Show the timeline of a schedule; without times, in the table's own slots.

    Options:
      out: .png, .pdf, .svg, or a page as `explore` writes (.html).

    Example:
      pipejax show -s hanayo -P 4 -M 4 --waves 2 --messages
    """
    costs = or_slots(pricing, table)
    evaluation = pj.evaluate(table, costs, link=links)
    unit = "s" if pricing is not None else "slots"
    sized = Pricing(lambda table: costs) if pricing is None else pricing
    sizes = activations.of(table, sized.workload, sized.microbatches)
    shown = sizes.held(evaluation) if memory else None
    if out.path is not None and out.path.suffix == ".html":
        more = [name for name, wanted in (("messages", messages), ("memory", memory)) if wanted]
        save_page([table], pricing, links, activations, out, show=more)
    elif out.path is not None:
        # matplotlib is an extra, slow to import
        from pipejax.plots.memory import Curves
        from pipejax.plots.timeline import draw_timeline

        curves = None if shown is None else Curves(shown.memory, NAMES[sizes.unit], sizes.text)
        drawn = partial(draw_timeline, messages=messages, unit=unit, memory=curves)
        out.save(lambda draft: drawn(evaluation, draft))
    if json:
        print_json(_as_json(evaluation, out) | ({} if shown is None else _memory_json(shown)))
    elif out.path is not None:
        print_written("drawn to", out.written)
    else:
        _print(evaluation, messages, shown, unit, width)


def _memory_json(held: HeldMemory) -> dict[str, object]:
    curves = [held.memory.curve(worker) for worker in range(len(held.memory.peak))]
    steps = [{"time": time, "held": level} for time, level in curves]
    return {"activation_memory": held.as_json() | {"curves": steps}}


def _as_json(evaluation: "pj.Evaluation", out: Output) -> dict[str, object]:
    from pipejax.analysis.timeline import arrows, bars

    return {
        **pick(evaluation, "schedule makespan"),
        **out.as_json(),
        "ops": [
            {"op": bar.label, **pick(bar, "worker start finish"), "critical": bar.is_critical}
            for bar in bars(evaluation)
        ],
        "messages": [
            {
                "op": str(arrow.op),
                **pick(arrow, "sender receiver start finish"),
                "critical": arrow.is_critical,
            }
            for arrow in arrows(evaluation)
        ],
    }


def _print(
    evaluation: "pj.Evaluation",
    messages: bool,
    held: HeldMemory | None,
    unit: str,
    width: int | None,
) -> None:
    from pipejax.analysis.timeline import arrows, bars

    out = console()
    peaks = [] if held is None else [held.stages.text(peak) for peak in held.memory.peak]
    label = max(map(len, [f"worker {evaluation.workers - 1}", *peaks]))
    columns = (width or out.width) - label - 3
    end = evaluation.makespan or 1.0
    total = seconds(evaluation.makespan) if unit == "s" else f"{evaluation.makespan:g} slots"
    out.print(
        f"[bold]{escape(evaluation.schedule)}[/] on {evaluation.workers} workers: {total}, idle "
        f"{percent(evaluation.bubble_ratio)}, {evaluation.links.model} links"
    )
    drawn, sent = bars(evaluation), arrows(evaluation)
    for worker in range(evaluation.workers):
        row = [bar for bar in drawn if bar.worker == worker]
        compute = [bar for bar in row if not bar.on_host_link and bar.ops[0].phase not in WAITS]
        lines = {f"worker {worker}": _row(compute, columns, end)}
        if evaluation.table.offloads:
            on_host = [bar for bar in row if bar.on_host_link]
            lines["host"] = _row(on_host, columns, end)
        if held is not None:
            lines[peaks[worker]] = _curve(held.memory, worker, columns, end)
        if messages:
            lines[""] = _lines([arrow for arrow in sent if arrow.sender == worker], columns, end)
        for name, line in lines.items():
            text = name.ljust(label) if name.startswith("worker") else name.rjust(label)
            out.print(Text(f"{text} ").append_text(line), no_wrap=True)
    legend = Text("number: microbatch, underlined: critical path  ")
    for phase, style in TERMINAL.items():
        if any(op.phase is phase for bar in drawn for op in bar.ops):
            legend.append(f" {phase.name} ", style).append(" ")
    if any(len(bar.ops) == 2 for bar in drawn):
        legend.append(" F+B ", PAIR).append(" ")
    if messages:
        legend.append(" ─ message under its sender")
    if held is not None:
        legend.append(f" ▃ {NAMES[held.stages.unit]}, at its peak the number")
    out.print(legend)


def _row(row: "list[Bar]", columns: int, end: float) -> Text:
    """One worker's ops as coloured cells; each at least one column while there is room."""
    # times over the end first: columns over an end of 1e-310 s are beyond a float
    cells = [(" ", "")] * columns
    for bar in row:
        first = min(round(bar.start / end * columns), columns - 1)
        size = min(max(round(bar.finish / end * columns), first + 1), columns) - first
        style = PAIR if len(bar.ops) == 2 else TERMINAL.get(bar.ops[0].phase, OTHER)
        style += " underline" if bar.is_critical else ""
        held = [op for op in bar.ops if op.microbatch >= 0]
        number = "+".join(str(op.microbatch) for op in held)
        lettered = "+".join(f"{op.phase.name}{op.microbatch}" for op in held)
        label = next((text for text in (lettered, number) if len(text) <= size), "").center(size)
        for k, letter in enumerate(label):
            cells[first + k] = (letter, style)
    return Text.assemble(*cells)


def _curve(memory: "ActivationMemory", worker: int, columns: int, end: float) -> Text:
    """The most that a worker holds in each column, relative to the largest peak of all."""
    time, held = memory.curve(worker)
    edges = np.arange(columns + 1) / columns * end
    first = np.searchsorted(time, edges[:-1], side="right") - 1
    after = np.maximum(np.searchsorted(time, edges[1:], side="left"), first + 1)
    steps = zip(first.tolist(), after.tolist(), strict=True)
    most = np.array([held[max(a, 0) : b].max(initial=0) for a, b in steps])
    size = np.ceil(most / (memory.peak.max() or 1) * (len(BLOCKS) - 1)).astype(int)
    return Text("".join(BLOCKS[k] for k in size), "bright_black")


def _lines(lines: "list[Arrow]", columns: int, end: float) -> Text:
    """Messages of one sender as thin lines, from leaving to arriving."""
    cells = [(" ", "")] * columns
    for arrow in lines:
        first = min(round(arrow.start / end * columns), columns - 1)
        for k in range(first, max(first + 1, min(round(arrow.finish / end * columns), columns))):
            cells[k] = ("─", "bold red" if arrow.is_critical else "dim")
    return Text.assemble(*cells)
