"""What notebooks show of results: tables in HTML that take their colours from the page.

No colour is named, so light and dark pages both stay readable; nothing is fetched and no script
runs. Every text is escaped, and the markup is XML as well.
"""

import html
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from pipejax.base.short_repr import abbreviated, facts

ENTRIES = 12  # of a collection that are shown
NUMBERS = 16  # of an array
CHARACTERS = 500  # of a text

_CONTROLS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not in XML
_TABLE = "border-collapse:collapse;text-align:left;margin:0"
_CELL = "text-align:left;vertical-align:top;padding:0.1em 1em 0.1em 0"
_FAINT = "opacity:0.65"


def record_html(record: Any) -> str:
    """Return a record as a table: what it says of itself, and the names of the rest."""
    said = dict(facts(record))
    meaning = _meanings(type(record))
    rest = ", ".join(name for name in meaning if name not in said)
    return facts_html(type(record).__name__, said.items(), meaning, rest)


def facts_html(
    title: str, said: Iterable[tuple[str, Any]], meaning: Mapping[str, str] = {}, rest: str = ""
) -> str:
    """Return names and values as a table; what a name means shows when the mouse is on it."""
    rows = [
        f'<tr><th style="{_CELL}" title="{_escaped(meaning.get(name, ""))}">{_escaped(name)}</th>'
        f'<td style="{_CELL}">{_value(value)}</td></tr>'
        for name, value in said
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
    said = [
        record if isinstance(record, Mapping) else dict(facts(record))
        for record in [*records][:ENTRIES]
    ]
    names = list(dict.fromkeys(name for each in said for name in each))
    rows = [_row("th", map(_escaped, names))]
    rows += [_row("td", (_value(each.get(name, "")) for name in names)) for each in said]
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
        (name, (inspect.getdoc(each) or "").partition("\n")[0])
        for name, each in inspect.getmembers(record, lambda each: isinstance(each, property))
        if not name.startswith("_")
    )
    return {name: " ".join(text.split()) for name, text in (*fields, *properties)}


def _escaped(text: str) -> str:
    cut = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}..."
    return html.escape(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", cut))
