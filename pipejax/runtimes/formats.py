"""Forms in which a table is written for other programs: the command and Python read one list.

Each names its writer, which is imported when it is asked for: the list itself is read for help.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pipejax.schedules.table.table import ScheduleTable


class TableFormat(NamedTuple):
    """A form of a table.

    Attributes:
      module: of the writer.
      function: returns the text.
      of_run: whether it takes a run (`Evaluation`) and no table.
    """

    module: str
    function: str
    of_run: bool = False

    @property
    def writer(self) -> Callable[[Any], str]:
        """What makes the text of a table, or of a run."""
        found: Callable[[Any], str] = getattr(import_module(self.module), self.function)
        return found


FORMATS: Mapping[str, TableFormat] = {
    "torch-csv": TableFormat("pipejax.runtimes.torch_tables", "to_torch_csv"),
    "jaxpp": TableFormat("pipejax.runtimes.writers.jaxpp", "to_jaxpp"),
    "shardy": TableFormat("pipejax.runtimes.writers.shardy", "to_shardy"),
    "json": TableFormat("pipejax.schedules.table.table_files", "to_json"),
    "chrome-trace": TableFormat("pipejax.analysis.runs.chrome_trace", "chrome_trace", of_run=True),
}


def write_table(table: "ScheduleTable", path: str | Path, *, format: str | None = None) -> None:
    """Write a table for a program, as JSON where the name ends in .json, otherwise as a CSV.

    JSON holds everything. A CSV holds the rows alone: where reading it back would give another
    placement, other slot durations or stage shares, or another weight rule, a warning says which.
    Its name is that of the file.

    Args:
      table: the schedule.
      path: the file; it is replaced.
      format: as `pipejax export` takes it: "torch-csv", "jaxpp", "shardy" or "json"; what the
        program does not know is left out with a warning. By the name of the file if None.

    Raises:
      ValueError: if the format is unknown, or cannot hold the table.
      OSError: if the file cannot be written.

    Example:
      >>> import pathlib, tempfile, pipejax as pj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "chimera.json"
      >>> pj.write_table(pj.schedules.build("chimera", num_workers=2, num_microbatches=2), path)
      >>> pj.read_table(path).num_pipes
      2
    """
    from pipejax.base.checks import check_types, one_of
    from pipejax.base.files import write_file
    from pipejax.schedules.table.table import ScheduleTable
    from pipejax.schedules.table.table_files import text_for

    check_types(table=(table, ScheduleTable), path=(path, str, Path))
    if format is None:
        text = text_for(table, Path(path))
    else:
        of_tables = {name: one for name, one in FORMATS.items() if not one.of_run}
        text = of_tables[one_of(format, of_tables, "format")].writer(table)
    write_file(path, text)
