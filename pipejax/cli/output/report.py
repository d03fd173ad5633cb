"""Parts of a report and how they are printed: lines, tables of a search, headings, the style."""

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pipejax.base.checks import resolve_choice
from pipejax.cli.output.numbers import percent, saving, seconds
from pipejax.cli.output.tables import FORMATS, Figure, TextTable, fitted, format_table, grid

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


def folded(table: TextTable) -> TextTable:
    """Move columns with the same value in all rows into the caption, except in CSV."""
    names, columns = table.plain()
    varies = [len(cells) == 1 or len({*cells}) > 1 for cells in columns]
    shared = [f"{names[k]} {c[0]}" for k, c in enumerate(columns) if not varies[k] and c[0]]
    if not has_lines() or not shared or not any(varies):
        return table
    headers, cells = [*compress(table.headers, varies)], [*compress(table.columns, varies)]
    return table._replace(headers=headers, columns=cells, caption=f"all: {', '.join(shared)}")


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
    """Return the heading of a report: the schedule or its file, a note, and sizes."""
    nouns = {"workers": "worker", "stages": "stage", "microbatches": "microbatch"}
    counts = ", ".join(
        f"{sizes[name]} {noun if sizes[name] == 1 else name}" for name, noun in nouns.items()
    )
    slices = f" in {sizes['slices']} slices" if "slices" in sizes else ""
    return f"[bold]{schedule_name(sizes)}[/]{note}, {counts}{slices}"


def schedule_name(sizes: Mapping[str, Any]) -> str:
    """Return the schedule, or the name of its file."""
    return escape(Path(str(current_style().options.get("table", sizes["schedule"]))).name)


# reasons to stop a search that could still improve, by `stopped` of --json
STOP_TEXTS = {"time": "--time-limit", "effort": "--effort", "gap": "--gap", "interrupted": "Ctrl-C"}
SEARCH_FIELDS = "value lower_bound gap baselines evaluated stopped"  # of every search result


def savings(
    noun: str,
    time: str,
    times: Mapping[str, float | None],
    best: float,
    too_large: Collection[str] = (),
) -> TextTable:
    """Make a table of the best candidate of a search and its baselines, with their times [s]."""
    # baselines named in `too_large` do not fit in memory
    all_times = {"best": best, **times}
    texts = ("-" if time is None else seconds(time) for time in all_times.values())
    shares = (
        "does not fit in memory" if name in too_large else percent(saving(time, best))
        for name, time in all_times.items()
    )
    names = (name.replace("scattered", "random") for name in all_times)
    names = (name.replace("folded", "first and last side by side") for name in names)
    labels = (name.replace("PyTorch", "as PyTorch gathers") for name in names)
    return grid([(noun, labels), (time, texts), ("the best is shorter by", shares)])


def less_than(name: str, time: float | None, best: float) -> str:
    """Compare the best time with that of the named candidate [s]."""
    share = saving(time, best) or 0.0
    return f"{percent(share)} less than {name}" if share > 1e-9 else f"as fast as {name}"


def search_end(result: Any, candidates: str) -> Iterator[str]:
    """Yield the lower bound of a search and why it stopped; `candidates` says what it tried."""
    if not result.lower_bound:
        proof = "no lower bound is known, so a much shorter time may be possible"
    elif result.gap <= 1e-12 or result.stopped == "optimal":
        proof = "optimal: no other can be shorter"
    else:
        bound = seconds(result.lower_bound)
        proof = f"lower bound {bound}, so at most {percent(result.gap)} more could be saved"
    ended = f"; stopped by {STOP_TEXTS[result.stopped]}" if result.stopped in STOP_TEXTS else ""
    tried = candidates if candidates.startswith("all ") else f"{result.evaluated} {candidates}"
    yield f"{proof} ({tried}{ended})"


def pick(record: Any, names: str) -> dict[str, Any]:
    """Return attributes by name; `names` has spaces between them."""
    return {name: getattr(record, name) for name in names.split()}
