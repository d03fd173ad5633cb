"""Tables as text that keeps the width, as Markdown, LaTeX or CSV: one description of each."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

LONG = 20  # columns of a cell that is broken at its spaces where room is scarce
NARROW = 16  # columns that such a cell keeps
FRAME = 3  # columns between two cells
# what stands on the right: a number, with its unit
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?[%A-Za-z/]+)?|-|")
_BARS = re.compile(r"[▁-█ ]*")
_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


class KeyedTable(Table):
    """A table of texts with markup.

    Attributes:
      keys: how many columns say what a row is of: a table that is too wide goes on below with them.
    """

    keys: int = 1


def grid(
    columns: Iterable[tuple[str, Iterable[object]]],
    keys: int = 1,
    styles: Iterable[str] = (),
    **style: Any,
) -> KeyedTable:
    """Make a table from its columns, each a header and the cells under it.

    Args:
      columns: headers and cells.
      keys: columns that say what a row is of.
      styles: of the rows.
      style: of the table, as rich takes it: title, caption, box.
    """
    headers, cells = zip(*columns, strict=True)
    table = KeyedTable(*headers, **style)
    table.keys = keys
    for row in zip(*cells, strict=True):
        table.add_row(*map(str, row))
    for row_style, drawn in zip(styles, table.rows, strict=False):
        drawn.style = row_style
    return table


def facts(rows: Iterable[tuple[str, str]]) -> KeyedTable:
    """Make a list of names and what they are."""
    names, values = zip(*rows, strict=True)
    table = grid([("name", names), ("value", values)], show_header=False, box=None, padding=(0, 2))
    table.columns[0].no_wrap = True
    return table


def lines_of(table: Table, format: str) -> str:
    """Write a table in a format that is not for a terminal."""
    headers, cells = _plain(table)
    kept = [k for k, column in enumerate(cells) if not all(map(_BARS.fullmatch, column))]
    headers, cells = [headers[k] for k in kept], [cells[k] for k in kept]
    rows = list(zip(*cells, strict=True))
    right = [_is_number(column) for column in cells]
    titles = [text for text in (table.title, table.caption) if text]
    return FORMATS[format](headers, rows, right, [_text(str(text)) for text in titles])


def _markdown(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: list[bool], titles: list[str]
) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    rule = line("---:" if each else "---" for each in right)
    said = "".join(f"{title}\n\n" for title in titles)
    return said + line(headers) + rule + "".join(map(line, rows)) + "\n"


def _latex(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: list[bool], titles: list[str]
) -> str:
    def line(cells: Iterable[str]) -> str:
        return " & ".join("".join(_LATEX.get(c, c) for c in cell) for cell in cells) + r" \\" + "\n"

    columns = "".join("r" if each else "l" for each in right)
    said = "".join(f"% {title}\n" for title in titles)
    body = f"\\hline\n{line(headers)}\\hline\n{''.join(map(line, rows))}\\hline\n"
    return f"{said}\\begin{{tabular}}{{{columns}}}\n{body}\\end{{tabular}}\n\n"


def _csv(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: list[bool], titles: list[str]
) -> str:
    del right, titles
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([headers, *rows])
    return text.getvalue() + "\n"


FORMATS: Mapping[str, Callable[..., str]] = {"markdown": _markdown, "latex": _latex, "csv": _csv}


def fitted(table: Table, width: int) -> Iterator[Table | str]:
    """Yield what draws a table in so many columns: nothing is cut.

    Headers and long cells are broken at their spaces. Where that is not enough, the table goes on
    below itself, with the columns again that say what a row is of.
    """
    if table.box is None:
        for column in table.columns:
            column.overflow = "fold"
        yield table
        return
    headers, cells = _plain(table)
    least = [_least(header, column) for header, column in zip(headers, cells, strict=True)]
    keys = table.keys if isinstance(table, KeyedTable) else 1
    if table.title:
        yield f"[italic]{table.title}[/]"
    for part in _parts(least, keys, width):
        widest = [max(map(cell_len, (headers[k], *cells[k]))) for k in part]
        room = _widths([least[k] for k in part], widest, width - FRAME * len(part) - 1)
        drawn = Table(box=table.box)
        for k, columns in zip(part, room, strict=True):
            where: Any = "right" if _is_number(cells[k]) else "left"
            drawn.add_column(headers[k], width=columns, justify=where, overflow="fold")
        marked = [list(table.columns[k].cells) for k in part]
        for style, *row in zip((row.style for row in table.rows), *marked, strict=True):
            drawn.add_row(*row, style=style)
        yield drawn
    if table.caption:
        yield f"[italic]{table.caption}[/]"


def _parts(least: Sequence[int], keys: int, width: int) -> Iterator[list[int]]:
    """Yield the columns of each part of a table, the keys first in all."""
    first = list(range(min(keys, len(least))))
    part = list(first)
    for k in range(len(first), len(least)):
        if len(part) > keys and sum(least[j] + FRAME for j in (*part, k)) + 1 > width:
            yield part
            part = list(first)
        part.append(k)
    yield part


def _widths(least: Sequence[int], widest: Sequence[int], room: int) -> list[int]:
    """Share what is left of the room among columns, those that lack least first."""
    widths, spare = list(least), room - sum(least)
    for k in sorted(range(len(least)), key=lambda k: widest[k] - least[k]):
        more = max(0, min(widest[k] - least[k], spare))
        widths[k], spare = widths[k] + more, spare - more
    return widths


def _least(header: str, cells: Sequence[str]) -> int:
    """Columns that a column cannot do without: words are not broken, nor are short cells."""
    longest = max(map(cell_len, cells), default=0)
    words = [cell_len(word) for text in (header, *cells) for word in text.split()]
    if longest > LONG and longest > max(words, default=0):
        return max(NARROW, *words)
    return max([longest, *(cell_len(word) for word in header.split())], default=1)


def _is_number(cells: Sequence[str]) -> bool:
    return any(cells) and all(map(_NUMBER.fullmatch, cells))


def _plain(table: Table) -> tuple[list[str], list[list[str]]]:
    """Headers and cells by column, without markup."""
    headers = [_text(str(column.header)) for column in table.columns]
    return headers, [[_text(str(cell)) for cell in column.cells] for column in table.columns]


def _text(marked: str) -> str:
    return Text.from_markup(marked).plain
