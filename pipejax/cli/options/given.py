"""What a command line gives, as it is written.

Looked at twice: before a command reads it, for what the parser lets pass (an option given twice,
empty, or without effect beside the others), and when an error of the library is to name the option
that was given, not the argument that it became.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

from pipejax.cli.options.declared import flag
from pipejax.cli.options.numbers import is_plain
from pipejax.schedules.table.links import LINKS, POSTINGS, QUEUES


class Needs(NamedTuple):
    """What an option needs beside it to have an effect.

    Attributes:
      other: the option.
      values: one of these must be its value, if there are any.
      known: values of the option itself; of others its own check speaks.
    """

    other: str
    values: tuple[str, ...] = ()
    known: tuple[str, ...] = ()


NEEDS: Mapping[str, Needs] = {
    "queues": Needs("link", ("rendezvous",), QUEUES),
    "posting": Needs("link", ("rendezvous",), POSTINGS),
    "shared_links": Needs("link", LINKS[1:]),  # under delay messages use no resource
    "sequence_parallel": Needs("tensor_parallel"),
    "scatter_gather": Needs("tensor_parallel"),
    "repair": Needs("table"),
    "distinct_counts": Needs("paths"),
}
# arguments of the library whose option has another name
_RENAMED = {
    "num_workers": "workers",
    "num_microbatches": "microbatches",
    "num_threads": "threads",
    "num_batches": "batches",
    "sizes": "activation_sizes",
    "distribution": "op",
}
_CLAUSE = re.compile(r"(^|: )(\w+)(?=(=| must | needs | names | does | are |(?: '[^']*') needs )?)")
# what a cost is called in Python, beside the letter that options and files call it by
_LETTER = re.compile(r"\b[a-z]+(?:_[a-z]+)? \(([A-Z])\)|(?<=[A-Z]) \([a-z]+_[a-z]+\)")
_NUMBER = re.compile(r"\bnum_(\w+) (\d+)")
_KEYWORD = re.compile(r"((?<![\w-]))(\w+)(?=(=)')")
_UNKNOWN = re.compile(r"unknown (\w+) ")


class GivenOptions:
    """The options of one command line.

    Args:
      arguments: behind the name of the command.
      takes: the command's options by name.
    """

    def __init__(self, arguments: Sequence[str], takes: Mapping[str, Parameter]) -> None:
        """Find the value of every option."""
        self.takes = {name: _kinds(parameter) for name, parameter in takes.items()}
        self.repeated = {
            name for name, kinds in self.takes.items() if any(get_origin(k) is list for k in kinds)
        }
        self.values = list(self._read(arguments))

    def _read(self, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield name and value of every option; a flag has its own name for a value."""
        names, words = {flag(name): name for name in self.takes}, iter(arguments)
        for word in words:
            written, equals, value = word.partition("=")
            name = names.get(written)
            if name is not None and bool in self.takes[name]:
                yield name, name
            elif name is not None:
                yield name, value if equals else next(words, "")

    def check(self) -> None:
        """Refuse what says nothing, says it twice, or has no effect.

        Raises:
          ValueError: with the option and its value.
        """
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
        for name, needs in NEEDS.items():
            if name not in seen or needs.other not in self.takes:
                continue
            is_there = needs.other in seen and not needs.values
            if is_there or seen.get(needs.other, "").lower() in needs.values:
                continue
            if not needs.known or seen[name].lower() in needs.known:
                wanted = f"{flag(needs.other)} {', '.join(needs.values)}".strip()
                raise ValueError(f"{flag(name)} has no effect without {wanted}")

    def named(self, message: str) -> str:
        """Return an error of the library with options in place of arguments.

        Where a clause begins, `memory_limit must be ...`, or a keyword has a text, `what='layers'`.
        What a file says is left alone.
        """
        parts = [(name, part) for name, value in self.values for part in value.split(",")]
        for name, value in [*self.values, *parts]:
            is_file = "." in value and message.startswith(f"{value} ")
            if message.startswith(f"{value}: ") or is_file:
                return f"{flag(name)} {_in_letters(message)}"
        kind = _UNKNOWN.match(message)
        if kind is not None and (option := self._option(kind[1])):
            return f"{option}: {message}"
        message = _KEYWORD.sub(self._renamed, _CLAUSE.sub(self._renamed, _in_letters(message)))
        for name, value in self.values:
            if "--" not in message and "_" in name and name.replace("_", " ") in message:
                return f"{flag(name)} {value}: {message}"
        return message

    def _renamed(self, clause: re.Match[str]) -> str:
        begin, word, verb = clause.groups()
        option = self._option(word) if "_" in word or (verb and not begin) else None
        return begin + (option or word)

    def _option(self, argument: str) -> str | None:
        """Return how the option of an argument is written, if the command has it."""
        for name in (argument, _RENAMED.get(argument, ""), f"{argument}s"):
            if name in self.takes:
                return flag(name)
        return None


def _in_letters(message: str) -> str:
    """Name costs by their letters, and counts in words."""
    return _NUMBER.sub(r"\2 \1", _LETTER.sub(lambda found: found[1] or "", message))


def _kinds(parameter: Parameter) -> set[Any]:
    """Return the types of an option's value, without None."""
    kind = get_args(parameter.annotation)[0]
    return {*(get_args(kind) if isinstance(kind, UnionType) else (kind,))} - {type(None)}
