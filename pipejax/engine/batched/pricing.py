"""Programs of a batch of costs: one for each set of messages that lie below `Links.eager_below`."""

from collections.abc import Iterator

import jax
import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import below_threshold, settled
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Rows = Int[NumpyArray, " rows"]


def programs_of_batch(
    table: ScheduleTable, links: Links, costs: Costs
) -> Iterator[tuple[Program, Rows | None]]:
    """Lower a table for a batch of costs, whose axis stands first on every leaf with axes.

    Yields programs, each with the rows of the batch that it is for; None stands for all.
    """
    if not links.eager_below:
        yield lower(table, link=links), None
        return
    is_below = below_threshold(costs.transmit, links.eager_below, 1)
    _, first, kind = np.unique(
        is_below.reshape(len(is_below), -1), axis=0, return_index=True, return_inverse=True
    )
    for number, row in enumerate(first.tolist()):
        one = jax.tree.map(lambda leaf, row=row: leaf[min(row, len(leaf) - 1)], _arrays(costs))
        program = settled(lower(table, link=links, costs=one))
        yield program, None if len(first) == 1 else np.flatnonzero(kind.ravel() == number)


def _arrays(costs: Costs) -> Costs:
    arrays: Costs = jax.tree.map(np.atleast_1d, costs)
    return arrays
