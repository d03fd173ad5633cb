"""Tables of other programs' arguments and file keys, and of their effect in pipejax.

The tables are data in `costs/data/arguments`. Each argument that is set is either read, or has no
effect on time and memory, or a note names it with the value that is assumed instead.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from typing import Any, NamedTuple

from pipejax.base.data_files import load_json
from pipejax.costs.system.system import data_file

NOTHING = ("None", "False", "[]", "")  # texts of an argument that is not set


class ArgumentTable(NamedTuple):
    """Table of a training program's arguments: which are read, ignored or without effect."""

    read: Mapping[str, str]  # {argument: what it sets}
    names: Mapping[str, Sequence[str]]  # {argument: its older names}
    # {unread argument: records}: the assumption `as`, values that agree with it (`agrees`; "=name"
    # is another argument's value), and an argument without which it has no effect (`with`)
    assumptions: Mapping[str, Sequence[Mapping[str, Any]]]
    without_effect: re.Pattern[str]  # pattern of the names that change neither time nor memory
    sizes: Mapping[str, str]  # {key of a model's file: argument or key}

    def notes(self, values: Mapping[str, str], where: str) -> list[str]:
        """Return notes on ignored and on unknown arguments; `values` is {argument: its text}."""
        notes = []
        for name, text in values.items():
            for record in self.assumptions.get(name, ()):
                # the value of the argument that switches this one on, if there is such an argument
                condition = values.get(record["with"], "") if "with" in record else "True"
                # "=hidden_size" stands for the value of hidden_size
                agreeing = [
                    values.get(value[1:]) if value[:1] == "=" else value
                    for value in record.get("agrees", NOTHING)
                ]
                if condition not in (*NOTHING, "0", "1") and text not in agreeing:
                    notes.append(f"{where}: {name} {text} is not read: {record['as']}")
        unknown = [
            f"{name} {value}"
            for name, value in values.items()
            if value not in NOTHING and not self.has(name)
        ]
        if unknown:
            notes.append(f"{where}: {len(unknown)} unknown, not read: {', '.join(unknown)}")
        return notes

    def has(self, name: str) -> bool:
        """Return whether the table lists an argument."""
        is_listed = name in self.read or name in self.assumptions
        return is_listed or self.without_effect.match(name) is not None


@functools.cache
def load_arguments(program: str) -> ArgumentTable:
    """Read the argument table of a program named "megatron" or "hugging-face"."""
    data: dict[str, Any] = load_json(data_file("arguments", program, "program"))
    assumptions: dict[str, list[Mapping[str, Any]]] = {}
    for record in data["taken"]:
        for name in record["arguments"]:
            assumptions.setdefault(name, []).append(record)
    names = [translate(name) for names in data["without_effect"].values() for name in names]
    return ArgumentTable(
        data["read"], data["names"], assumptions, re.compile("|".join(names)), data["sizes"]
    )
