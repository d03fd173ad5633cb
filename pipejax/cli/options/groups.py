"""Options that commands share: which table, at what costs, over which links."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pipejax as pj
from pipejax.base.checks import one_of
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.memory import choose_activations
from pipejax.cli.options.objective import ObjectiveSettings
from pipejax.cli.options.pricing import PricingSettings
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
      posting: early or program; without SEND and RECV cells program puts them producer by
        producer.
      shared_links: pairs (both ways of every pair of workers), or groups, as 0-1+1-0,2-3+1-3.
      pair_links: as 0-1=rendezvous,1-2=queued; both ways, unless 1-0 is there too.
      eager_below: such messages are buffered, as queued; others meet under rendezvous.
    """
    link, queues = one_of(link, LINKS, "--link"), one_of(queues, QUEUES, "--queues")
    posting = one_of(posting, POSTINGS, "--posting")
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


_GROUPS: dict[str, Callable[..., Any]] = {
    "options": ScheduleSettings,
    "table": TableChoice,  # built
    "choice": TableChoice,
    "listed": ScheduleList,
    "objectives": ObjectiveSettings,
    "pricing": PricingSettings,
    "links": choose_links,
    "rendezvous": choose_rendezvous,
    "activations": choose_activations,
}
_TABLES = ("table", "choice", "listed")  # groups that need the options of schedules
_INPUTS = ("options", "pricing")  # groups that those are made from


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of every group that it takes as an argument.

    A command declares groups, such as `table`, `options`, `pricing` or `links`, as arguments and
    receives what the group's options choose. An argument that is a named tuple of options is a
    group too; every other argument is an option of its own. Where it has the name of a group's
    option, it is the command that reads it. What docstrings say of options beyond the catalogue is
    their help. An output is checked before all else; a command that has one has `--force`.

    Args:
      command: function of the command.

    Returns:
      The function that typer sees, with all options in its signature.
    """
    wanted = declared(command)
    given = inspect.signature(command).parameters.items()
    makers = {name: p.annotation for name, p in given if hasattr(p.annotation, "_fields")}
    makers |= _GROUPS
    groups = [
        name
        for name in makers
        if name in wanted or (name == "options" and any(group in wanted for group in _TABLES))
    ]
    takes = {group: declared(makers[group]) for group in groups}
    shared: dict[str, inspect.Parameter] = {}
    for group in sorted(groups, key=lambda name: name == "options"):  # --schedule comes first
        shared |= {
            name: parameter
            for name, parameter in takes[group].items()
            if name not in makers or (name == "table" and group in _TABLES)
        }
    own = {name: parameter for name, parameter in wanted.items() if name not in makers}
    kinds = {name: kind for name, p in given if (kind := output_kind(p)) is not None}
    records = [group for group in groups if group not in _GROUPS]
    left_out = {"force": not kinds, "format": command.__name__ in NO_TABLES}
    always = {name: p for name, p in ALWAYS.items() if not left_out.get(name)}
    read_by_command = {**always, **own}
    for record in records:
        read_by_command |= {name: p for name, p in takes[record].items() if name not in makers}

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        outputs = {  # before any work
            name: Output(given[name], flag(name), given["force"]).check(kind)
            for name, kind in kinds.items()
        }
        check_apart(outputs.values())
        chosen: dict[str, Any] = {}
        for group in sorted(groups, key=lambda name: name not in _INPUTS):
            inputs = {
                name: chosen.get(name) if name in _INPUTS else given[name]
                for name in takes[group]
                if group in records or name not in read_by_command
            }
            made = makers[group](**inputs)
            made = made.chosen() if hasattr(made, "chosen") else made
            if group == "options" and "activations" in groups:
                made = made._replace(of_runs=OF_RUNS)
            chosen[group] = made.build() if group == "table" else made
        arguments = {name: chosen[name] for name in groups if name in wanted}
        format = None if "format" in own else given.get("format")
        with printing(format, json=given["json"]):
            command(**arguments, **{name: given[name] for name in own} | outputs)
        for output in outputs.values():
            output.end(json=given["json"])

    parameters = list({**shared, **read_by_command}.values())
    described: Any = run
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
