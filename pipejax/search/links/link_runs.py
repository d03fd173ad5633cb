"""Runs that tell link models apart: a table, what it costs, and a known extra delay somewhere."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import check_types, number, one_of
from pipejax.base.display import short_repr
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.communication_cells import messages_of
from pipejax.schedules.table.table import ScheduleTable

PARTS = ("latency", "transmit")
FORMS = "an op (0F1), a message (0SEND_F1), a link (0-1) or a worker (worker2)"
_OP = re.compile(r"(\d+)([FBIWR])(\d+)", re.ASCII)
_MESSAGE = re.compile(r"(\d+)SEND_([FB])(\d+)", re.ASCII)
_LINK = re.compile(r"(\d+)-(\d+)", re.ASCII)
_WORKER = re.compile(r"worker(\d+)", re.ASCII)


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class LinkRun:
    """One run of a known table at known costs, with an extra delay that is known too.

    Attributes:
      table: the schedule.
      costs: unbatched costs without the delay [s].
      delay_on: what was delayed: an op ("0F1"), a message ("0SEND_F1"), all messages of a link
        ("0-1", one direction), all ops of a worker ("worker2"), or nothing ("").
      delay: by how much [s], each of them.
      delay_of: part of a message that is longer: "latency" (it arrives later) or "transmit".
      seconds: the measured step time, or NaN where it is still to be measured.

    Raises:
      ValueError: if what is delayed does not exist in the table, or a number is wrong.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)
      >>> run = pj.LinkRun(table, costs, "0SEND_F1", 3.0, seconds=13.4)
      >>> pj.evaluate(table, run.delayed).makespan
      13.0
    """

    table: ScheduleTable
    costs: Costs
    delay_on: str = ""
    delay: float = 0.0
    delay_of: str = "latency"
    seconds: float = float("nan")

    def __post_init__(self) -> None:
        """Check that there is something to delay."""
        check_types(table=(self.table, ScheduleTable), costs=(self.costs, Costs))
        check_types(delay_on=(self.delay_on, str))
        one_of(self.delay_of, PARTS, "delay_of")
        object.__setattr__(self, "delay", number(self.delay, "delay"))
        if not np.isnan(self.seconds):
            number(self.seconds, "seconds")
        self.costs.check_values()
        _places(self.table, self.delay_on)

    @property
    def delayed(self) -> Costs:
        """Costs with the delay: those that it is on differ by microbatch."""
        if not self.delay_on or not self.delay:
            return self.costs
        found: dict[str, Any] = {}
        fused_on = set()
        for place in _places(self.table, self.delay_on):
            field = self.delay_of if place.phase is None else PHASE_FIELDS[place.phase.name]
            if field not in found:
                found[field] = _by_microbatch(self.table, field, getattr(self.costs, field))
            found[field][place.entry] += self.delay
            fused_on |= {place.phase}
        if self.costs.pair is not None and fused_on - {None} and self.table.is_fused.any():
            raise ValueError(
                f"delay_on {self.delay_on}: ops of fused pairs with a cost of their own cannot be "
                "delayed one by one: leave the pair cost out"
            )
        return dataclasses.replace(self.costs, **found)


class _Place(NamedTuple):
    """One entry of the costs: of an op (stage, microbatch), or of a message, without a phase."""

    phase: Phase | None
    entry: tuple[int, ...]


def _places(table: ScheduleTable, target: str) -> list[_Place]:
    """Find the entries of costs by microbatch that a delay is on."""
    if not target:
        return []
    if found := _MESSAGE.fullmatch(target):
        way, stage, m = int(found[2] == "B"), int(found[1]), int(found[3])
        sent = messages_of(table)
        is_it = (sent.from_stage == stage) & (sent.microbatch == m) & (sent.direction == way)
    elif found := _LINK.fullmatch(target):
        sent = messages_of(table)
        ends = sent.producer // table.num_slots, sent.consumer // table.num_slots
        is_it = (ends[0] == int(found[1])) & (ends[1] == int(found[2]))
    elif (found := _OP.fullmatch(target)) or (worker := _WORKER.fullmatch(target)):
        ops = [op for row in table.rows() for cell in row for op in cell]
        if found:
            ops = [op for op in ops if str(op) == target]
        else:
            rows = [*table.rows()]
            row = rows[int(worker[1])] if worker and int(worker[1]) < len(rows) else []
            ops = [op for cell in row for op in cell if op.phase.name in "FBIWR"]
        places = [_Place(op.phase, (op.stage, op.microbatch)) for op in ops]
        return _some(places, target)
    else:
        raise ValueError(f"delay_on must be {FORMS}, got {target!r}")
    columns = sent.direction, sent.pipe, sent.boundary, sent.microbatch
    places = [
        _Place(None, place)
        for place in zip(*(column[is_it].tolist() for column in columns), strict=True)
    ]
    return _some(places, target)


def _some(places: list[_Place], target: str) -> list[_Place]:
    if not places:
        raise ValueError(f"delay_on {target!r} is not in the table: give {FORMS}")
    return places


def _by_microbatch(table: ScheduleTable, field: str, value: Any) -> NumpyArray:
    """Write a time out for every microbatch."""
    array = np.asarray(jax.device_get(value), np.float64)
    shape: tuple[int, ...] = (table.num_stages, table.num_microbatches)
    if field in PARTS:
        shape = 2, table.num_pipes, table.num_stages - 1, table.num_microbatches
    return np.array(np.broadcast_to(array if array.ndim == len(shape) else array[..., None], shape))
