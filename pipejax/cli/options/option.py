"""Options as cyclopts reads them: each has its line of the catalogue and a detail of its own."""

import dataclasses
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args, get_origin

import numpy as np
from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.data_files import is_plain, parse_float, parse_ratio, read_quantity
from pipejax.base.progress import Notice
from pipejax.cli.options import catalogue
from pipejax.cli.output.files import Output, OutputKind, check_distinct_paths

# Values of options: how they are declared, and how texts become numbers

MIXED = 100  # times the longest time with a unit: a number without one may lack it


def parse_list(text: str, where: str, *, seconds: bool = False) -> list[float]:
    """Read finite numbers of at least 0, such as "1,1,2", or times."""
    parse = parse_seconds if seconds else parse_number
    numbers = [parse(part.strip(), where) for part in text.split(",")]
    if seconds:
        warn_of_mixed_units(text, where)
    return numbers


def warn_of_mixed_units(text: str, option: str, other_times: str = "") -> None:
    """Warn of a time without a unit that is far longer than the times with one, as in F=1ms,B=2."""
    # `other_times` has the times of another option that go with those of `text`.
    entries = [entry.rpartition("=")[2].strip() for entry in text.split(",")]
    other_entries = [entry.rpartition("=")[2].strip() for entry in other_times.split(",")]
    # parse_float is NaN for a time with a unit
    without_unit = [entry for entry in entries if parse_float(entry) > 0]
    with_unit = [e for e in entries + other_entries if e and math.isnan(parse_float(e))]
    if not without_unit or not with_unit:
        return
    longest = max(without_unit, key=float)
    if float(longest) > MIXED * max(parse_seconds(entry, option) for entry in with_unit):
        message = f"{option} {text}: {longest} has no unit and is read as seconds"
        warnings.warn(message, Notice, stacklevel=4)


def parse_counts(text: str, where: str, least: int = 1) -> list[int]:
    """Read whole numbers of at least `least`, such as "8,16"."""
    numbers = whole_numbers(text)
    if numbers is None or min(numbers) < least:
        raise ValueError(f"{where} must be whole numbers of at least {least}, got {text!r}")
    return numbers


def whole_numbers(text: str) -> list[int] | None:
    """Read numbers in digits, such as "0,8"; None if one is not."""
    words = [word.strip() for word in text.split(",")]
    are_digits = all(word.isdigit() and is_plain(word) for word in words)
    return [int(word) for word in words] if are_digits else None


def number_text(number: float) -> str:
    """Write a number so that reading it gives the same number: 1, 0.25, 1.1609066379844362."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def seconds_text(seconds: float) -> str:
    """Write a time so that reading it gives the same time, in the unit with fewest letters."""
    texts = [number_text(seconds)]
    texts += [f"{number_text(seconds / 10.0**-k)}{unit}" for k, unit in ((3, "ms"), (6, "us"))]
    return min((text for text in texts if parse_seconds(text, "") == seconds), key=len)


def seconds_texts(times: Iterable[float]) -> list[str]:
    """Write times so that reading them gives the same times, all with units or none."""
    texts = [*map(seconds_text, times)]
    has_unit = any(math.isnan(parse_float(text)) for text in texts)
    return [f"{text}s" if has_unit and parse_float(text) > 0 else text for text in texts]


def parse_layers(text: str | None, stages: int) -> list[int] | None:
    """Read the layers of each stage: one number for all, or one each; None for no text."""
    if text is None:
        return None
    counts = parse_counts(text, "--stage-layers")
    return counts * stages if len(counts) == 1 else counts


def for_each(
    values: list[float], count: int, option: str, noun: str
) -> Float[NumpyArray, " entries"]:
    """Return an array of `count` numbers, one per stage or worker; a single number is repeated."""
    if len(values) not in (1, count):
        raise ValueError(
            f"{option} must be a number or one for each of {count} {noun}, got {len(values)}"
        )
    return np.broadcast_to(np.array(values, float), (count,)).copy()


def parse_pairs(text: str, form: str) -> dict[str, str]:
    """Read values by name from a text as replica=dp,step=it; `form` begins the error message."""
    pairs = [[part.strip() for part in entry.partition("=")] for entry in text.split(",")]
    values = {name: value for name, _, value in pairs if name and value}
    if len(values) < len(pairs):
        raise ValueError(f"{form}, got {text!r}")
    return values


def parse_seconds(text: str, where: str) -> float:
    """Read a time of at least 0: with a unit, as 40us, or in seconds."""
    value = read_quantity(text, "s", where)
    return parse_number(text, where) if value is None else value


def parse_number(text: str, where: str) -> float:
    """Read a finite number of at least 0."""
    value = parse_float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} must be a finite number of at least 0, got {text!r}")
    return value


def parse_share(text: str, where: str) -> float:
    """Read a share from 0 to 1: a number, or with % a hundredth of one."""
    value = parse_ratio(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{where} must be a share from 0 to 1, as 0.1 or 10%, got {text!r}")
    return value


def parse_percent(text: str, where: str) -> float:
    """Read a percentage of at least 0, with or without the sign."""
    value = parse_float(text.strip().removesuffix("%").strip())
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} must be a percentage of at least 0, as 5 or 5%, got {text!r}")
    return value


GROUPS = {title: Group(title, sort_key=k) for k, title in enumerate(catalogue.PANELS)}
Described = TypeVar("Described")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(described: Described, details: Mapping[str, str] | None = None) -> Described:
    """Turn the fields of a class, or the parameters of a command, into options for cyclopts."""
    # Each annotation gets the reader and the help of its option, with a detail: by default that of
    # the catalogue. A class becomes a frozen dataclass.
    details = details or catalogue.DETAILS.get(getattr(described, "__name__", ""), {})
    is_record = isinstance(described, type)
    command = "" if is_record else getattr(described, "__name__", "")
    # a record's own annotations, not those of its bases
    kinds = vars(described).get("__annotations__", {}) if is_record else described.__annotations__
    for name in kinds.keys() & catalogue.CATALOGUE.keys():
        aliases: tuple[str, ...] = ()
        if name == "figure":  # people also try --plot, and --out if a command writes only a picture
            aliases = ("--plot",) if "out" in kinds else ("--plot", "--out", "-o")
        mark = parameter(name, kinds[name], command, details.get(name, ""), aliases)
        kinds[name] = Annotated[kinds[name], mark]
    if not is_record:
        return described
    record_class: Any = described
    options_class: Any = dataclasses.dataclass(frozen=True, kw_only=True)(record_class)
    return Parameter(name="*")(options_class)


def parameter(
    name: str, kind: Any, command: str = "", detail: str = "", aliases: Collection[str] = ()
) -> Parameter:
    """Return the reader and the help of an option for cyclopts; `kind` is its annotation."""
    entry, kinds = catalogue.record(name, command), value_kinds(kind)
    about, detail = catalogue.begin_sentence(entry.head), f"{entry.more} {detail}".strip()
    if detail:
        about += f"{'. ' if detail[0].isupper() else ': '}{detail}"
    is_output, is_number = output_kind(kind) is not None, bool(kinds & {int, float})
    reader: Any = next((READERS[value] for value in kinds & READERS.keys()), None)
    if is_output:
        reader = _read_output
    return Parameter(
        name=catalogue.flag(name),
        alias=[*([f"-{entry.short}"] if entry.short else []), *aliases],
        help=about,
        group=GROUPS[catalogue.option_panel(name, command)],
        metavar=entry.kind.metavar,
        converter=reader,
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
    if math.isnan(number := parse_float(text)):
        raise ValueError(f"must be a number in digits 0 to 9, got {text!r}")
    return number


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


_ASSERT = "names and units of `pipejax schema COMMAND`; of a list for all entries; several."
# options of all commands: type of the value, default, and detail of the help
COMMON: Mapping[str, tuple[Any, Any, str]] = {
    "format": (str, "text", ""),
    "details": (bool, False, ""),
    "force": (bool, False, ""),
    "json": (bool, False, ""),
    "assert_": (list[str] | None, None, _ASSERT),
    "config": (str | None, None, "keys are names of options; an option on the line wins."),
}
HELP = ("help", "help_all")  # options that the program answers itself
NO_TABLES = ("show",)  # commands that print none, and need no --format


def with_common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that cyclopts sees with the options that all commands have."""
    parameters = inspect.signature(command).parameters
    excluded = {*parameters, *(("format",) if command.__name__ in NO_TABLES else ())}
    if not any(output_kind(option.annotation) for option in parameters.values()):
        excluded.add("force")
    common = []
    for name, (kind, default, detail) in COMMON.items():
        if name not in excluded:
            mark, place = parameter(name, kind, detail=detail), inspect.Parameter.KEYWORD_ONLY
            fields = {"default": default, "annotation": Annotated[kind, mark]}
            common.append(inspect.Parameter(name, place, **fields))
    return with_signature([*parameters.values(), *common])


def with_signature(parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Return a function that has these parameters for cyclopts, and does nothing."""

    def described(*args: Any, **options: Any) -> None: ...

    function: Any = described
    function.__signature__ = inspect.Signature(parameters)
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
            name = field.name if field.name in catalogue.CATALOGUE else argument.name + dots
            listed[name] = CommandOption(argument.hint, default, about)
    for name in HELP:
        listed[name] = CommandOption(bool, False, parameter(name, bool).help or "")
    return listed


def check_outputs(
    command: Callable[..., Any], arguments: dict[str, Any], *, force: bool
) -> list[Output]:
    """Check, before the work, that a command can write its files; return its outputs."""
    # `arguments` gets outputs that know their option, and whether they replace a file.
    parameters = inspect.signature(command).parameters
    marks = {name: output_kind(option.annotation) for name, option in parameters.items()}
    kinds = {name: kind for name, kind in marks.items() if kind is not None}
    for name, kind in kinds.items():
        drawn_by = catalogue.flag("figure") if "figure" in kinds and name != "figure" else ""
        output = Output(arguments[name].path, catalogue.flag(name), force, drawn_by)
        arguments[name] = output.check(kind)
    outputs = [arguments[name] for name in kinds]
    check_distinct_paths(outputs)
    return outputs
