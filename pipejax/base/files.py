"""Atomic files and folders: drafted beside their final place, then moved there."""

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pipejax.base.interruption import if_interrupted

DRAFT = ".draft-"


@contextlib.contextmanager
def drafted(path: str | Path, *, is_locked: bool = False) -> Iterator[Path]:
    """Yield a path for a draft of a file or folder, which moves to `path` at the end of the block.

    If the block ends early, `path` stays as it was. The draft has the same name, for writers
    that look at the suffix. With `is_locked` the caller holds the folder's lock: drafts
    of the same name are left by processes that were killed, and are removed.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path  # a pipe or a terminal cannot be replaced
        return
    path = Path(os.path.realpath(path))  # a link goes on to point where it points
    with draft_folder(path, is_locked=is_locked) as folder:
        draft = folder / path.name
        yield draft
        if draft.is_file():
            _sync(draft)
            if path.is_file():
                shutil.copymode(path, draft)
        elif path.is_dir():  # only an empty folder can be replaced in one step
            os.rename(path, folder / "replaced")
        os.replace(draft, path)


@contextlib.contextmanager
def draft_folder(path: Path, *, is_locked: bool = False) -> Iterator[Path]:
    """Make a folder for drafts beside `path`, and remove it with all that is left in it."""
    prefix = f".{path.name}{DRAFT}"
    for left in path.parent.glob(f"{glob.escape(prefix)}*") if is_locked else ():
        shutil.rmtree(left, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    except OSError as error:  # say which file cannot be written, not which draft
        raise OSError(error.errno, error.strerror, str(path)) from None
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        with if_interrupted(remove):
            yield folder
    finally:
        remove()


def write_file(path: str | Path, content: bytes | str, *, is_locked: bool = False) -> None:
    """Write a file atomically and flush it to disk; text as UTF-8, line ends unchanged."""
    with drafted(path, is_locked=is_locked) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def checksum(content: bytes | str) -> str:
    """SHA-256 of a content, in hexadecimal."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
