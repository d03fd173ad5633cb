"""Options as cyclopts reads them: each has its line of the catalogue and a detail of its own."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args, get_origin

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from pipejax.cli.options.catalogue import (
    CATALOGUE,
    PANELS,
    begin_sentence,
    flag,
    option_panel,
    record,
)
from pipejax.cli.options.values import is_plain
from pipejax.cli.output.files import Output, OutputKind, check_apart

GROUPS = {title: Group(title, sort_key=k) for k, title in enumerate(PANELS)}
# an entry of a docstring under `Attributes:` or `Options:`, with the lines that it goes on in
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n {4,}\S.*)*)", re.MULTILINE)
Described = TypeVar("Described")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(described: Described) -> Described:
    """Make options of the fields of a record, or of the parameters of a command."""
    details = dict(_ENTRY.findall(inspect.getdoc(described) or ""))
    is_record = isinstance(described, type)
    command = "" if is_record else getattr(described, "__name__", "")
    # a record's own annotations, not those of its bases
    kinds = vars(described).get("__annotations__", {}) if is_record else described.__annotations__
    for name in kinds.keys() & CATALOGUE.keys():
        detail = " ".join(details.get(name, "").split())
        # --plot is what people try; where a command writes nothing but a picture, --out names it
        figure_names = ("--plot",) if "out" in kinds else ("--plot", "--out", "-o")
        aliases = figure_names if name == "figure" else ()
        kinds[name] = Annotated[kinds[name], parameter(name, kinds[name], command, detail, aliases)]
    if not is_record:
        return described
    record_class: Any = described
    options_class: Any = dataclasses.dataclass(frozen=True, kw_only=True)(record_class)
    return Parameter(name="*")(options_class)


def parameter(
    name: str, kind: Any, command: str = "", detail: str = "", aliases: Collection[str] = ()
) -> Parameter:
    """Return how an option is read and what its help says."""
    entry = record(name, command)
    is_output, kinds = output_kind(kind) is not None, value_kinds(kind)
    is_number = bool(kinds & {int, float})
    readers = [READERS[value] for value in kinds & READERS.keys()]
    return Parameter(
        name=flag(name),
        alias=[*([f"-{entry.short}"] if entry.short else []), *aliases],
        help=sentences(entry.head, " ".join(filter(None, (entry.more, detail)))),
        group=GROUPS[option_panel(name, command)],
        metavar=entry.kind.metavar,
        converter=_read_output if is_output else next(iter(readers), None),
        accepts_keys=False if is_output else None,
        validator=Number(gte=entry.kind.least, lte=entry.kind.largest) if is_number else None,
        allow_repeating=any(get_origin(value) is list for value in kinds),
    )


def _read_output(_: Any, tokens: Any) -> Output:
    return Output(Path(tokens[0].value))


def _read_whole(_: Any, tokens: Any) -> int:
    text = tokens[0].value
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
        raise ValueError(f"must be a whole number, got {text!r}")
    return int(text)


def _read_number(_: Any, tokens: Any) -> float:
    text = tokens[0].value
    try:
        return float(text if is_plain(text) else "")
    except ValueError:
        raise ValueError(f"must be a number in digits 0 to 9, got {text!r}") from None


# cyclopts itself takes 4.5 for 4, 0x10 for 16, and none for a number that is not there
READERS = {int: _read_whole, float: _read_number}


def value_kinds(annotation: Any) -> set[Any]:
    """Return the types of a value, without None."""
    if get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return {*kinds} - {NoneType}


def output_kind(annotation: Any) -> OutputKind | None:
    """Return the kind of file that an option names, if it is an output."""
    marks = getattr(annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, OutputKind)), None)


def sentences(head: str, detail: str) -> str:
    """Join the line of the catalogue and the detail of a docstring."""
    if not detail:
        return begin_sentence(head)
    return f"{begin_sentence(head)}{'. ' if detail[0].isupper() else ': '}{detail}"


# options of all commands: type of the value, and default
COMMON: Mapping[str, tuple[Any, Any]] = {
    "format": (str, "text"),
    "details": (bool, False),
    "force": (bool, False),
    "json": (bool, False),
    "config": (str | None, None),
}
HELP = ("help", "help_all")  # options that the program answers itself
DETAILS = {"config": "keys are names of options; an option on the line wins."}
NO_TABLES = ("show",)  # commands that print none, and need no --format


def with_common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of all: in its signature alone, which cyclopts reads."""
    signature = inspect.signature(command)
    takes = signature.parameters
    has_outputs = any(output_kind(option.annotation) for option in takes.values())
    excluded = {"force": not has_outputs, "format": command.__name__ in NO_TABLES}
    common = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, parameter(name, kind, "", DETAILS.get(name, ""))],
        )
        for name, (kind, default) in COMMON.items()
        if name not in takes and not excluded.get(name)
    ]

    def described(*args: Any, **options: Any) -> Any:
        return command(*args, **options)

    parameters = [*takes.values(), *common]
    function: Any = described
    function.__signature__ = signature.replace(parameters=parameters)
    function.__annotations__ = {option.name: option.annotation for option in parameters}
    return described


@functools.cache
def parser(command: Callable[..., Any]) -> App:
    """Return the parser of a command's options."""
    app = App(help_flags=(), version_flags=(), default_parameter=Parameter(negative=()))
    app.default(with_common_options(command))
    return app


class CommandOption(NamedTuple):
    """An option of a command, or an argument that stands without a name."""

    kind: Any  # type of its value
    default: Any  # `inspect.Parameter.empty` if it has to be given
    help: str


def command_options(command: Callable[..., Any]) -> dict[str, CommandOption]:
    """Return the options of a command by name, and its arguments by their names in help."""
    listed: dict[str, CommandOption] = {}
    for argument in parser(command).assemble_argument_collection():
        field, about = argument.field_info, argument.parameter.help or ""
        default = None if isinstance(field.default, Output) else field.default
        dots = "..." if field.kind is field.VAR_POSITIONAL else ""
        if argument.parse and not argument.children:
            name = field.name if field.name in CATALOGUE else argument.name + dots
            listed[name] = CommandOption(argument.hint, default, about)
    for name in HELP:
        listed[name] = CommandOption(bool, False, parameter(name, bool).help or "")
    return listed


def check_outputs(
    command: Callable[..., Any], arguments: dict[str, Any], *, force: bool
) -> list[Output]:
    """Check before the work the files that a command is to write, and fill in their options."""
    takes = inspect.signature(command).parameters
    marks = {name: output_kind(option.annotation) for name, option in takes.items()}
    kinds = {name: kind for name, kind in marks.items() if kind is not None}
    draws = flag("figure") if "figure" in kinds else ""
    for name, kind in kinds.items():
        drawn_by = "" if name == "figure" else draws
        arguments[name] = Output(arguments[name].path, flag(name), force, drawn_by).check(kind)
    outputs = [arguments[name] for name in kinds]
    check_apart(outputs)
    return outputs
