"""A report as a page: the parts and remedies of a run, and the explorer with the run in it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.progress import waiting

if TYPE_CHECKING:
    from pipejax.analysis.runs.evaluate import Evaluation
    from pipejax.base.array_types import Float, NumpyArray
    from pipejax.plots.explorer.payload import MemoryShown
    from pipejax.plots.report import Section
    from pipejax.schedules.table.table import ScheduleTable
    from pipejax.search.remedies.explain import Explanation

ROUNDING = 1e-12  # of the step: a part below it is what sums in double precision leave


class Ran(NamedTuple):
    """A measured run that the explorer shows first.

    Attributes:
      title: which it is.
      run: its replay.
      starts: (workers, slots) when its ops started [s].
    """

    title: str
    run: "Evaluation"
    starts: 'Float[NumpyArray, "workers slots"]'


def report_page(
    found: "Explanation",
    rows: Sequence[Mapping[str, Any]],
    title: str,
    lines: Sequence[str],
    *,
    sections: "Sequence[Section]" = (),
    heading: str = "Where the seconds go",
    name: str = "as it is",
    ran: Ran | None = None,
) -> str:
    """The report, with the run as it is and with the first remedy.

    Args:
      found: parts of the run and remedies.
      rows: the remedies as `--json` has them.
      title: what the report is of.
      lines: of diagnosis.
      sections: what stands before the parts.
      heading: of the parts.
      name: what the run is called.
      ran: what is shown above both, as it ran and as replayed.
    """
    from pipejax.plots.explorer.page import page
    from pipejax.plots.explorer.payload import Explored
    from pipejax.plots.report import PartShown, RemedyShown, report

    setups = [found.memory.begin, *(remedy.setup for remedy in found.remedies[:1])]
    explored = [
        Explored(setup.run, _memory(setup.table), name=called)
        for called, setup in zip((name, "first remedy"), setups, strict=False)
    ]
    names = [name, *(remedy.what for remedy in found.remedies[:1])]
    if ran is not None:
        replayed = Explored(ran.run, _memory(ran.run.table), None, "replayed", ran.starts)
        explored.insert(0, replayed)
        names = [f"{ran.title}, as it ran", "replayed", *names]
    remedies = [
        RemedyShown(
            row["what"],
            seconds(row["saves"]),
            seconds(row["step_time"]),
            f"x {row['memory']:.3g}",
            seconds(row["bound"]),
            row["assumes"],
            row["command"],
        )
        for row in rows
    ]
    parts = [
        PartShown(name, seconds(time), time / (found.step_time or 1.0), of)
        for name, time, of in found.parts
        if abs(time) > ROUNDING * found.step_time
    ]
    first, *below = names
    shown = f"{first[0].upper()}{first[1:]}" + ", and below: " * bool(below) + "; ".join(below)
    with waiting("looking for closed forms"):
        explorer = page(explored)
    return report(
        title, lines, parts, remedies, shown, explorer, sections=sections, heading=heading
    )


def _memory(table: "ScheduleTable") -> "MemoryShown":
    """What holds of a table, whatever a model says of bytes."""
    from pipejax.plots.explorer.payload import MemoryShown

    return MemoryShown(*ActivationOptions(None, None).of(table, None)[:5], None)
