"""JSON Schemas of answers: `python -m pages.schemas [FOLDER]` writes pipejax/cli/schemas/.

FOLDER holds schemas of the answers that tests have asked for (`make schemas`), in files of
{command: schema}. They are joined with those that are there: a version only adds keys.
Outputs of a run state their meaning in `OUTPUTS`, all other keys in schema_keys.toml.
"""

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any

from pipejax.analysis.step.outputs import MEASURES, OUTPUTS, RUN_OUTPUTS, STEP_OUTPUTS
from pipejax.cli.app import COMMANDS, summary
from pipejax.cli.options.assertions import FOLDER

VERSION = 2  # to be raised when a key goes, is renamed, or means something else
KEYS = Path(__file__).parent / "schema_keys.toml"
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
ORDER = ("type", "items", "additionalProperties", "properties", "required", "description", "unit")
Names = tuple[str, ...]  # keys from the command down; "*" in a map


@cache
def vocabulary() -> dict[str, Any]:
    """Return meanings of keys, and which objects are maps."""
    listed = tomllib.loads(KEYS.read_text())
    outputs = {k: [o.unit, o.meaning] for k, o in OUTPUTS.items() if not o.resources}
    if doubles := outputs.keys() & listed["keys"].keys():
        raise ValueError(f"{KEYS.name} repeats outputs: {', '.join(sorted(doubles))}")
    return listed | {"keys": listed["keys"] | outputs}


def add_outputs(schemas: Mapping[str, Any]) -> None:
    """Add the keys of all outputs to the schemas of the commands that have outputs."""
    best, front = (schemas["sweep show"]["properties"][key]["items"] for key in ("best", "pareto"))
    rows = schemas["compare"]["properties"]["rows"]["items"]
    columns = [name for name, output in RUN_OUTPUTS.items() if output.column]
    for schema, names in (
        (schemas["evaluate"], (*RUN_OUTPUTS, *STEP_OUTPUTS)),
        (rows, (*columns, *STEP_OUTPUTS)),
        (best, MEASURES),
        (front, MEASURES),
    ):
        for name in names:
            schema["properties"].setdefault(name, {"type": ["number"]})


def is_listed(kind: str, names: Names) -> bool:
    """Return whether an object is one of `maps`, `opaque` or `open`."""
    listed = vocabulary()[kind]
    return any(key in listed for key in lookups(names))


def lookups(names: Names) -> list[str]:
    """Return how a key may be written, the most special first."""
    return [".".join(names[-2:]), names[-1]]


def value_schema(value: Any, names: Names) -> dict[str, Any]:
    """Return the schema of one value."""
    if isinstance(value, list):
        entries = [value_schema(entry, names) for entry in value]
        return {"type": ["array"]} | ({"items": reduce(union, entries)} if entries else {})
    if not isinstance(value, dict):
        return {"type": [NAMES[type(value)]]}
    if is_listed("opaque", names):
        return {"type": ["object"]}
    if is_listed("maps", names):
        inner = [value_schema(entry, (*names, "*")) for entry in value.values()]
        return {"type": ["object"], "additionalProperties": reduce(union, inner) if inner else {}}
    is_open = is_listed("open", names)
    properties = {
        key: value_schema(entry, (*names, key))
        for key, entry in value.items()
        if not is_open or key in vocabulary()["keys"]
    }
    others: dict[str, Any] = {"additionalProperties": {}} if is_open else {}
    return {"type": ["object"], "properties": properties, "required": sorted(properties)} | others


def union(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that allows what either allows."""
    kinds = {*first.get("type", ()), *second.get("type", ())}
    joined: dict[str, Any] = {"type": sorted(kinds - ({"integer"} if "number" in kinds else set()))}
    for key in ("items", "additionalProperties"):
        parts = [schema[key] for schema in (first, second) if key in schema]
        if parts:
            joined[key] = reduce(union, parts) if any(parts) else {}
    objects = [schema for schema in (first, second) if "properties" in schema]
    if objects:
        sets = [{*schema.get("required", ())} for schema in objects]
        names = dict.fromkeys(name for schema in objects for name in schema["properties"])
        joined["properties"] = {
            name: reduce(union, [s["properties"][name] for s in objects if name in s["properties"]])
            for name in names
        }
        joined["required"] = sorted(set.intersection(*sets))
    return joined


def described(schema: Mapping[str, Any], names: Names, *, is_entry: bool = False) -> dict[str, Any]:
    """Add meanings and units; write a single type as a text.

    Raises:
      LookupError: if a key has no meaning, or a number no unit.
    """
    result = dict(schema)
    kinds = result.get("type", [])
    is_number = bool({*kinds} & {"number", "integer"})
    if len(names) > 1:
        unit, meaning = _meaning(names, needs_unit=is_number)
        result |= {} if is_entry else {"description": meaning}
        result |= {"unit": unit} if is_number and unit else {}
    result |= {"type": kinds[0]} if len(kinds) == 1 else {}
    if "items" in result:
        result["items"] = described(result["items"], names, is_entry=True)
    if result.get("additionalProperties"):
        inner = result["additionalProperties"]
        result["additionalProperties"] = described(inner, names, is_entry=True)
    if "properties" in result:
        result["properties"] = {
            name: described(inner, (*names, name)) for name, inner in result["properties"].items()
        }
    return {
        key: result[key] for key in ORDER if key in result and (result[key] or key != "required")
    }


def _meaning(names: Names, *, needs_unit: bool) -> tuple[str, str]:
    keys = vocabulary()["keys"]
    entries = [keys[key] for key in lookups(names) if key in keys]
    if not entries:
        raise LookupError(f"{KEYS.name}: no meaning of {'.'.join(names)}")
    if isinstance(entries[0], str):
        if needs_unit:
            raise LookupError(f"{KEYS.name}: no unit of {'.'.join(names)}")
        return "", entries[0]
    unit, meaning = entries[0]
    return unit, meaning


def undescribed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Take meanings and units out again, so that a schema can be joined with another."""
    if not schema:  # of an open object nothing is known
        return {}
    inner: dict[str, Any] = {
        key: undescribed(schema[key]) for key in ("items", "additionalProperties") if key in schema
    }
    kinds = schema.get("type", [])
    inner |= {"type": [kinds] if isinstance(kinds, str) else kinds}
    if "properties" in schema:
        inner["properties"] = {k: undescribed(value) for k, value in schema["properties"].items()}
        inner["required"] = schema.get("required", [])
    return inner


def write_schemas(answers: Iterable[Mapping[str, Any]]) -> None:
    """Write the schema of each command.

    Raises:
      ValueError: if a promise of this version would be broken.
    """
    paths = [path for path in map(schema_path, COMMANDS) if path.exists()]
    written = {path.stem.replace("_", " "): json.loads(path.read_text()) for path in paths}
    earlier = {name: undescribed(s) for name, s in written.items() if s["version"] == VERSION}
    joined: dict[str, Any] = dict(earlier)
    for schemas in answers:
        for command, schema in schemas.items():
            joined[command] = union(joined[command], schema) if command in joined else schema
    add_outputs(joined)
    broken = [
        f"{command}: {promise}"
        for command, schema in earlier.items()
        for promise in sorted(promises(schema) - promises(joined[command]))
    ]
    if broken:
        raise ValueError(f"raise VERSION, for these hold no longer: {'; '.join(broken)}")
    contents = {
        command: {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"pipejax {command} --json",
            "description": summary(command),
            "version": VERSION,
        }
        | described(schema, (command,))
        for command, schema in joined.items()
    }
    for command, content in contents.items():
        schema_path(command).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def promises(schema: Mapping[str, Any], path: str = "the answer") -> set[str]:
    """Return what a schema promises: keys that are always there, and types of values."""
    kinds = " or ".join(schema["type"])
    promised = {f"{path} is {kinds}"} | {f"{path} has {key}" for key in schema.get("required", ())}
    inner = {f"{path}.{key}": value for key, value in schema.get("properties", {}).items()}
    inner |= {
        f"{path}[]": schema[key] for key in ("items", "additionalProperties") if schema.get(key)
    }
    return promised.union(*(promises(value, where) for where, value in inner.items()))


def schema_path(command: str) -> Path:
    """Return the file of a command's schema."""
    return FOLDER / f"{command.replace(' ', '_')}.json"


if __name__ == "__main__":
    files = [path for folder in sys.argv[1:] for path in sorted(Path(folder).glob("*.json"))]
    if sys.argv[1:] and not files:
        sys.exit(f"{sys.argv[1]} has no answers: run tests with PIPEJAX_ANSWERS={sys.argv[1]}")
    write_schemas(json.loads(path.read_text()) for path in files)
