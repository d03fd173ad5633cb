"""Tables in files: PyTorch's schedule CSV, and JSON.

The CSV has one row per rank and one cell per slot, and states neither placement nor name; a table
that it does not hold as a whole is written with a warning that says what reading it will not give.
JSON states everything, so writing and reading are inverse. One table is repaired on request:
PyTorch's own 1F1B.
"""

import csv
import dataclasses
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipejax.base.checks import check_types, resolve_choice
from pipejax.base.data_files import parse_json
from pipejax.base.display import abbreviated
from pipejax.base.files import read_file
from pipejax.base.progress import Notice
from pipejax.schedules.cells.cells import WeightRule
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    SHARDING,
    Op,
    OpKind,
    Phase,
    ScheduleError,
    format_cell,
    parse_cell,
)
from pipejax.schedules.table import pasted_rows
from pipejax.schedules.table.table import ScheduleTable, check_usual

GRAMMAR = ("kinds", "rules", "items", "slices", "forward_only", "graph", "lanes")
_FIELDS: Mapping[str, Any] = {  # of a kind, and what it may be in JSON
    "letters": str,
    "name": str,
    "time": str,
    "lane": str,
    "of": str,
    "together": bool,
    "slot": (int, float),
    "at_start": dict,
    "at_end": dict,
    "look": list,
}


def grammar_data(grammar: Grammar) -> dict[str, Any]:
    """Return the kinds and rules of a table's own, for JSON; empty for a usual table."""
    if grammar.is_usual:
        return {}
    parts = {part: name for name, part in grammar.parts.items()}
    kinds = []
    for phase in grammar.own:
        values = phase.kind._asdict() | {
            moment: {parts[part]: change for part, change in getattr(phase.kind, moment).items()}
            for moment in ("at_start", "at_end")
        }
        entry = {
            name: values[name] for name in _FIELDS if values.get(name) not in (None, {}, False)
        }
        kinds.append({"letters": phase.name, **entry})
    data = {
        "kinds": kinds,
        "rules": list(grammar.texts),
        "items": dict(grammar.items),
        "slices": grammar.slices,
        "forward_only": grammar.forward_only,
        "graph": [list(edge) for edge in grammar.graph],
        "lanes": dict(grammar.lanes),
    }
    usual = {"slices": 1, "forward_only": False}
    return {name: value for name, value in data.items() if value not in ([], {}, usual.get(name))}


def read_grammar(data: Mapping[str, Any]) -> Grammar:
    """Read what a table in JSON has of its own."""
    fields = {name: data[name] for name in GRAMMAR if name in data}
    if not fields:
        return USUAL
    try:
        for name, value in fields.items():
            fits, form = _GRAMMAR_FORMS[name]
            if not fits(value):
                raise ValueError(f"{name} must be {form}, got {value!r}")
        entries = [_kind(entry) for entry in fields.pop("kinds", [])]
        kinds = dict(entries)
        if len(kinds) < len(entries):
            raise ValueError(f"letters of kinds stand once each, got {[k for k, _ in entries]}")
        graph = [tuple(edge) for edge in fields.pop("graph", [])]
        return Grammar(kinds=kinds, graph=graph, **fields)
    except ValueError as error:
        raise ScheduleError(f"the table's own kinds and rules: {error}") from None


_GRAMMAR_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "kinds": (lambda value: _is_list(value, dict), "a list of objects"),
    "rules": (lambda value: _is_list(value, str), "a list of texts"),
    "items": (lambda value: isinstance(value, dict), "an object of numbers"),
    "slices": (lambda value: type(value) is int, "a whole number"),
    "forward_only": (lambda value: isinstance(value, bool), "true or false"),
    "graph": (
        lambda value: _is_list(value, list) and all(len(edge) == 2 for edge in value),
        "a list of pairs of stages",
    ),
    "lanes": (lambda value: isinstance(value, dict), "an object of lanes by letters"),
}


def _kind(entry: Mapping[str, Any]) -> tuple[str, OpKind]:
    """Read a kind of op and its letters; what takes no name is called as its letters."""
    for name, value in entry.items():
        resolve_choice(name, tuple(_FIELDS), "key of a kind")
        if not isinstance(value, _FIELDS[name]):
            raise ValueError(f"{name} of a kind cannot be {value!r}")
    fields = dict(entry)
    letters = fields.pop("letters", None)
    if "look" in fields:
        fields["look"] = tuple(fields["look"])
    return letters, OpKind(**{"name": letters, "time": letters, **fields})


FORMAT = "pipejax-table"
VERSION = 1
LONGEST = 1000  # characters of a name, which reports print
FIELDS = ("name", "placement", "pipe_of_microbatch", "slots", "stage_shares", "rows")
_KEYS = {"format", "version", *FIELDS}


class LossWarning(Notice):
    """A CSV does not hold all of a table."""


class RepairNotice(Notice):
    """Notice of a repair of a table, or that there was nothing to repair."""


class ReadingNotice(Notice):
    """Notice that says how cells were read where letters or lines have two meanings."""


def read_table(path: str | Path, *, repair: str | None = None) -> ScheduleTable:
    r"""Read a table from PyTorch's CSV, from rows as reports print them, or from JSON.

    Rows may be lists in brackets, stand behind "Rank 0:", be split by bars, tabs or blanks, or hold
    a step each. PyTorch's letters of 2024 (B, W, BW) are read too; notices say what was inferred.

    A CSV does not state the placement: there each stage is on one rank, or there are two pipes
    that mirror each other; JSON holds any placement. Where there are SEND and RECV cells, they
    are checked on reading, whatever link model is used later.

    Args:
      path: the file.
      repair: "torch-1f1b" reads PyTorch's own 1F1B, whose last rank is off by one, and warns of
        what it changed; nothing else is repaired, and nothing unasked.

    Returns:
      The table; one from CSV carries the file's name.

    Raises:
      ValueError: if the repair is unknown, or asked for JSON.
      ScheduleError: if the file is not a table, or the schedule cannot run.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile, pipejax as pj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.csv"
      >>> _ = path.write_text("0F0,0B0\n1F0,1B0\n")
      >>> pj.read_table(path).num_stages
      2
    """
    check_types(path=(path, str, Path))
    repair = None if repair is None else resolve_choice(repair, REPAIRS, "repair")
    path = Path(path)
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ScheduleError(f"{path} is not a table: it is not text (UTF-8)") from None
    if not text.strip():
        raise ScheduleError(f"{path} is not a table: the file is empty")
    if "\0" in text:
        raise ScheduleError(f"{path} is not a table: it holds binary data")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        if text.lstrip().startswith("{") and not pasted_rows.is_rank_dict(text):
            if repair is not None:
                raise ScheduleError(f"--repair {repair} is for a CSV, this is JSON")
            return _from_json(text)
        return _from_csv(text, path.stem, repair)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error.reason}", error.grid) from None


def text_for(table: ScheduleTable, path: Path) -> str:
    """Return a table in the form that the suffix of a file's name says."""
    return to_json(table) if path.suffix == ".json" else to_csv(table)


def to_csv(table: ScheduleTable) -> str:
    r"""Return a table in PyTorch's CSV form: idle slots are empty cells; warn of what is lost."""
    check_usual(table, "a CSV")
    text = _to_csv(table)
    if lost := _lost(table, text):
        warnings.warn(
            f"a CSV does not hold the {lost} of {table.name}: reading it gives another table, "
            "a .json file keeps them",
            LossWarning,
            stacklevel=3,
        )
    return text


def is_csv(table: ScheduleTable) -> bool:
    """Return whether a CSV holds all of a table."""
    return table.grammar.is_usual and not _lost(table, _to_csv(table))


def _to_csv(table: ScheduleTable) -> str:
    text = io.StringIO()
    # PyTorch refuses idle cells beside SEND and RECV; they say nothing but to offloads
    dense = table.has_communication and not table.offloads
    csv.writer(text).writerows(
        [table.grammar.text(cell) for cell in row if cell or not dense] for row in table.rows()
    )
    return text.getvalue()


_UNSTATED = {  # fields that reading a CSV may give another value
    "placement": "placement",
    "pipe_of_microbatch": "pipes of the microbatches",
    "slots": "slot durations",
    "stage_shares": "stage shares",
    "weights": "weight rule",
}


def _lost(table: ScheduleTable, text: str) -> str:
    """Name what reading a CSV does not give back."""
    try:
        read, data = _as_data(_from_csv(text, table.name)), _as_data(table)
    except ScheduleError:  # neither one worker for each stage nor two that mirror each other
        return "placement"
    return " and ".join(
        words for name, words in _UNSTATED.items() if read.get(name) != data.get(name)
    )


def to_json(table: ScheduleTable) -> str:
    """Return a table as JSON, complete with placement, slots and name."""
    return json.dumps(_as_data(table), indent=1)


def _as_data(table: ScheduleTable) -> dict[str, Any]:
    rule = {"weights": dataclasses.asdict(table.weights)} if table.updates_within else {}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": table.name,
        "placement": table.placement.tolist(),
        "pipe_of_microbatch": table.pipe_of_microbatch.tolist(),
        "slots": dict(table.slots),
        "stage_shares": list(table.stage_shares),
        **rule,
        **grammar_data(table.grammar),
        "rows": [[table.grammar.text(cell) for cell in row] for row in table.rows()],
    }


def _from_csv(text: str, name: str, repair: str | None = None) -> ScheduleTable:
    rows, steps = _cells(text)
    rows, letters = pasted_rows.in_todays_letters(rows)
    for note in filter(None, (steps, letters)):
        warnings.warn(f"{name}: {note}", ReadingNotice, stacklevel=3)
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if repair is not None:
        mended = repaired(rows) or rows
        message = f"{repair}: {changes(rows, mended) or 'nothing to repair'}"
        warnings.warn(f"{name}: {message}", RepairNotice, stacklevel=3)
        return ScheduleTable.from_rows(mended, name=name)
    try:
        return ScheduleTable.from_rows(rows, name=name)
    except ScheduleError as error:
        if "is not an op" in error.reason and pasted_rows.is_pasted(text):
            raise ScheduleError(error.reason + pasted_rows.FORMS, error.grid) from None
        if _runs(repaired(rows) or rows):
            raise ScheduleError(error.reason + LOOKS_LIKE, error.grid) from None
        raise


def _cells(text: str) -> tuple[list[list[str]], str]:
    """Return the cells of each row, and a note where lines are read as steps."""
    if pasted_rows.is_pasted(text):
        return pasted_rows.split_rows(text)
    try:
        return list(csv.reader(io.StringIO(text), strict=True)), ""
    except csv.Error as error:
        raise ScheduleError(f"this is not a table: {error}") from None


def _runs(rows: Sequence[Sequence[str]]) -> bool:
    try:
        return bool(ScheduleTable.from_rows(rows))
    except ScheduleError:
        return False


def _from_json(text: str) -> ScheduleTable:
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ScheduleError(f"this is not JSON: {error}") from None
    check_json(data)
    return from_json(data)


def from_json(data: Mapping[str, Any]) -> ScheduleTable:
    """Make a table of what `to_json` wrote, once its form is checked."""
    fields = {name: data[name] for name in FIELDS}
    weights = _weights(data.get("weights", {}))
    return ScheduleTable.from_rows(**fields, weights=weights, grammar=read_grammar(data))


def _weights(rule: Any) -> WeightRule:
    names = [field.name for field in dataclasses.fields(WeightRule)]
    if not isinstance(rule, dict) or not set(rule) <= set(names):
        raise ScheduleError(f"weights: expected an object with {', '.join(names)}, got {rule!r}")
    try:
        return WeightRule(**rule)
    except ValueError as error:
        raise ScheduleError(f"weights: {error}") from None


def check_json(data: Mapping[str, Any]) -> None:
    """Check the keys and the types of their values; the table checks what they mean."""
    version = data.get("version")
    is_known = version == VERSION and not isinstance(version, bool)  # true is 1 in Python
    if data.get("format") != FORMAT or not is_known:
        raise ScheduleError(
            f'this is not a table: expected "format": "{FORMAT}" and "version": {VERSION}, '
            f"got {data.get('format')!r} and {version!r}"
        )
    if odd_ones := (set(data) - {"weights", *GRAMMAR}) ^ _KEYS:
        odd = sorted(odd_ones)[0]
        raise ScheduleError(f"{'missing' if odd in _KEYS else 'unknown'} key {odd!r} in the table")
    for name, (fits, form) in _FORMS.items():
        if not fits(data[name]):
            raise ScheduleError(f"{name} must be {form}, got {abbreviated(data[name])}")
    if len(data["name"]) > LONGEST:
        name = abbreviated(data["name"])
        raise ScheduleError(f"name must have at most {LONGEST} characters, got {name}")


def _is_list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, kinds) and not isinstance(entry, bool) for entry in value
    )


def _are_lists(value: Any, kind: type) -> bool:
    return _is_list(value, list) and all(_is_list(row, kind) for row in value)


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str), "a text"),
    "rows": (lambda value: _are_lists(value, str), "lists of texts"),
    "placement": (
        lambda value: _are_lists(value, int) and len({len(row) for row in value}) <= 1,
        "lists of whole numbers of one length",
    ),
    "pipe_of_microbatch": (lambda value: _is_list(value, int), "a list of whole numbers"),
    "stage_shares": (lambda value: _is_list(value, int, float), "a list of numbers"),
    "slots": (
        lambda value: isinstance(value, dict) and _is_list([*value.values()], int, float),
        "numbers by phase letter",
    ),
}


# PyTorch's own table of 1F1B, whose last rank is off by one.
#
# `Schedule1F1B` counts the forwards of a rank on from its warm-up; the last rank has none, and
# begins at 1 where all others begin at 0: with four ranks it holds 3F1, 3B0, 3F2, 3B1 and so on.
# The runtime does not read this table; what is dumped of it cannot run until the forwards of that
# rank are counted from 0. Nothing else is repaired.

Texts = Sequence[Sequence[str]]

REPAIRS = ("torch-1f1b",)
LOOKS_LIKE = (
    "; this looks like PyTorch's own 1F1B, whose last rank is off by one: --repair torch-1f1b (in "
    'Python repair="torch-1f1b") reads it'
)


def repaired(rows: Texts) -> list[list[str]] | None:
    """Return the cells with the forwards of the last rank counted from 0; None for other tables."""
    *before, last = rows
    rank = len(before)
    rank_ops = [_ops(row) for row in rows]
    if any(ops is None or {op.stage for op in ops} != {r} for r, ops in enumerate(rank_ops)):
        return None
    last_ops = [op for op in rank_ops[-1] or () if op.phase not in SHARDING]
    turns = [(Op(Phase.F, rank, m + 1), Op(Phase.B, rank, m)) for m in range(len(last_ops) // 2)]
    if last_ops != [op for turn in turns for op in turn]:
        return None
    return [list(row) for row in before] + [[_lower(text) for text in last]]


def changes(before: Texts, after: Texts) -> str:
    """Say which cells of the last rank are others; nothing if none is."""
    cells = [
        f"{old.strip()} is read as {new}"
        for old, new in zip(before[-1], after[-1], strict=True)
        if old != new
    ]
    if not cells:
        return ""
    listed = [*cells[:2], "...", cells[-1]] if len(cells) > 4 else cells
    return f"rank {len(before) - 1}, {len(cells)} cells: {', '.join(listed)}"


def _ops(row: Sequence[str]) -> list[Op] | None:
    """The ops of a row of single cells in order; None if there is another one."""
    try:
        cells = [cell for cell in map(parse_cell, row) if cell]
    except ValueError:
        return None
    phases = Phase.F, Phase.B, *SHARDING
    is_plain = all(len(cell) == 1 and cell[0].phase in phases for cell in cells)
    return [cell[0] for cell in cells] if is_plain else None


def _lower(text: str) -> str:
    """Count a forward one lower."""
    cell = parse_cell(text)
    if not cell or cell[0].phase is not Phase.F:
        return text
    return format_cell((cell[0]._replace(microbatch=cell[0].microbatch - 1),))
