"""Errors of predictions of published runs, each with its tolerance."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from pipejax.results import PredictionErrors

MEAN, MEDIAN, EACH, BIAS = "mean", "median", "each", "bias"


class Accuracy(NamedTuple):
    """Errors of some runs, and what is allowed.

    Attributes:
      group: what they have in common.
      runs: which runs, and what is predicted of them.
      errors: of them, in percent.
      tolerance: what is allowed [%]; None where errors are only reported.
      of: what the tolerance is of: their `MEAN` or `MEDIAN`, `EACH` of them, or their `BIAS`.
    """

    group: str
    runs: str
    errors: PredictionErrors
    tolerance: float | None = None
    measure: str = MEAN

    @property
    def holds(self) -> bool:
        """Return whether the errors are within the tolerance."""
        e = self.errors
        error = {MEAN: e.mape, MEDIAN: e.median, EACH: e.largest, BIAS: abs(e.bias)}[self.measure]
        return self.tolerance is None or error <= self.tolerance

    @property
    def allowed(self) -> str:
        """The tolerance in words, empty where there is none."""
        return "" if self.tolerance is None else f"{self.measure} {self.tolerance:g} %"


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
        word = "" if not row.allowed else "[green]holds[/]" if row.holds else "[red]fails[/]"
        bias = f"{e.bias:+.2f} %"
        grid.add_row(row.group, row.runs, str(e.rows), *figures, bias, row.allowed, word)
    console = Console(width=120)
    console.print(grid, *reasons, sep="\n")
    if not all(row.holds for row in accuracies):
        raise SystemExit(1)
