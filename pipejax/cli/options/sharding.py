"""Options that say how sharded weights are gathered, under any schedule and in any table."""

from typing import NamedTuple

import numpy as np

import pipejax as pj
from pipejax.cli.options.values import Text, parse_list
from pipejax.schedules.cells.ops import COMPUTING, HOST_LINK, NETWORK, SHARDING


class ShardingChoice(NamedTuple):
    """Sharding cells to insert into a table, and their lane."""

    # of UNSHARD and REDUCE_GRAD; as the table has it, or beside compute where cells are put in, if
    # None
    lane: str | None
    # uses by which weights are gathered ahead, of all workers or each; no cells are put in if it
    # and the residency are None
    lookahead: list[int] | None
    residency: list[int] | None  # stages that are gathered at once, likewise

    @classmethod
    def read(cls, lane: Text, lookahead: Text, residency: Text) -> "ShardingChoice | None":
        """Read the options; return None if there are none."""
        if lane == HOST_LINK or lane == "":
            raise ValueError(
                f"--sharding-lane must be compute, net or a name of your own, got {lane!r}"
            )
        ahead = None if lookahead is None else _whole(lookahead, "--lookahead", 0)
        held = None if residency is None else _whole(residency, "--residency", 1)
        is_given = any(value is not None for value in (lane, ahead, held))
        return cls(lane, ahead, held) if is_given else None

    def apply(self, table: pj.ScheduleTable) -> pj.ScheduleTable:
        """Return the table with these cells and this lane."""
        from pipejax.schedules.table.sharding import insert_sharding, on_lane

        if self.lookahead is None and self.residency is None:
            if not np.isin(table.phase, SHARDING).any():
                raise ValueError(
                    f"--sharding-lane {self.lane}: {table.name} has no UNSHARD or REDUCE_GRAD "
                    "cells: --lookahead N puts them in"
                )
            return on_lane(table, self.lane or COMPUTING)
        return insert_sharding(
            table,
            lookahead=_for_workers(self.lookahead or [1]),
            residency=None if self.residency is None else _for_workers(self.residency),
            lane=self.lane or NETWORK,
        )


def _whole(text: str, option: str, least: int) -> list[int]:
    numbers = parse_list(text, option)
    if any(number != int(number) or number < least for number in numbers):
        raise ValueError(f"{option} must be whole numbers of at least {least}, got {text!r}")
    return [int(number) for number in numbers]


def _for_workers(numbers: list[int]) -> int | list[int]:
    """One number stands for all workers."""
    return numbers if len(numbers) > 1 else numbers[0]
