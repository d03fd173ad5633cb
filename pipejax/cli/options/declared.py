"""How options are declared: a record or a command says their types, the catalogue what they are.

What a docstring says of an option under `Options:` or `Attributes:` follows its line of the
catalogue in `--help-all`: the details, or what the command does with it.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import ArgumentInfo

from pipejax.cli.options.catalogue import CATALOGUE, begun, flag, record
from pipejax.cli.output.files import NO_OUTPUT, OutputKind

# types of values; what an option is, and between which numbers it lies, is in the catalogue
Text = str | None
Count = int
CountIfGiven = int | None
FileIfGiven = str | None
Seed = int
JsonFlag = bool
Schedules = str
TimeLimit = str
WeightShare = float | None
VALUES = {str, int, float, bool, Path}


# an entry of a docstring under `Attributes:` or `Options:`, with the lines that it goes on in
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n {4,}\S.*)*)", re.MULTILINE)


def declared(described: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return what a function or a record takes, each with its help and, if a bool, one flag."""
    said = dict(_ENTRY.findall(inspect.getdoc(described) or ""))
    return {
        name: parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            default=None if parameter.default is NO_OUTPUT else parameter.default,
            annotation=_with_help(
                parameter, described.__name__, " ".join(said.get(name, "").split())
            ),
        )
        for name, parameter in inspect.signature(described).parameters.items()
    }


def value_kinds(annotation: Any) -> set[Any]:
    """Return the types of a value, without None."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return {*kinds} - {NoneType}


def output_kind(parameter: inspect.Parameter) -> OutputKind | None:
    """Return the kind of file that a parameter names, if it is an output."""
    found = getattr(parameter.annotation, "__metadata__", (None,))[0]
    return found if isinstance(found, OutputKind) else None


def _with_help(parameter: inspect.Parameter, command: str, detail: str) -> Any:
    annotation = parameter.annotation
    if output_kind(parameter) is not None:
        is_needed = parameter.default is inspect.Parameter.empty
        annotation = Path if is_needed else Path | None
    elif get_origin(annotation) is Annotated:
        if isinstance(annotation.__metadata__[0], ArgumentInfo):
            return annotation
        annotation = annotation.__origin__
    if parameter.name not in CATALOGUE and not value_kinds(annotation) <= VALUES:
        return annotation  # a group, which options make
    known = record(parameter.name, command)
    option = typer.Option(flag(parameter.name), metavar=known.kind.metavar or None)  # no --no-...
    if value_kinds(annotation) <= {int, float}:
        option.min, option.max = known.kind.least, known.kind.most
    option.help = sentences(known.head, " ".join(filter(None, (known.more, detail))))
    return Annotated[annotation, option]


def sentences(head: str, detail: str) -> str:
    """Join the line of the catalogue and what a docstring says beyond it."""
    if not detail:
        return begun(head)
    return f"{begun(head)}{'. ' if detail[0].isupper() else ': '}{detail}"
