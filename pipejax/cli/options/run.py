"""Options that commands share: which table, at what costs, over which links."""

from functools import cached_property
from typing import Any

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.costs import CostOptions
from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import build, parse_scenario
from pipejax.cli.options.tables import OF_RUNS, ScheduleList, ScheduleSettings, TableOptions
from pipejax.cli.options.values import CountIfGiven, Text, parse_list, parse_seconds
from pipejax.schedules.naming import named
from pipejax.schedules.table.links import (
    LINKS,
    POSTINGS,
    QUEUES,
    parse_groups,
    parse_pair_links,
    parse_pairs,
)


@options
class RendezvousOptions:
    """Queues and host links, for commands that know no other link model.

    Attributes:
      queues: worker, pair or direction.
      host_links: O and L of such workers take turns.
    """

    queues: str = "worker"
    host_links: Text = None

    def links(self) -> pj.Links:
        """Read the options."""
        return pj.Links("rendezvous", _queues(self.queues), _host_links(self.host_links))


@options
class LinkOptions(RendezvousOptions):
    """The link model, and the links that messages share.

    Attributes:
      posting: early is from the start of the step, program when its row reaches the cell; without
        SEND and RECV cells program puts them producer by producer.
      shared_links: pairs (both ways of every pair of workers), or groups, as 0-1+1-0,2-3+1-3.
      pair_links: of workers 0 and 1, say, as 0-1=rendezvous,1-2=queued; both ways, unless 1-0 is
        there too.
      eager_below: those with a transmit time below this are buffered, as under queued.
    """

    link: str = "delay"
    posting: str = "early"
    shared_links: Text = None
    pair_links: Text = None
    eager_below: Text = None

    def links(self) -> pj.Links:
        """Read the options."""
        pairs, models, least = self.shared_links, self.pair_links, self.eager_below
        return pj.Links(
            resolve_choice(self.link, LINKS, "--link"),
            _queues(self.queues),
            _host_links(self.host_links),
            resolve_choice(self.posting, POSTINGS, "--posting"),
            () if pairs is None else parse_pairs(pairs, "--shared-links"),
            () if models is None else parse_pair_links(models, "--pair-links"),
            0.0 if least is None else parse_seconds(least, "--eager-below"),
        )


def _queues(queues: str) -> str:
    return resolve_choice(queues, QUEUES, "--queues")


def _host_links(text: Text) -> tuple[tuple[int, ...], ...]:
    return () if text is None else parse_groups(text, "--host-links")


@options
class TableFields(ScheduleSettings):
    """A schedule and its size, or a table.

    Attributes:
      repair: torch-1f1b is PyTorch's own 1F1B, whose last rank is off by one.
    """

    schedule: Text = None
    table: Text = None
    workers: CountIfGiven = None
    microbatches: CountIfGiven = None
    repair: Text = None

    @property
    def settings(self) -> TableOptions:
        """The options of the schedule."""
        return self.table_options()

    @cached_property
    def name(self) -> str | None:
        """The schedule that is meant."""
        return None if self.schedule is None else named(self.schedule)

    def scenario(self, settings: TableOptions | None = None) -> "pj.Scenario":
        """Read the scenario, with other options of its schedule if these are given.

        Raises:
          ValueError: if the options do not name one table.
        """
        return parse_scenario(self, settings=settings)

    def planned_for(self, table: pj.ScheduleTable) -> dict[str, Any]:
        """Times that the order of the table, which this built, was planned for, by letter."""
        return self.settings.planned_for(self.name, table) if self.name else {}


@options
class RunOptions(TableFields, CostOptions, LinkOptions):
    """A table with times of its ops and messages, and links."""


@options
class RendezvousRun(TableFields, CostOptions, RendezvousOptions):
    """A table with times of its ops and messages, under rendezvous."""


@options
class SizedCostOptions(CostOptions):
    """Times of ops and messages, and sizes of activations.

    Attributes:
      activation_sizes: a number or one per stage, as 1,1,2.
    """

    activation_sizes: Text = None

    @property
    def activations(self) -> ActivationOptions:
        """Read the sizes of activations."""
        sizes = self.activation_sizes
        listed = None if sizes is None else parse_list(sizes, "--activation-sizes")
        return ActivationOptions(self.weight_share, listed)


@options
class SizedRunOptions(TableFields, SizedCostOptions, LinkOptions):
    """A table with times of its ops and messages and sizes of its activations."""

    @property
    def settings(self) -> TableOptions:
        """The options of the schedule; some say something of its run too."""
        return self.table_options(OF_RUNS)


@options
class ListedRunOptions(ScheduleSettings, CostOptions, LinkOptions):
    """Several schedules with times of their ops and messages.

    Attributes:
      tables: may be given several times.
      workers: those of the tables if not given.
    """

    schedules: Text = None
    tables: list[str] | None = None
    workers: CountIfGiven = None
    repair: Text = None

    @property
    def listed(self) -> ScheduleList:
        """Find the schedules that are meant."""
        return ScheduleList.read(
            self.table_options(), self.schedules, self.tables, self.workers, self.repair
        )


@options
class PricedSettings(ScheduleSettings, CostOptions, LinkOptions):
    """Options of schedules, and times of their ops and messages."""


def shown_scenarios(
    run: SizedRunOptions, settings: TableOptions, schedules: Text
) -> "tuple[list[pj.Scenario], dict[str, str]]":
    """Build or read the tables; of several that are named, some may not exist: these say why."""
    if schedules is None:
        scenario = run.scenario(settings)
        build(scenario)
        return [scenario], {}
    if run.schedule is not None or run.table is not None:
        raise ValueError(f"--schedules {schedules} and --schedule or --table: choose one")
    several = ScheduleList.read(settings, schedules, workers=run.workers)
    counts = None if run.microbatches is None else [run.microbatches]
    scenarios, missing = several.build(run, several.sized(counts))
    if not scenarios:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in missing.items()))
    several.check_used(scenarios.values())
    return list(scenarios.values()), missing
