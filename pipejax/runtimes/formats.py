"""File formats in which the command line and Python write tables for other programs.

Each names its writer, which is imported when it is asked for: the list itself is read for help.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple


class TableFormat(NamedTuple):
    """A file format of tables."""

    module: str  # of the writer
    function: str  # returns the text
    is_run: bool = False  # whether it takes a run (`Evaluation`) and no table

    @property
    def writer(self) -> Callable[[Any], str]:
        """Return the function that writes a table, or a run, as text."""
        return getattr(import_module(self.module), self.function)


FORMATS: Mapping[str, TableFormat] = {
    "torch-csv": TableFormat("pipejax.runtimes.exports", "to_torch_csv"),
    "jaxpp": TableFormat("pipejax.runtimes.exports", "to_jaxpp"),
    "shardy": TableFormat("pipejax.runtimes.exports", "to_shardy"),
    "json": TableFormat("pipejax.schedules.table.table_files", "to_json"),
    "chrome-trace": TableFormat("pipejax.analysis.runs.chrome_trace", "chrome_trace", is_run=True),
}
