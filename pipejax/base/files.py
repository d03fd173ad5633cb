"""Atomic writing of files and folders, locks of folders, and the origin of results."""

import contextlib
import errno
import functools
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pipejax.base.checks import memory
from pipejax.base.progress import if_interrupted

# the origin of a result, version, commit and code hash, is in the attributes of its dataset

ATTRIBUTES = ".zattrs"  # file in a Zarr store that has its attributes
ORIGIN = ("pipejax", "jax", "numpy", "code")  # facts that all results of a store share
PACKAGE = Path(__file__).parents[1]
VIEWS = ("cli", "plots")  # subpackages that only show numbers


def own_version() -> str:
    """Return the version of pipejax, or "unknown" if the package is not installed."""
    from importlib import metadata  # only results need it

    try:
        return metadata.version("pipejax")
    except metadata.PackageNotFoundError:
        return "unknown"


def provenance() -> dict[str, str]:
    """Return the origin that is stored with a result: versions, commit and code hash."""
    from importlib.metadata import version

    versions = {"pipejax": own_version(), "jax": version("jax"), "numpy": version("numpy")}
    return versions | {"commit": _commit(), "code": code_hash()}


def check_origin(path: Path, attributes: Mapping[str, Any]) -> None:
    """Raise an error if another version of the code began the store at `path`."""
    for key, value in provenance().items():
        if key in ORIGIN and attributes.get(key) != value:
            raise ValueError(
                f"{path} was begun with {key} {attributes.get(key)}, but this is {value}: results "
                "would not match; give another --out, or --force to begin anew"
            )


def refuse_existing(path: Path) -> NoReturn:
    """Raise the error for an output that exists, without --resume and --force."""
    how = "it exists: go on with it by --resume, begin anew by --force, or give another --out"
    raise FileExistsError(errno.EEXIST, how, str(path))


def is_dataset(path: Path) -> bool:
    """Return whether the attributes of a folder show a Zarr store that pipejax wrote."""
    try:
        attributes = json.loads((path / ATTRIBUTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(attributes, dict) and "pipejax" in attributes


def _commit() -> str:
    """Return the commit of the repository that tracks this file, or "unknown"."""
    if _git("ls-files", "--error-unmatch", __file__) is None:
        return "unknown"
    changes = _git("status", "--porcelain", "--", ".")
    return (_git("rev-parse", "HEAD") or "unknown") + ("+changes" if changes else "")


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this package; None outside a repository."""
    import subprocess

    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def code_hash(folder: Path = PACKAGE) -> str:
    """Hash all modules in a folder that affect results; equal hashes mean equal results."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if name.parts[0] not in VIEWS:
            digest.update(str(name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


DRAFT = ".draft-"
MAX_PREFIX = 200  # bytes of the final name in a draft's name, because systems limit names
BYTES_PER_CHARACTER = 300  # memory of a table for each character of its most compact file
PROBE_BYTES = 4096  # written to test whether the disk has space
LOCK = ".lock"
CACHE = "PIPEJAX_CACHE"  # environment variable: the cache folder


@contextlib.contextmanager
def atomic_write(
    path: str | Path, *, replace: bool = True, is_locked: bool = False
) -> Iterator[Path]:
    """Yield a path to write a draft to; at the end of the block the draft moves to `path`.

    If the block raises, `path` stays as it was. The draft has the name of `path`, because some
    writers look at the suffix. Without `replace`, an existing `path` is an error. `is_locked` says
    that the caller holds the lock of the folder. Other drafts of this name are then from killed
    processes, and are removed. Errors of the system name `path`, not the draft.
    """
    path, to_stream = Path(path), is_stream(path)
    # replace the target of a link, not the link; write into a pipe or a terminal
    target = Path(tempfile.gettempdir(), path.name) if to_stream else Path(os.path.realpath(path))
    with name_in_errors(path), draft_folder(target, is_locked=is_locked) as folder:
        draft = folder / path.name
        yield draft
        if to_stream:
            path.write_bytes(draft.read_bytes())
        elif not replace and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "another process has made it meanwhile", str(path))
        else:
            _move(draft, target, folder)


def _move(draft: Path, path: Path, folder: Path) -> None:
    """Move a draft to `path`; if `path` is a folder, it first moves into `folder`."""
    if draft.is_file():
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        if path.is_file():
            shutil.copymode(path, draft)
    if draft.is_file() or not path.is_dir():
        os.replace(draft, path)
        return
    old = folder / "replaced"  # `os.replace` replaces only empty folders

    def put_back() -> None:  # `folder` is about to be removed
        if not path.exists():
            os.rename(old, path)

    with if_interrupted(put_back):
        os.rename(path, old)
        try:
            os.replace(draft, path)
        except BaseException:
            put_back()
            raise


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Make an OSError of the block name `path` if it names a draft or no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None or DRAFT in str(error.filename):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def is_stream(path: str | Path) -> bool:
    """Return whether a path is a pipe, a terminal or another character device."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def check_writable(path: str | Path) -> None:
    """Check that `atomic_write` can write a file or folder, by a trial draft beside it.

    Permissions do not suffice: a superuser needs none, and nobody can write to a full disk. The
    draft is removed; an existing file is not touched.

    Raises:
      OSError: if the path cannot be written; the error names `path`.
    """
    path = Path(path)
    if is_stream(path):
        return
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)  # raises if the name is too long or a link leads to itself
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        why = f"there is no folder {target.parent if path.is_symlink() else path.parent}"
        raise FileNotFoundError(errno.ENOENT, why, str(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        raise OSError(errno.EINVAL, "it is neither a file nor a pipe", str(path))
    with name_in_errors(path), draft_folder(target) as folder:
        (folder / target.name).write_bytes(bytes(PROBE_BYTES))


@contextlib.contextmanager
def draft_folder(path: Path, *, is_locked: bool = False) -> Iterator[Path]:
    """Make a folder for drafts beside `path`, and remove it after the block."""
    # With `is_locked`, other draft folders of this path are from killed processes: remove them.
    name = os.fsdecode(os.fsencode(path.name)[:MAX_PREFIX])
    prefix = f".{name}{DRAFT}"
    if is_locked:
        for stale in path.parent.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(stale, ignore_errors=True)
    with name_in_errors(path):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        with if_interrupted(remove):
            yield folder
    finally:
        remove()


def write_file(path: str | Path, content: bytes | str, *, is_locked: bool = False) -> None:
    """Write a file atomically and flush it to disk; texts are UTF-8 with unchanged line ends."""
    with atomic_write(path, is_locked=is_locked) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def read_file(path: str | Path) -> bytes:
    """Read a file; refuse a file whose table would need more memory than this machine has."""
    status = os.stat(path)
    if not stat.S_ISFIFO(status.st_mode):
        return _read_content(path, status.st_size)
    # /dev/stdin and <(...) lead to pipes that have no name
    if os.path.exists(os.path.realpath(path)):
        raise ValueError(f"{path}: a named pipe may never end: give a file, or /dev/stdin")
    return _read_pipe(path, status.st_ino)


@functools.cache
def _read_pipe(path: str | Path, inode: int) -> bytes:
    """Read a pipe once; `inode` distinguishes pipes of one name in the cache."""
    return _read_content(path, 0)


def _read_content(path: str | Path, size: int) -> bytes:
    """Read a file of this size, or a pipe (size 0)."""
    maximum = memory() // BYTES_PER_CHARACTER
    if size <= maximum:
        with open(path, "rb") as file:
            content = file.read(maximum + 1)
        if len(content) <= maximum:
            return content
        size = len(content)
    raise ValueError(
        f"{path}: it has {size / 1e6:,.0f} MB or more, but a machine with {memory() / 1e9:,.1f} GB "
        f"of memory can work with at most {maximum / 1e6:,.0f} MB"
    )


def cache_folder(part: str) -> Path:
    """Return the path of a folder in the user's cache."""
    chosen = os.environ.get(CACHE)
    if chosen:
        return Path(chosen) / part
    from platformdirs import user_cache_path  # an optional package

    return user_cache_path("pipejax", appauthor=False) / part


def checksum(content: bytes | str) -> str:
    """Return the SHA-256 hash of bytes or of a text, in hexadecimal."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder's lock for the block; if another process holds it, wait or raise."""
    # A missing folder is made. The system releases the lock when this process ends. The lock file
    # stays, because two waiting processes could both get the lock if it were removed.
    from filelock import FileLock, Timeout  # an optional package

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
