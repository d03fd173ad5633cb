"""Locks on folders, which the system releases when a process ends, however it ends.

Imported only by what needs it: filelock is an extra.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder for this thread, and make it where it is missing; wait for others, or refuse.

    The lock's empty file stays: removing it while others wait would let two of them in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=-1 if wait else 0, poll_interval=0.01)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(0, "another process writes to it", str(folder)) from None
    try:
        yield
    finally:
        lock.release()
