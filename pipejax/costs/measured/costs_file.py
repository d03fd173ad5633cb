"""Costs read from a file of measured times, or set to a table's slots for drawings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

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

MIN_BANDWIDTH = 1e5  # smallest credible bandwidth [B/s], if a message is longer than 1e5 bytes
BACK = "_back"  # suffix of keys for messages that carry gradients
_PARTS = {**dict.fromkeys(MESSAGE_FIELDS, "s"), "bytes": "", "bandwidth": "B/s"}
_MESSAGES = {f"{part}{way}": kind for part, kind in _PARTS.items() for way in ("", BACK)}
_STAGE = {"stage": FileField(whole(0))}
COLUMNS: Mapping[str, FileField] = {
    **_STAGE,
    **dict.fromkeys(TIME_FIELDS, FileField(NUMBER, None, "s")),
    **{name: FileField(NUMBER, None, kind) for name, kind in _MESSAGES.items()},
}


def read_csv(path: Path) -> dict[str, Any]:
    """Read a CSV file of costs; return the content that a JSON file of these costs would have."""
    # Columns are `stage` and times with a unit: F_ms, latency_us, bandwidth_GB_per_s. The row of a
    # stage has the message to the next stage, so the last row has none.
    header, *_ = read_lines(path)
    if "stage" not in header:
        raise ValueError(
            f"{path} is neither JSON nor a CSV of costs: column 'stage' is missing, which numbers "
            "the rows from 0"
        )
    keys = [name for name, _ in check_header(path, header, COLUMNS).values() if name != "stage"]
    # each row needs a stage; `_json_content` checks the other cells
    rows = read_cells(path, COLUMNS, lambda _, cells: with_defaults(_STAGE, cells) | cells)
    rows.sort(key=lambda row: row["stage"])
    stages = [row["stage"] for row in rows]
    if stages != list(range(len(rows))):
        allowed = f"a row for each stage, 0 to {len(rows) - 1}"
        raise ValueError(f"{path}: there must be {allowed}, got stages {abbreviated(stages)}")
    return _json_content(path, keys, rows)


def _json_content(path: Path, keys: list[str], rows: list[dict[str, float]]) -> dict[str, Any]:
    """Convert CSV rows to a JSON file's content: lists by stage, or by boundary for messages."""
    # rows with F 1, latency 2 and F 3: {"F": [1, 3], "message": {"latency": [2]}}
    content: dict[str, Any] = {"unit": "seconds"}
    for key in keys:
        count = len(rows) - 1 if key in _MESSAGES else len(rows)
        for stage, row in enumerate(rows):
            if stage < count and key not in row:
                raise ValueError(f"{path}, stage {stage}: {key} is missing")
            if stage >= count and key in row:
                wrong = "is given: no message leaves the last stage"
                raise ValueError(f"{path}, stage {stage}: {key} {wrong}")
        section = content
        if key in _MESSAGES:
            name = f"message{BACK}" if key.endswith(BACK) else "message"
            section = content.setdefault(name, {})
        section[key.removesuffix(BACK)] = [row[key] for row in rows[:count]]
    return content


def _check_series(value: Any, where: str) -> Any:
    """Check that a value is a number, or a list of numbers and of lists by microbatch."""
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
_SERIES = FileField(FieldKind(_check_series, _NUMBER_OR_LISTS), None)
_MESSAGE = section(dict.fromkeys((*MESSAGE_FIELDS, "bytes", "bandwidth"), _SERIES))
_MESSAGES_BY_LEVEL = FieldKind(
    _messages, several(FieldKind(_messages, json_schema(_MESSAGE.fields or {}))).schema
)
_FACTORS = {"type": "object", "additionalProperties": POSITIVE.schema}
_BACKWARD = ("backward", "input_grad", "weight_grad")
UNIT_SECONDS: Mapping[str, float] = {
    **{"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6},
    **{"s": 1.0, "ms": 1e-3, "us": 1e-6},
}
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
    with one entry per stage, or per stage boundary for messages. An entry is a number, or a list
    with one number per microbatch. A missing B is I + W; missing I and W are half of B each. A B
    that contradicts I + W by more than 1 % is refused, unless "recorded" is true.

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
    levels, sizes = read_levels(path, table), read_key(path, "workers_per_node")
    if not sizes and not places:
        return levels[0]
    if not sizes:
        raise ValueError(f"{path}: places need workers_per_node, which it does not say")
    return PlacedCosts.from_levels(levels, table, sizes).at(places_on(table, places))


def read_key(path: str | Path, key: str) -> Any:
    """Read the value of one key of a file, or its default."""
    return read_field(key, FILE[key], _load(path), str(path))


def read_halved(path: str | Path, table: ScheduleTable) -> bool:
    """Return whether the table needs I and W but the file has only B, so that both are B / 2."""
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
    """Read costs once per link level, as if all messages used links of that level."""
    # Level 0 is inside a node, level 1 between nodes, and so on. The file may have another number
    # of `stages` than the table: `restaged_costs` merges or divides them.
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
            times[field] = unit * _per_microbatch(data[key], sizes, "stages", f"{path}: {key}")
            if field in OF_STAGES and times[field].shape[1] > 1:
                raise ValueError(f"{path}: {key} has no microbatch axis: give one value per stage")
    slow = data["stragglers"]
    check_workers(slow, table, f"{path}: stragglers")
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
        costs = restaged_costs(costs, sizes.num_stages, table)
        levels.append(scaled_costs(costs, table, workers=slow) if slow else costs)
    return levels


def _message_times(
    data: dict[str, Any], sizes: _Sizes, path: str, scale: float
) -> Iterator[dict[str, NumpyArray]]:
    """Yield latency and transmit time [s] of messages, for each level of links in the machine."""
    # Arrays are (2 directions, 1 pipe, boundaries, microbatches). The file's unit is `scale` s.
    num_levels = len(data["workers_per_node"]) + 1
    back_key = "message" if data["message_back"] is None else "message_back"
    directions = []  # times of each level, for activations and then for gradients
    for key in ("message", back_key):
        sections = data[key] if num_levels > 1 else [data[key] or _MESSAGE.read({}, path)]
        if not isinstance(sections, list) or len(sections) != num_levels:
            raise ValueError(
                f"{path}: {key} must be a list of {num_levels}: inside a node, between nodes, and "
                f"so on, got {sections!r}"
            )
        directions.append(
            [_section_times(part, sizes, f"{path}: {key}", scale) for part in sections]
        )
    for forth, back in zip(*directions, strict=True):
        yield {
            name: np.stack(np.broadcast_arrays(forth[name], back[name]))[:, None]
            for name in MESSAGE_FIELDS
        }


PerMicrobatch = Float[NumpyArray, "entries microbatches"]  # (entries, 1) if microbatches are equal


def _without_equal_microbatches(times: dict[str, Any]) -> dict[str, Any]:
    """Drop the axis of microbatches if its length is 1; B, I and W keep or drop it together."""
    names = [name for name in _BACKWARD if name in times]
    backwards = np.broadcast_arrays(*(times[name] for name in names))
    times = times | dict(zip(names, backwards, strict=True))
    return {name: time[..., 0] if time.shape[-1] == 1 else time for name, time in times.items()}


def _per_microbatch(
    value: Any, sizes: _Sizes, places: Literal["stages", "stage boundaries"], where: str
) -> PerMicrobatch:
    """Convert a number or list of a file to an array with a row for each stage or boundary."""
    # A list has an entry for each of the `places`; an entry is a number, or a list by microbatch.
    # 3 stages, 2 microbatches: 5 -> [[5] [5] [5]]; [5, 6, [7, 8]] -> [[5 5] [6 6] [7 8]]
    count = sizes.num_stages if places == "stages" else sizes.num_stages - 1
    entries = value if isinstance(value, list) else [value] * count
    if len(entries) != count:
        raise MismatchError(f"{where} has {len(entries)} entries, the table has {count} {places}")
    lists = [entry for entry in entries if isinstance(entry, list)]
    for entry in lists:
        if len(entry) != sizes.num_microbatches:
            counts = f"{len(entry)} entries, the table has {sizes.num_microbatches} microbatches"
            raise MismatchError(f"{where} has {counts}")
    length = sizes.num_microbatches if lists else 1
    rows = [entry if isinstance(entry, list) else [entry] * length for entry in entries]
    return np.array(rows, float).reshape(count, length)


def _section_times(
    section: Any, sizes: _Sizes, where: str, scale: float
) -> dict[str, PerMicrobatch]:
    """Return latency and transmit time [s] of a section: (boundaries, microbatches)."""
    if not isinstance(section, dict):  # without workers_per_node, there is one link level
        raise ValueError(f"{where} must be one object without workers_per_node, got {section!r}")
    values = {
        key: _per_microbatch(value, sizes, "stage boundaries", f"{where}: {key}")
        for key, value in section.items()
        if value is not None
    }
    given_sizes = {"bytes", "bandwidth"} & set(values)
    if given_sizes and ("transmit" in values or len(given_sizes) == 1):
        why = f"{where} has {', '.join(values)}"
        raise ValueError(f'{why}: give "transmit", or "bytes" and "bandwidth" together')
    zero = np.zeros((sizes.num_stages - 1, 1))
    transmit = scale * values.get("transmit", zero)
    if given_sizes:
        if (values["bandwidth"] <= 0).any():
            raise ValueError(f"{where}: bandwidth must be above 0 bytes per second")
        slowest = values["bandwidth"].min()
        if slowest < MIN_BANDWIDTH and values["bytes"].max() > MIN_BANDWIDTH:
            raise ValueError(
                f"{where}: bandwidth {slowest:g} is in bytes per second, and no link is so slow; "
                f"{slowest:g} GB/s would be {slowest * 1e9:g}"
            )
        with np.errstate(over="ignore"):  # `Costs` refuses infinite times
            transmit = values["bytes"] / values["bandwidth"]
    return {"latency": scale * values.get("latency", zero), "transmit": transmit}


def slot_costs(table: ScheduleTable, durations: Slots | None = None) -> Costs:
    """Return costs at which an op takes 1 s per slot, of the table or of `durations`."""
    slots = durations or table.slots
    shares = np.asarray(table.stage_shares)  # a stage with more layers takes longer
    field_costs: dict[str, Any] = {}
    custom_costs: dict[str, Any] = {}  # costs of kinds of ops that the table defines
    for phase in table.grammar.timed_phases:
        if phase.name in slots:
            slot = slots[phase.name]
            costs = field_costs if phase.kind.time in FIELDS else custom_costs
            costs[phase.kind.time] = slot if phase.kind.scope == WORKER else slot * shares
    return Costs(offload=0.0, others=custom_costs, **field_costs)
