"""Names of schedules, and the builders that these names refer to.

A name is that of a built-in, registered or installed schedule, FILE.py:FUNCTION, or the path of a
table. A user's function or table becomes a `Builder`, like the published schedules.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipejax.base import checks
from pipejax.base.display import abbreviated
from pipejax.base.files import read_file
from pipejax.schedules.builders.published import Builder
from pipejax.schedules.cells.ops import ScheduleError
from pipejax.schedules.registry import BUILT_IN, check_size
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import FORMAT, read_table, to_json

GROUP = "pipejax.schedules"  # group of entry points
SIZES = ("num_workers", "num_microbatches")
PACKAGE = str(Path(__file__).parents[1])
_NAME = re.compile(r"[^\s,:=/\\]+")

registered: dict[str, Builder] = {}


@dataclass(frozen=True, eq=False)
class OwnFunction:
    """A user's function as a builder, which checks its result and locates its errors."""

    name: str  # name of its tables
    function: Callable[..., Any]  # makes a table, or rows of one
    file: tuple[str, str] = ("", "")  # path and text, for processes that do not have the file

    def __post_init__(self) -> None:
        """Check that the function takes both sizes by name."""
        if not callable(self.function):
            raise ValueError(f"{self.name} must be a function, got {abbreviated(self.function)}")
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            raise ValueError(f"{self.name} has no signature that can be read") from None
        by_name = {n for n, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_any and not by_name >= set(SIZES):
            raise ValueError(
                f"{self.name} must take num_workers and num_microbatches by name, got "
                f"{inspect.signature(self.function)}"
            )

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the function, which gives the schedule its signature and docstring."""
        return self.function

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text of the function's file, since another machine may lack the file."""
        if self.file[0]:
            return _from_text, (self.name, *self.file)
        return OwnFunction, (self.name, self.function)

    def __call__(self, **arguments: Any) -> ScheduleTable:
        """Make a table for the requested numbers of workers and microbatches."""
        workers, microbatches = (
            checks.whole_number(arguments.get(name), name, maximum=checks.MAX_COUNT)
            for name in SIZES
        )
        arguments |= {"num_workers": workers, "num_microbatches": microbatches}
        check_size(Builder(self, ""), num_workers=workers, num_microbatches=microbatches)
        for name, p in inspect.signature(self.function).parameters.items():
            by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            if by_name and p.default is p.empty and name not in arguments:
                raise ValueError(f"{self.name} needs {name}, which has no default")
        table = self._table(self._call(arguments))
        table_microbatches = table.num_microbatches // table.grammar.slices
        if (table.num_workers, table_microbatches) != (workers, microbatches):
            raise ValueError(
                f"{self.name} made a table of {table.num_workers} workers and "
                f"{table_microbatches} microbatches for {workers} and {microbatches}"
            )
        return table

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the user's function; raise its errors as a ValueError with file and line."""
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the output of the command
                return self.function(**arguments)
        except MemoryError:
            raise
        except ValueError as error:  # the schedule does not exist for these numbers
            raise checks.MismatchError(self._error_text(error)) from error
        except (Exception, SystemExit) as error:
            raise ValueError(self._error_text(error)) from error

    def _error_text(self, error: BaseException) -> str:
        source = inspect.getsourcefile(inspect.unwrap(self.function)) or ""
        return f"{self.name}: {_error_text(error, self.file[0] or source)}"

    def _table(self, value: Any) -> ScheduleTable:
        """Return a table with this name from the function's value, a table or rows."""
        if isinstance(value, ScheduleTable):
            return value if value.name == self.name else replace(value, name=self.name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            got = f"{abbreviated(value)} of type {type(value).__name__}"
            raise ValueError(f"{self.name} must return a ScheduleTable or rows, got {got}")
        try:
            return ScheduleTable.from_rows(value, name=self.name)
        except ScheduleError as error:
            raise ScheduleError(f"{self.name}: {error.reason}", error.grid) from None


@dataclass(frozen=True, eq=False)
class OneTable:
    """A fixed table as a builder, which can build only the table's own size."""

    name: str  # path of the table
    table: ScheduleTable  # table under a name that no published schedule has

    def __call__(self, num_workers: int, num_microbatches: int) -> ScheduleTable:
        """Return the table if it has the requested size."""
        sizes = (self.table.num_workers, self.table.num_microbatches)
        if sizes != (num_workers, num_microbatches):
            has = f"{sizes[0]} workers and {sizes[1]} microbatches"
            raise checks.MismatchError(
                f"{self.name} is a table of {has}, not of {num_workers} and {num_microbatches}"
            )
        return self.table


def register(name: str, function: Callable[..., Any]) -> None:
    """Register a function of your own as a schedule under a name, like the built-in schedules.

    Two other ways need no registration: an installed package names its functions as entry points
    of the group `pipejax.schedules`, and a Python file is given as `mine.py:build`.

    Args:
      name: name of the schedule; it replaces a schedule that was registered under this name.
      function: function with the arguments num_workers and num_microbatches, and further options.
        It returns a `ScheduleTable`, or rows as for `ScheduleTable.from_rows`. It raises a
        ValueError if the schedule does not exist for these numbers.

    Raises:
      ValueError: if the name is no single word or is that of a built-in schedule, or the function
        does not take both sizes.

    Example:
      >>> def one_by_one(num_workers, num_microbatches):
      ...     return [[f"{w}{phase}{m}" for m in range(num_microbatches) for phase in "FB"]
      ...             for w in range(num_workers)]
      >>> register("one-by-one", one_by_one)
      >>> import pipejax as pj
      >>> pj.schedules.build("one-by-one", num_workers=2, num_microbatches=4).num_slots
      8
    """
    checks.check_types(name=(name, str))
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be one word without , : = / or \\, got {name!r}")
    if checks.match_name(name, BUILT_IN) is not None:
        raise ValueError(f"name {name!r} is that of a built-in schedule: give another")
    module = getattr(function, "__module__", "")
    registered[name] = _function_builder(OwnFunction(name, function), f"registered, {module}")


def _function_builder(function: OwnFunction, source: str) -> Builder:
    text = function.file[1]
    if not text:
        with contextlib.suppress(OSError, TypeError):
            text = inspect.getsource(inspect.unwrap(function))
    return Builder(function, source, content=_digest(f"{source}\n{text}"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def installed() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return schedules of installed packages (entry points) by name, except built-in names."""
    return {
        point.name: point
        for point in importlib.metadata.entry_points(group=GROUP)
        if checks.match_name(point.name, BUILT_IN) is None
    }


@functools.cache
def installed_builder(name: str) -> Builder:
    """Return the builder of the function that an entry point names."""
    point = installed()[name]
    package = "" if point.dist is None else f"{point.dist.name} {point.dist.version}, "
    try:
        with contextlib.redirect_stdout(sys.stderr):
            function = point.load()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: entry point {point.value}: {_error_text(error, '')}") from error
    return _function_builder(OwnFunction(name, function), f"{package}{point.value}")


def _from_text(name: str, path: str, text: str) -> OwnFunction:
    """Execute the text of a file, and return the function that FILE.py:FUNCTION names."""
    module, function = _execute(path, text), name.rpartition(":")[2]
    if not hasattr(module, function):
        functions = ((n, value) for n, value in vars(module).items() if inspect.isfunction(value))
        names = [n for n, value in functions if value.__module__ == module.__name__]
        raise ValueError(f"{path}: {checks.unknown('function', function, names)}")
    return OwnFunction(name, getattr(module, function), (path, text))


@functools.cache
def _execute(path: str, text: str) -> types.ModuleType:
    """Execute a file once, with its folder first in the module search path."""
    module = types.ModuleType(f"pipejax_own_{_digest(path + text)[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look up the module there
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise ValueError(f"{path}: {_error_text(error, path)}") from error
    finally:
        del sys.path[0]
    return module


@functools.lru_cache(256)
def _table_builder(path: str, repair: str | None, *_version: int) -> Builder:
    """Return the builder of a table file; `_version` makes the cache miss if the file changes."""
    table = replace(read_table(path, repair=repair), name=path)
    sizes = (table.num_workers, table.num_microbatches)
    legal = f"P = {sizes[0]}, M = {sizes[1]}"
    content = _digest(to_json(table))
    return Builder(OneTable(path, table), path, sizes=sizes, legal=legal, content=content)


def _error_text(error: BaseException, file: str) -> str:
    """Return a line about an error, with its last place in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if f.filename == file]
    if not user_frames:
        user_frames = [f for f in frames if not f.filename.startswith((PACKAGE, "<frozen"))]
    path, line = (user_frames[-1].filename, user_frames[-1].lineno) if user_frames else ("", 0)
    text = str(error)
    if isinstance(error, SyntaxError):
        path, line, text = error.filename or file, error.lineno, error.msg
    place = f"{path}, line {line}: " if path else ""
    first_line = text.strip().splitlines()[0] if text.strip() else "no message"
    return f"{place}{type(error).__name__}: {first_line}"


TABLES = (".csv", ".json")
OWN = "; or a table (.csv, .json), or FILE.py:FUNCTION"


def names() -> tuple[str, ...]:
    """Return the names of all schedules that can be built.

    Returns:
      Names for `build`: built-in schedules, then those that are registered or installed.

    Example:
      >>> names()[:3]
      ('gpipe', '1f1b', 'eager-1f1b')
    """
    return (*BUILT_IN, *{**registered, **installed()})


def named(text: str) -> str:
    """Return the schedule name that a text denotes; only paths are case-sensitive.

    Args:
      text: a name, FILE.py:FUNCTION, or the path of a table.

    Returns:
      The name, under which `find` finds its builder.

    Raises:
      ValueError: if no schedule has the name; the message lists all names and suggests the nearest.

    Example:
      >>> named("GPipe")
      'gpipe'
    """
    return _name_and_builder(text)[0]


def find(text: str, *, repair: str | None = None) -> Builder:
    """Return the builder of a schedule by its name.

    Args:
      text: a name, FILE.py:FUNCTION, or the path of a table.
      repair: as for `read_table`, if the text is the path of a CSV.

    Returns:
      The builder; for a table from a file, it can build one size only.

    Raises:
      ValueError: if the text names no schedule, or the file holds no schedule.
      OSError: if the file cannot be read.

    Example:
      >>> find("hanayo").options
      ('waves',)
    """
    return _name_and_builder(text, repair)[1]


def listed(text: str, *, repair: str | None = None) -> list[str]:
    """Return the names of the schedules that a text denotes; for a folder, all its tables.

    Args:
      text: text as for `named`, or a folder, whose tables are its .csv files and the .json files
        that are tables.
      repair: as for `read_table`, for a CSV.

    Returns:
      Names; for a folder, those of its tables in order.

    Raises:
      ValueError: as `named`, or if the folder holds no table.

    Example:
      >>> listed("zb-h1")
      ['zb-h1']
    """
    checks.check_types(name=(text, str))
    if not is_folder(text):
        return [_name_and_builder(text, repair)[0]]
    paths = [str(path) for path in sorted(Path(text).iterdir()) if _is_table(path)]
    if not paths:
        raise ValueError(f"{text} holds no table: no .csv file, and no .json that is one")
    return [_name_and_builder(path, repair)[0] for path in paths]


def build(name: str, *, num_workers: int, num_microbatches: int, **options: Any) -> ScheduleTable:
    """Build a schedule by name.

    Args:
      name: one of `names()`, FILE.py:FUNCTION, or the path of a table.
      num_workers: P, at least 1.
      num_microbatches: M, at least 1.
      **options: options of the schedule, which `find(name).takes` lists.

    Returns:
      The table.

    Raises:
      ValueError: if the name is unknown, the schedule does not exist for these numbers, or its
        table cannot fit into the memory of this machine; errors of a function of your own are
        named with its file and line.

    Example:
      >>> print(build("1f1b", num_workers=2, num_microbatches=3, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5    6    7
        worker 0  0F0  0F1   .   0B0  0F2  0B1   .   0B2
        worker 1   .   1F0  1B0  1F1  1B1  1F2  1B2   .
    """
    name, builder = _name_and_builder(name)
    for option in options:
        if option not in builder.takes:
            raise ValueError(f"schedule {name} takes no {option}: {options_text(builder)}")
    arguments = {"num_workers": num_workers, "num_microbatches": num_microbatches, **options}
    return builder.function(**arguments)


def options_text(builder: Builder, form: Any = str) -> str:
    """Return a text that lists a schedule's options, each formatted by `form`."""
    if builder.sizes is not None:
        return "a table file states all itself"
    return f"its options are {', '.join(map(form, builder.takes)) or 'none'}"


def is_folder(text: str) -> bool:
    """Return whether a text is the path of a folder and not the name of a schedule."""
    return checks.match_name(text, [*BUILT_IN, *registered]) is None and os.path.isdir(text)


def _name_and_builder(text: str, repair: str | None = None) -> tuple[str, Builder]:
    """Return name and builder of a built-in, own or installed schedule, FILE.py:FUNCTION, table."""
    checks.check_types(name=(text, str))
    builders = {**BUILT_IN, **registered}
    name = checks.match_name(text, builders)
    if name is not None:
        return name, builders[name]
    path = Path(text)
    if ".py:" in text:
        file = text.rpartition(":")[0]
        source = importlib.util.decode_source(read_file(file))
        return text, _function_builder(_from_text(text, file, source), file)
    if path.suffix == ".py":
        raise ValueError(f"{text} names no function: add it, as {text}:build")
    if path.suffix not in TABLES:
        name = checks.match_name(text, installed())
        if name is not None:
            return name, installed_builder(name)
    if os.path.isdir(text):  # false for an empty text, while Path("") is a folder
        raise ValueError(f"{text} is a folder: name one of its tables")
    if path.suffix in TABLES or os.path.isfile(text):
        csv_repair = None if path.suffix == ".json" else repair
        stat = path.stat()  # so that the file is read again whenever it has changed
        return text, _table_builder(text, csv_repair, stat.st_mtime_ns, stat.st_size)
    raise checks.unknown("schedule", text, names(), OWN)


def _is_table(path: Path) -> bool:
    if path.suffix == ".json" and path.is_file():
        return f'"{FORMAT}"' in path.read_text(errors="replace")
    return path.suffix == ".csv" and path.is_file()
