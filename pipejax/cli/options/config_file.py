"""`--config FILE`: options from a file of TOML or JSON, whose keys are their names."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

from pipejax.base.checks import nearest
from pipejax.base.data_files import load_json
from pipejax.base.files import read_file
from pipejax.cli.options.catalogue import flag

OF_THE_LINE = ("config", "help", "help_all")  # options that a file does not give


def read_config(
    path: Path, command: str, takes: Mapping[str, Collection[Any]], commands: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the options that a file gives to a command, by name and as they would be written.

    A section that has the name of a command holds options of that command alone.

    Args:
      path: file of TOML or JSON.
      command: that is called.
      takes: types of its options by name.
      commands: all there are.

    Raises:
      ValueError: if a key is no option of the command, is given twice, or has no value of one.
    """
    content = _load(path)
    sections = {name: own for name, own in content.items() if name in commands and _is_table(own)}
    given = [(key, value) for key, value in content.items() if key not in sections]
    seen: set[str] = set()
    for key, value in [*given, *sections.get(command, {}).items()]:
        name = key.replace("-", "_")
        if name not in takes or name in OF_THE_LINE:
            known = [flag(each)[2:] for each in takes if each not in OF_THE_LINE]
            raise ValueError(f"{path}: {command} has no option {key!r}{nearest(key, known)}")
        if name in seen:
            raise ValueError(f"{path}: {key} is given twice")
        seen.add(name)
        is_repeated = any(get_origin(kind) is list for kind in takes[name])
        for each in value if is_repeated and isinstance(value, list) else [value]:
            text = _text(each, f"{path}: {key}")
            if bool not in takes[name]:
                yield name, text
            elif not isinstance(each, bool):
                raise ValueError(f"{path}: {key} must be true or false, got {each!r}")
            elif each:
                yield name, name


def _text(value: Any, where: str) -> str:
    """Write a value as on the line: lists with commas, tables as F=1,B=2."""
    if isinstance(value, str | bool | int | float):
        return str(value)
    parts = value if isinstance(value, list) else ()
    if _is_table(value):
        return ",".join(f"{key}={_text(part, where)}" for key, part in value.items())
    if not parts or any(isinstance(part, list | dict) for part in parts):
        raise ValueError(f"{where} must be a text, a number or a list of them, got {value!r}")
    return ",".join(_text(part, where) for part in parts)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _load(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return load_json(path)
    if path.suffix != ".toml":
        raise ValueError(f"--config must end in one of .toml, .json, got {str(path)!r}")
    try:
        return tomllib.loads(read_file(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {str(error).splitlines()[0]}") from None
