"""Standard streams that are there, that print every character, and whose errors can be told."""

import errno
import io
import os
import sys
from typing import Any, TextIO


class OutputError(Exception):
    """Standard output cannot be written.

    It is no OSError: typer and rich end the process at a broken pipe, without a line.

    Attributes:
      code: exit code: 141, as the shell has it, where the reader went away, else 2.
    """

    def __init__(self, error: OSError) -> None:
        """Say why."""
        super().__init__(f"standard output: {error.strerror}")
        self.code = 141 if error.errno == errno.EPIPE else 2


class _Stream(io.FileIO):
    """A standard stream of this process."""

    def write(self, data: Any) -> int:
        """Write; there is nobody who could be told that stderr cannot be written."""
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            raise OutputError(error) from None


def open_streams() -> None:
    """Open what the caller has closed, and print what the locale's encoding has no letter for.

    A file must not get the number of a stream, or what is printed would go into it. What stands
    for a closed stdout cannot be written either, so that a lost result is an error.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    sys.stdout = _text(1, sys.stdout, "replace")
    sys.stderr = _text(2, sys.stderr, "backslashreplace")


def _text(number: int, given: TextIO | None, errors: str) -> TextIO:
    raw = _Stream(number, "w", closefd=False)
    by_line = number == 2 or raw.isatty()
    encoding = "utf-8" if given is None else given.encoding
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line)
