"""What a command line gives, as it is written."""

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pipejax.base.checks import ArgumentError, UnknownNameError, nearest
from pipejax.base.data_files import load_json
from pipejax.base.files import read_file
from pipejax.cli.options.catalogue import CATALOGUE, OF_ARGUMENTS, OTHER_NAMES, SHORT, flag
from pipejax.cli.options.values import is_plain, value_kinds
from pipejax.schedules.table.links import CARRIED, MEETING, POSTINGS, QUEUES


class Needs(NamedTuple):
    """What an option needs beside it to have an effect."""

    other: str  # the option
    values: tuple[str, ...] = ()  # one of these must be its value, if there are any
    known: tuple[str, ...] = ()  # values of the option itself; of others its own check speaks
    within: str = ""  # an option of which a part, behind =, may be one of the values instead
    otherwise: str = ""  # what it is in commands that do not take that one

    def in_command(self, takes: Collection[str]) -> "Needs":
        """Return what is needed in a command that takes these options."""
        is_other = self.otherwise and self.other not in takes
        return self._replace(other=self.otherwise) if is_other else self

    def are_met(self, seen: Mapping[str, str]) -> bool:
        """Return whether the other options are what is needed, by their values."""
        parts = seen.get(self.within, "").lower().split(",")
        given = {seen.get(self.other, "").lower(), *(part.partition("=")[2] for part in parts)}
        return (self.other in seen and not self.values) or bool(given & {*self.values})


NEEDS: Mapping[str, Needs] = {
    "queues": Needs("link", MEETING, QUEUES, within="pair_links"),
    "posting": Needs("link", MEETING, POSTINGS, within="pair_links"),
    "eager_below": Needs("link", MEETING, within="pair_links"),
    # under delay messages use no resource
    "shared_links": Needs("link", CARRIED, within="pair_links"),
    "sequence_parallel": Needs("tensor_parallel"),
    "scatter_gather": Needs("tensor_parallel"),
    "repair": Needs("table"),
    "size": Needs("figure", otherwise="out"),
    "font": Needs("figure", otherwise="out"),
    "font_size": Needs("figure", otherwise="out"),
    "labels": Needs("figure"),
    "distinct_counts": Needs("paths"),
    "exchange": Needs("diff"),
}
BARE = ("files",)  # what stands on a line without the name of an option
_NAMES = {flag(name): name for name in CATALOGUE}


class Line(NamedTuple):
    """What a command line gives, for commands that say what to type next.

    Attributes:
      given: values by option, as they are written; of a flag nothing.
    """

    given: Mapping[str, str]

    @classmethod
    def of(cls, takes: Mapping[str, Parameter], values: Mapping[str, Any]) -> "Line":
        """Keep what differs from the defaults."""
        return cls(
            {
                name: "" if value is True else str(value)
                for name, value in values.items()
                if name in takes and value not in (None, False, takes[name].default)
            }
        )

    def command(
        self, called: str, changes: Mapping[str, str | None], without: Collection[str]
    ) -> str:
        """The line of another command: with other values, None for none, and without these."""
        options = {name: value for name, value in self.given.items() if name not in without}
        options |= {name: value for name, value in changes.items() if value is not None}
        words = [
            f"{flag(name)} {shlex.quote(value)}" if value else flag(name)
            for name, value in options.items()
            if changes.get(name, value) is not None
        ]
        return " ".join(["pipejax", called, *words])


class GivenOptions:
    """The options of one command line.

    Args:
      arguments: behind the name of the command.
      takes: the command's options by name.
    """

    def __init__(self, arguments: Sequence[str], takes: Mapping[str, Parameter]) -> None:
        """Write short options out, and find the value of every option."""
        self.takes = {
            name: value_kinds(get_args(parameter.annotation)[0])
            for name, parameter in takes.items()
        }
        self.repeated = {
            name for name, kinds in self.takes.items() if any(get_origin(k) is list for k in kinds)
        }
        self.words = list(self._spelled_out(arguments))
        self.values = list(self._read(self.words))

    def asks_for(self, name: str) -> bool:
        """Whether an option is given."""
        return any(name == given for given, _ in self.values)

    def _spelled_out(self, arguments: Sequence[str]) -> Iterator[str]:
        """Write letters as names: -P4, -P 4 and -P=4 are --workers 4."""
        words = iter(arguments)
        for given in words:
            name, equals, value = given.partition("=")
            word = self._meant(OTHER_NAMES.get(name, name)) + equals + value
            if word == "--":
                yield from (word, *words)
            elif re.match("-[A-Za-z]", word):
                yield from self._letters(word[1:], words)
            else:
                yield word
                if bool not in self.takes.get(_NAMES.get(word, ""), {bool}):  # a value follows
                    yield from itertools.islice(words, 1)

    def _meant(self, word: str) -> str:
        """Where a command writes nothing but a picture, --out names that."""
        is_picture = word == "--out" and "out" not in self.takes and "figure" in self.takes
        return "--figure" if is_picture else word

    def _letters(self, letters: str, words: Iterator[str]) -> Iterator[str]:
        """Write out letters of options behind one dash: all but the last are flags."""
        while letters:
            name = _NAMES.get(self._meant(flag(SHORT.get(letters[0], ""))), "")
            if name not in self.takes:  # the parser refuses it
                yield f"-{letters}"
                return
            yield flag(name)
            if bool not in self.takes[name]:
                behind = letters[1:]
                yield from [behind.removeprefix("=")] if behind else itertools.islice(words, 1)
                return
            letters = letters[1:]

    def _read(self, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield name and value of every option; a flag has its own name for a value."""
        words = itertools.takewhile(lambda word: word != "--", arguments)
        for word in words:
            written, equals, value = word.partition("=")
            name = _NAMES.get(written, "")
            if name in self.takes and bool in self.takes[name]:
                yield name, name
            elif name in self.takes:
                yield name, value if equals else next(words, "")

    def add_config(self, command: str, commands: Collection[str]) -> None:
        """Add what the file of `--config` gives, if there is one: the line wins."""
        on_line = dict(self.values)
        if "config" not in on_line:
            return

        found = read_config(Path(on_line["config"]), command, self.takes, commands)
        added = [(name, value) for name, value in found if name not in on_line]
        words = [flag(n) if bool in self.takes[n] else f"{flag(n)}={value}" for n, value in added]
        self.words, self.values = words + self.words, added + self.values

    def check(self) -> None:
        """Refuse what says nothing or says it twice."""
        seen: dict[str, str] = {}
        for name, value in self.values:
            if name in seen and name not in self.repeated:
                both = "" if name == value else f": {seen[name]} and {value}"
                raise ValueError(f"{flag(name)} is given twice{both}")
            if value == "":
                raise ValueError(f"{flag(name)} must not be empty")
            if {int, float} & self.takes[name] and not is_plain(value):
                raise ValueError(f"{flag(name)} must be a number in digits 0 to 9, got {value!r}")
            seen[name] = value

    def check_effects(self) -> None:
        """Refuse what has no effect beside the others."""
        seen = dict(self.values)
        for name, every in NEEDS.items():
            needs = every.in_command(self.takes)
            if name not in seen or needs.other not in self.takes:
                continue
            if needs.are_met(seen):
                continue
            if not needs.known or seen[name].lower() in needs.known:
                wanted = f"{flag(needs.other)} {', '.join(needs.values)}".strip()
                raise ValueError(f"{flag(name)} has no effect without {wanted}")

    def named(self, error: Exception) -> str:
        """Return what an error says, with the option in place of the argument that is wrong.

        The error may stand in the text of another, which says where. What a file says is left
        alone, behind the option that names the file.
        """
        message = str(getattr(error, "reason", error))
        parts = [(name, part) for name, value in self.values for part in value.split(",")]
        for name, value in [*self.values, *parts]:
            is_file = "." in value and message.startswith((f"{value} ", f"{value}, "))
            if message.startswith(f"{value}: ") or is_file:
                return f"{flag(name)} {_in_letters(message)}"
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, ArgumentError) and cause.argument):
            cause = cause.__context__
        if isinstance(cause, ArgumentError):
            text = str(getattr(cause, "reason", cause))
            message = message.replace(text, self._called(cause, text, alone="--" not in message))
        return _in_letters(message)

    def _called(self, error: ArgumentError, text: str, *, alone: bool) -> str:
        """Return the text of an error with an option in place of its argument."""
        name = self._option(error)
        if name is None:
            return text
        if isinstance(error, UnknownNameError):
            return f"{flag(name)}: {text}" if alone else text
        called = name.upper() if name in BARE else flag(name)
        found = re.sub(rf"\b{error.argument}\b", called, text, count=1)
        if found == text and alone and self.asks_for(name):
            return f"{flag(name)} {dict(self.values)[name]}: {text}"
        return found

    def _option(self, error: ArgumentError) -> str | None:
        """Return the option of an argument: one that is given, if the command has several."""
        names = (error.argument, OF_ARGUMENTS.get(error.argument, ""), f"{error.argument}s")
        known = [name for name in names if name in self.takes]
        given = [name for name in known if self.asks_for(name)]
        option = next(iter(given or known), None)
        if option is None or not isinstance(error, UnknownNameError):
            return option
        holding = [
            name
            for name, value in self.values
            for part in value.split(",")
            if part.rpartition("=")[2].strip() == error.value
        ]
        return option if option in holding else next(iter(holding), option)


def _in_letters(message: str) -> str:
    """Name costs by their letters alone, where a text names them for Python too."""
    from pipejax.schedules.cells.ops import KINDS, TIMED  # needs no JAX: that may be what is wrong

    for phase in TIMED:
        field = KINDS[phase].time
        message = message.replace(f"{field} ({phase.name})", phase.name).replace(f" ({field})", "")
    return message


OF_THE_LINE = ("config", "help", "help_all")  # options that a file does not give


def read_config(
    path: Path, command: str, takes: Mapping[str, Collection[Any]], commands: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the options that a file gives to a command, by name and as they would be written."""
    content = _load(path)
    firsts = {each.partition(" ")[0] for each in commands}
    sections = {name: own for name, own in content.items() if name in firsts and _is_table(own)}
    given = [(key, value) for key, value in content.items() if key not in sections]
    own: dict[str, Any] = sections
    for word in command.split():  # the section of `sweep run` is sweep.run
        own = own.get(word, {})
    seen: set[str] = set()
    for key, value in [*given, *own.items()]:
        name = key.replace("-", "_")
        if name not in takes or name in OF_THE_LINE:
            known = [flag(each)[2:] for each in takes if each not in OF_THE_LINE]
            raise ValueError(f"{path}: {command} has no option {key!r}{nearest(key, known)}")
        if name in seen:
            raise ValueError(f"{path}: {key} is given twice")
        seen.add(name)
        is_repeated = any(get_origin(kind) is list for kind in takes[name])
        for each in value if is_repeated and isinstance(value, list) else [value]:
            is_layout = name == "pipeline_layout" and isinstance(each, list)
            text = json.dumps(each) if is_layout else _text(each, f"{path}: {key}")
            if bool not in takes[name]:
                yield name, text
            elif not isinstance(each, bool):
                raise ValueError(f"{path}: {key} must be true or false, got {each!r}")
            elif each:
                yield name, name


def _text(value: Any, where: str) -> str:
    """Write a value as on the line: lists with commas, tables as F=1,B=2."""
    if isinstance(value, str | bool | int | float):
        return str(value)
    parts = value if isinstance(value, list) else ()
    if _is_table(value):
        return ",".join(f"{key}={_text(part, where)}" for key, part in value.items())
    if not parts or any(isinstance(part, list | dict) for part in parts):
        raise ValueError(f"{where} must be a text, a number or a list of them, got {value!r}")
    return ",".join(_text(part, where) for part in parts)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _load(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return load_json(path)
    if path.suffix != ".toml":
        raise ValueError(f"--config must end in one of .toml, .json, got {str(path)!r}")
    try:
        return tomllib.loads(read_file(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {str(error).splitlines()[0]}") from None


# options of what this command printed and wrote, or that are written out already
ANSWERED = ("json", "format", "config", "out", "figure", "certificate", "force")

_written: list[Mapping[str, Any]] = [{}]  # options of the command that runs: the last one counts


@contextmanager
def written_as(options: Mapping[str, Any]) -> Iterator[None]:
    """Take these for the options of the command that runs in this block."""
    _written.append(options)
    try:
        yield
    finally:
        _written.pop()


def written(*names: str) -> dict[str, Any]:
    """Those of some options that this command was given, by name."""
    return {name: _written[-1][name] for name in names if name in _written[-1]}


def written_but(*names: str) -> dict[str, Any]:
    """All options that this command was given, but some and those of what it answered."""
    return {k: v for k, v in _written[-1].items() if k not in (*names, *ANSWERED)}


def command_line(command: str, options: Mapping[str, Any]) -> str:
    """Write a command as it is typed."""
    words = ["pipejax", *command.split()]
    for name, value in options.items():
        named = [] if name in BARE else [flag(name)]
        for each in value if isinstance(value, list) else [value]:  # of options given several times
            words += named if each is True else [*named, str(each)]
    return shlex.join(words)


def config_text(options: Mapping[str, Any]) -> str:
    """Write options as a file of `--config`."""
    return "".join(f"{flag(name)[2:]} = {json.dumps(value)}\n" for name, value in options.items())
