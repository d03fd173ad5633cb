"""Every option: kind of value, line of help, short letter, panel, and what differs in a command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.data_files import load_json
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS, WorkloadField


class ValueKind(NamedTuple):
    """Kind of a value."""

    metavar: str  # stands for the value in help
    least: int | None = None  # smallest number, if there is one
    largest: int | None = None  # largest number
    note: str = ""  # how a value is written, where the metavar alone does not say it


class Option(NamedTuple):
    """An option of the catalogue, with the same meaning in every command."""

    kind: ValueKind  # of its value
    head: str  # its help in one line
    short: str = ""  # its letter, if it has one
    # words that complete its value, or the name of a list of `--completion`
    names: tuple[str, ...] | str = ()
    more: str = ""  # its help beyond the line, wherever it stands
    argument: str = ""  # what the library calls it, where that is something else
    frequent: bool = False  # whether `--help` gives it a line where it cannot give all of them one


_DATA = load_json(Path(__file__).with_name("catalogue.json"))
_KINDS = {name: ValueKind(**record) for name, record in _DATA["kinds"].items()}
FLAG, TIME = _KINDS["flag"], _KINDS["time"]


def _option(kind: str, names: Any = (), **fields: Any) -> Option:
    return Option(_KINDS[kind], names=names if isinstance(names, str) else (*names,), **fields)


def _workload_option(field: WorkloadField) -> Option:
    kinds = {
        **{"whole": ValueKind("N", field.least, field.largest), "flag": FLAG, "seconds": TIME},
        **{"name": _KINDS["name"], "share": _KINDS["number"]},
    }
    return Option(kinds.get(field.kind, _KINDS["rules"]), field.head, names=field.names)


def _panel(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Option]:
    """Return the options of a panel of the help, from their records in the catalogue's file."""
    options: dict[str, Option] = {}
    for name, fields in records.items():
        if name == "fields of a workload":  # their table is another file
            heads = ((field, record) for field, record in WORKLOAD_FIELDS.items() if record.head)
            options |= {field: _workload_option(record) for field, record in heads}
        else:
            options[name] = _option(**fields)
    return options


PANELS = {title: _panel(records) for title, records in _DATA["panels"].items()}
CATALOGUE: Mapping[str, Option] = {
    name: option for panel in PANELS.values() for name, option in panel.items()
}
_PANELS = {name: title for title, panel in PANELS.items() for name in panel}
OF_ARGUMENTS = {option.argument: name for name, option in CATALOGUE.items() if option.argument}
EXCEPTIONS = {
    (command, name): _option(**fields)
    for command, records in _DATA["exceptions"].items()
    for name, fields in records.items()
}
# by the title of a group in the help: module and function of each command
COMMAND_GROUPS: Mapping[str, Mapping[str, str]] = _DATA["commands"]
# what help adds on an option in one command or record, by the name of its function or class
DETAILS: Mapping[str, Mapping[str, str]] = _DATA["details"]
EXAMPLES: Mapping[str, str] = _DATA["examples"]  # a line of each command, by its function
FIRST_QUESTIONS: Mapping[str, str] = _DATA["questions"]  # of the commands that most people need
PROGRAM: Mapping[str, str] = _DATA["program"]  # options without a command


def flag(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.rstrip('_').replace('_', '-')}"  # from_: the word is Python's own


def begin_sentence(head: str) -> str:
    """Begin a sentence with a line of the catalogue, unless it begins with values."""
    return head if "|" in head.partition(" ")[0] else head[0].upper() + head[1:]


def record(name: str, command: str = "") -> Option:
    """Return the option of a name in a command."""
    try:
        return EXCEPTIONS.get((command.removeprefix("tune "), name)) or CATALOGUE[name]
    except KeyError:
        raise LookupError(f"option {name!r} has no record in {__name__}") from None


def option_panel(name: str, command: str) -> str:
    """Return the panel of help that an option of a command stands in."""
    panel: str = _DATA["places"].get(command, {}).get(name) or _PANELS[name]
    return panel
