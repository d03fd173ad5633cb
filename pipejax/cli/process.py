"""The process of the command line: its streams, its late start of JAX, and how it ends.

Python runs handlers of signals in the main thread and between two of its instructions: never while
XLA compiles there, and libraries swallow what a handler raises, or crash. So the handler stops the
main thread, and a second thread, which the interpreter wakes through a pipe, ends the process.
"""

import atexit
import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from typing import Any, NoReturn, TextIO

from pipejax.base import jax_on_demand
from pipejax.base.files import cache_folder
from pipejax.base.jax_on_demand import jax
from pipejax.base.progress import act

COMPILED = {  # settings of JAX's cache of compiled programs
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_compilation_cache_max_size": 1 << 29,  # bytes; the least recently used programs go first
}


class OutputError(Exception):
    """Standard output cannot be written."""

    # It is no OSError: rich ends the process at a broken pipe, without a line.

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        self.is_left = error.errno == errno.EPIPE  # whether the reader went away
        # exit code: 141, as the shell has it, where the reader went away, else 2
        self.code = 141 if self.is_left else 2


class _Stream(io.FileIO):
    def write(self, data: Any) -> int:
        """Write to stderr; ignore errors, because they cannot be reported."""
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            raise OutputError(error) from None


def open_streams() -> None:
    """Open closed standard streams anew; replace stdout and stderr by streams that never fail."""
    # A letter that the locale's encoding lacks is printed as `?` on stdout, and escaped on stderr.
    # The system gives the lowest free number to the next file, which would then get our output. A
    # closed stdout is opened for reading only: writing fails, and no output is lost in silence.
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    sys.stdout = _text(1, sys.stdout, "replace")
    sys.stderr = _text(2, sys.stderr, "backslashreplace")


def _text(number: int, stream: TextIO | None, errors: str) -> TextIO:
    raw = _Stream(number, "w", closefd=False)
    by_line = number == 2 or raw.isatty()
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line)


def defer_jax() -> None:
    """Import JAX when a command first uses it; keep compiled programs in the user's cache."""
    # JAX locks the cache, so that no process reads a program while another one writes it.
    jax_on_demand.defer()
    jax_on_demand.with_jax(_keep_compiled)


def _keep_compiled() -> None:
    """Set JAX's cache, unless the user has set it or its folder cannot be written."""
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]  # made late
        return
    try:
        import filelock  # noqa: F401  # JAX locks the cache with it

        folder = cache_folder("compiled")
        folder.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError, RuntimeError):
        return
    if os.access(folder, os.W_OK):
        for name, value in COMPILED.items():
            jax.config.update(name, value)
        jax.config.update("jax_compilation_cache_dir", str(folder))


SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "interrupted by SIGTERM"}
REPORT_TIME = 1.3  # seconds to report the best result of an interrupted command
STOP_TIME = 0.2  # seconds in which the main thread stops, unless it is in a longer call

_has_stopped = threading.Event()


def watch_signals() -> None:
    """Let SIGINT and SIGTERM, unless ignored as under nohup, end this process."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    threading.Thread(target=_end_at_signal, args=(read_end, write_end), daemon=True).start()


def _stop(number: int, frame: Any) -> NoReturn:
    """Stop the main thread, so that only the last report is written from now on."""
    _has_stopped.set()
    while True:
        time.sleep(REPORT_TIME)


def _end_at_signal(read_end: int, write_end: int) -> None:
    """Wait for a signal, report the best result, write an error line, and end the process."""
    # The system writes the number of a signal to the pipe, and `report` a 0 at its end. So the
    # report has time until it is complete, a second signal comes, or REPORT_TIME is over.
    number = signal.Signals(os.read(read_end, 1)[0])
    texts: list[str] = []  # at most one: the end of the error line

    def report() -> None:
        _has_stopped.wait(STOP_TIME)
        try:
            texts.append(act() or "")
            sys.stdout.flush()
        except Exception as error:
            texts[:] = [f"a part of the result could not be reported: {error}"]
        os.write(write_end, b"\0")

    threading.Thread(target=report, daemon=True).start()
    select.select([read_end], [], [], REPORT_TIME)
    ending = " ".join("".join(texts).split())
    line = f"error: {SIGNALS[number]}" + (f": {ending}" if ending else "")
    try:  # not through sys.stderr: the main thread may have stopped while it held its lock
        os.write(2, f"{line}\n".encode(errors="replace"))
    finally:  # skip Python's shutdown, which would wait for threads of XLA and of solvers
        os._exit(128 + number)


def leave(code: int) -> NoReturn:
    """Exit at once with a code after a command; signals are ignored from now on."""
    # Python would free memory object by object, which takes long with JAX loaded.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OutputError):  # has been said
        sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(code)
