"""What a user should know and is no error: warnings of our own, which commands print as a line."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Notice(UserWarning):
    """Something that a user should know, in one line."""


@contextmanager
def notices_as_lines() -> Iterator[None]:
    """Write each notice as a line on stderr; warnings of other packages are for programmers."""

    def write(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, Notice):
            sys.stderr.write(f"warning: {message}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        warnings.showwarning = write
        yield
