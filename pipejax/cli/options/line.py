"""A command line and its file of options as cyclopts reads them, and lines to go on with."""

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass as is_record
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_origin

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, Token
from cyclopts.exceptions import RepeatArgumentError, UnknownOptionError, UnusedCliTokensError

from pipejax.base.checks import ArgumentError, UnknownNameError, nearest
from pipejax.base.data_files import load_json, load_toml
from pipejax.cli.options.assertions import parse_assertions, verdicts
from pipejax.cli.options.catalogue import CATALOGUE, OF_ARGUMENTS, flag
from pipejax.cli.options.option import COMMON, check_outputs, parser, value_kinds
from pipejax.cli.output.files import Output
from pipejax.cli.output.report import current_style, is_json, plain, print_all, printing
from pipejax.schedules.table.links import LINK_OPTIONS, LINKS

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection


class Needs(NamedTuple):
    """Requirement of an option that has an effect only beside another."""

    other: str  # the other option
    values: tuple[str, ...] = ()  # values of the other option that meet it; any if empty
    legal: tuple[str, ...] = ()  # values of the option itself that have the need; all if empty
    within: str = ""  # an option whose value 0-1=rendezvous meets it too, if `values` has that name
    otherwise: str = ""  # the other option in commands that do not take `other`


NEEDS: Mapping[str, Needs] = {
    **{
        name: Needs("link", option.models, option.names, within="pair_links")
        for name, option in LINK_OPTIONS.items()
        if option.models != LINKS
    },
    **dict.fromkeys(("sequence_parallel", "scatter_gather"), Needs("tensor_parallel")),
    "repair": Needs("table"),
    **dict.fromkeys(("size", "font", "font_size"), Needs("figure", otherwise="out")),
    **dict.fromkeys(("title", "transfers"), Needs("out")),
    "caption": Needs("out", legal=("beside",)),
    "distinct_counts": Needs("paths"),
    "exchange": Needs("diff"),
}
BARE = ("files", "command")  # what stands on a line without the name of an option


class LineOptions:
    """The options that a command line, and the file of `--config`, give to a command."""

    # `commands` are the names of all commands, which have sections in such a file.

    def __init__(self, command: str, commands: Collection[str]) -> None:
        self.command, self.commands = command, commands
        self.takes: dict[str, set[Any]] = {}  # types of values by option
        self.values: list[tuple[str, str]] = []  # options and texts; a flag has its name for one

    def read(self, app: Any, commands: Any, arguments: "ArgumentCollection") -> None:
        """Join options of the line, as cyclopts read them, with options of the file."""
        del app, commands
        options = {
            argument.field_info.name: argument
            for argument in arguments
            if argument.parse and not argument.children
        }
        self.takes = {name: value_kinds(option.hint) for name, option in options.items()}
        self.values = [
            (name, name if token.implicit_value is True else token.value)  # True: a flag
            for name, option in options.items()
            for token in option.tokens
            if token.implicit_value is not False  # a flag that is switched off
        ]
        self._check()
        on_line = dict(self.values)
        if "config" in on_line:
            path = Path(on_line["config"])
            for name, text in read_config(path, self.command, self.takes, self.commands):
                if name not in on_line:
                    self.values.append((name, text))
                    is_flag = bool in self.takes[name]
                    value = {"implicit_value": True} if is_flag else {"value": text}
                    options[name].append(Token(keyword=flag(name), source=str(path), **value))
            self._check()
        self._check_effects()

    def has_value(self, name: str) -> bool:
        """Return whether an option has a value from the line or the file."""
        return any(name == option for option, _ in self.values)

    def typed_values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the options that are given, as the command gets them."""
        flat: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, Output):
                flat[name] = value.path
            elif is_record(value):
                flat |= vars(value)
            else:
                flat[name] = list(value) if isinstance(value, tuple) else value
        # printed commands have their options in the order of the help
        return {name: flat[name] for name in (*BARE, *CATALOGUE) if self.has_value(name)}

    def _check(self) -> None:
        """Refuse empty values."""
        for name, value in self.values:
            if value == "":
                called = flag(name) if name in CATALOGUE else name.upper()
                raise ValueError(f"{called} must not be empty")

    def _check_effects(self) -> None:
        """Refuse options that have no effect because an option that they need is missing."""
        seen = {name: value.lower() for name, value in self.values}  # `NEEDS`: what options need
        for name, needs in NEEDS.items():
            other = needs.other if needs.other in self.takes else needs.otherwise
            if name not in seen or other not in self.takes:
                continue
            if needs.legal and seen[name] not in needs.legal:
                continue  # another value needs nothing, or its own check refuses it
            parts = [part.partition("=")[2] for part in seen.get(needs.within, "").split(",")]
            is_met = other in seen
            if needs.values:
                is_met = not {*needs.values}.isdisjoint([seen.get(other), *parts])
            if not is_met:
                lacks = f"{flag(other)} {', '.join(needs.values)}".strip()
                raise ValueError(f"{flag(name)} has no effect without {lacks}")

    def error_text(self, error: Exception) -> str:
        """Return the text of an error, with the option in place of the wrong argument."""
        # "num_workers must be .." becomes "--workers must be ..", also inside another error. A text
        # about a file, "runs.csv: ..", only gets the option of the file in front.
        message = str(getattr(error, "reason", error))
        options = [(name, value) for name, value in self.values if name in CATALOGUE]
        parts = [(name, part) for name, value in options for part in value.split(",")]
        for name, value in [*options, *parts]:
            is_file = "." in value and message.startswith((f"{value} ", f"{value}, "))
            if message.startswith(f"{value}: ") or is_file:
                return f"{flag(name)} {_with_phase_letters(message)}"
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, ArgumentError) and cause.argument):
            cause = cause.__context__
        if isinstance(cause, ArgumentError):
            text = str(getattr(cause, "reason", cause))
            option_text = self._with_option(cause, text, has_option="--" in message)
            message = message.replace(text, option_text)
        return _with_phase_letters(message)

    def _with_option(self, error: ArgumentError, text: str, *, has_option: bool) -> str:
        """Return the text of an error with an option in place of its argument."""
        # If the text does not name the argument, the option goes in front of the text, unless the
        # whole message names an option already (`has_option`).
        name = self._argument_option(error)
        if name is None:
            return text
        if isinstance(error, UnknownNameError):
            return text if has_option else f"{flag(name)}: {text}"
        option = name.upper() if name in BARE else flag(name)
        message = re.sub(rf"\b{error.argument}\b", option, text, count=1)
        if message == text and not has_option and self.has_value(name):
            return f"{flag(name)} {dict(self.values)[name]}: {text}"
        # other arguments that the text names, as in "tensor_parallel x data_parallel"
        return re.sub(
            r"(?<![-.\w'])[a-z]+(?:_[a-z]+)+",
            lambda match: flag(match[0]) if match[0] in self.takes else match[0],
            message,
        )

    def _argument_option(self, error: ArgumentError) -> str | None:
        """Return the name of the option that sets the argument of an error; None if none does."""
        # Of several options, it is the option with a value. An unknown name belongs to the option
        # value.
        names = (error.argument, OF_ARGUMENTS.get(error.argument, ""), f"{error.argument}s")
        options = [name for name in names if name in self.takes]
        on_line = [name for name in options if self.has_value(name)]
        option = next(iter(on_line or options), None)
        if option is None or not isinstance(error, UnknownNameError):
            return option
        with_value = [
            name
            for name, value in self.values
            for part in value.split(",")
            if part.rpartition("=")[2].strip() == error.value
        ]
        return option if option in with_value else next(iter(with_value), option)


def _with_phase_letters(message: str) -> str:
    """Replace names of costs by letters: "input_grad (I)" becomes "I"."""
    from pipejax.schedules.cells.ops import KINDS, TIMED  # needs no JAX: that may be what is wrong

    for phase in TIMED:
        field = KINDS[phase].time
        message = message.replace(f"{field} ({phase.name})", phase.name).replace(f" ({field})", "")
    return message


def parse(
    command: Callable[..., Any], words: Sequence[str], options: LineOptions
) -> inspect.BoundArguments:
    """Read the options of a command, as a line and its file of options give them."""
    app = parser(command)
    app.config = (options.read,)
    try:
        _, bound, _ = app.parse_args(list(words), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ValueError(_message(error, options.command)) from None
    bound.apply_defaults()
    return bound


def _message(error: CycloptsError, command: str) -> str:
    """Return the text of an error of cyclopts, with the names of options as typed."""
    option = error.argument.name if error.argument else ""
    if isinstance(error, MissingArgumentError) and error.argument and not error.keyword:
        return f"missing option {option}" if option.startswith("-") else f"missing {option}"
    if isinstance(error, RepeatArgumentError):
        return f"{option or error.token.keyword} is given twice"
    if isinstance(error, CoercionError) and error.msg and error.token:
        return f"{option} {error.msg}"
    if isinstance(error, UnusedCliTokensError):
        words = " ".join(error.unused_tokens or ())
        return f"unexpected argument: {words}; give it after an option, which --help lists"
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value or ""
        names = {name for argument in error.argument_collection for name in argument.names}
        for other in (option.swapcase(), f"{option}s"):  # -s or --schedule, -S or --schedules
            if other in names:
                return f"unknown option: {option}; did you mean {other}?"
        if command == "show" and option in ("--figure", "--plot"):  # its file is the picture
            return f"unknown option: {option}; did you mean --out?"
        if option in map(flag, CATALOGUE):
            return f"{command} has no option {option}, which other commands have"
    text = str(error).removesuffix(".").replace(". Did you mean", "; did you mean")
    text = text.replace(". Must be >= ", ": must be at least ").replace('"', "'")
    return text[0].lower() + text[1:]


def answer(command: Callable[..., Any], bound: inspect.BoundArguments, options: LineOptions) -> int:
    """Run a command, print its answer and return the exit code: 0, 1 or 3, as in `app.run`."""
    arguments, parameters = bound.arguments, inspect.signature(command).parameters
    common = {name: arguments[name] for name in COMMON if name in arguments}
    for name in common.keys() - parameters.keys():  # the command does not take them
        del arguments[name]
    assertions = parse_assertions(options.command, common.get("assert_") or ())
    outputs = check_outputs(command, arguments, force=common.get("force", False))
    # `export --format` is the format of its file, not that of the printed tables
    format = None if "format" in parameters else common.get("format")
    typed_options = options.typed_values({**common, **arguments})
    style = {name: common[name] for name in ("json", "details")}
    with printing(format, **style, options=typed_options, outputs=outputs):
        result = command(*bound.args, **bound.kwargs)
        lines = verdicts(assertions, result.as_json())
        failures = [line for is_met, line in lines if not is_met]
        sys.stderr.write("".join(f"{line}\n" for line in failures))
        print_all(*(plain(line) for is_met, line in lines if is_met and not is_json()))
        result.show()
    return 3 if failures else 0 if result.holds else 1


OF_THE_LINE = ("config", "help", "help_all")  # options that a file does not give


def read_config(
    path: Path, command: str, takes: Mapping[str, Collection[Any]], commands: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each option that a file gives to a command."""
    # A section of the file has the options of one command; keys outside sections are for all. The
    # text is the value as typed on the line; the text of a flag is the name of the flag.
    loaders = {".json": load_json, ".toml": load_toml}
    if path.suffix not in loaders:
        raise ValueError(f"--config must end in one of .toml, .json, got {str(path)!r}")
    content = loaders[path.suffix](path)
    firsts = {name.partition(" ")[0] for name in commands}
    sections = {
        key: table
        for key, table in content.items()
        if key in firsts and isinstance(table, dict) and table
    }
    shared = [(key, value) for key, value in content.items() if key not in sections]
    section: dict[str, Any] = sections
    for word in command.split():  # the section of `sweep run` is sweep.run
        section = section.get(word, {})
    seen: set[str] = set()
    for key, value in [*shared, *section.items()]:
        name = key.replace("-", "_")
        name = f"{name}_" if f"{name}_" in takes else name  # assert and from are words of Python
        if name not in takes or name in OF_THE_LINE:
            names = [flag(option)[2:] for option in takes if option not in OF_THE_LINE]
            raise ValueError(f"{path}: {command} has no option {key!r}{nearest(key, names)}")
        if name in seen:
            raise ValueError(f"{path}: {key} is given twice")
        seen.add(name)
        is_repeated = any(get_origin(kind) is list for kind in takes[name])
        for entry in value if is_repeated and isinstance(value, list) else [value]:
            is_layout = name == "pipeline_layout" and isinstance(entry, list)
            text = json.dumps(entry) if is_layout else _text(entry, f"{path}: {key}")
            if bool not in takes[name]:
                yield name, text
            elif not isinstance(entry, bool):
                raise ValueError(f"{path}: {key} must be true or false, got {entry!r}")
            elif entry:
                yield name, name


def _text(value: Any, where: str) -> str:
    """Write a value as on the line: lists with commas, tables as F=1,B=2."""
    if isinstance(value, str | bool | int | float):
        return str(value)
    parts = value if isinstance(value, list) else ()
    if isinstance(value, dict) and value:
        return ",".join(f"{key}={_text(part, where)}" for key, part in value.items())
    if not parts or any(isinstance(part, list | dict) for part in parts):
        raise ValueError(f"{where} must be a text, a number or a list of them, got {value!r}")
    return ",".join(_text(part, where) for part in parts)


# options that a further command does not repeat: outputs, and options written out already
ANSWERED = (*COMMON, "out", "figure", "certificate")


def written(*names: str) -> dict[str, Any]:
    """Return the options of this command line that are among `names`, with their values."""
    options = current_style().options
    return {name: options[name] for name in names if name in options}


def written_but(*names: str) -> dict[str, Any]:
    """Return all options of this command line, except `names` and output options."""
    return {k: v for k, v in current_style().options.items() if k not in (*names, *ANSWERED)}


def command_line(command: str, options: Mapping[str, Any]) -> str:
    """Write a command as it is typed."""
    words = ["pipejax", *command.split()]
    for name, value in options.items():
        named = [] if name in BARE else [flag(name)]
        for entry in value if isinstance(value, list) else [value]:  # of repeated options
            words += named if entry is True or entry == "" else [*named, str(entry)]
    return shlex.join(words)


def config_text(options: Mapping[str, Any]) -> str:
    """Write options as a file of `--config`."""
    return "".join(f"{flag(name)[2:]} = {json.dumps(value)}\n" for name, value in options.items())
