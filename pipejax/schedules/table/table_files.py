"""Tables in files: PyTorch's schedule CSV, and JSON.

The CSV has one row per rank and one cell per slot, and states neither placement nor name; a warning
says what is lost. JSON states everything. One table is repaired on request: PyTorch's own 1F1B.
"""

import csv
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipejax.base.checks import check_types, resolve_choice, wrong
from pipejax.base.data_files import parse_json
from pipejax.base.file_fields import (
    FLAG,
    NUMBER,
    TEXT,
    FieldKind,
    Fields,
    FileField,
    choice,
    form_kind,
    optional,
    read_fields,
    section,
    whole,
)
from pipejax.base.files import read_file
from pipejax.base.progress import Notice
from pipejax.schedules.cells.cells import WeightRule
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    COMPUTING,
    MICROBATCH,
    SHARDING,
    CustomPhase,
    Op,
    OpKind,
    Phase,
    ScheduleError,
    format_cell,
    parse_cell,
)
from pipejax.schedules.table import pasted_rows
from pipejax.schedules.table.table import ScheduleTable, check_usual


def _list_kind(form: str, *types: type) -> FieldKind:
    return form_kind(lambda value: _is_list(value, *types), form, "array")


_OBJECT = form_kind(lambda value: isinstance(value, dict), "an object", "object")
_KIND: Fields = {  # fields of a kind of op; name and time default to the letters
    "letters": FileField(TEXT, None),
    "name": FileField(TEXT, None),
    "time": FileField(TEXT, None),
    "lane": FileField(TEXT, COMPUTING),
    "of": FileField(TEXT, MICROBATCH, target="scope"),
    "together": FileField(FLAG, False, target="is_collective"),
    "slot": FileField(NUMBER, None),
    "at_start": FileField(_OBJECT, {}),
    "at_end": FileField(_OBJECT, {}),
    "look": FileField(_list_kind("a list of colours", str), None),
}
GRAMMAR: Fields = {
    "kinds": FileField(_list_kind("a list of objects", dict), []),
    "rules": FileField(_list_kind("a list of texts", str), []),
    "items": FileField(_OBJECT, {}),
    "slices": FileField(whole(), 1),
    "forward_only": FileField(FLAG, False),
    "graph": FileField(
        form_kind(
            lambda value: _is_list(value, list) and all(len(edge) == 2 for edge in value),
            "a list of pairs of stages",
            "array",
        ),
        [],
    ),
    "lanes": FileField(_OBJECT, {}),
}


def _kind_data(phase: CustomPhase, part_names: Mapping[int, str]) -> dict[str, Any]:
    """Return a custom kind of op as JSON data, without fields that have their default."""
    fields = _KIND.items()
    values = {key: getattr(phase.kind, field.target or key, None) for key, field in fields}
    for moment in ("at_start", "at_end"):
        changes = getattr(phase.kind, moment)
        values[moment] = {part_names[part]: change for part, change in changes.items()}
    values["letters"] = phase.name
    return {key: value for key, value in values.items() if value not in (None, {}, False)}


def grammar_data(grammar: Grammar) -> dict[str, Any]:
    """Return the custom kinds and rules of a table as JSON data; empty for the default grammar."""
    if grammar.is_usual:
        return {}
    part_names = {part: name for name, part in grammar.parts.items()}
    data = {
        "kinds": [_kind_data(phase, part_names) for phase in grammar.custom_phases],
        "rules": list(grammar.texts),
        "items": dict(grammar.items),
        "slices": grammar.slices,
        "forward_only": grammar.forward_only,
        "graph": [list(edge) for edge in grammar.graph],
        "lanes": dict(grammar.lanes),
    }
    return {name: value for name, value in data.items() if value != GRAMMAR[name].default}


def _read_grammar(fields: Mapping[str, Any]) -> Grammar:
    """Return the grammar that a table's JSON fields define, or the default grammar."""
    grammar_fields = {name: fields[name] for name in GRAMMAR}
    if all(grammar_fields[name] == field.default for name, field in GRAMMAR.items()):
        return USUAL
    try:
        letters_and_kinds = [_read_kind(entry) for entry in grammar_fields.pop("kinds")]
        kinds = dict(letters_and_kinds)
        if len(kinds) < len(letters_and_kinds):
            letters = [letters for letters, _ in letters_and_kinds]
            raise ValueError(f"letters of kinds stand once each, got {letters}")
        graph = [tuple(edge) for edge in grammar_fields.pop("graph")]
        return Grammar(kinds=kinds, graph=graph, **grammar_fields)
    except ValueError as error:
        raise ScheduleError(f"the table's own kinds and rules: {error}") from None


def _read_kind(entry: Mapping[str, Any]) -> tuple[str, OpKind]:
    """Read a kind of op from JSON data; return its letters and record."""
    values = read_fields(_KIND, entry, "a kind")
    letters, look = values.pop("letters"), values.pop("look")
    values |= {name: values[name] or letters for name in ("name", "time")}
    fields = {_KIND[name].target or name: value for name, value in values.items()}
    return letters, OpKind(look=None if look is None else tuple(look), **fields)


FORMAT = "pipejax-table"
VERSION = 1
MAX_NAME_LENGTH = 1000  # characters of a name, which reports print
FIELDS = ("name", "placement", "pipe_of_microbatch", "slots", "stage_shares", "rows")


class LossWarning(Notice):
    """Warning that a CSV file cannot hold all data of a table."""


class RepairNotice(Notice):
    """Notice that a table was repaired, or that nothing needed repair."""


class ReadingNotice(Notice):
    """Notice of the chosen meaning of letters or lines that could be read in two ways."""


def read_table(path: str | Path, *, repair: str | None = None) -> ScheduleTable:
    r"""Read a table from PyTorch's CSV, from rows as reports print them, or from JSON.

    Rows may be lists in brackets, lines after "Rank 0:", cells between bars, tabs or blanks, or
    one line per step. PyTorch's letters of 2024 (B, W, BW) are read too; notices report guesses.

    A CSV does not state the placement: each stage is on one rank, or two pipes mirror each other;
    JSON holds any placement. The reader checks SEND and RECV cells for every link model.

    Args:
      path: the file.
      repair: "torch-1f1b" reads PyTorch's own 1F1B, whose last rank is off by one, and warns of
        the changes; nothing is repaired by default.

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
    """Return a table as JSON or CSV text, by the suffix of a path."""
    suffix = path.suffix.casefold()
    if suffix not in (".json", ".csv"):
        raise wrong("path", f"must end in .csv or .json, got {path.name!r}", path)
    return to_json(table) if suffix == ".json" else to_csv(table)


def to_csv(table: ScheduleTable) -> str:
    r"""Return a table in PyTorch's CSV form, with empty cells for idle slots; warn of losses."""
    check_usual(table, "a CSV")
    text = _to_csv(table)
    if lost := _lost_fields(table, text):
        warnings.warn(
            f"a CSV does not hold the {lost} of {table.name}: reading it gives another table, "
            "a .json file keeps them",
            LossWarning,
            stacklevel=3,
        )
    return text


def is_csv(table: ScheduleTable) -> bool:
    """Return whether a CSV file can hold all data of a table."""
    return table.grammar.is_usual and not _lost_fields(table, _to_csv(table))


def _to_csv(table: ScheduleTable) -> str:
    """Return a table in PyTorch's CSV form, without a warning about lost data."""
    text = io.StringIO()
    # PyTorch refuses idle cells beside SEND and RECV, and only offloads depend on idle cells
    is_dense = table.has_communication and not table.offloads
    csv.writer(text).writerows(
        [table.grammar.text(cell) for cell in row if cell or not is_dense] for row in table.rows()
    )
    return text.getvalue()


_UNSTATED = {  # fields that may change when a CSV is read
    "placement": "placement",
    "pipe_of_microbatch": "pipes of the microbatches",
    "slots": "slot durations",
    "stage_shares": "stage shares",
    "weights": "weight rule",
}


def _lost_fields(table: ScheduleTable, text: str) -> str:
    """Return the names of a table's fields that are lost when its CSV text is read again."""
    try:
        read_data, data = _json_fields(_from_csv(text, table.name)), _json_fields(table)
    except ScheduleError:  # neither one worker for each stage nor two that mirror each other
        return "placement"
    return " and ".join(
        words for name, words in _UNSTATED.items() if read_data.get(name) != data.get(name)
    )


def to_json(table: ScheduleTable) -> str:
    """Return a table as JSON, complete with placement, slots and name."""
    rows = [[table.grammar.text(cell) for cell in row] for row in table.rows()]
    return json.dumps({**_json_fields(table), "rows": rows}, indent=1)


def _json_fields(table: ScheduleTable) -> dict[str, Any]:
    """Return the object of a table's JSON file without its rows."""
    rule_fields = _WEIGHTS.items()
    weights = {key: getattr(table.weights, field.target or key) for key, field in rule_fields}
    rule = {"weights": weights} if table.updates_within else {}
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
    }


def _from_csv(text: str, name: str, repair: str | None = None) -> ScheduleTable:
    """Read a table from a CSV or from printed rows, with notices about inferences."""
    rows, step_note = _split_cells(text)
    rows, letter_note = pasted_rows.with_todays_letters(rows)
    for note in filter(None, (step_note, letter_note)):
        warnings.warn(f"{name}: {note}", ReadingNotice, stacklevel=3)
    if not any(cell.strip() for row in rows for cell in row):
        raise ScheduleError("this is not a table: no cell holds an op")
    if repair is not None:
        repaired_rows = repair_last_rank(rows) or rows
        message = f"{repair}: {list_changes(rows, repaired_rows) or 'nothing to repair'}"
        warnings.warn(f"{name}: {message}", RepairNotice, stacklevel=3)
        return ScheduleTable.from_rows(repaired_rows, name=name)
    try:
        return ScheduleTable.from_rows(rows, name=name)
    except ScheduleError as error:
        if "is not an op" in error.reason and pasted_rows.is_pasted(text):
            raise ScheduleError(error.reason + pasted_rows.FORMS, error.grid) from None
        if _is_legal(repair_last_rank(rows) or rows):
            raise ScheduleError(error.reason + REPAIR_HINT, error.grid) from None
        raise


def _split_cells(text: str) -> tuple[list[list[str]], str]:
    """Return each row's cells from a text, and a note if the lines were read as steps."""
    text = pasted_rows.without_comments(text)
    if pasted_rows.is_pasted(text):
        return pasted_rows.split_rows(text)
    try:
        rows = list(csv.reader(io.StringIO(text.rstrip()), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"this is not a table: {error}") from None
    last = max((index for index, row in enumerate(rows) if any(map(str.strip, row))), default=-1)
    num_empty = len(rows) - 1 - last
    has_note = num_empty and last >= 0
    note = f"empty rows at its end count as no workers ({num_empty})" if has_note else ""
    return rows[: last + 1], note


def _is_legal(rows: Sequence[Sequence[str]]) -> bool:
    try:
        return bool(ScheduleTable.from_rows(rows))
    except ScheduleError:
        return False


def _from_json(text: str) -> ScheduleTable:
    """Read a table from the text of a JSON file; check the file's format and version."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ScheduleError(f"it begins with '{{' but is not JSON: {error}") from None
    if (data.get("format"), str(data.get("version"))) != (FORMAT, str(VERSION)):
        raise ScheduleError(
            f'this is not a table: expected "format": "{FORMAT}" and "version": {VERSION}, '
            f"got {data.get('format')!r} and {data.get('version')!r}"
        )
    return from_json(data)


def from_json(data: Mapping[str, Any]) -> ScheduleTable:
    """Make a table from a JSON object, as `to_json` writes it."""
    try:
        fields = read_fields(FILE, data, "")
        weights = WeightRule(**fields["weights"])
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    arguments = {name: fields[name] for name in FIELDS}
    return ScheduleTable.from_rows(**arguments, weights=weights, grammar=_read_grammar(fields))


def _is_list(value: Any, *kinds: type) -> bool:
    """Return whether a value is a list of entries of these types; booleans are not numbers."""
    return isinstance(value, list) and all(
        isinstance(entry, kinds) and not isinstance(entry, bool) for entry in value
    )


def _are_lists(value: Any, kind: type) -> bool:
    return _is_list(value, list) and all(_is_list(row, kind) for row in value)


_NAME = form_kind(
    lambda value: isinstance(value, str) and len(value) <= MAX_NAME_LENGTH,
    f"a text of at most {MAX_NAME_LENGTH} characters",
    "string",
)
_ROWS = form_kind(lambda value: _are_lists(value, str), "lists of texts", "array")
_PLACEMENT = form_kind(
    lambda value: _are_lists(value, int) and len({len(row) for row in value}) <= 1,
    "lists of whole numbers of one length",
    "array",
)
_NUMBERS = form_kind(
    lambda value: isinstance(value, dict) and _is_list([*value.values()], int, float),
    "numbers by phase letter",
    "object",
)
_WEIGHTS: Fields = {
    "behind": FileField(optional(whole(0)), None, target="lag"),
    "runs": FileField(whole(), 1),
    "local_steps": FileField(whole(), 1),
}
FILE: Fields = {
    "format": FileField(choice((FORMAT,))),
    "version": FileField(whole(VERSION, VERSION)),
    "name": FileField(_NAME),
    "placement": FileField(_PLACEMENT),
    "pipe_of_microbatch": FileField(_list_kind("a list of whole numbers", int)),
    "slots": FileField(_NUMBERS),
    "stage_shares": FileField(_list_kind("a list of numbers", int, float)),
    "weights": FileField(section(_WEIGHTS, dict), {}),
    **GRAMMAR,
    "rows": FileField(_ROWS),
}


# PyTorch's own table of 1F1B, whose last rank is off by one.
#
# `Schedule1F1B` counts the forwards of a rank on from its warm-up. The last rank has no warm-up,
# and begins at 1 where other ranks begin at 0: with four ranks it holds 3F1, 3B0, 3F2, 3B1 and so
# on.

Texts = Sequence[Sequence[str]]

REPAIRS = ("torch-1f1b",)
REPAIR_HINT = (
    "; this looks like PyTorch's own 1F1B, whose last rank is off by one: --repair torch-1f1b (in "
    'Python repair="torch-1f1b") reads it'
)


def repair_last_rank(rows: Texts) -> list[list[str]] | None:
    """Undo PyTorch's error: number the last rank's forwards from 0; None for any other rows."""
    *first_rows, last_row = rows
    rank = len(first_rows)
    rank_ops = [_plain_ops(row) for row in rows]
    if any(ops is None or {op.stage for op in ops} != {r} for r, ops in enumerate(rank_ops)):
        return None
    last_ops = [op for op in rank_ops[-1] or () if op.phase not in SHARDING]  # `or` is for mypy
    faulty_ops: list[Op] = []  # as PyTorch writes them: F1 B0 F2 B1 ..
    for m in range(len(last_ops) // 2):
        faulty_ops += [Op(Phase.F, rank, m + 1), Op(Phase.B, rank, m)]
    if last_ops != faulty_ops:
        return None
    return [list(row) for row in first_rows] + [[_with_earlier_forward(t) for t in last_row]]


def list_changes(before: Texts, after: Texts) -> str:
    """Return a text that lists changed cells of the last rank; empty if no cell changed."""
    cells = [
        f"{old.strip()} is read as {new}"
        for old, new in zip(before[-1], after[-1], strict=True)
        if old != new
    ]
    if not cells:
        return ""
    listed = [*cells[:2], "...", cells[-1]] if len(cells) > 4 else cells
    return f"rank {len(before) - 1}, {len(cells)} cells: {', '.join(listed)}"


def _plain_ops(row: Sequence[str]) -> list[Op] | None:
    """Return a row's ops in order; None if a cell has a pair or an op other than F, B, sharding."""
    try:
        cells = [cell for cell in map(parse_cell, row) if cell]
    except ValueError:
        return None
    phases = Phase.F, Phase.B, *SHARDING
    is_plain = all(len(cell) == 1 and cell[0].phase in phases for cell in cells)
    return [cell[0] for cell in cells] if is_plain else None


def _with_earlier_forward(text: str) -> str:
    """Return a cell's text, with a forward's microbatch number reduced by one."""
    cell = parse_cell(text)
    if not cell or cell[0].phase is not Phase.F:
        return text
    return format_cell((cell[0]._replace(microbatch=cell[0].microbatch - 1),))
