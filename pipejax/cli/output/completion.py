"""Scripts that complete a command line in bash, zsh and fish, as cyclopts writes them."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from pipejax.base.checks import resolve_choice
from pipejax.cli.commands.init import USED_BY
from pipejax.cli.commands.tune import SETTINGS
from pipejax.cli.options.catalogue import CATALOGUE, FLAG, begin_sentence, flag, record
from pipejax.cli.options.option import command_options, with_signature
from pipejax.costs.model.model import model_names
from pipejax.costs.model.stack import stack_names
from pipejax.costs.system.system import system_names
from pipejax.schedules import names
from pipejax.schedules.table.links import LINK_OPTIONS

ARGUMENTS = {"init": USED_BY, "tune": SETTINGS}  # words beside options, by command


def completion_script(shell: str, functions: Mapping[str, Callable[..., Any]]) -> str:
    """Return the script that completes commands, options and names of schedules in a shell."""
    shell_name: Any = resolve_choice(shell, ("bash", "zsh", "fish"), "--completion SHELL")
    values_by_kind = {"schedules": names(), "models": model_names()}
    values_by_kind |= {"systems": system_names(), "stacks": stack_names()}
    values_by_kind |= {name: option.names for name, option in LINK_OPTIONS.items()}
    program = App(name="pipejax", help_flags=(), version_flags=("--version",))
    for command, function in functions.items():
        first, _, second = command.partition(" ")  # "sweep run" is a command of two words
        about = (inspect.getdoc(function) or "").partition("\n\n")[0]
        if first not in program:
            program.command(App(name=first, help=about, version_flags=()))
        if second:
            program[first].command(App(name=second, help=about, version_flags=()))
        app = program[first][second] if second else program[first]
        app.default(_completable(command, function, values_by_kind))
    script = program.generate_completion(shell=shell_name, prog_name="pipejax")
    # bash completes files where no name matches
    return script.replace("complete -F _pipejax", "complete -o default -F _pipejax")


def _completable(
    command: str, function: Callable[..., Any], values_by_kind: Mapping[str, Any]
) -> Callable[..., None]:
    """Return a function with the options of a command, whose types name the values to complete."""
    keyword_only, positional = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL
    parameters = []
    for name in command_options(function):
        if name not in CATALOGUE:
            continue
        entry = record(name, command)
        values = values_by_kind[entry.names] if isinstance(entry.names, str) else entry.names
        kind: Any = str
        if entry.kind == FLAG:
            kind = bool
        elif values:
            kind = Literal[*values]
        elif "FILE" in entry.kind.metavar or "FOLDER" in entry.kind.metavar:
            kind = Path
        flags = [flag(name), *([f"-{entry.short}"] if entry.short else [])]
        about = Parameter(flags, help=begin_sentence(entry.head), negative=())
        kind = Annotated[kind, about]
        parameters.append(inspect.Parameter(name, keyword_only, annotation=kind, default=None))
    argument: Any = Literal[*ARGUMENTS[command]] if command in ARGUMENTS else Path
    parameters.insert(0, inspect.Parameter("argument", positional, annotation=argument))
    return with_signature(parameters)
