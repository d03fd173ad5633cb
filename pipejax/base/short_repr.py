"""Short `repr`s of results: arrays by type and shape, never number by number."""

from collections.abc import Collection
from typing import Any, TypeVar

LONGEST = 60  # characters of one field

Record = TypeVar("Record")


def short_repr(record: type[Record]) -> type[Record]:
    """Give a dataclass or a named tuple a `repr` of the form `Name(field=value, ...)`."""
    record.__repr__ = _show  # type: ignore[method-assign]  # that is what this is for
    return record


def _show(record: Any) -> str:
    names = record._fields if hasattr(record, "_fields") else record.__dataclass_fields__
    defaults = getattr(record, "_field_defaults", None) or {
        name: field.default for name, field in getattr(record, "__dataclass_fields__", {}).items()
    }
    values = ((name, getattr(record, name)) for name in names)
    fields = ", ".join(
        f"{name}={abbreviated(value)}"
        for name, value in values
        if name not in defaults or not _same(value, defaults[name])
    )
    return f"{type(record).__name__}({fields})"


def _same(value: Any, default: Any) -> bool:
    """Whether a field has its default; numbers by value, since unpickling makes new objects."""
    return value is default or (
        isinstance(default, float | int | str) and repr(value) == repr(default)
    )


def abbreviated(value: Any) -> str:
    """Describe an array by type and shape, a large collection by size, other values in short."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape:
        return f"{value.dtype}{[*value.shape]}"
    if isinstance(value, float):
        return f"{value:g}"
    text = repr(value)
    if len(text) <= LONGEST:
        return text
    if (
        isinstance(value, Collection)
        and not isinstance(value, str)
        and not hasattr(value, "_fields")
    ):
        return f"{type(value).__name__} of {len(value)}"
    return f"{text[:LONGEST]}..."
