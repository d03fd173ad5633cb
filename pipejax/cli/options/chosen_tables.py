"""Tables of commands that show one schedule, or several beside each other."""

from collections.abc import Iterator
from contextlib import contextmanager

import pipejax as pj
from pipejax.base.checks import MismatchError
from pipejax.cli.options.groups import TableChoice
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.schedule import TableOptions
from pipejax.cli.options.schedule_list import ScheduleList


@contextmanager
def naming(table: pj.ScheduleTable) -> Iterator[None]:
    """Say which of several tables it is that cannot run."""
    try:
        yield
    except pj.ScheduleError as error:
        raise pj.ScheduleError(f"{table.name}: {error.reason}", error.grid) from error


def chosen_tables(
    options: TableOptions,
    choice: TableChoice,
    pricing: Pricing | None,
    schedules: str | None,
    *,
    with_curves: bool = True,
) -> tuple[list[pj.ScheduleTable], dict[str, str]]:
    """Build or read the tables; of several that are named, some may not exist: these say why.

    Where their memory curves are shown, a memory limit is a line in those of any schedule, beside
    what schedules are planned for that know a limit.
    """
    if with_curves:
        options = options._replace(of_runs=(*options.of_runs, "memory_limit"))
        choice = choice._replace(options=options)
    if schedules is None:
        return [choice.build()], {}
    if choice.is_given:
        raise ValueError(f"--schedules {schedules} and --schedule or --table: choose one")
    listed = ScheduleList(options, schedules, workers=choice.workers).chosen()
    counts = None if choice.microbatches is None else [choice.microbatches]
    tables, missing_names = [], {}
    for point in listed.sized(counts):
        own = options.of(point.name)
        try:
            tables.append(own.build(*point, pricing))
        except MismatchError as error:
            missing_names[point.name] = getattr(error, "reason", str(error))
    if not tables:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in missing_names.items()))
    if pricing is not None:
        pricing.check_used(tables, map(options.builder, listed.names))
    return tables, missing_names
