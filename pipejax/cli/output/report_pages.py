"""A report as a page: the parts of its text, drawings, and the explorer with the run in it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

import pipejax as pj
from pipejax.cli.output.report import progress
from pipejax.cli.output.tables import Figure, TextTable, is_number

if TYPE_CHECKING:
    from pipejax.base.array_types import Float, NumpyArray

TEMPLATE = Path(__file__).with_name("report.html")


class MeasuredRun(NamedTuple):
    """A measured run that the explorer shows first."""

    title: str
    run: "pj.Evaluation"  # its replay
    starts: 'Float[NumpyArray, "workers slots"]'  # when its ops started [s]


def report_page(
    explanation: "pj.results.Explanation",
    title: str,
    view: Iterable[object],
    details: Mapping[str, Iterable[object]],
    *,
    name: str = "as it is",
    ran: MeasuredRun | None = None,
) -> str:
    """Return a page with the parts of a report, and all of its runs in the explorer."""
    from pipejax.plots.explorer.payload import Explored, page, rendered

    explored, titles = [Explored(explanation.run, name)], [name]
    if ran is not None:
        explored.insert(0, Explored(ran.run, "replayed", recorded=ran.starts))
        titles = [f"{ran.title}, as it ran", "replayed", name]
    for remedy in explanation.remedies[:1]:
        explored.append(Explored(remedy.scenario.evaluate(), "first remedy"))
        titles.append(remedy.what)
    shown = ", and below: ".join(filter(None, (titles[0], "; ".join(titles[1:]))))
    with progress("looking for closed forms"):
        explorer = page(explored)
    return rendered(
        TEMPLATE,
        title=title,
        view=[*map(_page_part, view)],
        details={name: [*map(_page_part, parts)] for name, parts in details.items()},
        shown=shown[0].upper() + shown[1:],
        explorer=explorer,
    )


def _page_part(part: object) -> dict[str, Any]:
    """Return a part for the template: a table, a drawing or a line."""
    if isinstance(part, Figure):
        return {"drawing": part.draw()}
    if isinstance(part, TextTable):
        headers, columns = part.plain()
        is_right = [is_number(cells) for cells in columns]
        rows = [[*zip(row, is_right, strict=True)] for row in zip(*columns, strict=True)]
        heads = [] if part.is_list else [*zip(headers, is_right, strict=True)]
        return {"rows": rows, "heads": heads, "title": part.title, "caption": part.caption}
    line = part if isinstance(part, Text) else Text.from_markup(str(part))
    return {"line": line.plain.strip()}
