"""Fields of input files: values, unit and default of each in one record.

Readers of JSON, TOML and CSV and the JSON Schema of a file come from the same records. A key of a
quantity is its name and a unit, as in "bandwidth_GB_per_s"; `UNITS` lists the units.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pipejax.base.checks import (
    MAX_COUNT,
    efficiency,
    number,
    positive,
    resolve_choice,
    share,
    unknown,
    whole_number,
)
from pipejax.base.data_files import UNITS, to_si

NEEDED: Any = object()  # default of a field that each file must give
Record = TypeVar("Record")


class ValueKind(NamedTuple):
    """Values that a field may have.

    Attributes:
      read: checks a value and returns it; the second argument is its place, for errors.
      schema: the same as JSON Schema.
      fields: of an object, if it is one.
      entry: of an object with free names, the kind of each entry.
    """

    read: Callable[[Any, str], Any]
    schema: Mapping[str, Any] = {}
    fields: "Mapping[str, FileField] | None" = None
    entry: "ValueKind | None" = None


class FileField(NamedTuple):
    """One field of a section of a file.

    Attributes:
      kind: its values, in the unit of its key.
      default: what stands for a missing field; `NEEDED` if the file must give it.
      dimension: SI unit of a quantity; empty for keys without a unit.
      target: name or path of the number in the record that the section makes.
    """

    kind: ValueKind
    default: Any = NEEDED
    dimension: str = ""
    target: str = ""


Fields = Mapping[str, FileField]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a text, got {value!r}")
    return value


def _name(value: Any, where: str) -> str:
    if value == "":
        raise ValueError(f"{where} must be a text, got {value!r}")
    return _text(value, where)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false, got {value!r}")
    return value


def _fraction(value: Any, where: str) -> float:
    return share(float(value) if isinstance(value, bool) else value, where)


TEXT = ValueKind(_text, {"type": "string"})
NAME = ValueKind(_name, {"type": "string", "minLength": 1})
FLAG = ValueKind(_flag, {"type": "boolean"})
SHARE = ValueKind(_fraction, {"type": "number", "minimum": 0, "maximum": 1})
EFFICIENCY = ValueKind(efficiency, {"type": "number", "exclusiveMinimum": 0, "maximum": 1})
POSITIVE = ValueKind(positive, {"type": "number", "exclusiveMinimum": 0})


def at_least(minimum: float) -> ValueKind:
    """Return the kind of finite numbers of at least a minimum."""
    return ValueKind(partial(number, least=minimum), {"type": "number", "minimum": minimum})


NUMBER = at_least(0)


def whole(minimum: int = 1, maximum: int = MAX_COUNT) -> ValueKind:
    """Return the kind of whole numbers in a range."""
    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return ValueKind(partial(whole_number, minimum=minimum, maximum=maximum), schema)


def choice(names: Collection[str]) -> ValueKind:
    """Return the kind of some names; case does not matter."""
    return ValueKind(lambda value, where: resolve_choice(value, names, where), {"enum": [*names]})


def section(fields: Fields, make: Callable[..., Any] | None = None) -> ValueKind:
    """Return the kind of objects with some fields, which make a record, or a mapping by field."""
    read = partial(read_fields, fields) if make is None else partial(read_record, make, fields)
    return ValueKind(read, fields=fields)


def sections(entry: ValueKind) -> ValueKind:
    """Return the kind of objects with free names and entries of one kind."""

    def read(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {value!r}")
        return {name: entry.read(part, f"{where}: {name}") for name, part in value.items()}

    return ValueKind(read, entry=entry)


def unit_factors(name: str, dimension: str) -> dict[str, float]:
    """Return the keys that a field may have, each with the factor of its unit."""
    if not dimension:
        return {name: 1.0}
    units = ((unit, factor) for unit, (kind, factor) in UNITS.items() if kind == dimension)
    return {f"{name}_{unit}": factor for unit, factor in units}


def check_keys(data: Any, fields: Fields, where: str, what: str = "key") -> None:
    """Refuse anything but an object with keys of some fields."""
    keys = [key for name in fields for key in unit_factors(name, fields[name].dimension)]
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be an object with the keys {', '.join(keys)}")
    for key in data:
        if key in fields and fields[key].dimension:
            units = ", ".join(unit_factors(key, fields[key].dimension))
            raise ValueError(f"{where}: {what} {key!r} has no unit: expected {units}")
        if key not in keys:
            raise ValueError(f"{where}: {unknown(what, key, keys)}")


def read_fields(fields: Fields, data: Any, where: str, what: str = "key") -> dict[str, Any]:
    """Read a section into values by field, quantities in SI units."""
    check_keys(data, fields, where, what)
    return {name: read_field(name, field, data, where) for name, field in fields.items()}


def read_field(name: str, field: FileField, data: Mapping[str, Any], where: str) -> Any:
    """Read one field of a section whose keys are checked."""
    factors = unit_factors(name, field.dimension)
    keys = [key for key in factors if key in data]
    if not keys and field.default is not NEEDED:
        return field.default
    if len(keys) != 1:
        state = f"has {' and '.join(keys)}" if keys else "is missing"
        expected = f": expected one of {', '.join(factors)}" if field.dimension else ""
        raise ValueError(f"{where}: {name} {state}{expected}")
    value = field.kind.read(data[keys[0]], f"{where}: {keys[0]}")
    return to_si(value, factors[keys[0]]) if field.dimension else value


def read_record(make: Callable[..., Record], fields: Fields, data: Any, where: str) -> Record:
    """Read a section into a record, whose fields are the targets."""
    values = read_fields(fields, data, where)
    return make(**{field.target or name: values[name] for name, field in fields.items()})


def read_cell(field: FileField, text: str, where: str) -> Any:
    """Read the text of a cell of CSV as a value of a field."""
    if text.isascii() and text.isdigit():
        return field.kind.read(int(text), where)
    try:
        return field.kind.read(float(text), where)
    except ValueError:
        return field.kind.read(text, where)  # an error shows the text as it is written


def json_schema(fields: Fields, meanings: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the JSON Schema of an object with some fields; `meanings` describe their targets."""
    properties: dict[str, Any] = {}
    groups: list[Any] = []
    for name, field in fields.items():
        keys = [*unit_factors(name, field.dimension)]
        entry = _kind_schema(field.kind, meanings)
        if meaning := meanings.get(field.target or name):
            entry["description"] = meaning
        if isinstance(field.default, str | int | float) and not field.dimension:
            entry["default"] = field.default
        properties |= dict.fromkeys(keys, entry)
        if field.default is NEEDED:
            groups.append({"oneOf": [{"required": [key]} for key in keys]})
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"allOf": groups} if groups else {})


def _kind_schema(kind: ValueKind, meanings: Mapping[str, str]) -> dict[str, Any]:
    if kind.fields is not None:
        return json_schema(kind.fields, meanings)
    if kind.entry is not None:
        return {"type": "object", "additionalProperties": _kind_schema(kind.entry, meanings)}
    return dict(kind.schema)
