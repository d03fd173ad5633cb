"""Descriptions of the fields of input files: kind of values, unit and default.

The same records give the readers of JSON, TOML and CSV, and the JSON Schema of a file. The key of
a quantity is a name and a unit, as in "bandwidth_GB_per_s"; `UNITS` lists the units.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipejax.base import checks
from pipejax.base.data_files import UNITS, parse_float, read_lines, to_si
from pipejax.base.display import abbreviated

NEEDED: Any = object()  # default of a field that each file must give
Record = TypeVar("Record")


class FieldKind(NamedTuple):
    """Kind of values that a field of a file may have: a reader and a JSON schema."""

    # checks a value and returns it; the second argument names the value in errors
    read: Callable[[Any, str], Any]
    schema: Mapping[str, Any] = {}  # JSON Schema of the values
    fields: "Mapping[str, FileField] | None" = None  # if the value is an object: its fields
    entry: "FieldKind | None" = None  # if the value has free names: kind of its entries


class FileField(NamedTuple):
    """Description of a field in a section of a file: kind of values, default and unit."""

    kind: FieldKind  # of the value in the file, in the unit of the key
    default: Any = NEEDED  # value if the field is missing; `NEEDED` if the file must have it
    dimension: str = ""  # SI unit of a quantity; empty for keys without a unit
    target: str = ""  # name or path of the value in the record; "": as the field


Fields = Mapping[str, FileField]


def form_kind(has_form: Callable[[Any], Any], form: str, json_type: str) -> FieldKind:
    """Return the kind of values that `has_form` accepts; `form` describes them in errors."""

    def read_value(value: Any, where: str) -> Any:
        if not has_form(value):
            raise ValueError(f"{where} must be {form}, got {abbreviated(value)}")
        return value

    is_plain = json_type in ("string", "boolean")
    return FieldKind(read_value, {"type": json_type} | ({} if is_plain else {"description": form}))


def optional(kind: FieldKind) -> FieldKind:
    """Return the kind of values that may also be null."""
    schema = {"anyOf": [kind.schema, {"type": "null"}]}
    return FieldKind(
        lambda value, where: None if value is None else kind.read(value, where), schema
    )


def _fraction(value: Any, where: str) -> float:
    return checks.share(float(value) if isinstance(value, bool) else value, where)


TEXT = form_kind(lambda value: isinstance(value, str), "a text", "string")
NAME = form_kind(lambda value: isinstance(value, str) and value, "a text", "string")
FLAG = form_kind(lambda value: isinstance(value, bool), "true or false", "boolean")
SHARE = FieldKind(_fraction, {"type": "number", "minimum": 0, "maximum": 1})
EFFICIENCY = FieldKind(checks.efficiency, {"type": "number", "exclusiveMinimum": 0, "maximum": 1})
POSITIVE = FieldKind(checks.positive, {"type": "number", "exclusiveMinimum": 0})


def at_least(minimum: float) -> FieldKind:
    """Return the kind of finite numbers of at least a minimum."""
    return FieldKind(partial(checks.number, least=minimum), {"type": "number", "minimum": minimum})


NUMBER = at_least(0)


def whole(minimum: int = 1, maximum: int = checks.MAX_COUNT) -> FieldKind:
    """Return the kind of whole numbers in a range."""
    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return FieldKind(partial(checks.whole_number, minimum=minimum, maximum=maximum), schema)


def choice(names: Collection[str]) -> FieldKind:
    """Return the kind of a choice among names, in upper or lower case."""
    schema = {"enum": [*names]}
    return FieldKind(lambda value, where: checks.resolve_choice(value, names, where), schema)


def section(fields: Fields, make: Callable[..., Any] | None = None) -> FieldKind:
    """Return the kind of objects with these fields; `make` builds a record, default: a dict."""
    read = partial(read_fields, fields) if make is None else partial(read_record, make, fields)
    return FieldKind(read, fields=fields)


def sections(entry: FieldKind) -> FieldKind:
    """Return the kind of objects with any names as keys, whose values all have kind `entry`."""

    def read_sections(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {value!r}")
        return {name: entry.read(part, f"{where}: {name}") for name, part in value.items()}

    return FieldKind(read_sections, entry=entry)


def several(kind: FieldKind) -> FieldKind:
    """Return the kind of fields that have a value of `kind` or a list of such values."""
    entries = {"type": "array", "items": kind.schema}
    return FieldKind(kind.read, {"anyOf": [kind.schema, entries]})


def unit_factors(name: str, dimension: str) -> dict[str, float]:
    """Return {key: SI factor of its unit} for all keys by which a file may name a field."""
    if not dimension:
        return {name: 1.0}
    units = ((unit, factor) for unit, (kind, factor) in UNITS.items() if kind == dimension)
    return {f"{name}_{unit}": factor for unit, factor in units}


def check_keys(data: Any, fields: Fields, where: str, what: str = "key") -> None:
    """Check that data is an object, and that every key is the key of a field."""
    keys = [key for name in fields for key in unit_factors(name, fields[name].dimension)]
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be an object with the keys {', '.join(keys)}")
    key = next((key for key in data if key not in keys), None)
    if key is None:
        return
    quantities = [name for name in fields if fields[name].dimension]
    matches = [name for name in quantities if f"{key}_".startswith(f"{name}_")]
    if matches:  # bandwidth, or bandwidth_XB_per_s
        name = max(matches, key=len)
        units = ", ".join(unit_factors(name, fields[name].dimension))
        state = f"{what} {key!r} has no unit" if key == name else f"unknown {what} {key!r}"
        raise ValueError(f"{where}: {state}: expected {units}")
    more = f", quantities with a unit, as {quantities[0]}_.." if quantities else ""
    listed = f"known are {', '.join(fields)}{more}{checks.nearest(key, keys)}"
    raise ValueError(f"{where}: unknown {what} {key!r}: {listed}")


def read_fields(fields: Fields, data: Any, where: str, what: str = "key") -> dict[str, Any]:
    """Read a section of a file; return {field: value}, with quantities in SI units."""
    check_keys(data, fields, where, what)
    return {name: read_field(name, field, data, where) for name, field in fields.items()}


def read_field(name: str, field: FileField, data: Mapping[str, Any], where: str = "") -> Any:
    """Read one field of a section; `check_keys` has checked the keys of the section."""
    prefix = f"{where}: " if where else ""
    factors = unit_factors(name, field.dimension)
    keys = [key for key in factors if key in data]
    if not keys and field.default is not NEEDED:
        return field.default
    if len(keys) != 1:
        state = f"has {' and '.join(keys)}" if keys else "is missing"
        expected = factors if field.dimension else field.kind.schema.get("enum")
        more = f": expected one of {', '.join(expected)}" if expected else ""
        if field.dimension and not keys:
            raise ValueError(f"{prefix}{name} is missing: add {' or '.join(factors)}")
        raise ValueError(f"{prefix}{'' if keys else 'key '}{name} {state}{more}")
    value = field.kind.read(data[keys[0]], f"{prefix}{keys[0]}")
    return to_si(value, factors[keys[0]]) if field.dimension else value


def read_record(make: Callable[..., Record], fields: Fields, data: Any, where: str) -> Record:
    """Read a section of a file; return the record that `make` builds from its values."""
    values = read_fields(fields, data, where)
    return make(**{field.target or name: values[name] for name, field in fields.items()})


def read_cell(kind: FieldKind, text: str, where: str) -> Any:
    """Read the text of a CSV cell as a value of the given kind."""
    if kind.schema.get("type") not in ("number", "integer"):
        return kind.read(text, where)
    if text.isascii() and text.isdigit():
        return kind.read(int(text), where)
    try:
        return kind.read(parse_float(text), where)
    except ValueError:
        return kind.read(text, where)  # an error shows the text as it is written


def read_cells(
    path: Path, fields: Fields, read: Callable[[int, dict[str, Any]], Record]
) -> list[Record]:
    """Read a CSV file with a header; call `read` for each row, and list the results."""
    # Arguments of `read`: number of the row, from 1, and {field: value in SI units} of its cells,
    # without empty cells. An error in a row names file and row.
    header, *rows = read_lines(path)
    columns = check_header(path, header, fields)
    if not rows:
        raise ValueError(f"{path} has no rows: give a header and a row for each run")
    records = []
    for row_number, row in enumerate(rows, 1):
        try:
            if len(row) != len(header):
                raise ValueError(f"it has {len(row)} cells, the header {len(header)}")
            cells: dict[str, Any] = {}
            for (key, (name, factor)), text in zip(columns.items(), row, strict=True):
                if text:
                    value = read_cell(fields[name].kind, text, key)
                    cells[name] = to_si(value, factor) if fields[name].dimension else value
            records.append(read(row_number, cells))
        except ValueError as error:
            reason = getattr(error, "reason", error)  # a ScheduleError appends its table
            raise ValueError(f"{path}, row {row_number}: {reason}") from None
    return records


def check_header(
    path: Path, header: Collection[str], fields: Fields
) -> dict[str, tuple[str, float]]:
    """Check the columns of a CSV file; return {column: (field, SI factor of its unit)}."""
    # columns stage and F_ms -> {"stage": ("stage", 1.0), "F_ms": ("F", 0.001)}
    check_keys(dict.fromkeys(header), fields, str(path), "column")
    columns: dict[str, tuple[str, float]] = {}
    for name, field in fields.items():
        factors = unit_factors(name, field.dimension)
        keys = [key for key in header if key in factors]
        if len(keys) > 1:
            units = ", with two units" if len({*keys}) > 1 else ""
            raise ValueError(f"{path}: column {name} stands twice{units}")
        columns |= {key: (name, factors[key]) for key in keys}
    return {key: columns[key] for key in header}


def with_defaults(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field: value} of a row, with defaults for missing fields."""
    for name, field in fields.items():
        if field.default is NEEDED and name not in values:
            raise ValueError(f"{name} is missing")
    return {name: values.get(name, field.default) for name, field in fields.items()}


def json_schema(fields: Fields, meanings: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the JSON Schema of an object with these fields; `meanings` maps a field to a text."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    choices: list[Any] = []  # for each required quantity: exactly one of its keys with a unit
    for name, field in fields.items():
        keys = [*unit_factors(name, field.dimension)]
        entry = _kind_schema(field.kind, meanings)
        if meaning := meanings.get(field.target or name):
            entry["description"] = meaning
        if isinstance(field.default, str | int | float) and not field.dimension:
            entry["default"] = field.default
        properties |= dict.fromkeys(keys, entry)
        if field.default is NEEDED and len(keys) == 1:
            required += keys
        elif field.default is NEEDED:
            choices.append({"oneOf": [{"required": [key]} for key in keys]})
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    groups = {"required": required, "allOf": choices}
    return schema | {name: group for name, group in groups.items() if group}


def _kind_schema(kind: FieldKind, meanings: Mapping[str, str]) -> dict[str, Any]:
    if kind.fields is not None:
        return json_schema(kind.fields, meanings)
    if kind.entry is not None:
        return {"type": "object", "additionalProperties": _kind_schema(kind.entry, meanings)}
    return dict(kind.schema)
