"""Signs of life while a command takes time, on stderr and only where a person sees them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from pipejax.base.progress import if_interrupted


class ProgressBar(NamedTuple):
    """A bar on stderr that nobody sees unless it is a terminal."""

    move: Callable[..., None]  # takes `advance` or `completed`, and `description`
    note: Callable[[str], None]  # prints a line above the bar

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
