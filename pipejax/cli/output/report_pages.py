"""A report as a page: the parts and remedies of a run, and the explorer with the run in it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.progress import waiting

if TYPE_CHECKING:
    from pipejax.plots.report import Section
    from pipejax.search.remedies.explain import Explanation

ROUNDING = 1e-12  # of the step: a part below it is what sums in double precision leave


def report_page(
    found: "Explanation",
    rows: Sequence[Mapping[str, Any]],
    title: str,
    lines: Sequence[str],
    *,
    sections: "Sequence[Section]" = (),
    heading: str = "Where the seconds go",
) -> str:
    """The report, with the run as it is and with the first remedy.

    Args:
      found: parts of the run and remedies.
      rows: the remedies as `--json` has them.
      title: what the report is of.
      lines: of diagnosis.
      sections: what stands before the parts.
      heading: of the parts.
    """
    from pipejax.plots.explorer.page import page
    from pipejax.plots.explorer.payload import Explored, MemoryShown
    from pipejax.plots.report import PartShown, RemedyShown, report

    setups = [found.memory.begin, *(remedy.setup for remedy in found.remedies[:1])]
    # what holds of the table, whatever a model says of bytes
    sized = ActivationOptions(None, None)
    explored = [
        Explored(setup.run, MemoryShown(*sized.of(setup.table, None)[:4], None)) for setup in setups
    ]
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
    shown = "As it is" if len(setups) == 1 else f"As it is, and below: {found.remedies[0].what}"
    with waiting("looking for closed forms"):
        explorer = page(explored)
    return report(
        title, lines, parts, remedies, shown, explorer, sections=sections, heading=heading
    )
