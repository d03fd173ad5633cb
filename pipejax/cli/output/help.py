"""Texts of `--help`: one screen for a command; `--help-all` explains every option in panels."""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from pipejax.cli.options.catalogue import (
    CATALOGUE,
    EXAMPLES,
    FIRST_QUESTIONS,
    PANELS,
    PROGRAM,
    TIME,
    Option,
    begin_sentence,
    flag,
    option_panel,
    record,
)

if TYPE_CHECKING:
    from pipejax.cli.options.option import CommandOption

SCREEN = 24  # lines
NARROWEST, WIDEST = 60, 100  # columns of a help text
MAX_NAMES_WIDTH = 36  # of the column of option names


def program_help(about: str, num_commands: int) -> str:
    """Return the first screen of the program: a command for each question."""
    width = _width()
    lines = ["Usage: pipejax COMMAND [OPTIONS]", *textwrap.wrap(about, width), ""]
    lines += _columns(((f"  {name}", text) for name, text in FIRST_QUESTIONS.items()), 12, width)
    lines += [
        "",
        "  $ pipejax evaluate -s 1f1b -P 4 -M 8 --worker-times F=10ms,B=20ms --comm 1ms",
        "  $ pipejax schedule.csv costs.json     evaluates a schedule file at measured costs",
        "",
        f"{num_commands - len(FIRST_QUESTIONS)} more commands: pipejax --help-all",
        "Options of a command: pipejax COMMAND --help",
    ]
    return "\n".join([*lines, ""])


def all_commands_help(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return a list of commands, grouped by their questions."""
    width = _width()
    column = max(len(name) for commands in groups.values() for name in commands) + 4
    lines = ["Usage: pipejax COMMAND [OPTIONS]"]
    for title, commands in groups.items():
        lines += ["", _bold(title), *_columns(commands.items(), column, width)]
    lines += ["", _bold("Options"), *_columns(PROGRAM.items(), column + 2, width)]
    return "\n".join([*lines, ""])


def command_help(name: str, command: Callable[..., Any], *, everything: bool) -> str:
    """Return the help of a command: all options explained, or one screen of frequent ones."""
    from pipejax.cli.options.option import command_options  # loads cyclopts

    width, parameters = _width(), command_options(command)
    options = {key: option for key, option in parameters.items() if key in CATALOGUE}
    lines = _head(name, command, parameters, width, short=not everything)
    if everything:
        for panel in _panels(command.__name__, options, width):
            lines += ["", *panel]
        return "\n".join([*lines, *_notes(command.__name__, options, width), ""])
    records = {key: record(key, command.__name__) for key in CATALOGUE if key in options}
    option_lines = _option_lines(records, options, width)
    if len(option_lines) > SCREEN - len(lines) - 2:  # an empty line above them, a line below
        example = EXAMPLES[command.__name__].split()
        for key, entry in [*records.items()]:
            is_required = options[key].default is inspect.Parameter.empty
            if not (entry.frequent or is_required or {flag(key), f"-{entry.short}"} & {*example}):
                del records[key]
        option_lines = _option_lines(records, options, width)
    num_more = len(options) - len(records)
    foot = f"{num_more} more options: " if num_more else "Every option explained: "
    return "\n".join([*lines, "", *option_lines, f"{foot}pipejax {name} --help-all", ""])


def _option_lines(
    records: Mapping[str, Option], options: "Mapping[str, CommandOption]", width: int
) -> list[str]:
    """Return the lines of options for the one-screen help, their details only if they fit."""
    names = {key: _option_text(key, entry) for key, entry in records.items()}
    column = min(max(map(len, names.values())) + 2, MAX_NAMES_WIDTH)
    rows = []
    for key, entry in records.items():
        default = _default(options[key])
        text = options[key].help + default
        if len(text) > width - column:
            text = begin_sentence(entry.head) + default
        rows.append((names[key], text))
    return list(_columns(rows, column, width))


def _width() -> int:
    return min(max(get_terminal_size().columns, NARROWEST), WIDEST)


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def _head(
    name: str,
    command: Callable[..., Any],
    options: "Mapping[str, CommandOption]",
    width: int,
    *,
    short: bool = False,
) -> list[str]:
    """Return usage, purpose and example of a command; `short` omits all but a first paragraph."""
    about = (inspect.getdoc(command) or "").split("\n\n")
    required = [
        f"{flag(key)} {CATALOGUE[key].kind.metavar}"
        for key, option in options.items()
        if key in CATALOGUE and option.default is inspect.Parameter.empty
    ]
    arguments = {key: option.help for key, option in options.items() if key not in CATALOGUE}
    if not required and not arguments:  # a schedule file replaces the schedule's name and sizes
        required = [f"--{key} NAME ..." for key in ("schedule", "schedules") if key in options][:1]
    usage = f"Usage: pipejax {name} {' '.join([*arguments, *required, '[OPTIONS]'])}"
    lines = _wrapped(usage, width, "  ")
    for paragraph in about[:1] if short else about:
        lines += textwrap.wrap(" ".join(paragraph.split()), width)
    for argument, argument_text in arguments.items():
        lines += textwrap.wrap(f"{argument}: {argument_text}", width)
    return lines + _wrapped(f"  $ {EXAMPLES[command.__name__]}", width - 2, "      ")


def _panels(
    command: str, options: "Mapping[str, CommandOption]", width: int
) -> Iterator[list[str]]:
    """Yield the lines of each panel, with every option explained."""
    records = {key: record(key, command) for key in CATALOGUE if key in options}
    longest = max(len(_option_text(key, entry)) for key, entry in records.items())
    column = min(longest + 2, MAX_NAMES_WIDTH)
    for title in PANELS:
        rows = [
            (_option_text(key, entry), options[key].help + _default(options[key]))
            for key, entry in records.items()
            if option_panel(key, command) == title
        ]
        if rows:
            yield [_bold(title), *_columns(rows, column, width)]


def _option_text(name: str, option: Option) -> str:
    """Return how an option is written: letter, name and value."""
    letter = f"-{option.short}, " if option.short else "    "
    return f"  {letter}{flag(name)} {option.kind.metavar}".rstrip()


def _default(option: "CommandOption") -> str:
    """Return a note on the default of an option; "" if it is None or a flag."""
    if option.default is inspect.Parameter.empty:
        return " [required]"
    if option.default is None or isinstance(option.default, bool):
        return ""
    return f" [default: {option.default}]"


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _columns(rows: Iterable[tuple[str, str]], column: int, width: int) -> Iterator[str]:
    """Yield lines of names, and of texts that begin at a column; a long name gets its own line."""
    for name, text in rows:
        lines = textwrap.wrap(text, width - column, break_on_hyphens=False) or [""]
        if len(name) > column - 2:
            yield name
            name = ""
        yield f"{name:<{column}}{lines[0]}".rstrip()
        yield from (" " * column + line for line in lines[1:])


def _notes(command: str, options: "Mapping[str, CommandOption]", width: int) -> Iterator[str]:
    """Yield notes on values whose placeholder does not say how they are written."""
    kinds = [record(key, command).kind for key in options]
    notes = {kind.note: "TIME" if kind.note == TIME.note else kind.metavar for kind in kinds}
    for note, metavar in notes.items():
        yield from textwrap.wrap(f"{metavar}: {note}", width) if note else ()
