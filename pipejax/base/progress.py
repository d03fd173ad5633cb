"""Support for long calls: progress, notices, interruption, jobs in threads.

A report of progress has the amount of work done, the total (None if unknown) and a text. The
caller may give a function for reports; otherwise a notebook shows a progress bar. The library
handles no signals. An interrupted command line exits without `finally` blocks
(`pipejax.cli.process`), and runs the actions of `if_interrupted` instead.
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

BAR_DELAY = 1.0  # seconds until a bar shows
BAR_INTERVAL = 0.2  # seconds from one update of the bar to the next
_actions: list[Action] = []


def no_progress(done: float, total: float | None, text: str) -> None:
    """Ignore a report of progress."""


@contextlib.contextmanager
def telling(what: str, on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """Yield a function that reports progress: the caller's, or a bar's in a notebook."""
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
        yield no_progress


def _notebook() -> Callable[..., Any] | None:
    """Return IPython's `display` function; None outside a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    return display if getattr(get_ipython(), "kernel", None) is not None else None


class _Bar:
    """A progress bar below the cell of a notebook."""

    def __init__(self, what: str, display: Callable[..., Any]) -> None:
        self._what, self._display = what, display
        self._begin = time.monotonic()
        self._next_update = self._begin + BAR_DELAY
        self._handle: Any = None  # IPython's handle of the bar, once the bar is displayed
        self._report: tuple[float, float | None, str] = (0, None, "")

    def tell(self, done: float, total: float | None, text: str) -> None:
        """Store a report of progress, and show it if an update is due."""
        self._report = done, total, text
        if time.monotonic() >= self._next_update:
            self._show()
            self._next_update = time.monotonic() + BAR_INTERVAL

    def end(self) -> None:
        """Show the last report if the bar is displayed."""
        if self._handle is not None:
            self._show()

    def _show(self) -> None:
        """Display the last report in a new bar, or in the displayed one."""
        done, total, text = self._report
        total_text = "" if total is None else f" of {total:.9g}"
        line = f"{self._what}: {done:.9g}{total_text}, {time.monotonic() - self._begin:.0f} s"
        line += f", {text}" if text else ""
        bar = "" if total is None else f'<progress value="{done}" max="{total}"></progress> '
        picture = {"text/plain": line, "text/html": f"<div>{bar}{html.escape(line)}</div>"}
        if self._handle is None:
            self._handle = self._display(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)


@contextlib.contextmanager
def if_interrupted(action: Action) -> Iterator[None]:
    """Run an action if the command line is interrupted in this block."""
    # Another thread runs the action while the main thread stands still or is in a long call. The
    # line about the interruption has the text that the action returns.
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def act() -> str | None:
    """Run all actions of `if_interrupted`, the innermost first; return the first text."""
    messages = [action() for action in reversed(_actions.copy())]
    return next(filter(None, messages), None)


class Notice(UserWarning):
    """Warning category for one-line notices to the user."""


@contextlib.contextmanager
def notices_as_lines() -> Iterator[None]:
    """Write each notice once, as a line on stderr; ignore warnings of other packages."""
    written = set[str]()

    def write(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, Notice) and str(message) not in written:
            sys.stderr.write(f"warning: {message}\n")
            written.add(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        warnings.showwarning = write
        yield


def merge_progress(
    jobs: Sequence[Callable[[Callable[[News], None]], None]], stop: Callable[[], None]
) -> Generator[News, None, None]:
    """Run each job in a thread; yield the progress reports of the jobs until all have ended."""
    # A job gets a function and calls it with each report. The call returns when the caller has
    # used the report, so the caller's speed does not change what jobs do. When the iterator is
    # closed, `stop` is called again and again until the jobs have ended. The error of a job is
    # raised in the thread of the caller.
    reports: queue.SimpleQueue[tuple[News, threading.Event] | BaseException | None]
    reports, is_closed = queue.SimpleQueue(), threading.Event()

    def report_news(news: News) -> None:
        """Queue a report, and wait until the caller has used it or closed the iterator."""
        if not is_closed.is_set():
            reports.put((news, is_read := threading.Event()))
            while not (is_read.wait(0.05) or is_closed.is_set()):
                pass

    def run_job(job: Callable[[Callable[[News], None]], None]) -> None:
        """Run a job in a thread; queue its error, if any, and None at its end."""
        try:
            job(report_news)
        except BaseException as error:  # raised again in the caller's thread
            reports.put(error)
        finally:
            reports.put(None)

    threads = [threading.Thread(target=run_job, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    num_running = len(threads)
    try:
        while num_running:
            report = reports.get()
            if isinstance(report, BaseException):
                raise report
            if report is None:
                num_running -= 1
            else:
                news, is_read = report
                yield news
                is_read.set()
    finally:
        is_closed.set()
        while any(thread.is_alive() for thread in threads):
            stop()
            for thread in threads:
                with contextlib.suppress(RuntimeError):
                    thread.join(0.05)
