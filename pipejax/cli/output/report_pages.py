"""A report as a page: the parts of its text, drawings, and the explorer with the run in it."""

from collections.abc import Iterable, Mapping
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from pipejax.cli.output.answer import progress
from pipejax.cli.output.report import Figure, TextTable, is_number, seconds
from pipejax.plots.palette import ink

if TYPE_CHECKING:
    from pipejax.analysis.runs.evaluate import Evaluation
    from pipejax.base.array_types import Float, NumpyArray
    from pipejax.search.remedies.explain import Explanation

TEMPLATE = Path(__file__).with_name("report.html")
MIN_LABELLED = 0.1  # share of a bar from which a part has its name in it
# alternately light and dark, so that parts differ in grey too; compute is the first
SHADES = (
    *("#A6D4F5", "#003C78", "#6F8EA4", "#00875F", "#F9F08F", "#D87C00"),
    *("#651E00", "#D9A2CB", "#87647E", "#1C1C1C", "#AEA864", "#B06500"),
)


class MeasuredRun(NamedTuple):
    """A measured run that the explorer shows first."""

    title: str
    run: "Evaluation"  # its replay
    starts: 'Float[NumpyArray, "workers slots"]'  # when its ops started [s]


def share_bar(parts: Mapping[str, float]) -> Figure:
    """Make a bar of parts [s], each as wide as its share and with its name."""
    times = {name: time for name, time in parts.items() if time > 0}
    total, cells = sum(times.values()), ""
    for shade, (name, time) in zip(cycle(SHADES), times.items(), strict=False):
        label = escape(name) if time > MIN_LABELLED * total else ""
        style = f"width:{100 * time / total:.4f}%;background:{shade};color:{ink(shade)}"
        cells += f'<div style="{style}" title="{escape(name)}: {seconds(time)}">{label}</div>'
    return Figure(lambda: f'<div class="bar">{cells}</div>')


def report_page(
    explanation: "Explanation",
    title: str,
    view: Iterable[object],
    details: Mapping[str, Iterable[object]],
    *,
    name: str = "as it is",
    ran: MeasuredRun | None = None,
) -> str:
    """Return a page: the parts of a text, and the run, called `name`, in the explorer."""
    from pipejax.plots.explorer.payload import Explored, page, rendered

    explored, titles = [Explored(explanation.run, name)], [name]
    if ran is not None:
        explored.insert(0, Explored(ran.run, "replayed", recorded=ran.starts))
        titles = [f"{ran.title}, as it ran", "replayed", name]
    for remedy in explanation.remedies[:1]:
        explored.append(Explored(remedy.scenario.evaluate(), "first remedy"))
        titles.append(remedy.what)
    title_of_first, *titles_below = titles
    with progress("looking for closed forms"):
        explorer = page(explored)
    return rendered(
        TEMPLATE,
        title=title,
        view=[*map(_page_part, view)],
        details={name: [*map(_page_part, parts)] for name, parts in details.items()},
        shown=title_of_first[0].upper()
        + title_of_first[1:]
        + (f", and below: {'; '.join(titles_below)}" if titles_below else ""),
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
