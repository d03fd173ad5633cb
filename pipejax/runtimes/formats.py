"""File formats in which the command line and Python write tables for other programs.

A format names its writer, which is imported at first use, because `--help` reads this list too.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple


class TableFormat(NamedTuple):
    """A file format of tables."""

    module: str  # module of the writer
    function: str  # function of this module that returns the text
    is_run: bool = False  # whether the writer takes a run (`Evaluation`) instead of a table

    @property
    def writer(self) -> Callable[[Any], str]:
        """Return the function that converts a table, or a run, to text."""
        return getattr(import_module(self.module), self.function)


FORMATS: Mapping[str, TableFormat] = {
    "torch-csv": TableFormat("pipejax.runtimes.exports", "to_torch_csv"),
    "jaxpp": TableFormat("pipejax.runtimes.exports", "to_jaxpp"),
    "shardy": TableFormat("pipejax.runtimes.exports", "to_shardy"),
    "json": TableFormat("pipejax.schedules.table.table_files", "to_json"),
    "chrome-trace": TableFormat("pipejax.analysis.runs.chrome_trace", "chrome_trace", is_run=True),
}
