"""Options of commands that look at several schedules: names, tables, folders of tables."""

from collections.abc import Sequence
from typing import NamedTuple

from pipejax.base.checks import one_of
from pipejax.cli.options.declared import CountIfGiven, Text
from pipejax.cli.options.schedule import OF_RUNS, TableOptions
from pipejax.schedules import listed
from pipejax.schedules.table.torch_1f1b import REPAIRS


class SizedSchedule(NamedTuple):
    """A schedule at one size.

    Attributes:
      name: for `schedules.find`.
      workers: P.
      microbatches: M.
    """

    name: str
    workers: int
    microbatches: int


class ScheduleList(NamedTuple):
    """Which schedules are looked at.

    Attributes:
      options: of those that are built.
      tables: may be given several times.
      workers: those of the tables if not given.
    """

    options: TableOptions
    schedules: Text = None
    tables: list[str] | None = None
    workers: CountIfGiven = None
    repair: Text = None

    def chosen(self) -> "ScheduleList":
        """Check what is named, and the options."""
        if self.schedules is None and self.tables is None:
            raise ValueError("--schedules or --tables is missing: as gpipe,1f1b,mine.csv")
        repair = None if self.repair is None else one_of(self.repair, REPAIRS, "--repair")
        made = self._replace(options=self.options._replace(repair=repair))
        made.check()
        return made

    def check(self) -> None:
        """Refuse a schedule that is named twice, and an option without effect."""
        names = self.names
        for name in names:
            if names.count(name) > 1:
                option = "--schedules" if self.tables is None else "--schedules and --tables"
                raise ValueError(f"{option} names {name} twice")
        # whether an option that says something of runs too has an effect, the command knows
        self.options._replace(of_runs=(*self.options.of_runs, *OF_RUNS)).check(names)
        repair = self.options.repair
        if repair and all(self.options.builder(name).sizes is None for name in names):
            raise ValueError(f"--repair {repair} has no effect without a table")

    @property
    def names(self) -> list[str]:
        """Names of all, folders unfolded."""
        texts = [] if self.schedules is None else [t.strip() for t in self.schedules.split(",")]
        return [name for text in (*texts, *(self.tables or ())) for name in self._listed(text)]

    def _listed(self, text: str) -> list[str]:
        return listed(text, repair=self.options.repair)

    def sized(self, microbatches: Sequence[int] | None) -> list[SizedSchedule]:
        """Give each its size: as asked for, else that of its table, else that of all tables.

        Raises:
          ValueError: if a schedule that is built is left without a size.
        """
        own = {name: self.options.builder(name).sizes for name in self.names}
        tables = [sizes for sizes in own.values() if sizes is not None]
        alike = [{sizes[k] for sizes in tables} for k in range(2)]
        given = [None if self.workers is None else [self.workers], microbatches]
        every: dict[str, list[Sequence[int]]] = {name: [] for name in own}
        for place, option in enumerate(("--workers", "--microbatches")):
            common = sorted(alike[place]) if len(alike[place]) == 1 else None
            for name, sizes in own.items():
                of_table = None if sizes is None else [sizes[place]]
                found = given[place] or of_table or common
                if found is None:
                    differ = " and the tables differ" if tables else ""
                    raise ValueError(f"{option} is missing: {name} is of any size{differ}")
                every[name].append(found)
        rounds = range(len(microbatches or [1]))  # of all schedules, one for each M
        return [
            SizedSchedule(name, workers[0], counts[k])
            for k in rounds
            for name, (workers, counts) in every.items()
        ]
