"""What names a schedule: the one place that turns a text into a builder.

A name is that of a built-in schedule, of a registered or installed one, FILE.py:FUNCTION, or the
path of a table. Commands, sweeps and Python ask here, so each takes all of these.
"""

import os
from pathlib import Path
from typing import Any

from pipejax.base.checks import check_types, meant, unknown
from pipejax.schedules.own_schedules import (
    builder_of_file,
    builder_of_table,
    installed,
    installed_builder,
    registered,
)
from pipejax.schedules.registry import REGISTRY, Builder
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import FORMAT

TABLES = (".csv", ".json")
OWN = "; or a table (.csv, .json), or FILE.py:FUNCTION"


def names() -> tuple[str, ...]:
    """Return the names of all schedules that can be built.

    Returns:
      Names for `build`: the built-in ones, then those that are registered or installed.

    Example:
      >>> names()[:3]
      ('gpipe', '1f1b', 'eager-1f1b')
    """
    return (*REGISTRY, *{**registered, **installed()})


def named(text: str) -> str:
    """Return the name of the schedule that a text means: case does not matter, save in paths.

    Args:
      text: a name, FILE.py:FUNCTION, or the path of a table.

    Returns:
      The name, under which `find` finds its builder.

    Raises:
      ValueError: if it names none; the message lists the names and says which is the nearest.

    Example:
      >>> named("GPipe")
      'gpipe'
    """
    return _found(text)[0]


def find(text: str, *, repair: str | None = None) -> Builder:
    """Return what builds a schedule.

    Args:
      text: a name, FILE.py:FUNCTION, or the path of a table.
      repair: as `read_table` takes it, where the text is the path of a CSV.

    Returns:
      The builder; that of a table from a file has one size alone.

    Raises:
      ValueError: if it names no schedule, or its file holds none.
      OSError: if its file cannot be read.

    Example:
      >>> find("hanayo").options
      ('waves',)
    """
    return _found(text, repair)[1]


def listed(text: str, *, repair: str | None = None) -> list[str]:
    """Return the names that a text stands for: of a folder, all tables in it.

    Args:
      text: what `named` takes, or a folder. Of its files, those that end in .csv are tables, and
        those in .json that say so.
      repair: as `read_table` takes it, for a CSV.

    Returns:
      Names, of a folder's tables in order.

    Raises:
      ValueError: as `named`, or if the folder holds no table.

    Example:
      >>> listed("zb-h1")
      ['zb-h1']
    """
    check_types(name=(text, str))
    if not is_folder(text):
        return [_found(text, repair)[0]]
    found = [str(path) for path in sorted(Path(text).iterdir()) if _is_table(path)]
    if not found:
        raise ValueError(f"{text} holds no table: no .csv file, and no .json that is one")
    return [_found(path, repair)[0] for path in found]


def build(name: str, *, num_workers: int, num_microbatches: int, **options: Any) -> ScheduleTable:
    """Build a schedule by name.

    Args:
      name: one of `names()`, FILE.py:FUNCTION, or the path of a table.
      num_workers: P, at least 1.
      num_microbatches: M, at least 1.
      **options: what the schedule takes besides: stages_per_worker, waves, accumulation, runs,
        local_steps, admission, stage_shares, memory_limit, weight_share, transfer, offload, load,
        offload_share, group_size, host_links, slots; of a function of your own, what it takes.

    Returns:
      The table.

    Raises:
      ValueError: if the name is unknown, or the schedule does not exist for these numbers; the
        message says which are legal. Sizes whose table cannot fit into the memory of this machine
        are refused at once, with both; what fits is built, however long that takes. What a
        function of your own raises is named with its file and line.

    Example:
      >>> print(build("1f1b", num_workers=2, num_microbatches=3, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5    6    7
        worker 0  0F0  0F1   .   0B0  0F2  0B1   .   0B2
        worker 1   .   1F0  1B0  1F1  1B1  1F2  1B2   .
    """
    name, builder = _found(name)
    for option in options:
        if option not in builder.takes:
            raise ValueError(f"schedule {name} takes no {option}: {told_options(builder)}")
    given = {"num_workers": num_workers, "num_microbatches": num_microbatches, **options}
    return builder.function(**given)


def told_options(builder: Builder, form: Any = str) -> str:
    """Say which options a schedule takes, each in the form that they are written in."""
    if builder.sizes is not None:
        return "a table file states all itself"
    return f"its options are {', '.join(map(form, builder.takes)) or 'none'}"


def is_folder(text: str) -> bool:
    """Whether a text is that of a folder, and no name."""
    return meant(text, [*REGISTRY, *registered]) is None and os.path.isdir(text)


def _found(text: str, repair: str | None = None) -> tuple[str, Builder]:
    check_types(name=(text, str))
    known = {**REGISTRY, **registered}
    name = meant(text, known)
    if name is not None:
        return name, known[name]
    path = Path(text)
    if ".py:" in text:
        return text, builder_of_file(text)
    if path.suffix == ".py":
        raise ValueError(f"{text} names no function: add it, as {text}:build")
    if path.suffix not in TABLES:
        name = meant(text, installed())
        if name is not None:
            return name, installed_builder(name)
    if os.path.isdir(text):  # which an empty text is not, while Path("") is
        raise ValueError(f"{text} is a folder: name one of its tables")
    if path.suffix in TABLES or os.path.isfile(text):
        return text, builder_of_table(text, None if path.suffix == ".json" else repair)
    raise ValueError(unknown("schedule", text, names(), OWN))


def _is_table(path: Path) -> bool:
    if path.suffix == ".json" and path.is_file():
        return f'"{FORMAT}"' in path.read_text(errors="replace")
    return path.suffix == ".csv" and path.is_file()
