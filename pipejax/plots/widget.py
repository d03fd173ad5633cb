"""The explorer in a cell of a notebook."""

from collections.abc import Sequence
from pathlib import Path

import anywidget
import traitlets

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.plots.explorer.payload import Explored, page


class ExplorerWidget(anywidget.AnyWidget):
    """The explorer's page as a widget that reports the selected op to Python.

    Attributes:
      page: HTML of the page.
      height: height of the cell [pixels].
      selected: op that is selected, as "2F5"; "" if no op is.
    """

    _esm = Path(__file__).with_name("widget.js")
    page = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int(640).tag(sync=True)
    selected = traitlets.Unicode().tag(sync=True)


def explore(runs: Evaluation | Sequence[Evaluation], *, height: int = 640) -> ExplorerWidget:
    """Show runs in a notebook as a page on which users change times and select ops.

    Args:
      runs: runs with equal kinds of costs; the first run is on top.
      height: height of the cell [pixels].

    Returns:
      A widget; `widget.observe(function, "selected")` calls a function when an op is selected.

    Raises:
      ModuleNotFoundError: without `pip install 'pipejax[notebook]'`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> widget = pj.plots.explore(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))
      >>> widget.selected, "1f1b" in widget.page
      ('', True)
    """
    runs = [runs] if isinstance(runs, Evaluation) else list(runs)
    return ExplorerWidget(page=page([*map(Explored, runs)]), height=height)
