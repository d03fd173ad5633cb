"""Display of results: a short `repr`, and HTML tables and pictures in notebooks.

The facts of a record are the fields that its class names. If the class names none, they are the
first field and all fields that differ from their defaults. `repr` shows as many facts as fit. HTML
tables use the colours of the page, escape all texts, are valid XML and need no script.
"""

import html
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

MAX_FIELD = 60  # characters of one field
MAX_REPR = 400  # characters of a `repr`
MAX_ENTRIES = 12  # entries of a collection
MAX_NUMBERS = 16  # numbers of an array
MAX_TEXT = 500  # characters of a text in HTML
MAX_CELLS = 20_000  # cells of a table that a notebook draws unasked, which takes a second
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
    """Decorate a class with a `repr` of fields and properties; spaces separate their names."""

    def decorate(record: type[Record]) -> type[Record]:
        attributes = {"_facts": names.split(), "__repr__": _show, "_repr_html_": _as_html}
        for name, value in attributes.items():
            setattr(record, name, value)
        return record

    return decorate


class ResultList(list[Item]):
    """A list of results, whose `repr` shows as many results as fit."""

    def __repr__(self) -> str:
        return _join_fitting("[", map(repr, self), f"... {len(self)} in all]", "]")

    def _repr_html_(self) -> str:
        return list_html(self)


class ResultDict(dict[str, Any]):
    """A dictionary for JSON, whose `repr` shows as many entries as fit."""

    def __repr__(self) -> str:
        texts = (f"{key!r}: {abbreviated(value)}" for key, value in self.items())
        return _join_fitting("{", texts, "...}", "}")

    def _repr_html_(self) -> str:
        return facts_html("", self.items())


def facts(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each fact of a record."""
    # without `_facts`: the first field, unless it is None, and fields that are not the default
    if record._facts:
        yield from ((name, getattr(record, name)) for name in record._facts)
        return
    if hasattr(record, "_fields"):
        names, defaults = record._fields, record._field_defaults
    else:
        fields = record.__dataclass_fields__.items()
        defaults = {name: field.default for name, field in fields if not name.startswith("_")}
        names = tuple(defaults)
    for index, name in enumerate(names):
        value = getattr(record, name)
        is_default = name in defaults and _is_default(value, defaults[name])
        if not is_default or (index == 0 and value is not None):
            yield name, value


def _show(record: Any) -> str:
    texts = (f"{name}={abbreviated(value)}" for name, value in facts(record))
    return _join_fitting(f"{type(record).__name__}(", texts, "...)", ")")


def _as_html(record: Any) -> str:
    """Render a record as HTML: a table of its facts, and the names of all other attributes."""
    values = dict(facts(record))
    meanings = attribute_meanings(type(record))
    other_names = ", ".join(name for name in meanings if name not in values)
    text = facts_html(type(record).__name__, values.items(), meanings, other_names)
    return record.above_picture(text) if isinstance(record, Drawn) else text


def _join_fitting(start: str, texts: Iterator[str], cut: str, end: str) -> str:
    """Join texts by commas between `start` and `end`; if they do not fit, end with `cut`."""
    joined, max_length = "", MAX_REPR - len(start) - len(cut)
    for text in texts:
        if len(joined) + len(text) + 2 > max_length:
            return f"{start}{joined}{cut}"
        joined += f"{text}, "
    return f"{start}{joined.removesuffix(', ')}{end}"


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a field has its default: an equal simple value, or the same object."""
    is_plain = isinstance(default, float | int | str) or hasattr(default, "_facts")
    return value is default or (is_plain and repr(value) == repr(default))


def abbreviated(value: Any) -> str:
    """Describe an array by type and shape, a large collection by size, other values by `repr`."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape:
        return f"{value.dtype}{[*value.shape]}"
    if isinstance(value, float):
        return f"{value + 0.0:g}"  # -0.0 becomes 0
    text = repr(value)
    if len(text) <= MAX_FIELD:
        return text
    is_scalar = isinstance(value, str) or hasattr(value, "_fields")
    if isinstance(value, Collection) and not is_scalar:
        return f"{type(value).__name__} of {len(value)}"
    return f"{text[:MAX_FIELD]}..."


def facts_html(
    title: str,
    values: Iterable[tuple[str, Any]],
    meanings: Mapping[str, str] = {},
    other_names: str = "",
) -> str:
    """Render names and values as an HTML table; the tooltip of a name is its meaning."""
    rows = [
        f'<tr><th style="{_CELL}" title="{_escape(meanings.get(name, ""))}">{_escape(name)}</th>'
        f'<td style="{_CELL}">{_value(value)}</td></tr>'
        for name, value in values
    ]
    if other_names:
        rows.append(
            f'<tr style="{_FAINT}"><th style="{_CELL}">also</th>'
            f'<td style="{_CELL}">{_escape(other_names)}</td></tr>'
        )
    return _table(title, rows)


def list_html(records: Collection[Any]) -> str:
    """Render records as an HTML table with a row for each; render any other list as one cell."""
    if not all(hasattr(record, "_facts") or isinstance(record, Mapping) for record in records):
        return _table("", [_row("td", [_value([*records])])])
    if not records:
        return _table("none", [])
    row_values = [
        record if isinstance(record, Mapping) else dict(facts(record))
        for record in [*records][:MAX_ENTRIES]
    ]
    names = list(dict.fromkeys(name for values in row_values for name in values))
    rows = [_row("th", map(_escape, names))]
    rows += [_row("td", (_value(values.get(name, "")) for name in names)) for values in row_values]
    if len(records) > MAX_ENTRIES:
        rows.append(_row("td", [f"... {len(records)} in all"]))
    return _table(type(next(iter(records))).__name__, rows)


def grid_html(title: str, names: Iterable[str], texts: Iterable[Iterable[str]]) -> str:
    """Render rows of short texts as an HTML grid; each row begins with a name."""
    cell = "padding:0 0.35em;text-align:center;white-space:nowrap"
    rows = [
        f'<tr><th style="{_CELL};white-space:nowrap">{_escape(name)}</th>'
        + "".join(f'<td style="{cell}">{_escape(text)}</td>' for text in row)
        + "</tr>"
        for name, row in zip(names, texts, strict=True)
    ]
    return _table(title, rows)


def _table(title: str, rows: Iterable[str]) -> str:
    caption = f'<caption style="{_CELL}"><b>{_escape(title)}</b></caption>' if title else ""
    return f'<table style="{_TABLE}">{caption}<tbody>{"".join(rows)}</tbody></table>'


def _row(kind: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f'<{kind} style="{_CELL}">{cell}</{kind}>' for cell in cells) + "</tr>"


def _value(value: Any) -> str:
    """Render a value as HTML; show at most `MAX_ENTRIES` entries of a list or a mapping."""
    if hasattr(value, "_facts") or isinstance(value, str):
        return _escape(str(value) if isinstance(value, str) else repr(value))
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape:
        return _escape(_array(value))
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        is_plain = all(isinstance(entry, str | float | int) for entry in value)
        separator = ", " if is_plain else "<br/>"
        return _lines(map(_entry_text, value[:MAX_ENTRIES]), len(value), separator)
    return _escape(abbreviated(value))


def _mapping(value: Mapping[Any, Any]) -> str:
    """Render the entries of a mapping; if too many, show the numbers of largest magnitude."""
    names = [*value]
    is_numeric = all(isinstance(number, float | int) for number in value.values())
    if len(names) > MAX_ENTRIES and is_numeric:
        names.sort(key=lambda name: -abs(value[name]))
    texts = (f"{name}: {_entry_text(value[name])}" for name in names[:MAX_ENTRIES])
    return _lines(texts, len(names))


def _entry_text(value: Any) -> str:
    return value if isinstance(value, str) else abbreviated(value)


def _lines(texts: Iterable[str], count: int, between: str = "<br/>") -> str:
    lines = [_escape(text) for text in texts]
    if count > len(lines):
        lines.append(f'<span style="{_FAINT}">... {count} in all</span>')
    return between.join(lines) or "none"


def _array(value: Any) -> str:
    """Write the numbers of a short array, or type, shape and range of a long array."""
    numbers = np.asarray(value)
    if numbers.ndim == 1 and numbers.size <= MAX_NUMBERS:
        return ", ".join(abbreviated(number) for number in numbers.tolist())
    finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind in "fiu" else numbers[:0]
    value_range = f", {finite.min():g} to {finite.max():g}" if finite.size else ""
    return f"{abbreviated(value)}{value_range}"


def attribute_meanings(record: type[Any]) -> dict[str, str]:
    """Return {name: meaning} of fields and properties, read from the docstrings of a class."""
    _, _, attributes = (inspect.getdoc(record) or "").partition("Attributes:\n")
    attributes = attributes.partition("\n\n")[0]
    # a field is a line "  name: text", continued by lines with a deeper indent
    fields = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", attributes, re.MULTILINE)
    properties = (
        (name, (inspect.getdoc(member) or "").partition("\n")[0])
        for name, member in inspect.getmembers(record, lambda member: isinstance(member, property))
        if not name.startswith("_")
    )
    return {name: " ".join(text.split()) for name, text in (*fields, *properties)}


def _escape(text: str) -> str:
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return html.escape(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", cut))


class Drawn:
    """Base class of results that can be drawn as a timeline."""

    def plot(self, **options: Any) -> Any:
        """Draw a timeline; options and result are those of `pipejax.plot`."""
        import pipejax as pj  # a lower room may not import plots

        return pj.plot(self, **options)  # type: ignore[arg-type]  # pj.plot takes the subclasses

    def _repr_svg_(self) -> str | None:
        """Return the timeline as SVG; None if it is too large or matplotlib is missing."""
        table: Any = getattr(self, "table", self)
        if table.num_workers * table.num_slots > MAX_CELLS:
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
        """Return HTML with the timeline below it; a notebook ignores `_repr_svg_` beside HTML."""
        picture = self._repr_svg_()
        return text if picture is None else f"<div>{text}{picture}</div>"
