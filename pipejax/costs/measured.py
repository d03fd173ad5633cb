"""Measured costs from a file, and op times from the command line's short form."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import is_number
from pipejax.base.units import load_json
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.schedules.table.table import ScheduleTable

UNIT_SECONDS: Mapping[str, float] = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6}
MESSAGE_KEYS = ("latency", "transmit", "bytes", "bandwidth")


def read_costs(path: str | Path, table: ScheduleTable) -> Costs:
    """Read measured costs for a table.

    The file is {"unit": "seconds", "F": x, "B": x, "I": x, "W": x, "message": {"latency": x,
    "transmit": x}}; x is a number or a list with one entry per stage, or per stage boundary for
    messages. A missing B is I + W; "transmit" may be "bytes" and "bandwidth" (bytes per second);
    messages go the same both ways unless "message_back" is given; "pair" is the duration of a
    fused pair by the stage of its forward.

    Args:
      path: the file.
      table: the schedule that the costs are for.

    Returns:
      The costs [s].

    Raises:
      ValueError: if the file is not of that form; the message names the key and its value.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "costs.json"
      >>> _ = path.write_text('{"unit": "seconds", "F": [1, 2], "I": 1, "W": 0.5}')
      >>> table = ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
      >>> read_costs(path, table).backward
      array([1.5, 1.5])
    """
    data = load_json(Path(path))
    known = ("unit", *PHASE_FIELDS, "pair", "message", "message_back")
    for key in data:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}: known are {', '.join(known)}")
    if data.get("unit") not in tuple(UNIT_SECONDS):
        raise ValueError(
            f'{path}: "unit" must be one of {", ".join(UNIT_SECONDS)}, got {data.get("unit")!r}'
        )
    scale = UNIT_SECONDS[data["unit"]]
    if "F" not in data:
        raise ValueError(f'{path}: "F" is missing: every schedule has forwards')
    fields = {**PHASE_FIELDS, "pair": "pair"}
    times = {
        field: scale * _numbers(data[key], table.num_stages, f"{path}: {key}", "stages")
        for key, field in fields.items()
        if key in data
    }
    there = _message(data.get("message", {}), table, f"{path}: message", scale)
    back = (
        _message(data["message_back"], table, f"{path}: message_back", scale)
        if "message_back" in data
        else there
    )
    for name in ("latency", "transmit"):
        times[name] = np.stack([there[name], back[name]])[:, None, :]
    try:
        return Costs.per_stage(table, **times)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _numbers(value: Any, count: int, where: str, what: str) -> Float[NumpyArray, " entries"]:
    """Read a number, or a list with one number per stage or boundary."""
    values = value if isinstance(value, list) else [value] * count
    for entry in values:
        if not is_number(entry):
            raise ValueError(f"{where} must be finite numbers of at least 0, got {entry!r}")
    if len(values) != count:
        raise ValueError(f"{where} has {len(values)} entries, the table has {count} {what}")
    return np.array(values, float)


def _message(
    section: Any, table: ScheduleTable, where: str, scale: float
) -> dict[str, Float[NumpyArray, " boundaries"]]:
    """Read latency and transmit time of every stage boundary."""
    if not isinstance(section, dict):
        raise ValueError(f"{where} must be an object with the keys {', '.join(MESSAGE_KEYS)}")
    for key in section:
        if key not in MESSAGE_KEYS:
            raise ValueError(f"{where}: unknown key {key!r}: known are {', '.join(MESSAGE_KEYS)}")
    values = {
        key: _numbers(value, table.num_stages - 1, f"{where}: {key}", "stage boundaries")
        for key, value in section.items()
    }
    by_volume = {"bytes", "bandwidth"} & set(section)
    if by_volume and ("transmit" in section or len(by_volume) == 1):
        raise ValueError(f'{where}: give "transmit", or "bytes" and "bandwidth" together')
    zero = np.zeros(table.num_stages - 1)
    transmit = scale * values.get("transmit", zero)
    if by_volume:
        if (values["bandwidth"] <= 0).any():
            raise ValueError(f"{where}: bandwidth must be above 0 bytes per second")
        with np.errstate(over="ignore"):  # infinite times are refused with the other costs
            transmit = values["bytes"] / values["bandwidth"]
    return {"latency": scale * values.get("latency", zero), "transmit": transmit}


def parse_times(text: str, option: str) -> dict[str, float]:
    """Read op times such as "F=1,B=2"."""
    times: dict[str, float] = {}
    for entry in text.split(","):
        letter, _, value = (part.strip() for part in entry.partition("="))
        if letter not in PHASE_FIELDS:
            raise ValueError(
                f"{option}: {entry.strip()!r} is not LETTER=SECONDS: letters are "
                f"{', '.join(PHASE_FIELDS)}"
            )
        if PHASE_FIELDS[letter] in times:
            raise ValueError(f"{option}: {letter} is given twice")
        times[PHASE_FIELDS[letter]] = parse_seconds(value, f"{option}: {letter}")
    if "forward" not in times:
        raise ValueError(f"{option}: F is missing, got {text!r}")
    return times


def parse_seconds(text: str, where: str) -> float:
    """Read a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} must be a finite number of at least 0, got {text!r}")
    return value


def stage_times(table: ScheduleTable, times: Mapping[str, float]) -> Costs:
    """Costs where every stage takes the same times.

    Args:
      table: the schedule.
      times: seconds per op of one stage, by field of `Costs`.

    Returns:
      The costs.

    Raises:
      ValueError: if a time is negative or not finite, or neither B nor I and W are given.

    Example:
      >>> table = ScheduleTable.from_rows([["0F0", "0B0"]])
      >>> stage_times(table, {"forward": 1.0, "input_grad": 1.0, "weight_grad": 0.5}).backward
      1.5
    """
    return Costs.per_stage(table, **times)


def worker_times(table: ScheduleTable, times: Mapping[str, float]) -> Costs:
    """Costs from what one microbatch takes on one worker, divided over its stages there.

    All schedules then do the same work: interleaved stages take a V-th each, those of a Hanayo
    wave a 2 * waves-th; a Chimera microbatch meets one stage per worker. A stage with a larger
    share of the layers takes more.

    Args:
      table: the schedule.
      times: seconds of one microbatch on one worker, by field of `Costs`.

    Returns:
      The costs.

    Raises:
      ValueError: if a time is negative or not finite, or neither B nor I and W are given.

    Example:
      >>> from pipejax import schedules
      >>> table = schedules.build("hanayo", num_workers=2, num_microbatches=2, waves=2)
      >>> worker_times(table, {"forward": 1.0, "backward": 2.0}).forward.tolist()
      [0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]
    """
    workers = table.placement[0]
    there = np.bincount(workers, minlength=table.num_workers)[workers]
    factor = np.asarray(table.stage_shares) / there
    return Costs.per_stage(table, **{name: value * factor for name, value in times.items()})


def slot_costs(table: ScheduleTable) -> Costs:
    """Costs that are the table's own slots, for drawings where no times are given."""
    shares = np.asarray(table.stage_shares)
    return Costs.per_stage(
        table, **{PHASE_FIELDS[letter]: slots * shares for letter, slots in table.slots.items()}
    )
