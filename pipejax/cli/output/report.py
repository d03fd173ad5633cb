"""What a person reads: tables from columns, single lines, and bars while it takes time."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

from pipejax.base.checks import one_of
from pipejax.base.progress import if_interrupted
from pipejax.cli.output.numbers import console
from pipejax.cli.output.tables import FORMATS, fitted, lines_of

_chosen = ["text"]  # formats of what is printed: the last one counts


@contextmanager
def printing(format: str | None, *, json: bool) -> Iterator[None]:
    """Print tables in a format, whoever prints them in this block.

    Raises:
      ValueError: if there is no such format, or nothing is printed in it.
    """
    _chosen.append(one_of(format or "text", ("text", *FORMATS), "--format"))
    try:
        if json and _chosen[-1] != "text":
            raise ValueError(f"--format {format} has no effect with --json")
        yield
    finally:
        _chosen.pop()


def tells_lines() -> bool:
    """Whether lines are printed beside tables: if not, the tables must hold all there is to say."""
    return _chosen[-1] != "csv"


def print_all(*parts: object) -> None:
    """Print lines with markup, and tables."""
    for part in parts:
        if isinstance(part, Table):
            _print_table(part)
        else:
            _print_line(Text.from_markup(str(part)))


def print_plain(text: str) -> None:
    """Print a line as it is, with names of files in it, say."""
    _print_line(Text(text))


def _print_table(table: Table) -> None:
    if _chosen[-1] != "text":
        sys.stdout.write(lines_of(table, _chosen[-1]))
        return
    out = console()
    for part in fitted(table, out.width):
        out.print(part)


def _print_line(text: Text) -> None:
    """Print a line beside tables: in a file of LaTeX as a comment, in one of CSV not at all."""
    if _chosen[-1] == "text":
        out = console()
        out.print(text, soft_wrap=not out.is_terminal)
    elif tells_lines():
        begin, end = ("% ", "") if _chosen[-1] == "latex" else ("", "\n")
        lines = text.plain.strip().splitlines()
        sys.stdout.write("".join(f"{begin}{line}\n" for line in lines) + end)


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

    def tell(self, done: float, total: float | None, text: str) -> None:
        """Move to where a long call says that it is: the `on_progress` of the library."""
        self.move(completed=done, total=total, description=text)

    def after(self, before: float) -> Callable[[float, float | None, str], None]:
        """Return the same for one of several calls, when so much was done before it."""
        return lambda done, total, text: self.move(completed=before + done, description=text)


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
        stopped = search.run(iterations, limit, bar.tell)
        show = report(search.result(stopped))
    show()
