"""How far long work is: one kind of callback for all of it, and in a notebook a bar by itself.

A long call tells how far it is: what is done, of how much if that is known, and a text, as the best
so far or what is counted. It goes to the caller's function; without one to a bar under the cell of
a notebook once the call has taken a second, and in a script to nobody.
"""

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

OnProgress = Callable[[float, float | None, str], object]

AFTER = 1.0  # seconds until a bar shows
BETWEEN = 0.2  # seconds from one picture of it to the next


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
        """Begin; nothing shows yet."""
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
        of = "" if total is None else f" of {total:.9g}"
        line = f"{self._what}: {done:.9g}{of}, {time.monotonic() - self._begun:.0f} s"
        line += f", {text}" if text else ""
        bar = "" if total is None else f'<progress value="{done}" max="{total}"></progress> '
        picture = {"text/plain": line, "text/html": f"<div>{bar}{html.escape(line)}</div>"}
        if self._shown is None:
            self._shown = self._display(picture, raw=True, display_id=True)
        else:
            self._shown.update(picture, raw=True)
