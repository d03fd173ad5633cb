"""What a person reads: tables from columns, single lines, and bars while it takes time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn
from rich.table import Table

from pipejax.base.interruption import if_interrupted
from pipejax.cli.output.numbers import console, seconds


@contextmanager
def printing(format: str, *, json: bool) -> Iterator[None]:
    """Print tables in a format, whoever prints them in this block."""
    yield


def grid(columns: Iterable[tuple[str, Iterable[object]]], **style: Any) -> Table:
    """Make a table from its columns, each a header and the cells under it."""
    headers, cells = zip(*columns, strict=True)
    table = Table(*headers, **style)
    for row in zip(*cells, strict=True):
        table.add_row(*map(str, row))
    return table


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Make a list of names and what they are."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def print_all(*parts: object) -> None:
    """Print lines with markup, and tables."""
    for part in parts:
        console().print(part)


def print_plain(text: str) -> None:
    """Print a line as it is, with names of files in it, say."""
    console().print(text, soft_wrap=True, markup=False)


def print_written(what: str, path: object) -> None:
    """Say where something has been written, if it has."""
    if path is not None:
        print_plain(f"{what} {path}")


def heading(run: Any, end: str, optimised: str = "") -> str:
    """Say what a report is about: schedule and sizes of a run, or of what was optimised to it."""
    name = f"[bold]{escape(optimised or run.schedule)}[/]" + " optimised" * bool(optimised)
    return (
        f"{name}, {run.workers} workers, {run.stages} stages, "
        f"{run.microbatches} microbatches, {end}"
    )


def pick(found: Any, names: str) -> dict[str, Any]:
    """Take attributes, named with spaces between them, for `--json`."""
    return {name: getattr(found, name) for name in names.split()}


class ProgressBar(NamedTuple):
    """A bar on stderr that nobody sees unless it is a terminal.

    Attributes:
      move: takes `advance` or `completed`, and `description`.
      note: prints a line above the bar.
    """

    move: Callable[..., None]
    note: Callable[[str], None]


@contextmanager
def progress(
    what: str, total: float | None, *columns: ProgressColumn, transient: bool = True
) -> Iterator[ProgressBar]:
    """Show how far work is, where a person sees it."""
    err = Console(stderr=True, highlight=False)
    shown: dict[str, Any] = {"console": err, "transient": transient, "disable": not err.is_terminal}
    with Progress(*columns, **shown) as bar, if_interrupted(bar.stop):
        note = partial(err.print, markup=False) if err.is_terminal else lambda text: None
        yield ProgressBar(partial(bar.update, bar.add_task(what, total=total)), note)


@contextmanager
def waiting(what: str) -> Iterator[Console]:
    """Show that work goes on, where a person sees it; the console prints above that."""
    err = Console(stderr=True)
    with err.status(what) as shown, if_interrupted(shown.stop):
        yield err


@contextmanager
def best_so_far(report: Callable[[Any], object]) -> Iterator[Callable[[Any], object]]:
    """Report, if the command is interrupted in this block, what was last kept in it."""
    kept: deque[Any] = deque(maxlen=1)

    def say() -> str | None:
        if not kept:
            return None
        report(kept[0])
        return "this is the best so far"

    with if_interrupted(say):
        yield kept.append


def search_and_report(
    search: Any, iterations: int, limit: float, report: Callable[[Any], Callable[[], object]]
) -> None:
    """Run a local search under a bar, and report its result, if interrupted that so far.

    `report` works out what is said of a result, and returns what writes and prints it.
    """
    with (
        best_so_far(lambda search: report(search.result("interrupted"))()) as keep,
        progress("searching", iterations) as bar,
    ):
        keep(search)
        stopped = search.run(
            iterations,
            limit,
            lambda done, makespan: bar.move(
                completed=done, description=f"best {seconds(makespan)}"
            ),
        )
        show = report(search.result(stopped))
    show()
