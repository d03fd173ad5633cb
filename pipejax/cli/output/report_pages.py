"""A report as a page: the parts and remedies of a run, and the explorer with the run in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.progress import waiting

if TYPE_CHECKING:
    from pipejax.analysis.runs.evaluate import Evaluation
    from pipejax.base.array_types import Float, NumpyArray
    from pipejax.plots.explorer.payload import MemoryView
    from pipejax.schedules.table.table import ScheduleTable
    from pipejax.search.remedies.explain import Explanation

ROUNDING = 1e-12  # of the step: a part below it is what sums in double precision leave
TEMPLATE = Path(__file__).with_name("report.html")
# from dark to light, so that parts are told apart in grey too; compute is the first
SHADES = (
    *("#A6D4F5", "#003C78", "#6F8EA4", "#00875F", "#F9F08F", "#D87C00"),
    *("#651E00", "#D9A2CB", "#87647E", "#1C1C1C", "#AEA864", "#B06500"),
)


class Ran(NamedTuple):
    """A measured run that the explorer shows first."""

    title: str
    run: "Evaluation"  # its replay
    starts: 'Float[NumpyArray, "workers slots"]'  # when its ops started [s]


class Section(NamedTuple):
    """Something that a report says, under a heading of its own."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    texts: int = 1  # columns that are texts; numbers stand behind them
    note: str = ""
    picture: str = ""  # an SVG above the table


def report_page(
    found: "Explanation",
    rows: Sequence[Mapping[str, Any]],
    title: str,
    lines: Sequence[str],
    *,
    sections: Sequence[Section] = (),
    heading: str = "Where the seconds go",
    name: str = "as it is",
    ran: Ran | None = None,
) -> str:
    """Return the page: the run as it is, called `name`, and with the first remedy."""
    from pipejax.plots.explorer.page import page, rendered
    from pipejax.plots.explorer.payload import Explored

    runs = [found.run, *(remedy.scenario.evaluate() for remedy in found.remedies[:1])]
    explored = [
        Explored(run, _memory(run.table), name=called)
        for called, run in zip((name, "first remedy"), runs, strict=False)
    ]
    names = [name, *(remedy.what for remedy in found.remedies[:1])]
    if ran is not None:
        replayed = Explored(ran.run, _memory(ran.run.table), None, "replayed", ran.starts)
        explored.insert(0, replayed)
        names = [f"{ran.title}, as it ran", "replayed", *names]
    parts = [part for part in found.parts if abs(part.seconds) > ROUNDING * found.step_time]
    first, *below = names
    with waiting("looking for closed forms"):
        explorer = page(explored)
    return rendered(
        TEMPLATE,
        {"time": seconds},
        title=title,
        lines=lines,
        sections=sections,
        heading=heading,
        parts=parts,
        shades=dict(zip((part.name for part in parts), SHADES * len(parts), strict=False)),
        drawn=sum(max(part.seconds, 0.0) for part in parts) or 1.0,
        step_time=found.step_time or 1.0,
        remedies=rows,
        shown=f"{first[0].upper()}{first[1:]}" + ", and below: " * bool(below) + "; ".join(below),
        explorer=explorer,
    )


def _memory(table: "ScheduleTable") -> "MemoryView":
    """What holds of a table, whatever a model says of bytes."""
    from pipejax.plots.explorer.payload import MemoryView

    return MemoryView(*ActivationOptions(None, None).of(table, None)[:5], None)
