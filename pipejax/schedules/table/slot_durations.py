"""Slot durations: how long ops last in the drawing of a table; and shares of the layers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pipejax.base.checks import are_positive
from pipejax.base.display import abbreviated
from pipejax.schedules.cells.schedule_error import ScheduleError

Slots = Mapping[str, float]  # durations by phase letter
UNIT_SLOTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1, "R": 1})
EQUAL_SLOTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 1})


def check_shares(shares: Sequence[float], num_stages: int) -> None:
    """Check that every stage has a positive share of the layers."""
    if not are_positive(shares, num_stages):
        raise ScheduleError(
            f"stage_shares needs {num_stages} positive numbers, got {abbreviated(shares)}"
        )


def check_slots(slots: Slots) -> None:
    """Check that slot durations are positive and belong to phases that have one."""
    if not isinstance(slots, Mapping):
        raise ScheduleError(
            f"slots must be durations by phase letter, as {{'F': 1}}, got {slots!r}"
        )
    for letter, duration in slots.items():
        if letter not in UNIT_SLOTS:
            known = ", ".join(UNIT_SLOTS)
            raise ScheduleError(f"slots: unknown phase {letter!r}: known are {known}")
        if not are_positive([duration], 1):
            raise ScheduleError(
                f"slots: {letter} must be a finite number above 0, got {duration!r}"
            )
