"""Command lines to go on with: what was written for this command, as another one takes it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.given import BARE

# options of what this command printed and wrote, or that are written out already
ANSWERED = ("json", "format", "config", "out", "figure", "certificate", "force")

_written: list[Mapping[str, Any]] = [{}]  # options of the command that runs: the last one counts


@contextmanager
def written_as(options: Mapping[str, Any]) -> Iterator[None]:
    """Take these for the options of the command that runs in this block."""
    _written.append(options)
    try:
        yield
    finally:
        _written.pop()


def written(*names: str) -> dict[str, Any]:
    """Those of some options that this command was given, by name."""
    return {name: _written[-1][name] for name in names if name in _written[-1]}


def written_but(*names: str) -> dict[str, Any]:
    """All options that this command was given, but some and those of what it answered."""
    return {k: v for k, v in _written[-1].items() if k not in (*names, *ANSWERED)}


def command_line(command: str, options: Mapping[str, Any]) -> str:
    """Write a command as it is typed."""
    words = ["pipejax", *command.split()]
    for name, value in options.items():
        named = [] if name in BARE else [flag(name)]
        for each in value if isinstance(value, list) else [value]:  # of options given several times
            words += named if each is True else [*named, str(each)]
    return shlex.join(words)


def config_text(options: Mapping[str, Any]) -> str:
    """Write options as a file of `--config`."""
    return "".join(f"{flag(name)[2:]} = {json.dumps(value)}\n" for name, value in options.items())
