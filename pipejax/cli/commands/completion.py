"""`pipejax completion`: a script that completes command lines in a shell."""

import inspect
import sys
from typing import Annotated

import typer

from pipejax.base.checks import one_of
from pipejax.cli.options.catalogue import CATALOGUE, record
from pipejax.cli.options.values import JsonFlag
from pipejax.cli.output.completion import SHELLS, Completable
from pipejax.cli.output.report import print_json
from pipejax.cli.output.templates import TEMPLATES
from pipejax.schedules import names


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    json: JsonFlag = False,
) -> None:
    """Print a script that completes commands, options and names of schedules in a shell.

    Example:
      pipejax completion bash > ~/.local/share/bash-completion/completions/pipejax
    """
    from pipejax.cli.app import COMMANDS, command_of
    from pipejax.costs.model.model import model_names
    from pipejax.costs.system.system import system_names

    shell = one_of(shell, SHELLS, "SHELL")
    options = {
        called: {
            name: record(name, called)
            for name in inspect.signature(command_of(called)).parameters
            if name in CATALOGUE
        }
        for called in COMMANDS
    }
    lists = {"schedules": names(), "models": model_names(), "systems": system_names()}
    arguments = {"completion": [*SHELLS], "init": [*TEMPLATES], "diff": names()}
    script = SHELLS[shell](Completable(COMMANDS, options, arguments, lists))
    if json:
        print_json({"shell": shell, "script": script})
    else:
        sys.stdout.write(script)
