"""Command lines that pages show: every one is parsed, and those of a session are run.

A block `sh` holds commands; in a block `console` they follow a `$ `, and a whole build puts below
each what it prints.
"""

import contextlib
import functools
import importlib.util
import io
import re
import shlex
import shutil
import tempfile
from collections.abc import Collection, Iterator

from pages.repository import ROOT
from pipejax.cli.app import COMMANDS, command_function, run, split_command, summary
from pipejax.cli.options.line import LineOptions, parse
from pipejax.cli.options.option import parser

OTHER_PROGRAMS = ("apt", "cd", "dask", "git", "pip", "pipx", "uvx")  # whose options are their own
_BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_MENTION = re.compile(r"`((?:pipejax|make) [a-z][^`]*|--[a-z][^`]*)`")
_TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)


def command_lines(markdown: str) -> Iterator[str]:
    """All command lines of a page, those that go on in the next line as one."""
    for language, text in _BLOCK.findall(markdown):
        lines = text.replace("\\\n", " ").splitlines()
        prompted = language == "console"
        yield from (
            line.removeprefix("$ ") for line in lines if line.startswith("$ ") or not prompted
        )


def mentions(markdown: str) -> Iterator[str]:
    """Yield commands and options that the text of a page mentions, outside of blocks."""
    yield from _MENTION.findall(
        re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    )


def with_output(markdown: str) -> str:
    """Put below the commands of sessions what they print at 80 columns, in a folder of their own.

    Raises:
      ValueError: if a command fails.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(ROOT / "examples", "examples")

        def session(block: re.Match[str]) -> str:
            if block[1] != "console":
                return block[0]
            prompts = [f"$ {line}" for line in re.split(r"^\$ ", block[2], flags=re.MULTILINE)[1:]]
            lines = command_lines(block[0])
            shown = (
                f"{prompt}{command_output(line)}"
                for prompt, line in zip(prompts, lines, strict=True)
            )
            return "```console\n" + "\n".join(shown) + "\n```"

        return _BLOCK.sub(session, markdown)


def command_output(line: str) -> str:
    """Return what a `pipejax` command prints.

    Raises:
      ValueError: if it fails, with what it says.
    """
    program, *arguments = shlex.split(line, comments=True)
    if program != "pipejax":
        raise ValueError(f"only pipejax is run, got {program}")
    return "\n".join(text.rstrip() for text in run_quietly(arguments).rstrip().splitlines())


def run_quietly(arguments: list[str]) -> str:
    """Run `pipejax` and return what it prints.

    Raises:
      ValueError: if it fails, with what it says.
    """
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = run(arguments)
    if code:
        raise ValueError(f"{shlex.join(arguments)}: exit code {code}: {errors.getvalue().strip()}")
    return printed.getvalue()


def commands_page(*, whole: bool) -> str:
    """Return the page of all commands with their help."""
    parts = [
        "# All commands",
        "`pipejax COMMAND --help-all` prints what follows, `--help` less of it; [what holds for all"
        " of them](command_line.md) is a page of its own. [Getting started]"
        "(getting_started.md#on-the-command-line) has examples; what the files hold is in [own "
        "costs](own_costs.md).",
    ]
    for name in COMMANDS:
        parts += [f"## {name}", summary(name)]
        if whole:
            parts.append(f"```text\n{command_output(f'pipejax {name} --help-all')}\n```")
    return "\n\n".join(parts) + "\n"


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


def check_mention(text: str) -> None:
    """Check what the text of a page mentions: a command with some of its options, or an option.

    Raises:
      ValueError: if there is no such command or option.
    """
    words = text.split()
    if words[0] == "make":
        return check_line(text)
    named: Collection[str] = COMMANDS
    if words[0] == "pipejax":
        called, rest = split_command([word for word in words[1:3] if word.islower()])
        if called is None and rest and not rest[0].startswith("-"):
            raise ValueError(f"pipejax has no command {rest[0]}")
        named = [] if called is None else [called]
    options = {"--version", "--completion", "--help", "--help-all"}.union(*map(option_flags, named))
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in options:
            raise ValueError(f"{text}: there is no option {option}")


@functools.cache
def option_flags(called: str) -> frozenset[str]:
    """The options of a command, as they are written."""
    arguments = parser(command_function(called)).assemble_argument_collection()
    helps = ("--help", "-h", "--help-all")
    return frozenset((*helps, *(flag for argument in arguments for flag in argument.names)))


def check_pipejax(arguments: list[str]) -> None:
    """Parse the arguments of `pipejax` as the program does, and do nothing else."""
    called, words = split_command(arguments)
    if called is None:
        if arguments and not arguments[0].startswith("-"):
            raise ValueError(f"pipejax has no command {arguments[0]}")
    elif not {"--help", "-h", "--help-all"} & {*words}:
        with contextlib.suppress(FileNotFoundError):  # a file of options that a page writes
            parse(command_function(called), words, LineOptions(called, COMMANDS))


def _commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, without comments, variables and where output goes."""
    words: list[str] = []
    split = iter([*shlex.split(line, comments=True), ";"])
    for word in split:
        if word == ">":
            next(split)
        elif word in (";", "&", "&&", "|", "||"):
            if words:
                yield words
            words = []
        elif words or not re.fullmatch(r"\w+=.*", word):
            words.append(word)
