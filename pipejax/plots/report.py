"""A report as one page: why a step takes so long, what helps, and the explorer in it.

What else is known stands in sections before that: pictures, and tables of numbers.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TEMPLATE = Path(__file__).with_name("report.html")
# from dark to light, so that parts are told apart in grey too; compute is the first
SHADES = (
    "#A6D4F5",
    "#003C78",
    "#6F8EA4",
    "#00875F",
    "#F9F08F",
    "#D87C00",
    "#651E00",
    "#D9A2CB",
    "#87647E",
    "#1C1C1C",
    "#AEA864",
    "#B06500",
)


class PartShown(NamedTuple):
    """A part of a step.

    Attributes:
      name: its name.
      time: as it is printed.
      share: of the step; negative ones have no place in the bar.
      of: what it is of.
    """

    name: str
    time: str
    share: float
    of: str


class RemedyShown(NamedTuple):
    """A remedy, as it is printed."""

    what: str
    saves: str
    step_time: str
    memory: str
    bound: str
    assumes: str
    command: str


class Section(NamedTuple):
    """Something that a report says, under a heading of its own.

    Attributes:
      title: heading.
      head: names of the columns of a table; "" where there is none.
      rows: its cells.
      texts: how many columns are texts; numbers stand behind them.
      note: a text below.
      picture: an SVG above the table; none if "".
    """

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    texts: int = 1
    note: str = ""
    picture: str = ""


def report(
    title: str,
    lines: Sequence[str],
    parts: Sequence[PartShown],
    remedies: Iterable[RemedyShown],
    shown: str,
    explorer: str,
    *,
    sections: Iterable[Section] = (),
    heading: str = "Where the seconds go",
) -> str:
    """Return a page that needs no other file and no network.

    Args:
      title: what the report is of.
      lines: the diagnosis; the first one is set large.
      parts: of the step, which are drawn as one bar.
      remedies: by what they save.
      shown: what the explorer shows.
      explorer: its page.
      sections: what stands between the diagnosis and the parts.
      heading: of the parts.
    """
    shades = dict(zip((part.name for part in parts), SHADES * len(parts), strict=False))
    whole = sum(max(part.share, 0.0) for part in parts) or 1.0
    filled = {
        "title": html.escape(title),
        "lines": "\n".join(_lines(lines)),
        "sections": "\n".join(map(_section, sections)),
        "heading": html.escape(heading),
        "bar": "".join(
            f'<div style="width:{100 * part.share / whole:.4f}%;background:{shades[part.name]}" '
            f'title="{html.escape(f"{part.name}: {part.time}")}"></div>'
            for part in parts
            if part.share > 0
        ),
        "parts": "\n".join(
            _row(
                f'<span class="swatch" style="background:{shades[part.name]}"></span>',
                html.escape(part.name),
                *_numbers(part.time, f"{100 * part.share:.2f} %"),
                html.escape(part.of),
            )
            for part in parts
        ),
        "remedies": "\n".join(_remedies(remedies)),
        "shown": html.escape(shown),
        "explorer": html.escape(explorer),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"<!--(\w+)-->", lambda mark: filled[mark[1]], text)


def _lines(lines: Sequence[str]) -> Iterator[str]:
    for place, line in enumerate(lines):
        yield f"<p{' class=why' if place == 0 else ''}>{html.escape(line)}</p>"


def _section(one: Section) -> str:
    """A heading, a picture, a table and a text, as far as there are any."""
    parts = [f"<h2>{html.escape(one.title)}</h2>"]
    if one.picture:
        parts.append(f'<div class="scroll picture">{one.picture}</div>')
    if one.rows:
        classes = [""] * one.texts + [' class="number"'] * (len(one.head) - one.texts)
        head = (
            f"<th{k}>{html.escape(name)}</th>" for k, name in zip(classes, one.head, strict=True)
        )
        rows = (
            _row(*map(html.escape, row[: one.texts]), *_numbers(*row[one.texts :]))
            for row in one.rows
        )
        lines = "\n".join([f"<tr>{''.join(head)}</tr>", *rows])
        parts.append(f'<div class="scroll"><table>\n{lines}\n</table></div>')
    if one.note:
        parts.append(f'<p class="assumes">{html.escape(one.note)}</p>')
    return "\n".join(parts)


def _remedies(remedies: Iterable[RemedyShown]) -> Iterator[str]:
    for number, each in enumerate(remedies, 1):
        assumes = html.escape(f"Assumes: {each.assumes}.") if each.assumes else ""
        yield _row(
            f"{number}",
            f'{html.escape(each.what)}<div class="assumes">{assumes}</div>'
            f"<code>{html.escape(each.command)}</code>",
            *_numbers(each.saves, each.step_time, each.memory, each.bound),
        )


def _row(*cells: str) -> str:
    made = (cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in cells)
    return f"<tr>{''.join(made)}</tr>"


def _numbers(*texts: str) -> Iterator[str]:
    for text in texts:
        yield f'<td class="number">{html.escape(text)}</td>'
