"""Costs of the microbatches of many steps, to be gathered in any order."""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.costs import (
    FIELDS,
    PHASE_FIELDS,
    Costs,
    differs_by_microbatch,
    unchecked_costs,
)
from pipejax.engine.lowering.program import Program
from pipejax.schedules.cells.ops import TIMED
from pipejax.search.orders.order_bounds import with_least
from pipejax.search.orders.permutations import Orders


class StepCosts(NamedTuple):
    """Costs of many steps, whose microbatches are numbered through all of them."""

    # (members, ...) fields that differ by microbatch, of those that the program reads
    by_member: dict[str, NumpyArray]
    by_step: dict[str, NumpyArray]  # (steps, ...) or (1, ...) all others
    of_a_step: int  # members of a step

    @classmethod
    def of(cls, each: list[Costs], program: Program, of_a_step: int) -> "StepCosts":
        """Stack costs of one shape, with the least of each step behind it."""
        phases = {*program.layout.phases, *program.layout.paired_phases}
        unread = {PHASE_FIELDS[phase.name] for phase in TIMED if phase not in phases}
        by_member, by_step = {}, {}
        extended = [vars(with_least(costs)) for costs in each]
        for name in FIELDS:
            leaves = [leaves[name] for leaves in extended]
            if leaves[0] is None:
                continue
            if not differs_by_microbatch(name, leaves[0]):
                alike = all(np.array_equal(leaf, leaves[0]) for leaf in leaves)
                by_step[name] = np.stack(leaves[:1] if alike else leaves)
            elif name not in unread:
                whole = np.concatenate(leaves, axis=-1)
                by_member[name] = np.ascontiguousarray(np.moveaxis(whole, -1, 0))
        return cls(by_member, by_step, of_a_step)

    def step_of(self, orders: Orders) -> Int[NumpyArray, " orders"]:
        """Which step orders are of."""
        return orders[:, 0] // self.of_a_step

    def of_orders(self, orders: Orders) -> Costs:
        """Costs of orders, for `makespans`."""
        steps = self.step_of(orders)
        leaves = {
            name: time[steps] if len(time) > 1 else time for name, time in self.by_step.items()
        }
        for name, time in self.by_member.items():
            leaves[name] = np.moveaxis(time[orders], 1, -1)
        return unchecked_costs(leaves)
