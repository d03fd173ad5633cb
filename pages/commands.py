"""Command lines that pages show: every one is parsed, and those of a session are run.

A block `sh` holds commands; in a block `console` they follow a `$ `, and a whole build puts below
each what it prints.
"""

import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator

import typer

from pages.repository import ROOT
from pipejax.cli.app import COMMANDS, application
from pipejax.cli.options.given import GivenOptions

OTHER_PROGRAMS = ("apt", "cd", "dask", "git", "pip", "pipx", "uvx")  # whose options are their own
_BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)


def command_lines(markdown: str) -> Iterator[str]:
    """All command lines of a page, those that go on in the next line as one."""
    for language, text in _BLOCK.findall(markdown):
        lines = text.replace("\\\n", " ").splitlines()
        prompted = language == "console"
        yield from (
            line.removeprefix("$ ") for line in lines if line.startswith("$ ") or not prompted
        )


def check_line(line: str) -> None:
    """Check that a command line could be run: its program, command and options exist.

    Raises:
      ValueError: if not; options of `pipejax` raise the errors that a user sees.
    """
    for words in _commands(line):
        program, *arguments = words
        if program == "pipejax":
            check_pipejax(arguments)
        elif program == "make":
            targets = _TARGET.findall((ROOT / "Makefile").read_text())
            unknown = [word for word in arguments if "=" not in word and word not in targets]
            if unknown:
                raise ValueError(f"make has no target {unknown[0]}")
        elif program == "python" and arguments[:1] == ["-m"]:
            if importlib.util.find_spec(arguments[1]) is None:
                raise ValueError(f"there is no module {arguments[1]}")
        elif program not in (*OTHER_PROGRAMS, "python"):
            raise ValueError(f"what is {program}?")


def check_pipejax(arguments: list[str]) -> None:
    """Parse the arguments of `pipejax` as the program does, and do nothing else."""
    called = arguments[0] if arguments and arguments[0] in COMMANDS else None
    program = typer.main.get_command(application(called))
    if called is None:
        program.make_context("pipejax", arguments or ["--help"], resilient_parsing=True)
        if arguments and not arguments[0].startswith("-"):
            raise ValueError(f"pipejax has no command {arguments[0]}")
        return
    command = program.commands[called]  # type: ignore[attr-defined]
    context = command.make_context(called, arguments[1:], resilient_parsing="--help" in arguments)
    takes = inspect.signature(command.callback).parameters
    GivenOptions(arguments[1:], takes).check()
    context.close()


def _commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, without comments, variables and where output goes."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word in (";", "&", "&&", "|", "||"):
            if words:
                yield words
            words = []
        elif words or not re.fullmatch(r"\w+=.*", word):
            words.append(word)
