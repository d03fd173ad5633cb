"""How options are declared: a record or a command says their types, its docstring their help."""

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from pipejax.cli.output.files import NO_OUTPUT, OutputKind

Text = str | None
Count = Annotated[int, typer.Option(min=1)]
CountIfGiven = Annotated[int | None, typer.Option(min=1)]
FileIfGiven = Annotated[str | None, typer.Option(metavar="FILE")]
Seed = Annotated[int, typer.Option(min=0)]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
TimeLimit = Annotated[
    str, typer.Option(help="Seconds after which the search ends; Ctrl-C ends it sooner.")
]
WeightShare = Annotated[
    float | None,
    typer.Option(
        help="Share of an activation that W needs after I, from 0 to 1; with --model it follows "
        "from the layers if not given, else it is 1/3."
    ),
]

FORCE = inspect.Parameter(  # of every command that writes a file
    "force",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--force", help="Replace files that are there.")],
)

# an entry of a docstring under `Attributes:` or `Options:`, with the lines that it goes on in
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n {4,}\S.*)*)", re.MULTILINE)


def flag(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.replace('_', '-')}"


def declared(described: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return what a function or a record takes, each with its help and, if a bool, one flag."""
    said = dict(_ENTRY.findall(inspect.getdoc(described) or ""))
    return {
        name: parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            default=None if parameter.default is NO_OUTPUT else parameter.default,
            annotation=_with_help(parameter, " ".join(said.get(name, "").split())),
        )
        for name, parameter in inspect.signature(described).parameters.items()
    }


def output_kind(parameter: inspect.Parameter) -> OutputKind | None:
    """Return the kind of file that a parameter names, if it is an output."""
    found = getattr(parameter.annotation, "__metadata__", (None,))[0]
    return found if isinstance(found, OutputKind) else None


def _with_help(parameter: inspect.Parameter, said: str) -> Any:
    kind, option = parameter.annotation, typer.Option()
    if output_kind(parameter) is not None:
        is_needed = parameter.default is inspect.Parameter.empty
        kind, option = Path if is_needed else Path | None, typer.Option(metavar="FILE")
    elif get_origin(kind) is Annotated:
        kind, option = kind.__origin__, copy.copy(kind.__metadata__[0])
    elif kind is bool:  # or typer would add a second flag, --no-...
        option = typer.Option(flag(parameter.name))
    option.help = option.help or said or None
    return Annotated[kind, option]
