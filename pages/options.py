"""All names of options on one page: what each means, its default, and who takes it."""

import inspect
from collections.abc import Iterator, Mapping

from pipejax.cli.app import COMMANDS, command_function
from pipejax.cli.options.catalogue import (
    CATALOGUE,
    EXCEPTIONS,
    PANELS,
    begin_sentence,
    flag,
    record,
)
from pipejax.cli.options.option import command_options

NEEDED = "needed"
MANY = 8  # commands that are not all named
# options that have another default, or none, in some command, and why
DIFFERENT_DEFAULTS = {
    "format": "`export` writes a file of a format that has to be named",
    "iterations": "two searches of their own, each with as many rounds as take seconds",
    "link": "`validate` takes the link model that each row names",
    "memory_limit": "`optimize` searches under a limit, and has no other",
    "minibatch": "`plan` has no other source of costs than a model",
    "model": "`plan` has no other source of costs than a model",
    "out": "`export`, `calibrate` and `sweep run` are for their file",
    "schedule": "`tune` takes one where nothing is said",
    "stage_times": "`tune chunks` has no other source of costs",
    "steps": "`run` times some steps, `trace` is told how many there are",
    "system": "`plan` has no other source of costs than a model, `calibrate` fits one",
    "tolerance": "`validate` counts percent, `run` an error of gradients",
    "workers": "`tune chunks` has no table",
}


def option_defaults() -> dict[str, dict[str, str]]:
    """Return defaults by option and command; that of one that must be given is a word."""
    defaults: dict[str, dict[str, str]] = {}
    for command in COMMANDS:
        for name, option in command_options(command_function(command)).items():
            if name not in CATALOGUE:  # an argument
                continue
            default = option.default
            is_needed = default is inspect.Parameter.empty
            shown = (
                NEEDED if is_needed else "" if default is None or default is False else str(default)
            )
            defaults.setdefault(name, {})[command] = shown
    return defaults


def options_page() -> str:
    """Return the page: a table for each panel of help, and what differs between commands."""
    defaults = option_defaults()
    parts = [
        "# All options",
        "An option has one name, one meaning and one default, whichever command takes it. The "
        "exceptions are at the end, each with its reason. `pipejax COMMAND --help-all` says more "
        "of each, [the command line](command_line.md) how values are written.",
    ]
    for title, options in PANELS.items():
        rows = [_row(name, defaults[name]) for name in options]
        parts.append(f"## {title}")
        parts.append(
            "\n".join(["| option | means | default | taken by |", "|---|---|---|---|", *rows])
        )
    parts += ["## Exceptions", "\n".join(_exceptions(defaults))]
    return "\n\n".join(parts) + "\n"


def _row(name: str, defaults: Mapping[str, str]) -> str:
    option = record(name)
    letter = f", `-{option.short}`" if option.short else ""
    counts = list(defaults.values())
    default = max(counts, key=counts.count)
    commands = ", ".join(defaults) if len(defaults) <= MANY else f"{len(defaults)} commands"
    means = begin_sentence(option.head).replace("|", "\\|")
    written = f"`{flag(name)} {option.kind.metavar}".rstrip() + "`"
    return f"| {written.replace('|', chr(92) + '|')}{letter} | {means} | {default} | {commands} |"


def _exceptions(defaults: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for (command, name), exception in EXCEPTIONS.items():
        yield f"- `{flag(name)}` of `{command}` means: {exception.head}."
    for name, reason in DIFFERENT_DEFAULTS.items():
        by_default: dict[str, list[str]] = {}
        for command, default in defaults[name].items():
            by_default.setdefault(default or "none", []).append(command)
        common = max(by_default, key=lambda default: len(by_default[default]))
        others = "; ".join(
            f"{default} in {', '.join(commands)}"
            for default, commands in by_default.items()
            if default != common
        )
        yield f"- `{flag(name)}`: default {common}, but {others}: {reason}."
    yield (
        "- Degrees of parallelism are `--tensor-parallel 8` and so on of one layout, `--tensor "
        "4,8` of the layouts that `plan` searches: several values, all where none is given."
    )
    yield (
        "- `--sequence-parallel` is off where one layout is described, as in Megatron; `plan` and "
        "measured rows have it on where tensor parallelism is, as jobs do."
    )
