"""Reports and answers of commands, and how they are printed: lines, headings, the style, JSON."""

import json
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.text import Text

from pipejax.base.checks import resolve_choice
from pipejax.base.progress import OnProgress, if_interrupted
from pipejax.cli.options.option import parse_seconds
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


plain = Text  # a line without markup, for example with names of files


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
    counts = (f"{sizes[name]} {n if sizes[name] == 1 else name}" for name, n in nouns.items())
    slices = f" in {sizes['slices']} slices" if "slices" in sizes else ""
    return f"[bold]{schedule_name(sizes)}[/]{note}, {', '.join(counts)}{slices}"


def schedule_name(sizes: Mapping[str, Any]) -> str:
    """Return the schedule, or the name of its file."""
    return escape(Path(str(current_style().options.get("table", sizes["schedule"]))).name)


# reasons to stop a search that could still improve, by `stopped` of --json
STOP_TEXTS = {"time": "--time-limit", "effort": "--effort", "gap": "--gap", "interrupted": "Ctrl-C"}
SEARCH_FIELDS = "value lower_bound gap baselines evaluated stopped"  # of every search result


Times = Mapping[str, float | None]  # of candidates [s]; None if one cannot run


def savings(
    noun: str, time: str, times: Times, best: float, too_large: Collection[str] = ()
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
    """Yield the lower bound of a search and why it stopped; `candidates` is a noun for tries."""
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


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[OnProgress]:
    """Show a bar on a terminal while the block runs; yield the function that moves it."""
    err = Console(stderr=True, highlight=False)
    bar = Progress(console=err, transient=True, disable=not err.is_terminal)
    with bar, if_interrupted(bar.stop):
        task = bar.add_task(title, total=total)

        def show(done: float, total: float | None, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield show


class Answer(NamedTuple):
    """Answer of a command, which is printed when the command returns it."""

    # object of `--json`, without the files of the command and what to go on with
    result: dict[str, Any] | list[dict[str, Any]]
    # first screen: a sentence that answers, then at most a dozen lines and tables; a generator
    # makes them only if they are printed
    view: Iterable[object] = ()
    holds: bool = True  # False if a check of the command failed: exit code 1
    next: tuple[str, ...] = ()  # command lines to go on with
    details: Mapping[str, Iterable[object]] = {}  # parts that `--details` adds, by their names

    def as_json(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the value that `--json` prints: the result, next commands and written files."""
        if not isinstance(self.result, dict):
            return self.result
        result = self.result | ({"next": self.next} if self.next else {})
        for output in current_style().outputs:
            result = result | output.as_json()
        return result

    def show(self) -> None:
        """Print the answer; raise the error of the first file that could not be written."""
        if is_json():
            print_json(self.as_json())
        else:
            outputs = current_style().outputs
            view = [*self.view]
            count = len([*takewhile(lambda part: not str(part).startswith("next: "), view)])
            view[count:count] = [plain(f"wrote {file.written}") for file in outputs if file.written]
            print_all(*view)
            if has_details():
                printed_lines = [part for part in view if isinstance(part, Text)]
                details = chain.from_iterable(self.details.values())
                print_all(*(part for part in details if part not in printed_lines))
            next_lines = (plain(f"next: {line}") for line in self.next)
            print_all(*(line for line in next_lines if line not in view))
            if self.details and not has_details():
                print_all(plain(f"more with --details: {', '.join(self.details)}"))
        for output in current_style().outputs:
            output.end(json=is_json())


@contextmanager
def best_so_far(answer: Callable[[Any], Answer]) -> Iterator[Callable[[Any], object]]:
    """Yield a function that stores the best result so far of a search in the block.

    If the user interrupts the block, `answer` of the last stored result is printed.
    """
    best: deque[Any] = deque(maxlen=1)

    def show_best() -> str | None:
        """Print the best answer so far, and return a note on it; return None without one."""
        if not best:
            return None
        answer(best[0]).show()
        return "this is the best so far"

    with if_interrupted(show_best):
        yield best.append


def run_search(
    search: Any, iterations: int, limit: str, report: Callable[[Any], Answer], gap: float = 0.0
) -> Answer:
    """Run a local search for at most `iterations` and the time limit, and report its result.

    If the user interrupts it, the best result so far is reported. It stops early at the gap, the
    share that a better result could still save.
    """
    limit_seconds = parse_seconds(limit, "--time-limit")
    stored = best_so_far(lambda search: report(search.result("interrupted")))
    with stored as keep, progress("searching", iterations) as on_progress:
        keep(search)
        result = search.run(iterations, limit_seconds, on_progress, gap)
    return report(result)


def search_answer(
    first_lines: Sequence[str],
    data: Mapping[str, Any],
    result: Any,
    nouns: tuple[str, str],
    *,
    time: str = "step time",
    last_lines: Iterable[object] = (),
    next: tuple[str, ...] = (),
    details: Mapping[str, Iterable[object]] = {},
    too_large: Collection[str] = (),
) -> Answer:
    """Answer with the result of a search, its baselines and why it ended."""
    times = result.baselines
    tables = [savings(nouns[0], time, times, result.value, too_large)] if times else []
    view = [*first_lines, *tables, *search_end(result, nouns[1]), *last_lines]
    return Answer({**data, **pick(result, SEARCH_FIELDS)}, view, next=next, details=details)
