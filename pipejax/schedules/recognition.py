"""The registered schedule that a table runs, whatever its name says."""

from collections.abc import Collection, Mapping

from pipejax.base.cached_method import cached_method
from pipejax.base.checks import check_types
from pipejax.schedules.cells.ops import Cell, Phase
from pipejax.schedules.registry import REGISTRY
from pipejax.schedules.table.table import ScheduleTable

OWN_ORDER = "own"  # name of a schedule whose table bears the name of another


def registered(table: ScheduleTable) -> tuple[str, Mapping[str, int]] | None:
    """Find the registered schedule with the rows of a table, and its options; None without one.

    Args:
      table: any schedule, without communication.

    Returns:
      Name and options of its builder. Planned schedules are not tried, because their rows depend
      on times.

    Example:
      >>> import pipejax as pj
      >>> rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
      >>> pj.traces.registered(pj.ScheduleTable.from_rows(rows))
      ('1f1b', {})
    """
    check_types(table=(table, ScheduleTable))
    return _find(table, ())


def _find(table: ScheduleTable, ignored: Collection[Phase]) -> tuple[str, Mapping[str, int]] | None:
    """Find the registered schedule with the rows of a table but for some phases."""
    slices, per_worker = table.grammar.slices, table.num_stages // table.num_workers
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches // slices}
    values = {"stages_per_worker": per_worker, "waves": per_worker // 2, "slices": slices}
    rows = _rows_without_idle(table, ignored)
    for name in sorted(REGISTRY, key=lambda name: name != table.name):  # most names are true
        builder = REGISTRY[name]
        options = {key: value for key, value in values.items() if key in builder.options}
        if builder.planned:
            continue
        try:
            other = builder.function(**size, **options)
        except ValueError:  # it does not exist for these numbers
            continue
        if other.num_stages == table.num_stages and _rows_without_idle(other, ignored) == rows:
            return name, options
    return None


@cached_method
def schedule_name(table: ScheduleTable) -> str:
    """Return the name of the schedule that a table runs; of an unknown order that of the table."""
    # launchers recompute by an option of their own, in the same order
    match, builder = _find(table, (Phase.R,)), REGISTRY.get(table.name)
    if match is not None:
        return match[0]
    # a file can bear any name, and messages in an order of their own change a schedule
    return table.name if builder is None or builder.planned else OWN_ORDER


def _rows_without_idle(table: ScheduleTable, ignored: Collection[Phase]) -> list[list[Cell]]:
    cells = (
        [tuple(op for op in cell if op.phase not in ignored) for cell in row]
        for row in table.rows()
    )
    return [[cell for cell in row if cell] for row in cells]
