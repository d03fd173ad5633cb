"""Options that commands share: which table, at what costs, over which links."""

from functools import cached_property
from typing import Any

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.options.option import options
from pipejax.cli.options.pricing import CostOptions, Pricing
from pipejax.cli.options.tables import (
    OF_RUNS,
    ScheduleList,
    ScheduleSettings,
    TableOptions,
    built,
    told,
)
from pipejax.cli.options.values import (
    CountIfGiven,
    FileIfGiven,
    Text,
    parse_list,
    parse_seconds,
)
from pipejax.schedules.naming import find, named
from pipejax.schedules.table.links import (
    LINKS,
    POSTINGS,
    QUEUES,
    parse_groups,
    parse_pair_links,
    parse_pairs,
)
from pipejax.schedules.table.table_files import REPAIRS


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
    """The link models, and what messages share.

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
    table: FileIfGiven = None
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

    def build(
        self,
        settings: TableOptions | None = None,
        pricing: Pricing | None = None,
    ) -> pj.ScheduleTable:
        """Build or read the table, with other options or for other costs where these are given.

        Raises:
          ValueError: if the options do not name one table.
        """
        if (self.schedule is None) == (self.table is None):
            raise ValueError(
                "give either --schedule with --workers and --microbatches, or --table FILE"
            )
        settings = settings or self.settings
        pricing = pricing or getattr(self, "pricing", None)  # a closed form has no costs
        table = self._read(settings) if self.name is None else self._build(settings, pricing)
        if pricing is not None:
            builders = [] if self.name is None else [settings.builder(self.name)]
            pricing.check_used([table], builders)
        return table

    def planned_for(self, table: pj.ScheduleTable) -> dict[str, Any]:
        """Times that the order of the table, which this built, was planned for, by letter."""
        return self.settings.planned_for(self.name, table) if self.name else {}

    def _read(self, settings: TableOptions) -> pj.ScheduleTable:
        extra = [flag(name) for name in SIZES if getattr(self, name) is not None]
        extra += [told(name) for name in settings.options if name not in settings.of_runs]
        if extra:
            raise ValueError(f"{extra[0]} belongs to --schedule: a table file states it itself")
        repair = self.repair
        repair = None if repair is None else resolve_choice(repair, REPAIRS, "--repair")
        return settings.finished(pj.read_table(self.table or "", repair=repair))

    def _build(self, settings: TableOptions, pricing: Pricing | None) -> pj.ScheduleTable:
        name = self.name or ""
        sizes = find(name).sizes or (None, None)  # those of a table from a file
        workers, microbatches = self.workers or sizes[0], self.microbatches or sizes[1]
        if workers is None or microbatches is None:
            missing = next(size for size in SIZES if getattr(self, size) is None)
            raise ValueError(f"--schedule needs {flag(missing)}")
        return settings.build(name, workers, microbatches, pricing)


SIZES = ("workers", "microbatches")


@options
class RunOptions(TableFields, CostOptions):
    """A table with times of its ops and messages."""


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
class SizedRunOptions(TableFields, SizedCostOptions):
    """A table with times of its ops and messages and sizes of its activations."""

    @property
    def settings(self) -> TableOptions:
        """The options of the schedule; some say something of its run too."""
        return self.table_options(OF_RUNS)


@options
class ListedRunOptions(ScheduleSettings, CostOptions):
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
        several = ScheduleList(
            self.table_options(), self.schedules, self.tables, self.workers, self.repair
        )
        return several.chosen()


@options
class PricedSettings(ScheduleSettings, CostOptions):
    """Options of schedules, and times of their ops and messages."""


def shown_tables(
    run: SizedRunOptions, settings: TableOptions, schedules: Text
) -> tuple[list[pj.ScheduleTable], dict[str, str]]:
    """Build or read the tables; of several that are named, some may not exist: these say why."""
    if schedules is None:
        return [run.build(settings)], {}
    if run.schedule is not None or run.table is not None:
        raise ValueError(f"--schedules {schedules} and --schedule or --table: choose one")
    several = ScheduleList(settings, schedules, workers=run.workers).chosen()
    counts = None if run.microbatches is None else [run.microbatches]
    tables, missing = built(several.sized(counts), settings, run.pricing)
    if not tables:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in missing.items()))
    if run.pricing is not None:
        run.pricing.check_used(tables.values(), map(settings.builder, several.names))
    return list(tables.values()), missing
