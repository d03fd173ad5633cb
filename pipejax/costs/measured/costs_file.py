"""Costs from a file of measurements, and from the slots of a table."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import (
    MAX_COUNT,
    MismatchError,
    check_types,
    is_number,
    nearest,
    positive,
    resolve_choice,
)
from pipejax.base.data_files import (
    UNITS,
    check_keys,
    load_json,
    positive_cell,
    read_each,
    read_lines,
    to_si,
    whole_cell,
)
from pipejax.base.files import read_file
from pipejax.costs.costs import (
    DIMENSIONLESS,
    FIELDS,
    MESSAGE_FIELDS,
    OF_STAGES,
    PHASE_FIELDS,
    TIME_FIELDS,
    Costs,
    check_backward,
    needed_by,
)
from pipejax.costs.scaling import restaged_costs, scaled_costs
from pipejax.costs.topology import PlacedCosts, check_sizes, places_on
from pipejax.schedules.cells.ops import WORKER, Phase, Slots
from pipejax.schedules.table.table import ScheduleTable

BACK = "_back"  # behind a part of messages that are gradients
_PARTS = {**dict.fromkeys(MESSAGE_FIELDS, "s"), "bytes": "B", "bandwidth": "B/s"}
_MESSAGES = {f"{part}{way}": kind for part, kind in _PARTS.items() for way in ("", BACK)}
# columns beside `stage`, and the dimension that the unit in their header has
COLUMNS: Mapping[str, str] = {**dict.fromkeys(TIME_FIELDS, "s"), **_MESSAGES}


def read_csv(path: Path) -> dict[str, Any]:
    """Read a CSV file of costs into the content of a JSON file."""
    # Headers are `stage` and columns with a unit: F_ms, latency_us, bandwidth_GB_per_s. A message
    # stands in the row of the stage before its boundary, so the last row has none.
    header = read_lines(path)[0]
    if "stage" not in header:
        hint = ": columns are parted by ,, not by ;" if ";" in "".join(header) else ""
        raise ValueError(
            f"{path} is not JSON, and no table of costs: column 'stage' is missing, of a row for "
            f"each stage from 0{hint}"
        )
    heads = {name: _column(name, path) for name in header}
    columns = {name: head for name, head in heads.items() if name != "stage"}
    keys = [key for key, _ in columns.values()]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{path}: column {key} stands twice, with two units")
    rows: dict[int, dict[str, float]] = {}

    def read(_: int, cells: dict[str, str]) -> None:
        stage = whole_cell(cells.get("stage", ""), "stage", 0, MAX_COUNT)
        if stage in rows:
            raise ValueError(f"stage {stage} stands twice")
        rows[stage] = {
            key: to_si(positive_cell(cells, name, or_zero=True), factor)
            for name, (key, factor) in columns.items()
            if name in cells
        }

    read_each(path, list(heads), read)
    for stage in range(len(rows)):
        if stage not in rows:
            raise ValueError(f"{path}: stage {stage} has no row: stages count from 0")
    return _content(path, keys, [rows[stage] for stage in range(len(rows))])


def _column(name: str, path: Path) -> tuple[str, float]:
    """Return the key of a column, and the factor of its unit."""
    if name == "stage":
        return name, 1.0
    for key, kind in COLUMNS.items():
        units = {f"{key}_{unit}": factor for unit, (dim, factor) in UNITS.items() if dim == kind}
        if kind == "B":  # the word is a unit already
            units = {key: 1.0}
        if name in units:
            return key, units[name]
        if name == key:
            raise ValueError(f"{path}: column {name!r} has no unit: expected {', '.join(units)}")
    listed = ", ".join(("stage", *COLUMNS))
    raise ValueError(
        f"{path}: unknown column {name!r}: known are {listed}, each time with its unit, as F_ms"
        f"{nearest(name, COLUMNS)}"
    )


def _content(path: Path, keys: list[str], rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the content of a JSON file from columns: lists by stage, for messages by boundary."""
    content: dict[str, Any] = {"unit": "seconds"}
    for key in keys:
        count = len(rows) - (key in _MESSAGES)
        for stage, row in enumerate(rows):
            if (key in row) != (stage < count):
                wrong = "is given: no message leaves the last stage" if key in row else "is missing"
                raise ValueError(f"{path}, stage {stage}: {key} {wrong}")
        section = content
        if key in _MESSAGES:
            name = f"message{BACK}" if key.endswith(BACK) else "message"
            section = content.setdefault(name, {})
        section[key.removesuffix(BACK)] = [row[key] for row in rows[:count]]
    return content


_BACKWARD = ("backward", "input_grad", "weight_grad")
_KEYS = (
    "unit",
    *PHASE_FIELDS,
    "pair",
    "pair_factor",
    "message",
    "message_back",
    "stragglers",
    "workers_per_node",
    "recorded",
)
UNIT_SECONDS: Mapping[str, float] = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6}


def read_costs(path: str | Path, table: ScheduleTable, *, places: Sequence[int] = ()) -> Costs:
    """Read measured costs for a table.

    The file is {"unit": "seconds", "F": x, "B": x, "I": x, "W": x, "message": {"latency": x,
    "transmit": x}}, with "O" and "L" where activations go to the host and back (a missing L is O);
    x is a number or a list with one entry per stage, or per stage boundary for messages; an entry
    is a number, or a list of them with one for each microbatch. A missing B is I + W, missing I and
    W are half of B each. A B that contradicts I + W by more than 1 % is refused, but where
    "recorded" is true: all were measured in one run, and a whole backward may be faster.
    "transmit" may be "bytes" and "bandwidth" (bytes per second); messages go the same both ways
    unless "message_back" is given; "pair" is the duration of a fused pair by the stage of its
    forward, or "pair_factor" the k in max(F, B) + k min(F, B), which has no unit. "stragglers" are
    factors by slow worker, as {"3": 1.2}, on what it executes.

    A file that ends in .csv is a table with a row for each stage instead, with the columns "stage",
    "F_ms", "B_ms", or "I_ms" and "W_ms", and so on, a unit in each; messages, "latency_us",
    "transmit_us" or "bytes" and "bandwidth_GB_per_s", each also with "_back" before its unit, stand
    in the row of the stage before their boundary.

    With "workers_per_node", a number or several as `Topology` has them, "message" and
    "message_back" are lists: inside a node, between nodes, and so on.

    Args:
      path: the file.
      table: the schedule that the costs are for.
      places: place of each worker on a machine of nodes; in order if not given.

    Returns:
      The costs [s].

    Raises:
      ValueError: if the file is not of that form; the message names the key and its value.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile, pipejax as pj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "costs.json"
      >>> _ = path.write_text('{"unit": "seconds", "F": [1, 2], "I": 1, "W": 0.5}')
      >>> table = pj.ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
      >>> pj.read_costs(path, table).backward
      array([1.5, 1.5])
    """
    check_types(path=(path, str, Path), table=(table, ScheduleTable))
    levels, sizes = read_levels(path, table), read_sizes(path)
    if not sizes and not places:
        return levels[0]
    if not sizes:
        raise ValueError(f"{path}: places need workers_per_node, which it does not say")
    return PlacedCosts.from_levels(levels, table, sizes).at(places_on(table, places))


def read_sizes(path: str | Path) -> tuple[int, ...]:
    """Read the numbers of places of a node, a rack and so on; none if the file has none."""
    sizes = _load(path).get("workers_per_node")
    return () if sizes is None else check_sizes(sizes, f"{path}: workers_per_node")


def read_halved(path: str | Path, table: ScheduleTable) -> bool:
    """Read whether a table needs I and W, and a file of costs has only B, which is halved then."""
    return bool(np.isin(Phase.I, table.ops.phase)) and not {"I", "W"} & _load(path).keys()


class _Sizes(NamedTuple):
    """Numbers of stages and microbatches of a file."""

    num_stages: int
    num_microbatches: int


def _load(path: str | Path) -> dict[str, Any]:
    """Read a file of costs in either form; JSON is JSON whatever its name ends in."""
    file = Path(path)
    is_table = file.suffix == ".csv" and not read_file(file).lstrip().startswith(b"{")
    return read_csv(file) if is_table else load_json(file)


def read_levels(path: str | Path, table: ScheduleTable, stages: int | None = None) -> list[Costs]:
    """Read measured costs as if all messages went over links of each level of the machine."""
    # Those of another number of stages become those of the table, see `restaged_costs`.
    sizes = _Sizes(stages or table.num_stages, table.num_microbatches)
    data = _load(path)
    fields_by_name = {phase.name: phase.kind.time for phase in table.grammar.custom_phases}
    check_keys(data, dict.fromkeys((*_KEYS, *fields_by_name), ""), str(path))
    scale = UNIT_SECONDS[resolve_choice(data.get("unit"), UNIT_SECONDS, f'{path}: "unit"')]
    if "F" not in data and Phase.F in needed_by(table):
        raise ValueError(f'{path}: "F" is missing: the schedule has forwards')
    fields = {**TIME_FIELDS, **fields_by_name, "pair_factor": "pair_factor"}
    times: dict[str, Any] = {}
    for key, field in fields.items():
        if key in data:
            unit = 1.0 if field in DIMENSIONLESS else scale
            times[field] = unit * _numbers(data[key], sizes, "stages", f"{path}: {key}")
            if field in OF_STAGES and times[field].shape[1] > 1:
                raise ValueError(f"{path}: {key} has no microbatch axis: give one value per stage")
    slow = _stragglers(data.get("stragglers", {}), f"{path}: stragglers")
    levels = []
    for messages in _messages(data, sizes, str(path), scale):
        try:
            if not _is_recorded(data, path):
                check_backward(times)
            values = _without_equal_microbatches(times | messages)
            others = {name: values.pop(name) for name in fields_by_name.values() if name in values}
            costs = Costs(**values, others=others)
            costs.check_known(needed_by(table))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        costs = restaged_costs(costs, sizes.num_stages, table)
        levels.append(scaled_costs(costs, table, workers=slow) if slow else costs)
    return levels


def _is_recorded(data: Mapping[str, Any], path: str | Path) -> bool:
    """Return whether a file holds the times of a run as they were."""
    flag = data.get("recorded", False)
    if type(flag) is not bool:
        raise ValueError(f"{path}: recorded must be true or false, got {flag!r}")
    return flag


def _messages(
    data: dict[str, Any], table: _Sizes, path: str, scale: float
) -> Iterator[dict[str, NumpyArray]]:
    """Yield latency and transmit time (2, 1, boundaries, microbatches) [s] of each level."""
    levels = len(read_sizes(path)) + 1
    keys = "message", "message_back" if "message_back" in data else "message"
    for key in keys if levels > 1 else ():
        by_level = data.get(key)
        if not isinstance(by_level, list) or len(by_level) != levels:
            raise ValueError(
                f"{path}: {key} must be a list of {levels}: inside a node, between nodes, and so "
                f"on, got {by_level!r}"
            )
    for level in range(levels):
        ways = []  # forth and back
        for key in keys:
            section = data.get(key, {})
            section = section[level] if levels > 1 else section
            ways.append(_message(section, table, f"{path}: {key}", scale))
        yield {
            name: np.stack(np.broadcast_arrays(*(way[name] for way in ways)))[:, None]
            for name in MESSAGE_FIELDS
        }


def _stragglers(section: Any, where: str) -> dict[int, float]:
    """Read the factor of each slow worker from its section."""
    if not isinstance(section, dict):
        raise ValueError(f'{where} must be factors by worker, as {{"3": 1.2}}, got {section!r}')
    for worker, factor in section.items():
        if not (worker.isdecimal() and worker.isascii()):
            raise ValueError(f"{where}: {worker!r} is no number of a worker")
        positive(factor, f"{where}: {worker}")
    return {int(worker): float(factor) for worker, factor in section.items()}


PerMicrobatch = Float[NumpyArray, "entries microbatches"]  # microbatches are 1 where all are alike


def _without_equal_microbatches(times: dict[str, Any]) -> dict[str, Any]:
    """Drop the axis of microbatches of size 1; B, I and W keep or drop it together."""
    backward = {name: times[name] for name in _BACKWARD if name in times}
    together = np.broadcast_arrays(*backward.values())
    times = times | dict(zip(backward, together, strict=True))
    return {name: time[..., 0] if time.shape[-1] == 1 else time for name, time in times.items()}


def _numbers(value: Any, table: _Sizes, what: str, where: str) -> PerMicrobatch:
    """Read a number, or a list with an entry per stage or boundary, which may be a list itself."""
    count = table.num_stages - (what != "stages")
    entries = value if isinstance(value, list) else [value] * count
    lists = [entry for entry in entries if isinstance(entry, list)]
    for entry in [*(e for e in entries if not isinstance(e, list)), *(e for m in lists for e in m)]:
        if not is_number(entry):
            raise ValueError(f"{where} must be finite numbers of at least 0, got {entry!r}")
    if len(entries) != count:
        raise MismatchError(f"{where} has {len(entries)} entries, the table has {count} {what}")
    for entry in lists:
        if len(entry) != table.num_microbatches:
            raise MismatchError(
                f"{where} has {len(entry)} entries, the table has {table.num_microbatches} "
                "microbatches"
            )
    columns = table.num_microbatches if lists else 1
    rows = [entry if isinstance(entry, list) else [entry] * columns for entry in entries]
    return np.array(rows, float).reshape(count, columns)


def _message(section: Any, table: _Sizes, where: str, scale: float) -> dict[str, PerMicrobatch]:
    """Read latency and transmit time (boundaries, microbatches) [s] of every stage boundary."""
    check_keys(section, dict.fromkeys((*MESSAGE_FIELDS, "bytes", "bandwidth"), ""), where)
    values = {
        key: _numbers(value, table, "stage boundaries", f"{where}: {key}")
        for key, value in section.items()
    }
    by_volume = {"bytes", "bandwidth"} & set(section)
    if by_volume and ("transmit" in section or len(by_volume) == 1):
        raise ValueError(f'{where}: give "transmit", or "bytes" and "bandwidth" together')
    zero = np.zeros((table.num_stages - 1, 1))
    transmit = scale * values.get("transmit", zero)
    if by_volume:
        if (values["bandwidth"] <= 0).any():
            raise ValueError(f"{where}: bandwidth must be above 0 bytes per second")
        with np.errstate(over="ignore"):  # infinite times are refused with the other costs
            transmit = values["bytes"] / values["bandwidth"]
    return {"latency": scale * values.get("latency", zero), "transmit": transmit}


def slot_costs(table: ScheduleTable, durations: Slots | None = None) -> Costs:
    """Return costs equal to slot durations, by default the table's, for drawings without times."""
    shares = np.asarray(table.stage_shares)
    slots: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for phase in table.grammar.timed:
        if (slot := (durations or table.slots).get(phase.name)) is not None:
            seconds = slot if phase.kind.scope == WORKER else slot * shares
            (slots if phase.kind.time in FIELDS else others)[phase.kind.time] = seconds
    return Costs(offload=0.0, others=others, **slots)
