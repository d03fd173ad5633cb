"""Options that commands share: which table, at what costs, over which links."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.given import Line, written_as
from pipejax.cli.options.memory import choose_activations
from pipejax.cli.options.pricing import (
    choose_pricing,
    choose_shared,
    pricing_options,
    shared_options,
)
from pipejax.cli.options.tables import (
    OF_RUNS,
    ScheduleList,
    ScheduleSettings,
    TableChoice,
)
from pipejax.cli.options.values import (
    FileIfGiven,
    Text,
    declared,
    output_kind,
    parse_seconds,
)
from pipejax.cli.output.files import Output, check_apart
from pipejax.cli.output.report import printing
from pipejax.schedules.table.links import (
    LINKS,
    POSTINGS,
    QUEUES,
    parse_groups,
    parse_pair_links,
    parse_pairs,
)


def _always(
    format: str = "text",
    force: bool = False,
    json: bool = False,
    config: FileIfGiven = None,
    help: bool = False,
    help_all: bool = False,
) -> None:
    """Take what commands have without declaring it.

    Options:
      config: keys are names of options; an option on the line wins.
    """


ALWAYS = declared(_always)
NO_TABLES = ("show",)  # commands that print none, and need no --format


def choose_links(
    link: str = "delay",
    queues: str = "worker",
    host_links: Text = None,
    posting: str = "early",
    shared_links: Text = None,
    pair_links: Text = None,
    eager_below: Text = None,
) -> pj.Links:
    """Read the link models and what is shared.

    Options:
      queues: worker, pair or direction.
      host_links: O and L of such workers take turns.
      posting: early is from the start of the step, program when its row reaches the cell; without
        SEND and RECV cells program puts them producer by producer.
      shared_links: pairs (both ways of every pair of workers), or groups, as 0-1+1-0,2-3+1-3.
      pair_links: of workers 0 and 1, say, as 0-1=rendezvous,1-2=queued; both ways, unless 1-0 is
        there too.
      eager_below: those with a transmit time below this are buffered, as under queued.
    """
    link, queues = resolve_choice(link, LINKS, "--link"), resolve_choice(queues, QUEUES, "--queues")
    posting = resolve_choice(posting, POSTINGS, "--posting")
    groups = () if host_links is None else parse_groups(host_links, "--host-links")
    pairs = () if shared_links is None else parse_pairs(shared_links, "--shared-links")
    models = () if pair_links is None else parse_pair_links(pair_links, "--pair-links")
    least = 0.0 if eager_below is None else parse_seconds(eager_below, "--eager-below")
    return pj.Links(link, queues, groups, posting, pairs, models, least)


def choose_rendezvous(queues: str = "worker", host_links: Text = None) -> pj.Links:
    """Read what is shared, for commands that know no other link model.

    Options:
      queues: worker, pair or direction.
      host_links: O and L of such workers take turns.
    """
    return choose_links("rendezvous", queues, host_links)


class OptionGroup(NamedTuple):
    """Options that together choose one argument of a command."""

    # makes it, from the values of the options and from other groups by name
    make: Callable[..., Any]
    takes: Mapping[str, inspect.Parameter]  # the options, and the groups that it is made from

    @classmethod
    def of(cls, make: Callable[..., Any]) -> "OptionGroup":
        """Take what a function or a record takes."""
        return cls(make, declared(make))


_TABLE = OptionGroup.of(TableChoice)
_GROUPS: Mapping[str, OptionGroup] = {
    "options": OptionGroup.of(ScheduleSettings),
    "table": _TABLE,  # built
    "choice": _TABLE,
    "listed": OptionGroup.of(ScheduleList),
    "pricing": OptionGroup(choose_pricing, pricing_options()),
    "shared": OptionGroup(choose_shared, shared_options()),
    "links": OptionGroup.of(choose_links),
    "rendezvous": OptionGroup.of(choose_rendezvous),
    "activations": OptionGroup.of(choose_activations),
    "line": OptionGroup(Line, {}),  # what is given, whatever it is
}
_TABLES = ("table", "choice", "listed")  # groups that need the options of schedules
_INPUTS = ("options", "pricing")  # groups that those are made from


class CommandOptions:
    """The options of a command: its own, and those of the groups that it takes as arguments."""

    def __init__(self, command: Callable[..., Any]) -> None:
        """Look up the groups, and put all options together."""
        self.command = command
        takes = inspect.signature(command).parameters
        every = declared(command)
        records = {
            name: OptionGroup.of(parameter.annotation)
            for name, parameter in takes.items()
            if hasattr(parameter.annotation, "_fields") and name not in _GROUPS
        }
        # by the name of the argument
        self.groups = records | {name: _GROUPS[name] for name in _GROUPS if name in takes}
        if any(name in self.groups for name in _TABLES):
            self.groups.setdefault("options", _GROUPS["options"])
        # the command's own options
        self.own = {name: every[name] for name in takes if name not in self.groups}
        kinds = {name: output_kind(parameter) for name, parameter in takes.items()}
        # the own options that name files to write, with their kinds
        self.outputs = {name: kind for name, kind in kinds.items() if kind is not None}
        left_out = {"force": not self.outputs, "format": command.__name__ in NO_TABLES}
        always = {name: p for name, p in ALWAYS.items() if not left_out.get(name)}
        of_records = [self._options_of(name) for name in records]
        self._read_by_command = dict(
            item for options in (always, self.own, *of_records) for item in options.items()
        )
        self._records = frozenset(records)
        shared: dict[str, inspect.Parameter] = {}
        for name in sorted(self.groups, key=lambda name: name == "options"):  # --schedule first
            shared |= self._options_of(name)
        self.parameters = {**shared, **self._read_by_command}  # all options, as typer reads them

    def _options_of(self, group: str) -> dict[str, inspect.Parameter]:
        """Options of a group, without the groups that it is made from."""
        is_table = group in _TABLES  # `table` is an option of theirs, and a group
        return {
            name: parameter
            for name, parameter in self.groups[group].takes.items()
            if name not in (*_GROUPS, *self.groups) or (name == "table" and is_table)
        }

    def chosen(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Make what the groups choose, those first that others are made from."""
        found: dict[str, Any] = {}
        for name in sorted(self.groups, key=lambda name: name not in _INPUTS):
            group = self.groups[name]
            if name == "line":
                found[name] = Line.of(self.parameters, given)
                continue
            inputs = {
                each: found.get(each) if each in _INPUTS else given[each]
                for each in group.takes
                if name in self._records or each not in self._read_by_command
            }
            made = group.make(**inputs)
            made = made.chosen() if hasattr(made, "chosen") else made
            if name == "options" and "activations" in self.groups:
                made = made._replace(of_runs=OF_RUNS)
            found[name] = made.build() if name == "table" else made
        return found

    def run(self, given: Mapping[str, Any]) -> int:
        """Run the command, print its answer and return the exit code."""
        draws = flag("figure") if "figure" in self.outputs else ""
        outputs = {
            name: Output(given[name], flag(name), given["force"], draws * (name != "figure")).check(
                kind
            )
            for name, kind in self.outputs.items()
        }
        check_apart(outputs.values())
        takes = inspect.signature(self.command).parameters
        chosen = {name: made for name, made in self.chosen(given).items() if name in takes}
        format = None if "format" in self.own else given.get("format")
        defaults = {name: parameter.default for name, parameter in self.parameters.items()}
        written = {name: value for name, value in given.items() if value != defaults.get(name)}
        with printing(format, json=given["json"]), written_as(written):
            answer = self.command(**chosen, **{name: given[name] for name in self.own} | outputs)
            answer.show()
        for output in outputs.values():
            output.end(json=given["json"])
        return 0 if answer.holds else 1


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of every group that it takes as an argument."""
    options = CommandOptions(command)

    @functools.wraps(command)
    def run(**given: Any) -> int:
        return options.run(given)

    described: Any = run
    described.__signature__ = inspect.Signature([*options.parameters.values()])
    described.__annotations__ = {p.name: p.annotation for p in options.parameters.values()}
    return run
