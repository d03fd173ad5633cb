"""Parts of a report: tables from columns or from rows of the JSON, lines and drawings."""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipejax.base.checks import resolve_choice
from pipejax.base.data_files import WRITTEN, time_unit

# Numbers as a person reads them

ROUNDING = 1e-12  # smaller ratios count as 0
MAX_WRITTEN_OUT = 1e9  # larger numbers are written with an exponent


def digits(value: float) -> str:
    """Format a number with three significant digits, and all digits before the point."""
    return f"{value:.0f}" if 999.5 <= abs(value) < MAX_WRITTEN_OUT else f"{value:.3g}"


def seconds(value: float) -> str:
    """Format a time with the prefix that suits it."""
    rounded = float(f"{value:.3g}") if abs(value) < 1e3 else value
    factor, unit = time_unit(rounded)
    return f"{digits(rounded / factor)} {unit}"


def percent(value: float | None) -> str:
    """Format a ratio as a percentage, or a dash where there is none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{digits(100 * value if abs(value) > ROUNDING else 0.0)} %"


def above(ratio: float) -> str:
    """Format how far a value lies above the best one, relative to that."""
    digits = ".1f" if abs(ratio) >= 1e-3 else ".2g"
    return f"{100 * ratio:+{digits}} %" if abs(ratio) > 1e-9 else "0 %"


def gigabytes(value: float) -> str:
    """Format bytes."""
    return f"{digits(value / 1e9)} GB"


UNITS = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s")}


def quantity(value: float, unit: str) -> str:
    """Format a number of an SI unit with a prefix that suits it."""
    if format := {"s": seconds, "B": gigabytes, "1": percent}.get(unit):
        return format(value)
    factor, name = UNITS.get(unit, (1.0, unit))
    return f"{digits(value / factor)} {name}".rstrip()


NARROWEST = 40  # columns: in fewer, tables lose their text


def console() -> Console:
    """Return the console on stdout: as wide as the terminal or COLUMNS say, or 80 columns."""
    terminal = Console(highlight=False)
    terminal.width = max(terminal.width, NARROWEST)
    return terminal


def print_json(data: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print one JSON object on stdout, or one list of them."""
    sys.stdout.write(json_text(data) + "\n")


def json_text(data: Any) -> str:
    """Write a value as JSON, with arrays as lists."""
    return json.dumps(data, default=_json_value, allow_nan=False)


def _json_value(value: Any) -> Any:
    """Convert a value that `json` cannot write: an array, a mapping or a path."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


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
        """Return headers, and cells by column, without markup."""
        return [*map(_text, self.headers)], [[*map(_text, cells)] for cells in self.columns]


class Figure(NamedTuple):
    """A drawing that only pages show."""

    draw: Callable[[], str]  # returns it as HTML or SVG


def grid(columns: Iterable[tuple[str, Iterable[object]]], keys: int = 1, **style: Any) -> TextTable:
    """Make a table from its columns, each a header and the cells under it."""
    headers, cells = zip(*columns, strict=True)
    return TextTable(headers, [[*map(str, column)] for column in cells], keys=keys, **style)


def folded(table: TextTable) -> TextTable:
    """Move columns with the same value in all rows into the caption, except in CSV."""
    names, columns = table.plain()
    varies = [len(cells) == 1 or len({*cells}) > 1 for cells in columns]
    shared = [f"{names[k]} {c[0]}" for k, c in enumerate(columns) if not varies[k] and c[0]]
    if not has_lines() or not shared or not any(varies):
        return table
    headers, cells = [*compress(table.headers, varies)], [*compress(table.columns, varies)]
    return table._replace(headers=headers, columns=cells, caption=f"all: {', '.join(shared)}")


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
    """Return header and cells of a column with the unit in the header, if all cells have one.

    Times of several units are converted to a common one.
    """
    matches = {cell: _WITH_UNIT.fullmatch(cell) for cell in cells if cell != "-"}
    quantities = {cell: (match[1], match[2]) for cell, match in matches.items() if match}
    units = {unit for _, unit in quantities.values()}
    if not units or len(quantities) < len(matches):
        return header, cells
    if len(units) == 1:
        numbers = {cell: number for cell, (number, _) in quantities.items()}
        return f"{header} [{units.pop()}]", [numbers.get(cell, "-") for cell in cells]
    if not units <= {*WRITTEN["s"]}:
        return header, cells
    times = {cell: float(n) * WRITTEN["s"][unit] for cell, (n, unit) in quantities.items()}
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
    """Split a table into parts within a width; yield the indices of the columns of each part.

    Every part begins with the first `num_keys` columns.
    """
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
    """Share a width among columns, those first that lack least to their largest width."""
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


class Style(NamedTuple):
    """Style of printing of the command that runs, with its options and files."""

    format: str = "text"
    json: bool = False
    details: bool = False
    options: Mapping[str, Any] = {}  # those that are given
    outputs: Sequence[Any] = ()  # `Output` of each option that names one


_styles = [Style()]  # the last one counts


@contextmanager
def printing(format: str | None, **style_fields: Any) -> Iterator[None]:
    """Set the style of everything that is printed in this block, by the fields of `Style`."""
    format = format or "text"
    style = Style(resolve_choice(format, ("text", *FORMATS), "--format"), **style_fields)
    for option, is_on in (("--details", style.details), (f"--format {format}", format != "text")):
        if style.json and is_on:
            raise ValueError(f"{option} has no effect with --json")
    _styles.append(style)
    try:
        yield
    finally:
        _styles.pop()


def current_style() -> Style:
    """Return the style of the command that runs."""
    return _styles[-1]


def is_json() -> bool:
    """Return whether one JSON object is printed and nothing else."""
    return _styles[-1].json


def has_details() -> bool:
    """Return whether details are printed: tables in a format for documents are complete."""
    return _styles[-1].details or _styles[-1].format != "text"


def has_lines() -> bool:
    """Return whether lines are printed beside tables: CSV has tables alone."""
    return _styles[-1].format != "csv"


def print_all(*parts: object) -> None:
    """Print lines with markup, plain texts and tables; skip figures, which only pages have."""
    for part in parts:
        if isinstance(part, TextTable):
            _print_table(part)
        elif not isinstance(part, Figure):
            _print_line(part if isinstance(part, Text) else Text.from_markup(str(part)))


def plain(text: str) -> Text:
    """Make a line without markup, for example with names of files."""
    return Text(text)


def _print_table(table: TextTable) -> None:
    if _styles[-1].format != "text":
        sys.stdout.write(format_table(table, _styles[-1].format))
        return
    out = console()
    for part in fitted(table, out.width):
        out.print(part)


def _print_line(text: Text) -> None:
    """Print a line beside tables: in a file of LaTeX as a comment, in one of CSV not at all."""
    if _styles[-1].format == "text":
        out = console()
        out.print(text, soft_wrap=not out.is_terminal)
    elif has_lines():
        begin, end = ("% ", "") if _styles[-1].format == "latex" else ("", "\n")
        lines = text.plain.strip().splitlines()
        sys.stdout.write("".join(f"{begin}{line}\n" for line in lines) + end)


def table_sizes(table: Any) -> dict[str, Any]:
    """Return name and sizes of a table for `--json`; slices if microbatches have some."""
    slices = table.grammar.slices
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches // slices,
        **({"slices": slices} if slices > 1 else {}),
    }


def heading(sizes: Mapping[str, Any], note: str = "") -> str:
    """Return the heading of a report: the schedule, its edits and its sizes."""
    names = ("workers", "stages", "microbatches")
    counts = ", ".join(
        f"{sizes[name]} {name.removesuffix('s') if sizes[name] == 1 else name}" for name in names
    )
    return (
        f"[bold]{escape(sizes['schedule'])}[/]{note}, {counts}"
        f"{' in {slices} slices'.format(**sizes) if 'slices' in sizes else ''}"
    )


SEARCH_FIELDS = "value lower_bound gap baselines evaluated stopped"  # of every search result


def saving(before: float | None, after: float) -> float | None:
    """Return the share of a time that a shorter one saves; None where there is no time before."""
    return 1 - after / before if before else before


def savings(noun: str, time: str, times: Mapping[str, float | None], best: float) -> TextTable:
    """Make a table of the best candidate of a search and its baselines, with their times [s].

    The headers are `noun`, `time` and what the best saves; an illegal baseline has the time None.
    """
    all_times = {"best": best, **times}
    texts = ("-" if time is None else seconds(time) for time in all_times.values())
    shares = (percent(saving(time, best)) for time in all_times.values())
    return grid([(noun, all_times), (time, texts), ("the best saves", shares)])


def search_end(result: Any, candidates: str) -> Iterator[str]:
    """Yield the lower bound of a search and why it stopped; `candidates` is a plural noun."""
    if not result.lower_bound:
        yield "no lower bound is known: a much shorter time may be possible"
    elif result.gap <= 1e-12:
        yield "optimal: the time is at its lower bound"
    else:
        bound = seconds(result.lower_bound)
        yield f"lower bound {bound}: at most {percent(result.gap)} more could be saved"
    yield f"{result.evaluated} {candidates} evaluated; search ended: {result.stopped}"


def pick(record: Any, names: str) -> dict[str, Any]:
    """Return attributes by name; `names` has spaces between them."""
    return {name: getattr(record, name) for name in names.split()}
