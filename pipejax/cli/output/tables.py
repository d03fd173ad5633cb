"""Tables of texts: from columns or from rows of the JSON, in Markdown, LaTeX, CSV or a terminal."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipejax.base.data_files import UNITS_BY_DIMENSION, time_unit

# widths, in characters
LONG = 20  # a longer cell is broken at its spaces in a narrow terminal
NARROW = 16  # least width of a broken cell
FRAME = 3  # between two cells
# a number, with its unit
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?[%A-Za-z/]+)?|-|")
_WITH_UNIT = re.compile(r"([-+]?\d[\d.]*(?:e[-+]?\d+)?) ([%A-Za-z/]+)")
_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


class TextTable(NamedTuple):
    """A table of texts with markup, for a terminal, a document or a page."""

    headers: Sequence[str]
    columns: Sequence[Sequence[str]]  # cells of each column
    title: str = ""
    caption: str = ""
    # number of first columns that identify a row; a table that is too wide repeats them below
    keys: int = 1
    is_list: bool = False  # whether it has names and values, without heads or frame
    math: Mapping[str, str] = {}  # LaTeX of a cell, by its text

    def plain(self) -> tuple[list[str], list[list[str]]]:
        """Return headers, and cells by column, without markup; headers have none, but units."""
        return [*self.headers], [[*map(_text, cells)] for cells in self.columns]


class Figure(NamedTuple):
    """A drawing that only pages show."""

    draw: Callable[[], str]  # returns it as HTML or SVG


def grid(columns: Iterable[tuple[str, Iterable[object]]], keys: int = 1, **style: Any) -> TextTable:
    """Make a table from its columns, each a header and the cells under it."""
    headers, cells = zip(*columns, strict=True)
    return TextTable(headers, [[*map(str, column)] for column in cells], keys=keys, **style)


class Column(NamedTuple):
    """A column of a table whose rows are those that `--json` prints."""

    header: str
    # name of its value in a row, or a function of a row that returns the cell
    value: str | Callable[[Any], object]
    # formats a value that has a name; a row without one gets a dash
    format: Callable[[Any], object] = str

    def cell(self, row: Mapping[str, Any]) -> object:
        """Return the cell of a row."""
        if callable(self.value):
            return self.value(row)
        value = row.get(self.value)
        return "-" if value is None else self.format(value)


def rows_table(
    rows: Iterable[Mapping[str, Any]], columns: Iterable[Column], keys: int = 1, **style: Any
) -> TextTable:
    """Make a table of rows as `grid` makes one of columns."""
    rows = list(rows)
    return grid(((column.header, map(column.cell, rows)) for column in columns), keys, **style)


def facts(rows: Iterable[tuple[str, str]], math: Mapping[str, str] | None = None) -> TextTable:
    """Make a list of names and values; LaTeX has `math` for cells of these texts."""
    names, values = zip(*rows, strict=True)
    return grid([("name", names), ("value", values)], is_list=True, math=math or {})


def format_table(table: TextTable, format: str) -> str:
    """Write a table in a format that is not for a terminal."""
    headers, columns = table.plain()
    if format == "latex":
        math = {text: _Math(latex) for text, latex in table.math.items()}
        columns = [[math.get(cell, cell) for cell in cells] for cells in columns]
    right = [is_number(cells) for cells in columns]
    titles = [_text(text) for text in (table.title, table.caption) if text]
    return FORMATS[format](headers, list(zip(*columns, strict=True)), right, titles)


def _markdown(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: list[bool], titles: list[str]
) -> str:
    """Write a table in Markdown; `right` says which columns are aligned to the right."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    rule = line("---:" if is_right else "---" for is_right in right)
    text = "".join(f"{title}\n\n" for title in titles)
    return text + line(headers) + rule + "".join(map(line, rows)) + "\n"


def _latex(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: list[bool], titles: list[str]
) -> str:
    """Write a table of LaTeX's booktabs: three rules, and the unit of a column in its head."""

    def line(cells: Iterable[str]) -> str:
        return " & ".join(map(_latex_cell, cells)) + r" \\" + "\n"

    columns = [_move_unit(h, [row[k] for row in rows]) for k, h in enumerate(headers)]
    head = line(header for header, _ in columns)
    body = "".join(map(line, zip(*(cells for _, cells in columns), strict=True)))
    alignment = "".join("r" if is_right else "l" for is_right in right)
    comments = "".join(f"% {title}\n" for title in titles)
    lines = f"\\toprule\n{head}\\midrule\n{body}\\bottomrule\n"
    return f"{comments}\\begin{{tabular}}{{{alignment}}}\n{lines}\\end{{tabular}}\n\n"


class _Math(str):
    """A cell that is LaTeX already."""

    __slots__ = ()


def _latex_cell(cell: str) -> str:
    return f"${cell}$" if isinstance(cell, _Math) else "".join(_LATEX.get(c, c) for c in cell)


def _move_unit(header: str, cells: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return header and cells of a column, with one unit in the header if all cells have any."""
    matches = {cell: _WITH_UNIT.fullmatch(cell) for cell in cells if cell != "-"}
    quantities = {cell: (match[1], match[2]) for cell, match in matches.items() if match}
    units = {unit for _, unit in quantities.values()}
    if not units or len(quantities) < len(matches):
        return header, cells
    if len(units) == 1:
        numbers = {cell: number for cell, (number, _) in quantities.items()}
        return f"{header} [{units.pop()}]", [numbers.get(cell, "-") for cell in cells]
    if not units <= {*UNITS_BY_DIMENSION["s"]}:
        return header, cells
    units_of_time = UNITS_BY_DIMENSION["s"]
    times = {cell: float(n) * units_of_time[unit] for cell, (n, unit) in quantities.items()}
    factor, unit = time_unit(max(map(abs, times.values())))
    numbers = {cell: f"{time / factor:.5g}" for cell, time in times.items()}
    return f"{header} [{unit}]", [numbers.get(cell, "-") for cell in cells]


def _csv(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: list[bool], titles: list[str]
) -> str:
    del right, titles
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([headers, *rows])
    return text.getvalue() + "\n"


FORMATS: Mapping[str, Callable[..., str]] = {"markdown": _markdown, "latex": _latex, "csv": _csv}


def fitted(grid: TextTable, width: int) -> Iterator[Table | str]:
    """Yield a table as rich prints it within `width` columns of the terminal.

    Headers and long cells are broken at their spaces. If the table is still too wide, it is split:
    further columns stand below, after the columns that identify a row.
    """
    if grid.is_list:
        names = Table(box=None, show_header=False, padding=(0, 2))
        names.add_column(no_wrap=True)
        names.add_column(overflow="fold")
        for row in zip(*grid.columns, strict=True):
            names.add_row(*row)
        yield names
        return
    headers, columns = grid.plain()
    min_widths = [_min_width(header, cells) for header, cells in zip(headers, columns, strict=True)]
    if grid.title:
        yield f"[italic]{grid.title}[/]"
    for part in _parts(min_widths, grid.keys, width):
        max_widths = [max(map(cell_len, (headers[k], *columns[k]))) for k in part]
        part_width = width - FRAME * len(part) - 1
        widths = _share_width([min_widths[k] for k in part], max_widths, part_width)
        table = Table()
        for k, column_width in zip(part, widths, strict=True):
            side: Any = "right" if is_number(columns[k]) else "left"
            table.add_column(escape(headers[k]), width=column_width, justify=side, overflow="fold")
        for row in zip(*(grid.columns[k] for k in part), strict=True):
            table.add_row(*row)
        yield table
    if grid.caption:
        yield f"[italic]{grid.caption}[/]"


def _parts(min_widths: Sequence[int], num_keys: int, width: int) -> Iterator[list[int]]:
    """Split a table into parts within a width, each behind the keys; yield indices of columns."""
    keys = list(range(min(num_keys, len(min_widths))))
    part = list(keys)
    for k in range(len(keys), len(min_widths)):
        part_width = sum(min_widths[j] + FRAME for j in (*part, k)) + 1
        if len(part) > num_keys and part_width > width:
            yield part
            part = list(keys)
        part.append(k)
    yield part


def _share_width(min_widths: Sequence[int], max_widths: Sequence[int], width: int) -> list[int]:
    """Share a width among columns; columns that lack least to their largest width come first."""
    # min 4 4, max 6 10, width 12: 4 are spare, so the first gets 6, and the second 6
    widths, spare = list(min_widths), width - sum(min_widths)
    lacking = [largest - least for least, largest in zip(min_widths, max_widths, strict=True)]
    for k in sorted(range(len(widths)), key=lambda k: lacking[k]):
        more = max(0, min(lacking[k], spare))
        widths[k], spare = widths[k] + more, spare - more
    return widths


def _min_width(header: str, cells: Sequence[str]) -> int:
    """Return the least width of a column: words and short cells are not broken."""
    longest = max(map(cell_len, cells), default=0)
    words = [cell_len(word) for text in (header, *cells) for word in text.split()]
    if longest > LONG and longest > max(words, default=0):
        return max(NARROW, *words)
    return max([longest, *(cell_len(word) for word in header.split())], default=1)


def is_number(cells: Sequence[str]) -> bool:
    """Return whether the cells of a column are numbers, which stand on the right."""
    return any(cells) and all(map(_NUMBER.fullmatch, cells))


def _text(marked: str) -> str:
    return Text.from_markup(marked).plain
