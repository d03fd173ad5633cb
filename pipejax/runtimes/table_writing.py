"""Tables written for programs: those that read PyTorch's cells or JSON, and those of `formats`."""

from pathlib import Path

from pipejax.base.checks import check_types, resolve_choice
from pipejax.base.files import write_file
from pipejax.runtimes.formats import FORMATS
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import text_for


def write_table(table: ScheduleTable, path: str | Path, *, format: str | None = None) -> None:
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
    check_types(table=(table, ScheduleTable), path=(path, str, Path))
    if format is None:
        text = text_for(table, Path(path))
    else:
        formats = {name: form for name, form in FORMATS.items() if not form.is_run}
        text = formats[resolve_choice(format, formats, "format")].writer(table)
    write_file(path, text)
