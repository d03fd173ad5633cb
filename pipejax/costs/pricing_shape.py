"""The static argument of compiled prices: equal workloads and tables compile once."""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple
from weakref import WeakValueDictionary

import jax

from pipejax.costs.workload import Workload
from pipejax.schedules.table.table import ScheduleTable

_tables: WeakValueDictionary[Hashable, ScheduleTable] = WeakValueDictionary()


class PricingShape(NamedTuple):
    """What prices depend on besides numbers, which are arguments of their own.

    Attributes:
      workload: parallelism and recomputation; its model and minibatch are placeholders.
      table: the schedule; the same object for tables of equal content.
    """

    workload: Workload
    table: ScheduleTable

    @classmethod
    def of(cls, workload: Workload, table: ScheduleTable) -> "PricingShape":
        """Strip a workload of its numbers, and find the table that represents all equal ones."""
        model = dataclasses.replace(workload.model, name="", source="")
        model = jax.tree.map(lambda _: 0, model)
        arrays = (*table.cells, *table.partners, table.placement)
        content = (*((array.shape, array.tobytes()) for array in arrays), table.stage_shares)
        return cls(
            dataclasses.replace(workload, model=model, minibatch=1),
            _tables.setdefault(content, table),
        )
