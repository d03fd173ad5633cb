"""Long work: how far it is, its notices, what is left to do on an interruption, jobs in threads.

A long call tells how far it is: what is done, of how much if that is known, and a text, as the best
so far or what is counted. It goes to the caller's function; without one to a bar under the cell of
a notebook once the call has taken a second, and in a script to nobody.

The library handles no signals: a KeyboardInterrupt unwinds as any exception does. The command line
ends without unwinding (`pipejax.cli.process`), and does what `if_interrupted` was given instead.
"""

import contextlib
import html
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

OnProgress = Callable[[float, float | None, str], object]
Action = Callable[[], str | None]
News = TypeVar("News")

AFTER = 1.0  # seconds until a bar shows
BETWEEN = 0.2  # seconds from one picture of it to the next
_actions: list[Action] = []


def to_nobody(done: float, total: float | None, text: str) -> None:
    """Stand for a callback where nobody asked."""


@contextlib.contextmanager
def telling(what: str, on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """Yield whom to tell how far this work is."""
    if on_progress is not None:
        if not callable(on_progress):
            raise ValueError(
                f"on_progress must be a function of done, total and text, got {on_progress!r}"
            )
        yield on_progress
    elif display := _notebook():
        bar = _Bar(what, display)
        try:
            yield bar.tell
        finally:
            bar.end()
    else:
        yield to_nobody


def _notebook() -> Callable[..., Any] | None:
    """Return what displays under a cell, where this runs in a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    return display if getattr(get_ipython(), "kernel", None) is not None else None


class _Bar:
    """A bar under the cell of a notebook."""

    def __init__(self, what: str, display: Callable[..., Any]) -> None:
        self._what, self._display = what, display
        self._begun = time.monotonic()
        self._next = self._begun + AFTER
        self._shown: Any = None
        self._last: tuple[float, float | None, str] = (0, None, "")

    def tell(self, done: float, total: float | None, text: str) -> None:
        """Take how far work is; most of the times that is all."""
        self._last = done, total, text
        if time.monotonic() >= self._next:
            self._show()
            self._next = time.monotonic() + BETWEEN

    def end(self) -> None:
        """Show the end, if anything was shown."""
        if self._shown is not None:
            self._show()

    def _show(self) -> None:
        done, total, text = self._last
        share_text = "" if total is None else f" of {total:.9g}"
        line = f"{self._what}: {done:.9g}{share_text}, {time.monotonic() - self._begun:.0f} s"
        line += f", {text}" if text else ""
        bar = "" if total is None else f'<progress value="{done}" max="{total}"></progress> '
        picture = {"text/plain": line, "text/html": f"<div>{bar}{html.escape(line)}</div>"}
        if self._shown is None:
            self._shown = self._display(picture, raw=True, display_id=True)
        else:
            self._shown.update(picture, raw=True)


@contextlib.contextmanager
def if_interrupted(action: Action) -> Iterator[None]:
    """Have something done if the command line is interrupted in this block."""
    # It is done by another thread, while the main one stands still or is in a long call. What it
    # returns, if anything, is what the line about the interruption says besides.
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def act() -> str | None:
    """Run all actions, the innermost first; return the first message of theirs."""
    messages = [action() for action in reversed(_actions.copy())]
    return next(filter(None, messages), None)


class Notice(UserWarning):
    """Something that a user should know, in one line."""


@contextlib.contextmanager
def notices_as_lines() -> Iterator[None]:
    """Write each notice as a line on stderr; warnings of other packages are for programmers."""

    def write(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, Notice):
            sys.stderr.write(f"warning: {message}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        warnings.showwarning = write
        yield


def merge_progress(
    jobs: Sequence[Callable[[Callable[[News], None]], None]], stop: Callable[[], None]
) -> Generator[News, None, None]:
    """Run jobs side by side and yield their news, until all have ended."""
    # Each job is given the function that it tells its news with; it goes on when the caller asks
    # for the next one, so that what it does does not depend on how fast they are taken. An error of
    # a job is raised here. When the iterator is closed, stop is called again and again until the
    # jobs have ended.
    reports: queue.SimpleQueue[tuple[News, threading.Event] | BaseException | None]
    reports, over = queue.SimpleQueue(), threading.Event()

    def tell(news: News) -> None:
        if not over.is_set():
            reports.put((news, is_read := threading.Event()))
            while not (is_read.wait(0.05) or over.is_set()):
                pass

    def run(job: Callable[[Callable[[News], None]], None]) -> None:
        try:
            job(tell)
        except BaseException as error:  # the caller's thread has to hear of it
            reports.put(error)
        finally:
            reports.put(None)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            report = reports.get()
            if isinstance(report, BaseException):
                raise report
            if report is None:
                running -= 1
            else:
                news, is_read = report
                yield news
                is_read.set()
    finally:
        over.set()
        while any(thread.is_alive() for thread in threads):
            stop()
            for thread in threads:
                with contextlib.suppress(RuntimeError):
                    thread.join(0.05)
