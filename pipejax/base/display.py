"""Views of results: a short `repr`, and in notebooks tables in HTML and pictures.

What a record says of itself is a list of names of fields and properties, the most important ones
first; without one it is the first field, and all that differ from their defaults. `repr` shows as
many of them as fit, a notebook all of them: arrays by type and shape.

Tables in HTML take their colours from the page: no colour is named, so light and dark pages both
stay readable; nothing is fetched and no script runs. Every text is escaped, and the markup is XML
as well.
"""

import html
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

LONGEST = 60  # characters of one field
WHOLE = 400  # characters of a `repr`
ENTRIES = 12  # of a collection that are shown
NUMBERS = 16  # of an array
CHARACTERS = 500  # of a text
MOST_CELLS = 20_000  # of a table that a notebook draws without being asked: it takes a second
_CONTROLS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not in XML
_TABLE = "border-collapse:collapse;text-align:left;margin:0"
_CELL = "text-align:left;vertical-align:top;padding:0.1em 1em 0.1em 0"
_FAINT = "opacity:0.65"

Record = TypeVar("Record")
Item = TypeVar("Item")


def short_repr(record: type[Record]) -> type[Record]:
    """Give a dataclass or a named tuple a `repr` of the form `Name(field=value, ...)`."""
    return with_short_repr("")(record)


def with_short_repr(names: str) -> Callable[[type[Record]], type[Record]]:
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
        return _fitting("[", map(repr, self), f"... {len(self)} in all]", "]")

    def _repr_html_(self) -> str:
        return list_html(self)


class ResultDict(dict[str, Any]):
    """A dictionary to be written as JSON, whose `repr` shows as much as fits."""

    def __repr__(self) -> str:
        texts = (f"{key!r}: {abbreviated(value)}" for key, value in self.items())
        return _fitting("{", texts, "...}", "}")

    def _repr_html_(self) -> str:
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
    """Return whether a field has its default; numbers by value: unpickling makes new objects."""
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


def record_html(record: Any) -> str:
    """Return a record as a table: what it says of itself, and the names of the rest."""
    values = dict(facts(record))
    meaning = _meanings(type(record))
    rest = ", ".join(name for name in meaning if name not in values)
    return facts_html(type(record).__name__, values.items(), meaning, rest)


def facts_html(
    title: str, values: Iterable[tuple[str, Any]], meaning: Mapping[str, str] = {}, rest: str = ""
) -> str:
    """Return names and values as a table; what a name means shows when the mouse is on it."""
    rows = [
        f'<tr><th style="{_CELL}" title="{_escaped(meaning.get(name, ""))}">{_escaped(name)}</th>'
        f'<td style="{_CELL}">{_value(value)}</td></tr>'
        for name, value in values
    ]
    if rest:
        rows.append(
            f'<tr style="{_FAINT}"><th style="{_CELL}">also</th>'
            f'<td style="{_CELL}">{_escaped(rest)}</td></tr>'
        )
    return _table(title, rows)


def list_html(records: Collection[Any]) -> str:
    """Return records of one kind as a table with a row for each, other values as a line."""
    if not all(hasattr(record, "_says") or isinstance(record, Mapping) for record in records):
        return _table("", [_row("td", [_value([*records])])])
    if not records:
        return _table("none", [])
    listed = [
        record if isinstance(record, Mapping) else dict(facts(record))
        for record in [*records][:ENTRIES]
    ]
    names = list(dict.fromkeys(name for values in listed for name in values))
    rows = [_row("th", map(_escaped, names))]
    rows += [_row("td", (_value(values.get(name, "")) for name in names)) for values in listed]
    if len(records) > ENTRIES:
        rows.append(_row("td", [f"... {len(records)} in all"]))
    return _table(type(next(iter(records))).__name__, rows)


def grid_html(title: str, names: Iterable[str], texts: Iterable[Iterable[str]]) -> str:
    """Return rows of short texts under each other, each with its name before it."""
    cell = "padding:0 0.35em;text-align:center;white-space:nowrap"
    rows = [
        f'<tr><th style="{_CELL};white-space:nowrap">{_escaped(name)}</th>'
        + "".join(f'<td style="{cell}">{_escaped(text)}</td>' for text in row)
        + "</tr>"
        for name, row in zip(names, texts, strict=True)
    ]
    return _table(title, rows)


def _table(title: str, rows: Iterable[str]) -> str:
    caption = f'<caption style="{_CELL}"><b>{_escaped(title)}</b></caption>' if title else ""
    return f'<table style="{_TABLE}">{caption}<tbody>{"".join(rows)}</tbody></table>'


def _row(kind: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f'<{kind} style="{_CELL}">{x}</{kind}>' for x in cells) + "</tr>"


def _value(value: Any) -> str:
    """Return a value: short collections entry by entry, long ones in short."""
    if hasattr(value, "_says") or isinstance(value, str):
        return _escaped(str(value) if isinstance(value, str) else repr(value))
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape:
        return _escaped(_array(value))
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        words = all(isinstance(entry, str | float | int) for entry in value)
        return _lines(map(_brief, value[:ENTRIES]), len(value), ", " if words else "<br/>")
    return _escaped(abbreviated(value))


def _mapping(value: Mapping[Any, Any]) -> str:
    """Return the entries of a mapping, of many numbers the largest ones."""
    entries = [*value.items()]
    if len(entries) > ENTRIES and all(isinstance(number, float | int) for _, number in entries):
        entries.sort(key=lambda entry: -abs(entry[1]))
    return _lines((f"{name}: {_brief(entry)}" for name, entry in entries[:ENTRIES]), len(entries))


def _brief(value: Any) -> str:
    return value if isinstance(value, str) else abbreviated(value)


def _lines(texts: Iterable[str], count: int, between: str = "<br/>") -> str:
    lines = [_escaped(text) for text in texts]
    more = [f'<span style="{_FAINT}">... {count} in all</span>'] * (count > len(lines))
    return between.join(lines + more) or "none"


def _array(value: Any) -> str:
    """Return few numbers one by one, many by type, shape and range."""
    numbers = np.asarray(value)
    if numbers.ndim == 1 and numbers.size <= NUMBERS:
        return ", ".join(abbreviated(number) for number in numbers.tolist())
    finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind in "fiu" else numbers[:0]
    between = f", {finite.min():g} to {finite.max():g}" if finite.size else ""
    return f"{abbreviated(value)}{between}"


def _meanings(record: type[Any]) -> dict[str, str]:
    """Find what fields and properties mean, in the docstrings of a class."""
    _, _, listed = (inspect.getdoc(record) or "").partition("Attributes:\n")
    listed = listed.partition("\n\n")[0]
    fields = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", listed, re.MULTILINE)
    properties = (
        (name, (inspect.getdoc(member) or "").partition("\n")[0])
        for name, member in inspect.getmembers(record, lambda member: isinstance(member, property))
        if not name.startswith("_")
    )
    return {name: " ".join(text.split()) for name, text in (*fields, *properties)}


def _escaped(text: str) -> str:
    cut = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}..."
    return html.escape(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", cut))


class Drawn:
    """A run, or a table in its own slots, as a timeline."""

    def plot(self, **how: Any) -> Any:
        """Draw it as a timeline; arguments and result are those of `pipejax.plot`."""
        import pipejax as pj  # drawing is above this room: the door knows where

        return pj.plot(self, **how)  # type: ignore[arg-type]  # all that are drawn derive from this

    def _repr_svg_(self) -> str | None:
        """Show it in a notebook, if it is not too large and matplotlib is installed."""
        table: Any = getattr(self, "table", self)
        if table.num_workers * table.num_slots > MOST_CELLS:
            return None
        try:
            picture = self.plot()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "matplotlib":
                raise
            return None
        text: str = picture._repr_svg_()
        return text

    def above_picture(self, text: str) -> str:
        """Put HTML above the picture: where there is HTML, a notebook shows nothing else."""
        picture = self._repr_svg_()
        return text if picture is None else f"<div>{text}{picture}</div>"
