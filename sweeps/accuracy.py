"""How far predictions of published runs are from what was measured, each with what is allowed."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from pipejax.analysis.prediction_errors import PredictionErrors

MEAN, EACH = "mean", "each"


class Accuracy(NamedTuple):
    """Errors of some runs, and what is allowed.

    Attributes:
      group: what they have in common.
      runs: which runs, and what is predicted of them.
      errors: of them, in percent.
      tolerance: what is allowed [%]; None where errors are only reported.
      of: what the tolerance is of: their `MEAN`, or `EACH` of them.
    """

    group: str
    runs: str
    errors: PredictionErrors
    tolerance: float | None = None
    of: str = MEAN

    @property
    def holds(self) -> bool:
        """Whether the errors are within the tolerance."""
        error = self.errors.mape if self.of == MEAN else self.errors.largest
        return self.tolerance is None or error <= self.tolerance


def report(title: str, accuracies: Sequence[Accuracy], reasons: Sequence[str] = ()) -> None:
    """Print errors and tolerances.

    Args:
      title: of the table.
      accuracies: its rows.
      reasons: why errors are as large as they are, printed below.

    Raises:
      SystemExit: with code 1, if an error is beyond its tolerance.
    """
    grid = Table("", "runs", "n", "mean", "median", "largest", "bias", "allowed", "", title=title)
    for row in accuracies:
        e = row.errors
        figures = [f"{value:.2f} %" for value in (e.mape, e.median, e.largest)]
        allowed = "" if row.tolerance is None else f"{row.of} {row.tolerance:g} %"
        word = {"": ""}.get(allowed, "[green]holds[/]" if row.holds else "[red]fails[/]")
        grid.add_row(row.group, row.runs, str(e.rows), *figures, f"{e.bias:+.2f} %", allowed, word)
    console = Console(width=120)
    console.print(grid, *reasons, sep="\n")
    if not all(row.holds for row in accuracies):
        raise SystemExit(1)
