"""The schedule axis of a sweep: names with options, tables, and folders of tables."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipejax import schedules
from pipejax.base.checks import MAX_COUNT, unknown, whole_number
from pipejax.costs.planning import is_planned
from pipejax.schedules.naming import is_folder
from pipejax.schedules.table.table import ScheduleTable

MAX_CACHED = 64  # tables in the cache


class Choice(NamedTuple):
    """A schedule with its options, which is one value of the schedule axis."""

    name: str  # of the builder
    options: tuple[tuple[str, Any], ...] = ()  # of the builder, beyond workers and microbatches
    # builder of a user's schedule, for workers of a cluster
    user_builder: schedules.Builder | None = None

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options)])

    @property
    def builder(self) -> schedules.Builder:
        """Return the builder of the schedule."""
        return self.user_builder or schedules.find(self.name)

    @property
    def is_planned(self) -> bool:
        """Return whether the schedule's order depends on the op times of each system."""
        return is_planned(self.builder, dict(self.options))


@functools.lru_cache(MAX_CACHED)
def built(choice: Choice, num_workers: int, num_microbatches: int) -> ScheduleTable:
    """Build a table, or return it with its programs from the cache of recent tables."""
    size = {"num_workers": num_workers, "num_microbatches": num_microbatches}
    return choice.builder.function(**size, **dict(choice.options))


def expand_folders(values: Any) -> Any:
    """Replace each folder by the list of its tables."""
    if isinstance(values, str):
        return schedules.listed(values) if is_folder(values) else values
    if not isinstance(values, Sequence):
        return values
    entries: list[Any] = []
    for value in values:
        tables = expand_folders(value) if isinstance(value, str) else value
        entries += tables if isinstance(tables, list) else [tables]
    return entries


def read_schedule(value: Any, where: str) -> Choice:
    """Read a value of the schedule axis: a name, or a mapping with a name and options."""
    fields = dict(value) if isinstance(value, Mapping) else {"name": value}
    if "name" not in fields:
        names = ", ".join(schedules.names())
        raise ValueError(f"{where}: {value!r} has no name: known are {names}")
    name = fields.pop("name")
    if not isinstance(name, str):
        raise ValueError(f"{where}: {unknown('schedule', name, schedules.names())}")
    try:
        name, builder = schedules.named(name), schedules.find(name)
    except ValueError as error:
        raise ValueError(f"{where}: {getattr(error, 'reason', error)}") from None
    check = _scalar if builder.content else _count
    for option in fields:
        if option not in builder.options:
            listed = ", ".join(builder.options) or "none"
            raise ValueError(f"{where}: {name} has no option {option!r}: known are {listed}")
        fields[option] = check(fields[option], f"{where}: {name}: {option}")
    return Choice(name, tuple(sorted(fields.items())), builder if builder.content else None)


def _scalar(value: Any, where: str) -> Any:
    """Check an option of a user's own schedule, which may have any single value."""
    if not isinstance(value, str | bool | int | float):
        raise ValueError(f"{where} must be a number, a text, true or false, got {value!r}")
    return value


def _count(value: Any, where: str) -> int:
    return whole_number(value, where, maximum=MAX_COUNT)
