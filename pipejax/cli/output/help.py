"""What `--help` prints: options in panels, two screens at most, and `--help-all`: every option."""

import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from shutil import get_terminal_size
from typing import Any

from pipejax.cli.options.catalogue import (
    CATALOGUE,
    PANELS,
    TIME,
    OptionRecord,
    begin_sentence,
    flag,
    panel_of,
    record,
)
from pipejax.cli.options.option import Option, command_options

SCREENS = 48  # lines of two screens
NARROWEST, WIDEST = 60, 100  # columns that help is written in
LEFT = 36  # most columns of the names of options
PROGRAM = {  # options without a command
    "--version": "show the version",
    "--completion SHELL": "print a script that completes command lines in bash, zsh or fish",
    "-h, --help": "show this",
}
_EXAMPLE = re.compile(r"\n\nExample:\n((?:  .*\n?)+)")


def program_help(about: str, groups: Mapping[str, Mapping[str, str]]) -> str:
    """Say what commands there are, by what they answer."""
    width = _width()
    left = max(len(name) for commands in groups.values() for name in commands) + 4
    lines = ["Usage: pipejax COMMAND [OPTIONS]", *textwrap.wrap(about, width)]
    for title, commands in groups.items():
        lines += ["", _bold(title), *_columns(commands.items(), left, width)]
    return "\n".join(
        [
            *lines,
            "",
            _bold("Options"),
            *_columns(PROGRAM.items(), max(map(len, PROGRAM)) + 4, width),
            "",
            *textwrap.wrap("`pipejax COMMAND --help` shows the options of a command.", width),
            "",
        ]
    )


def command_help(name: str, command: Callable[..., Any], *, everything: bool) -> str:
    """Say what a command does and takes: in two screens, or everything."""
    width, listed = _width(), command_options(command)
    head = _head(name, command, listed, width)
    options = {key: option for key, option in listed.items() if key in CATALOGUE}
    notes = list(_notes(command.__name__, options, width))
    if everything:
        panels = _panels(command.__name__, options, options, width, full=True)
        return "\n".join([*head, *(line for panel in panels for line in ("", *panel)), *notes, ""])
    foot = [*notes, "--help-all explains every option."]
    often = {key for key, parameter in options.items() if is_frequent(key, parameter)}
    for shown, gap in itertools.product((options, often), ([""], [])):
        panels = _panels(command.__name__, options, shown, width, full=False)
        lines = [*head, *(line for panel in panels for line in (*gap, *panel)), *gap, *foot]
        if len(lines) <= SCREENS:
            break
    return "\n".join([*lines, ""])


def is_frequent(name: str, parameter: Option) -> bool:
    """Whether an option has a line of its own where not all have one."""
    return CATALOGUE[name].frequent or parameter.default is inspect.Parameter.empty


def _width() -> int:
    return min(max(get_terminal_size().columns, NARROWEST), WIDEST)


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def _head(
    name: str, command: Callable[..., Any], options: Mapping[str, Option], width: int
) -> list[str]:
    """Usage, what the command does, and an example."""
    said = inspect.getdoc(command) or ""
    found = _EXAMPLE.search(said)
    about = said.partition("\n\nOptions:")[0].partition("\n\nExample:")[0]
    needed = [
        f"{flag(key)} {CATALOGUE[key].kind.metavar}"
        for key, p in options.items()
        if key in CATALOGUE and p.default is inspect.Parameter.empty
    ]
    arguments = {key: option.help for key, option in options.items() if key not in CATALOGUE}
    words = [*arguments, *needed, "[OPTIONS]"]
    usage = f"Usage: pipejax {name} {' '.join(words)}"
    lines = _wrapped(usage, width, "  ")
    for paragraph in about.split("\n\n"):
        lines += textwrap.wrap(" ".join(paragraph.split()), width)
    for argument, text in arguments.items():
        lines += textwrap.wrap(f"{argument}: {text}", width)
    example = "" if found is None else f"  $ {' '.join(found[1].split())}"
    return [*lines, *_wrapped(example, width - 2, "      ")]


def _panels(
    command: str,
    options: Mapping[str, Option],
    shown: Container[str],
    width: int,
    *,
    full: bool,
) -> Iterator[list[str]]:
    """Yield the lines of each panel: options that are shown, and the names of the others."""
    known = {key: record(key, command) for key in options}
    names = {key: _left(key, known[key]) for key in options if key in shown}
    left = min(max(map(len, names.values())) + 2, LEFT)
    order = [*CATALOGUE]
    for title in PANELS:
        panel = sorted((key for key in options if panel_of(key, command) == title), key=order.index)
        if not panel:
            continue
        own = [key for key in panel if key in shown]
        rest = " ".join(flag(key) for key in panel if key not in shown)
        lines = [_bold(title)] if own else []
        texts = [_text(known[key], options[key], width - left, full=full) for key in own]
        lines += _columns(zip((names[key] for key in own), texts, strict=True), left, width)
        begin, indent = ("      also ", " " * 6) if own else (f"{title}: ", "  ")
        yield lines + (_wrapped(begin + rest, width, indent) if rest else [])


def _left(name: str, option: OptionRecord) -> str:
    """Return how an option is written: letter, name and value."""
    letter = f"-{option.short}, " if option.short else "    "
    return f"  {letter}{flag(name)} {option.kind.metavar}".rstrip()


def _text(known: OptionRecord, parameter: Option, room: int, *, full: bool) -> str:
    """Return the help of an option: all of it, or as much as one line has room for."""
    default = parameter.default
    end = ""
    if default is inspect.Parameter.empty:
        end = " [required]"
    elif default is not None and not isinstance(default, bool):
        end = f" [default: {default}]"
    text = parameter.help + end
    return text if full or len(text) <= room else begin_sentence(known.head) + end


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _columns(rows: Iterable[tuple[str, str]], left: int, width: int) -> Iterator[str]:
    for name, text in rows:
        lines = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
        if len(name) > left - 2:
            yield name
            name = ""
        yield f"{name:<{left}}{lines[0]}".rstrip()
        yield from (" " * left + line for line in lines[1:])


def _notes(command: str, options: Mapping[str, Option], width: int) -> Iterator[str]:
    """Say how values are written whose metavar alone does not."""
    kinds = [record(key, command).kind for key in options]
    notes = {kind.note: "TIME" if kind.note == TIME.note else kind.metavar for kind in kinds}
    for note, metavar in notes.items():
        yield from textwrap.wrap(f"{metavar}: {note}", width) if note else ()
