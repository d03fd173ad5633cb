"""Short `repr`s of results and tables of them for notebooks: arrays by type and shape.

What a record says of itself is a list of names of fields and properties, the most important ones
first; without one it is the first field, and all that differ from their defaults. `repr` shows as
many of them as fit, a notebook all of them (notebook_html.py).
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from pipejax.base.drawn import Drawn

LONGEST = 60  # characters of one field
WHOLE = 400  # characters of a `repr`

Record = TypeVar("Record")
Item = TypeVar("Item")


def short_repr(record: type[Record]) -> type[Record]:
    """Give a dataclass or a named tuple a `repr` of the form `Name(field=value, ...)`."""
    return short_repr_of("")(record)


def short_repr_of(names: str) -> Callable[[type[Record]], type[Record]]:
    """Give a class a `repr` of some fields and properties: names with spaces between."""

    def decorate(record: type[Record]) -> type[Record]:
        vars_of_class = {"_says": names.split(), "__repr__": _show, "_repr_html_": _as_html}
        for name, value in vars_of_class.items():
            setattr(record, name, value)
        return record

    return decorate


class ResultList(list[Item]):
    """A list of results, whose `repr` shows as many as fit."""

    def __repr__(self) -> str:
        """Return the first ones and how many there are."""
        return _fitting("[", map(repr, self), f"... {len(self)} in all]", "]")

    def _repr_html_(self) -> str:
        from pipejax.base.notebook_html import list_html

        return list_html(self)


class ResultDict(dict[str, Any]):
    """A dictionary to be written as JSON, whose `repr` shows as much as fits."""

    def __repr__(self) -> str:
        """Return the first entries, each in short."""
        texts = (f"{key!r}: {abbreviated(value)}" for key, value in self.items())
        return _fitting("{", texts, "...}", "}")

    def _repr_html_(self) -> str:
        from pipejax.base.notebook_html import facts_html

        return facts_html("", self.items())


def facts(record: Any) -> Iterator[tuple[str, Any]]:
    """List what a record says of itself: names and values."""
    if record._says:
        yield from ((name, getattr(record, name)) for name in record._says)
        return
    names = record._fields if hasattr(record, "_fields") else record.__dataclass_fields__
    defaults = getattr(record, "_field_defaults", None) or {
        name: field.default for name, field in getattr(record, "__dataclass_fields__", {}).items()
    }
    for place, name in enumerate(names):
        value = getattr(record, name)
        is_default = name in defaults and _same(value, defaults[name])
        if not is_default or (place == 0 and value is not None):
            yield name, value


def _show(record: Any) -> str:
    texts = (f"{name}={abbreviated(value)}" for name, value in facts(record))
    return _fitting(f"{type(record).__name__}(", texts, "...)", ")")


def _as_html(record: Any) -> str:
    from pipejax.base.notebook_html import record_html

    text = record_html(record)
    return record.above_picture(text) if isinstance(record, Drawn) else text


def _fitting(start: str, texts: Iterator[str], cut: str, end: str) -> str:
    """Join texts by commas: all of them, or those that fit."""
    shown, room = "", WHOLE - len(start) - len(cut)
    for text in texts:
        if len(shown) + len(text) + 2 > room:
            return f"{start}{shown}{cut}"
        shown += f"{text}, "
    return f"{start}{shown.removesuffix(', ')}{end}"


def _same(value: Any, default: Any) -> bool:
    """Whether a field has its default; numbers by value, since unpickling makes new objects."""
    is_plain = isinstance(default, float | int | str) or hasattr(default, "_says")
    return value is default or (is_plain and repr(value) == repr(default))


def abbreviated(value: Any) -> str:
    """Describe an array by type and shape, a large collection by size, other values in short."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape:
        return f"{value.dtype}{[*value.shape]}"
    if isinstance(value, float):
        return f"{value + 0.0:g}"  # 0 has no sign
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
