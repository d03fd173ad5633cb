"""The reference of input files: JSON Schema of each kind, and a page that lists their fields."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipejax.base.checks import MAX_COUNT
from pipejax.base.display import attribute_meanings
from pipejax.base.file_fields import NEEDED, Fields, json_schema, unit_factors
from pipejax.costs.measured import costs_file, measured_rows
from pipejax.costs.model import model, stack
from pipejax.costs.model.workload import Workload
from pipejax.costs.system import parts, system
from pipejax.schedules.table import table_files
from pipejax.sweep import declaration

FOLDER = "reference"
HEAD = "| key | unit | value | default | meaning |\n|---|---|---|---|---|"
SCHEMA = "https://json-schema.org/draft/2020-12/schema"


class FileKind(NamedTuple):
    """One kind of input file."""

    title: str
    guide: str  # page of the documentation that explains it
    fields: Fields
    meanings: Mapping[str, str] = {}  # of the fields, by target


def _meanings(*records: type, **parts_by_name: type) -> dict[str, str]:
    """Return what fields of records mean, without units, which the keys of a file have."""
    texts = [item for record in records for item in attribute_meanings(record).items()]
    for name, record in parts_by_name.items():
        texts += [(f"{name}.{field}", text) for field, text in attribute_meanings(record).items()]
    return {name: re.sub(r" ?\[[^\]]*\]", "", text).rstrip(".") for name, text in texts}


FILES: Mapping[str, FileKind] = {
    "system": FileKind(
        "A system, in JSON",
        "systems.md",
        system.FILE,
        _meanings(system.CalibrationRecord, system.System, **parts.RECORDS),
    ),
    "model": FileKind(
        "A model, in JSON",
        "models.md",
        model.FILE,
        _meanings(model.LatentAttention, model.MixtureOfExperts, model.Model),
    ),
    "stack": FileKind("A stack, in JSON", "systems.md", stack.FILE, _meanings(stack.Stack)),
    "costs": FileKind("Measured costs, in JSON", "own_costs.md", costs_file.FILE),
    "costs_csv": FileKind("Measured costs, a row in CSV", "own_costs.md", costs_file.COLUMNS),
    "rows": FileKind("Measured runs, a row in CSV", "measured_rows.md", measured_rows.COLUMNS),
    "collectives": FileKind(
        "Measured collectives, a row in CSV", "systems.md", measured_rows.TIMED_COLUMNS
    ),
    "sweep": FileKind("A sweep, in TOML", "sweeps.md", declaration.FILE, _meanings(Workload)),
    "table": FileKind("A schedule table, in JSON", "any_schedule.md", table_files.FILE),
}


def input_file_pages() -> dict[str, str]:
    """Return the schema of each kind of file, and the page that shows all of them, by path."""
    pages = {f"{FOLDER}/{name}.schema.json": _schema_text(name) for name in FILES}
    parts = [
        "# Input files",
        "Keys, units, values and defaults. A key of a quantity is its name and a unit, as "
        "`latency_us`. Readers and schemas are made from the same records: an editor that knows "
        "the schema refuses what pipejax refuses.",
    ]
    for name, kind in FILES.items():
        parts += [
            f"## {kind.title}",
            f"[Guide](../{kind.guide}), [schema]({name}.schema.json)",
            f"{HEAD}\n" + "\n".join(_rows(kind.fields, kind.meanings)),
        ]
    return pages | {f"{FOLDER}/files.md": "\n\n".join(parts) + "\n"}


def _schema_text(name: str) -> str:
    kind = FILES[name]
    schema = {"$schema": SCHEMA, "title": kind.title, **json_schema(kind.fields, kind.meanings)}
    return json.dumps(schema, indent=2) + "\n"


def _rows(fields: Fields, meanings: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Yield a row for each field; the fields of a section follow it."""
    for name, field in fields.items():
        units = [key.removeprefix(f"{name}_") for key in unit_factors(name, field.dimension)]
        default = json.dumps(field.default) if isinstance(field.default, str | int | float) else ""
        schema = field.kind.schema
        cells = (
            f"`{prefix}{name}`",
            ", ".join(units) if field.dimension else "",
            "section" if field.kind.fields else _values(schema),
            "needed" if field.default is NEEDED else default.replace("NaN", ""),
            meanings.get(field.target or name, schema.get("description", "")),
        )
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        yield from _rows(field.kind.fields or {}, meanings, f"{prefix}{name}.")


def _values(schema: Mapping[str, Any]) -> str:
    """Return the values of a key in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_values, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{name}`" if name else "empty" for name in schema["enum"])
    types = schema.get("type", "object")
    words = " or ".join(types) if isinstance(types, list) else types
    limits = {"minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}"}
    ranges = [
        form.format(f"{schema[key]:g}")
        for key, form in limits.items()
        if schema.get(key, MAX_COUNT) != MAX_COUNT
    ]
    return " ".join([words, ", ".join(ranges)]).strip()
