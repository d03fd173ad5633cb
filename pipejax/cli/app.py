"""The application: commands, and how mistakes are reported."""

import ast
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipejax as pj
from pipejax.base.checks import nearest
from pipejax.base.jax_on_demand import is_loaded, jax
from pipejax.base.progress import notices_as_lines
from pipejax.cli.options.catalogue import COMMAND_GROUPS
from pipejax.cli.process import OutputError

if TYPE_CHECKING:
    from pipejax.cli.options.line import LineOptions

PLACES = {name: place for group in COMMAND_GROUPS.values() for name, place in group.items()}
COMMANDS = (*PLACES,)
# an error that ends with what to do: "x.csv exists: give another, or --force to replace it"
_SUGGESTION = re.compile(r"(.*)[:;] ((?:give|choose|write|did you mean) .*)")
HELP = ("--help", "-h", "--help-all")
NO_MEMORY = "RESOURCE_EXHAUSTED"  # in what XLA raises
SKILL = Path(pj.__file__).parent / "SKILL.md"  # instructions for programs that call this one
ABOUT = "How long does one LLM training step take under this pipeline schedule on this machine?"


def command_function(called: str) -> Callable[..., Any]:
    """Return the function of a command."""
    module, name = PLACES[called].split(".")
    commands: Any = importlib.import_module(f"pipejax.cli.commands.{module}")
    return getattr(commands, name)


def summary(called: str) -> str:
    """Return what a command does, as its docstring says; nothing is imported for it."""
    module, name = PLACES[called].split(".")
    text = Path(__file__).with_name("commands").joinpath(f"{module}.py").read_text("utf-8")
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    docstring = next(ast.get_docstring(node) for node in functions if node.name == name) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def split_command(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the words of a line into the command and its arguments."""
    # The command has one word or two. A line that begins with a .csv or .json file means evaluate;
    # of any other line without a command, the command is None.
    for count in (2, 1):
        called = " ".join(arguments[:count])
        if called in COMMANDS:
            return called, list(arguments[count:])
    first = arguments[0] if arguments else ""
    if _subcommands(first) and not {*arguments[1:2]} & {*HELP}:
        raise ValueError(f"{first} needs a second word: {', '.join(_subcommands(first))}")
    if first.endswith((".csv", ".json")):
        return "evaluate", _file_options(arguments)
    return None, list(arguments)


def _file_options(arguments: Sequence[str]) -> list[str]:
    """Put --table and --costs before the files with which the line begins."""
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if len(files) > 2:
        raise ValueError(
            f"expected a table and a file of costs, got {len(files)} files: {', '.join(files)}"
        )
    options = zip(("--table", "--costs"), files, strict=False)
    return [*itertools.chain.from_iterable(options), *arguments[len(files) :]]


def _subcommands(first: str) -> list[str]:
    """Return the commands of two words that begin with a word."""
    return [name for name in COMMANDS if name.startswith(f"{first} ")]


def _help(called: str | None, words: Sequence[str]) -> str | None:
    """Return the help that a line asks for; None for a command without --help."""
    # Without a command it is that of the program, or of the commands that begin with the first
    # word.
    from pipejax.cli.output.help import all_commands_help, command_help, program_help

    if called is None:
        subcommands = _subcommands(words[0]) if words else []
        if not subcommands and words != ["--help-all"]:
            return program_help(ABOUT, len(COMMANDS))
        groups: Mapping[str, Iterable[str]] = COMMAND_GROUPS
        groups = {"Commands": subcommands} if subcommands else groups
        return all_commands_help(
            {title: {name: summary(name) for name in names} for title, names in groups.items()}
        )
    if not {*HELP} & {*words}:
        return None
    return command_help(called, command_function(called), everything="--help-all" in words)


def _run_program(words: Sequence[str]) -> None:
    """Answer `--version`, `--skill` and `--completion`."""
    if words[0] == "--version":
        sys.stdout.write(f"pipejax {pj.__version__}\n")
        return
    if words[0] == "--skill":
        sys.stdout.write(SKILL.read_text())
        return
    if words[0].partition("=")[0] == "--completion":
        from pipejax.cli.output.completion import completion_script

        shell = words[0].partition("=")[2] or next(iter(words[1:]), "")
        functions = {called: command_function(called) for called in COMMANDS}
        sys.stdout.write(completion_script(shell, functions))
        return
    kind = "option" if words[0].startswith("-") else "command"
    first_words = dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)
    raise ValueError(f"no such {kind}: {words[0]}{nearest(words[0], [*first_words])}")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are written to stderr."""
    # Codes: 0; 1 if a check of the command fails; 2 for a mistake of the user; 3 if an --assert
    # fails; 141 if the reader of stdout went away.
    if is_loaded():  # else it is not imported: an error may need none of it
        jax.config.update("jax_enable_x64", True)
    else:
        os.environ.setdefault("JAX_ENABLE_X64", "true")
    options: LineOptions | None = None  # once they are read
    called, code = None, 0
    try:
        called, words = split_command(arguments)
        is_listed = called is None and (not words or words[0] in HELP)
        if called is None and not is_listed and not _subcommands(words[0]):
            _run_program(words)
        elif text := _help(called, words):
            sys.stdout.write(text)
        else:
            assert called is not None
            from pipejax.cli.options import line  # cyclopts, and NumPy

            options = line.LineOptions(called, COMMANDS)
            bound = line.parse(command_function(called), words, options)
            with notices_as_lines():
                code = line.answer(command_function(called), bound, options)
        sys.stdout.flush()  # what cannot be printed is an error of the command
        return code
    except OutputError as error:
        # a reader that has closed the pipe, such as `head`, is no error to report
        return error.code if error.is_left else _report(str(error), code=error.code)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _report(options.error_text(OSError(text)) if options else text)
    except (ValueError, OverflowError) as error:
        # a ScheduleError holds a drawing of the table beside its text
        grid = getattr(error, "grid", "") if sys.stderr.isatty() else ""
        text = options.error_text(error) if options else str(error)
        logs = [word for word in arguments if is_log(word, text)]
        if logs and called not in ("init", "trace"):  # these name the command themselves
            advice = f"give a training log to pipejax init model --from {logs[0]}"
            text = f"{text.partition('; give')[0]}; {advice}, which names the next command"
        return _report(text, grid)
    except (MemoryError, RuntimeError, AssertionError) as error:  # JAX raises the latter two
        if isinstance(error, MemoryError) or NO_MEMORY in str(error):
            return _report(f"too large for the memory of this machine: {error}")
        if reason := _backend_error():
            return _report(reason)
        if isinstance(error, RuntimeError) or not error.args:
            raise
        return _report(f"internal error: {error}", code=1)  # a result contradicts itself


def is_log(word: str, error: str) -> bool:
    """Return whether a word is a training log: the path of a log, or of a text without option."""
    is_text = word.endswith(".txt") and f"argument: {word}" in error
    return (is_text or word.endswith((".log", ".out"))) and Path(word).is_file()


def _backend_error() -> str | None:
    """Return an error text if a variable of the environment names a backend that JAX lacks."""
    variables = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
    settings = [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    if not settings or not is_loaded():
        return None
    try:
        jax.devices()
    except Exception as error:
        return f"{', '.join(settings)} names no backend that JAX has here: {error}".rstrip(": ")
    return None


def _report(message: str, details: str = "", code: int = 2) -> int:
    """Write an error to stderr, a suggestion at its end as a hint, and return the exit code."""
    text = " ".join(message.split())
    suggestion = _SUGGESTION.match(text)
    error, hint = suggestion.groups() if suggestion else (text, "")
    lines = [f"error: {error}", f"hint: {hint}" if hint else "", details]
    sys.stderr.write("".join(f"{line}\n" for line in lines if line))
    return code
