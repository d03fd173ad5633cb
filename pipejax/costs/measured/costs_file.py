"""Costs read from a file of measured times, or set to a table's slots for drawings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, check_types, is_number, positive
from pipejax.base.data_files import load_json, read_lines
from pipejax.base.display import abbreviated
from pipejax.base.file_fields import (
    FLAG,
    NUMBER,
    POSITIVE,
    FieldKind,
    FileField,
    check_header,
    choice,
    json_schema,
    read_cells,
    read_field,
    read_fields,
    section,
    several,
    whole,
    with_defaults,
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
    required_phases,
)
from pipejax.costs.scaling import check_workers, restaged_costs, scaled_costs
from pipejax.costs.topology import PlacedCosts, check_sizes, places_on
from pipejax.schedules.cells.ops import WORKER, Phase, Slots
from pipejax.schedules.table.table import ScheduleTable

MIN_BANDWIDTH = 1e5  # least of a link [B/s], for messages of at least as many bytes
BACK = "_back"  # behind a part of messages that are gradients
_PARTS = {**dict.fromkeys(MESSAGE_FIELDS, "s"), "bytes": "", "bandwidth": "B/s"}
_MESSAGES = {f"{part}{way}": kind for part, kind in _PARTS.items() for way in ("", BACK)}
_STAGE = {"stage": FileField(whole(0))}
COLUMNS: Mapping[str, FileField] = {
    **_STAGE,
    **dict.fromkeys(TIME_FIELDS, FileField(NUMBER, None, "s")),
    **{name: FileField(NUMBER, None, kind) for name, kind in _MESSAGES.items()},
}


def read_csv(path: Path) -> dict[str, Any]:
    """Read a CSV file of costs, and return what a JSON file of these costs would contain."""
    # Headers are `stage` and columns with a unit: F_ms, latency_us, bandwidth_GB_per_s. A message
    # stands in the row of the stage before its boundary, so the last row has none.
    header, *_ = read_lines(path)
    if "stage" not in header:
        raise ValueError(
            f"{path} is not JSON, and no table of costs: column 'stage' is missing, of a row for "
            "each stage from 0"
        )
    keys = [key for key, _ in check_header(path, header, COLUMNS).values() if key != "stage"]
    rows = read_cells(path, COLUMNS, lambda _, cells: with_defaults(_STAGE, cells) | cells)
    rows.sort(key=lambda row: row["stage"])
    stages = [row["stage"] for row in rows]
    if stages != list(range(len(rows))):
        allowed = f"a row for each stage, 0 to {len(rows) - 1}"
        raise ValueError(f"{path}: there must be {allowed}, got stages {abbreviated(stages)}")
    return _content(path, keys, rows)


def _content(path: Path, keys: list[str], rows: list[dict[str, float]]) -> dict[str, Any]:
    """Convert CSV rows to a JSON file's content: lists by stage, or by boundary for messages."""
    # rows with F 1, latency 2 and F 3: {"F": [1, 3], "message": {"latency": [2]}}
    content: dict[str, Any] = {"unit": "seconds"}
    for key in keys:
        count = len(rows) - 1 if key in _MESSAGES else len(rows)
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


def _series(value: Any, where: str) -> Any:
    """Check a number, or a list by stage or boundary of numbers or of lists by microbatch."""
    numbers = value if isinstance(value, list) else [value]
    for entry in numbers:
        for number in entry if isinstance(entry, list) else [entry]:
            if not is_number(number):
                raise ValueError(f"{where} must be finite numbers of at least 0, got {number!r}")
    return value


def _messages(value: Any, where: str) -> Any:
    """Read a section of message times, or a list of sections for the levels of the machine."""
    if isinstance(value, list):
        return [_MESSAGE.read(entry, where) for entry in value]
    return _MESSAGE.read(value, where)


def _slow_workers(value: Any, where: str) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError(f'{where} must be factors by worker, as {{"3": 1.2}}, got {value!r}')
    for worker in value:
        if not (worker.isdecimal() and worker.isascii()):
            raise ValueError(f"{where}: {worker!r} is no number of a worker")
    return {int(worker): positive(factor, f"{where}: {worker}") for worker, factor in value.items()}


_NUMBER_OR_LISTS = {
    "anyOf": [
        NUMBER.schema,
        {"type": "array", "items": {"anyOf": [NUMBER.schema, {"type": "array"}]}},
    ]
}
_SERIES = FileField(FieldKind(_series, _NUMBER_OR_LISTS), None)
_MESSAGE = section(dict.fromkeys((*MESSAGE_FIELDS, "bytes", "bandwidth"), _SERIES))
_MESSAGES_BY_LEVEL = FieldKind(
    _messages, several(FieldKind(_messages, json_schema(_MESSAGE.fields or {}))).schema
)
_FACTORS = {"type": "object", "additionalProperties": POSITIVE.schema}
_BACKWARD = ("backward", "input_grad", "weight_grad")
UNIT_SECONDS: Mapping[str, float] = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6}
FILE: Mapping[str, FileField] = {
    "unit": FileField(choice(UNIT_SECONDS)),
    **dict.fromkeys((*PHASE_FIELDS, "pair", "pair_factor"), _SERIES),
    **dict.fromkeys(("message", "message_back"), FileField(_MESSAGES_BY_LEVEL, None)),
    "stragglers": FileField(FieldKind(_slow_workers, _FACTORS), {}),
    "workers_per_node": FileField(FieldKind(check_sizes, {"type": ["integer", "array"]}), ()),
    "recorded": FileField(FLAG, False),
}


def read_costs(path: str | Path, table: ScheduleTable, *, places: Sequence[int] = ()) -> Costs:
    """Read a file of measured costs for the stages and microbatches of a table.

    The file is {"unit": "seconds", "F": x, "B": x, "message": {"latency": x, "transmit": x}}, or a
    CSV with a row for each stage; the page on input files has all keys. x is a number or a list
    with one entry per stage, or per stage boundary for messages; an entry is a number, or a
    list of them with one for each microbatch. A missing B is I + W, missing I and W are half of B
    each. A B that contradicts I + W by more than 1 % is refused, unless "recorded" is true.

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
    """Read the number of workers per node, per rack and so on; empty if the file has none."""
    return read_field("workers_per_node", FILE["workers_per_node"], _load(path), str(path))


def read_halved(path: str | Path, table: ScheduleTable) -> bool:
    """Return whether I and W are half of B each: the table needs them, and the file has only B."""
    return bool(np.isin(Phase.I, table.ops.phase)) and not {"I", "W"} & _load(path).keys()


class _Sizes(NamedTuple):
    """Number of stages and number of microbatches that a file's lists must have."""

    num_stages: int
    num_microbatches: int


def _load(path: str | Path) -> dict[str, Any]:
    """Read a file of costs as CSV if its name ends in .csv and it is not JSON, else as JSON."""
    file = Path(path)
    is_table = file.suffix == ".csv" and not read_file(file).lstrip().startswith(b"{")
    return read_csv(file) if is_table else load_json(file)


def read_levels(path: str | Path, table: ScheduleTable, stages: int | None = None) -> list[Costs]:
    """Read measured costs for each machine level, as if all messages used that level's links."""
    # costs of another number of stages are merged or divided, see `restaged_costs`
    sizes = _Sizes(stages or table.num_stages, table.num_microbatches)
    custom_times = {phase.name: phase.kind.time for phase in table.grammar.custom_phases}
    data = read_fields({**FILE, **dict.fromkeys(custom_times, _SERIES)}, _load(path), str(path))
    scale = UNIT_SECONDS[data["unit"]]
    if data["F"] is None and Phase.F in required_phases(table):
        raise ValueError(f'{path}: "F" is missing: the schedule has forwards')
    times: dict[str, Any] = {}
    for key, field in {**TIME_FIELDS, **custom_times, "pair_factor": "pair_factor"}.items():
        if data[key] is not None:
            unit = 1.0 if field in DIMENSIONLESS else scale
            times[field] = unit * _array(data[key], sizes, "stages", f"{path}: {key}")
            if field in OF_STAGES and times[field].shape[1] > 1:
                raise ValueError(f"{path}: {key} has no microbatch axis: give one value per stage")
    levels = []
    for messages in _message_times(data, sizes, str(path), scale):
        try:
            if not data["recorded"]:
                check_backward(times)
            values = _without_equal_microbatches(times | messages)
            others = {name: values.pop(name) for name in custom_times.values() if name in values}
            costs = Costs(**values, others=others)
            costs.check_known(required_phases(table))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        costs, slow = restaged_costs(costs, sizes.num_stages, table), data["stragglers"]
        check_workers(slow, table, f"{path}: stragglers")
        levels.append(scaled_costs(costs, table, workers=slow) if slow else costs)
    return levels


def _message_times(
    data: dict[str, Any], sizes: _Sizes, path: str, scale: float
) -> Iterator[dict[str, NumpyArray]]:
    """Yield by level the messages' latency and transmit time (2, 1, boundaries, microbatches)."""
    levels = len(data["workers_per_node"]) + 1
    keys = "message", "message" if data["message_back"] is None else "message_back"
    sections = []
    for key in keys:
        by_level = data[key] if levels > 1 else [data[key] or _MESSAGE.read({}, path)]
        if not isinstance(by_level, list) or len(by_level) != levels:
            raise ValueError(
                f"{path}: {key} must be a list of {levels}: inside a node, between nodes, and so "
                f"on, got {by_level!r}"
            )
        sections.append(by_level)
    for level in range(levels):
        forth, back = (
            _message(section[level], sizes, f"{path}: {key}", scale)
            for key, section in zip(keys, sections, strict=True)
        )
        yield {
            name: np.stack(np.broadcast_arrays(forth[name], back[name]))[:, None]
            for name in MESSAGE_FIELDS
        }


PerMicrobatch = Float[NumpyArray, "entries microbatches"]  # microbatches are 1 where all are alike


def _without_equal_microbatches(times: dict[str, Any]) -> dict[str, Any]:
    """Drop microbatch axes of length 1; B, I and W keep or drop theirs together."""
    names = [name for name in _BACKWARD if name in times]
    backwards = np.broadcast_arrays(*(times[name] for name in names))
    times = times | dict(zip(names, backwards, strict=True))
    return {name: time[..., 0] if time.shape[-1] == 1 else time for name, time in times.items()}


def _array(value: Any, sizes: _Sizes, what: str, where: str) -> PerMicrobatch:
    """Convert a series to an array with a row per stage or boundary; `what` says which."""
    count = sizes.num_stages if what == "stages" else sizes.num_stages - 1
    entries = value if isinstance(value, list) else [value] * count
    if len(entries) != count:
        raise MismatchError(f"{where} has {len(entries)} entries, the table has {count} {what}")
    columns = 1
    for entry in entries:
        if isinstance(entry, list):
            columns = sizes.num_microbatches
            if len(entry) != columns:
                raise MismatchError(
                    f"{where} has {len(entry)} entries, the table has {columns} microbatches"
                )
    rows = [entry if isinstance(entry, list) else [entry] * columns for entry in entries]
    return np.array(rows, float).reshape(count, columns)


def _message(section: Any, sizes: _Sizes, where: str, scale: float) -> dict[str, PerMicrobatch]:
    """Return latency and transmit time [s] from a section: (boundaries, microbatches) each."""
    if not isinstance(section, dict):
        raise ValueError(f"{where} must be one object without workers_per_node, got {section!r}")
    values = {
        key: _array(value, sizes, "stage boundaries", f"{where}: {key}")
        for key, value in section.items()
        if value is not None
    }
    by_volume = {"bytes", "bandwidth"} & set(values)
    if by_volume and ("transmit" in values or len(by_volume) == 1):
        raise ValueError(f'{where}: give "transmit", or "bytes" and "bandwidth" together')
    zero = np.zeros((sizes.num_stages - 1, 1))
    transmit = scale * values.get("transmit", zero)
    if by_volume:
        if (values["bandwidth"] <= 0).any():
            raise ValueError(f"{where}: bandwidth must be above 0 bytes per second")
        slowest = values["bandwidth"].min()
        if slowest < MIN_BANDWIDTH and values["bytes"].max() > MIN_BANDWIDTH:
            raise ValueError(
                f"{where}: bandwidth {slowest:g} is in bytes per second, and no link is so slow; "
                f"{slowest:g} GB/s would be {slowest * 1e9:g}"
            )
        with np.errstate(over="ignore"):  # infinite times are refused with the other costs
            transmit = values["bytes"] / values["bandwidth"]
    return {"latency": scale * values.get("latency", zero), "transmit": transmit}


def slot_costs(table: ScheduleTable, durations: Slots | None = None) -> Costs:
    """Return costs of one second per slot (by default the table's slots), to draw a table."""
    shares = np.asarray(table.stage_shares)
    slots: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for phase in table.grammar.timed:
        if (slot := (durations or table.slots).get(phase.name)) is not None:
            fields = slots if phase.kind.time in FIELDS else others
            fields[phase.kind.time] = slot if phase.kind.scope == WORKER else slot * shares
    return Costs(offload=0.0, others=others, **slots)
