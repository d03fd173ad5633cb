"""Options that commands share: which table, at what costs, over which links."""

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.options.option import options
from pipejax.cli.options.pricing import CostOptions
from pipejax.cli.options.tables import (
    OF_RUNS,
    ScheduleList,
    ScheduleSettings,
    TableChoice,
    TableOptions,
)
from pipejax.cli.options.values import (
    CountIfGiven,
    FileIfGiven,
    Text,
    parse_list,
    parse_seconds,
)
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
    """What transfers share, for commands that know no other link model.

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
class LinkOptions:
    """The link models and what is shared.

    Attributes:
      queues: worker, pair or direction.
      host_links: O and L of such workers take turns.
      posting: early is from the start of the step, program when its row reaches the cell; without
        SEND and RECV cells program puts them producer by producer.
      shared_links: pairs (both ways of every pair of workers), or groups, as 0-1+1-0,2-3+1-3.
      pair_links: of workers 0 and 1, say, as 0-1=rendezvous,1-2=queued; both ways, unless 1-0 is
        there too.
      eager_below: those with a transmit time below this are buffered, as under queued.
    """

    link: str = "delay"
    queues: str = "worker"
    host_links: Text = None
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


def _activations(chosen: "SizedRunOptions | SizedCostOptions") -> ActivationOptions:
    """Read how activations are sized."""
    sizes = chosen.activation_sizes
    listed = None if sizes is None else parse_list(sizes, "--activation-sizes")
    return ActivationOptions(chosen.weight_share, listed)


@options
class TableFields(ScheduleSettings):
    """A schedule and its size, or a table.

    Attributes:
      repair: torch-1f1b is PyTorch's own 1F1B, whose last rank is off by one.
    """

    schedule: Text = None
    table: FileIfGiven = None
    workers: CountIfGiven = None
    microbatches: CountIfGiven = None
    repair: Text = None

    def choice(self, settings: TableOptions | None = None) -> TableChoice:
        """Find the schedule or the table that is meant."""
        return TableChoice(
            self.table_options() if settings is None else settings,
            self.pricing if isinstance(self, CostOptions) else None,
            None if self.schedule is None else named(self.schedule),
            self.table,
            self.workers,
            self.microbatches,
            self.repair,
        )


@options
class RunOptions(TableFields, CostOptions):
    """A table and what its ops and messages take."""


@options
class SizedRunOptions(RunOptions):
    """A run whose activations have sizes.

    Attributes:
      activation_sizes: a number or one per stage, as 1,1,2.
    """

    activation_sizes: Text = None
    activations = property(_activations)

    def choice(self, settings: TableOptions | None = None) -> TableChoice:
        """Find the table that is meant; some options say something of its run too."""
        return super().choice(self.table_options(OF_RUNS) if settings is None else settings)


@options
class SizedCostOptions(CostOptions):
    """What ops and messages take, and how large activations are.

    Attributes:
      activation_sizes: a number or one per stage, as 1,1,2.
    """

    activation_sizes: Text = None
    activations = property(_activations)


@options
class ListedRunOptions(ScheduleSettings, CostOptions):
    """Several schedules, and what their ops and messages take.

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
        found = ScheduleList(
            self.table_options(), self.schedules, self.tables, self.workers, self.repair
        )
        return found.chosen()


@options
class PricedSettings(ScheduleSettings, CostOptions):
    """Options of schedules, and what their ops and messages take."""
