"""Declaration of a sweep: its axes, read from a Python mapping or from a TOML file."""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.analysis.step.outputs import SWEPT
from pipejax.base.checks import MAX_COUNT, check_fits, check_types, unknown, whole_number
from pipejax.base.data_files import load_toml, to_si
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.file_fields import (
    EFFICIENCY,
    NEEDED,
    NUMBER,
    TEXT,
    FieldKind,
    FileField,
    check_keys,
    choice,
    json_schema,
    read_field,
    read_fields,
    section,
    several,
    unit_factors,
    whole,
)
from pipejax.costs.model.launchers import find_launcher, launcher_defaults
from pipejax.costs.model.model import Model, load_model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.stack import AS_THE_SYSTEM, OF_WORKLOAD, Stack, load_stack
from pipejax.costs.model.workload import Workload
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS
from pipejax.costs.planning import is_planned
from pipejax.costs.scaling import parse_stragglers
from pipejax.costs.system.parts import SECTIONS
from pipejax.costs.system.system import System, load_system
from pipejax.costs.topology import parse_places
from pipejax.schedules.naming import is_folder
from pipejax.schedules.table.links import LINK_OPTIONS, Links
from pipejax.schedules.table.table import ScheduleTable

DTYPES = ("float64", "float32")
SCALES = ("linear", "log")
MAX_POINTS = 10**6  # largest number of values in a range
BYTES_PER_POINT = 8  # least memory of a point when a report reads the dataset
SMALLEST, LARGEST = 1e-15, 1e24  # limits of a system's numbers, in SI units
MAX_CACHED = 64  # number of tables in the cache


@short_repr
class Axis(NamedTuple):
    """Values along one dimension of a sweep's grid."""

    name: str  # name of the dimension
    values: tuple[Any, ...]  # values in SI units
    unit: str  # unit of the values, or ""
    is_listed: bool  # whether a list or range was declared, which is a dimension of the dataset


@with_short_repr("title sizes num_points outputs dtype")
@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid of (schedule, workload, system) points.

    Attributes:
      title: title of the dataset.
      shape_axes: axes of schedules and workloads, in the order of the dataset.
      system_axes: axes of systems, of accelerators per node, then of fields of the systems.
      outputs: outputs in the dataset besides step time, status, memory and reason.
      dtype: data type of evaluation and dataset.

    Example:
      >>> sweep = read_sweep({"schedules": ["gpipe", "1f1b"], "workers": 4, "minibatch": 8,
      ...                     "microbatch_size": [1, 2], "models": "gpt-22b", "systems": ["h100"]})
      >>> sweep.sizes, sweep.num_points
      ({'schedule': 2, 'microbatch_size': 2, 'system': 1}, 4)
    """

    title: str
    shape_axes: tuple[Axis, ...]
    system_axes: tuple[Axis, ...]
    outputs: tuple[str, ...]
    dtype: str

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return all axes, including axes with a single value."""
        return self.shape_axes + self.system_axes

    @property
    def sizes(self) -> dict[str, int]:
        """Return {dimension of the dataset: size}."""
        return {axis.name: len(axis.values) for axis in self.axes if axis.is_listed}

    @property
    def num_points(self) -> int:
        """Return the number of points."""
        return math.prod(len(axis.values) for axis in self.axes)

    def to_json(self) -> str:
        """Return a text of all that determines the results; equal texts mean equal grids.

        Returns:
          JSON with every value of every axis, models and systems with all their fields.

        Example:
          >>> sweep = read_sweep({"schedules": "1f1b", "workers": 2, "minibatch": 2,
          ...     "microbatch_size": 1, "models": "gpt-22b", "systems": "h100"})
          >>> '"workers": [2]' in sweep.to_json()
          True
        """
        values = {axis.name: [_identity(value) for value in axis.values] for axis in self.axes}
        fields = {"title": self.title, "axes": values, "dimensions": list(self.sizes)}
        return json.dumps(fields | {"outputs": self.outputs, "dtype": self.dtype})


def read_sweep(declaration: Mapping[str, Any] | str | Path) -> Sweep:
    """Read the declaration of a sweep.

    Args:
      declaration: a mapping, or the path of a TOML file. These keys take a value or a list:
        `schedules` (a name, a table, a folder of tables, FILE.py:FUNCTION, or
        `{name, stages_per_worker, waves}`), `models`, `systems`, `stack`, `launcher`, `workers`,
        `minibatch`, `microbatch_size` or `microbatches`, every field of `Workload`, and `link`,
        `queues`, `host_links`, `posting`, `shared_links`, `pair_links`, `eager_below` [s]. A
        launcher sets defaults of missing keys, and points that it cannot run are illegal. `system`
        holds axes over fields of the systems. Other keys are `title`, `outputs` and `dtype`.

    Returns:
      The sweep.

    Raises:
      ValueError: if a key is unknown or missing, a value is wrong, or the dataset cannot fit into
        memory.
      OSError: if the file cannot be read.

    Example:
      >>> import pipejax as pj
      >>> sweep = pj.read_sweep({"schedules": "1f1b", "workers": [4, 8], "minibatch": 64,
      ...     "microbatch_size": [1, 2, 4], "models": "llama3-70b", "systems": "h100",
      ...     "system": {"network": {"latency_us": [1, 10]}}})
      >>> sweep.sizes
      {'workers': 2, 'microbatch_size': 3, 'network.latency': 2}
    """
    check_types(given=(declaration, Mapping, str, Path))
    where = "sweep"
    if isinstance(declaration, str | Path):
        where, declaration = str(declaration), load_toml(declaration)
    check_keys(declaration, FILE, where)
    title, outputs, dtype = (
        read_field(name, FILE[name], declaration, where) for name in ("title", "outputs", "dtype")
    )
    _check_size(declaration, where)
    axes: dict[str, Axis] = {}
    software, defaults = _default_stack(declaration, where)
    for key, field in AXES.items():
        if field.default is NEEDED and key not in declaration:
            raise ValueError(f"{where}: {key} is missing")
        is_default = field.default is not None and key not in defaults
        if key in declaration or is_default:
            values = _axis_values(key, declaration, where)
            name = field.target or key
            axes[name] = read_axis(name, values, f"{where}: {key}", field.kind.read)
    if "stack" not in declaration:
        axes["stack"] = axes["stack"]._replace(values=(software,))
    _check_stacks(axes, where)
    if ("microbatches" in declaration) == ("microbatch_size" in declaration):
        which = "both" if "microbatches" in declaration else "neither"
        text = f"it has {which} of microbatches and microbatch_size"
        raise ValueError(f"{where}: {text}: give one of them")
    system_axes = read_system_axes(declaration.get("system", {}), f"{where}: system")
    fields = {axis.name: axis for axis in system_axes}
    per_node = fields.pop("node.gpus", Axis("node.gpus", (None,), "", False))
    return Sweep(
        title=title,
        shape_axes=tuple(axis for name, axis in axes.items() if name != "system"),
        system_axes=(axes["system"], per_node, *fields.values()),
        outputs=tuple(name for name in SWEPT if name in outputs),
        dtype=dtype,
    )


def _axis_values(key: str, declaration: Mapping[str, Any], where: str) -> Any:
    """Return the declared or default values of a key; a folder becomes the list of its tables."""
    values = declaration.get(key, AXES[key].default)
    if key == "schedules":
        return expand_folders(values)
    if key == "pipeline_layout" and isinstance(values, list):
        # a list of lists with one embedding is one layout; its lists are stages
        are_lists = all(isinstance(value, list) for value in values)
        if are_lists and str(values).lower().count("embedding") < 2:
            return AXES[key].kind.read(values, f"{where}: {key}")
    return values


def _default_stack(declaration: Mapping[str, Any], where: str) -> tuple[Stack, Collection[str]]:
    """Return the default software of the systems, and the keys that software or launchers set."""
    launchers = _read_values("launcher", declaration, where) or (None,)
    records = [find_launcher(name) for name in launchers if name]
    launcher_keys = {key for record in records for key in record.workload}
    launcher_keys |= {"overlap" for record in records if record.overlap_from_zero < math.inf}
    models, systems = (_read_values(key, declaration, where) for key in ("models", "systems"))
    if "stack" in declaration or not (models and systems):  # missing keys are refused later
        return AS_THE_SYSTEM, {*OF_WORKLOAD, *launcher_keys}
    runs = []  # (name, software)
    for system in systems:
        for launcher in launchers:
            name = f"{system.name} under {launcher}" if launcher else system.name
            _, software, _ = launcher_defaults(launcher, models[0], system)
            runs.append((name, software))
    first, software = runs[0]
    for name, other in runs[1:]:
        if other != software:
            raise ValueError(
                f"{where}: systems: {first} and {name} have different software: give stack, a "
                'name or "" for none, and overlap'
            )
    return software, {*launcher_keys, *(OF_WORKLOAD if software.workload else ())}


def _read_values(key: str, declaration: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """Read the declared values of a key; empty if the key is missing."""
    if key not in declaration:
        return ()
    return read_axis(key, declaration[key], f"{where}: {key}", AXES[key].kind.read).values


def _check_stacks(axes: Mapping[str, Axis], where: str) -> None:
    for stack in axes["stack"].values:
        for system in axes["system"].values:
            try:
                stack.on(system)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


def _check_size(declaration: Mapping[str, Any], where: str) -> None:
    """Refuse a grid whose dataset cannot fit into memory, before its axes are built."""
    entries = [declaration[key] for key in AXES if key in declaration]
    system = declaration.get("system", {})
    for fields in system.values() if isinstance(system, Mapping) else ():
        entries += fields.values() if isinstance(fields, Mapping) else ()
    points = math.prod(map(_num_values, entries))
    check_fits(points * BYTES_PER_POINT, f"{where}: a dataset of {points:,} points needs")


def _num_values(values: Any) -> int:
    if isinstance(values, Mapping):
        points = values.get("points", 1)
        return points if isinstance(points, int) and 1 <= points <= MAX_POINTS else 1
    return len(values) if isinstance(values, Sequence) and not isinstance(values, str) else 1


def label(value: Any) -> Any:
    """Return the label of a value in the dataset."""
    return str(value) if isinstance(value, tuple) else getattr(value, "name", value)


def read_axis(name: str, entry: Any, where: str, check: Any, unit: str = "") -> Axis:
    """Read an axis from one value or a list of values; `check` reads or refuses each value."""
    is_listed = isinstance(entry, Sequence) and not isinstance(entry, str)
    values = tuple(check(value, where) for value in (entry if is_listed else [entry]))
    if not values:
        raise ValueError(f"{where} is empty: an axis needs at least one value")
    labels = [label(value) for value in values]
    if len(set(labels)) < len(labels):
        [(duplicate, _)] = Counter(labels).most_common(1)
        raise ValueError(f"{where} lists {duplicate!r} more than once")
    return Axis(name, values, unit, is_listed)


def read_system_axes(section: Any, where: str) -> tuple[Axis, ...]:
    """Read the axes of a sweep whose values replace fields of systems, such as a bandwidth."""
    # Sections and keys are those of a system file, with units. A value is a number, a list, or
    # `{from, to, points, scale}` with the scale "linear" or "log".
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} must be a table of {', '.join(SECTIONS)}, got {section!r}")
    check_keys(section, _SYSTEM_FIELDS, where)
    axes: list[Axis] = []
    for name, entries in section.items():
        place = f"{where}: {name}"
        check_keys(entries, _SYSTEM[name], place)
        for key, entry in entries.items():
            axes.append(_read_field(name, key, entry, place))
            if axes[-1].name in [axis.name for axis in axes[:-1]]:
                raise ValueError(f"{place}: {key}: {axes[-1].name} is given twice")
    return tuple(axes)


def _read_field(section: str, key: str, entry: Any, place: str) -> Axis:
    """Read the axis of a field of the systems, such as latency_us of network, in SI units."""
    name, field = next(
        (name, field)
        for name, field in SECTIONS[section].items()
        if key in unit_factors(name, field.dimension)
    )
    where, dimension = f"{place}: {key}", field.dimension
    if isinstance(entry, Mapping):
        entry = _read_range(entry, where)
    kind = EFFICIENCY if name == "efficiency" else field.kind  # one number instead of a curve
    axis = read_axis(f"{section}.{name}", entry, where, kind.read, dimension)
    if not dimension:
        return axis
    values = tuple(to_si(value, unit_factors(name, dimension)[key]) for value in axis.values)
    for stated_value, value in zip(axis.values, values, strict=True):
        if value and not SMALLEST <= value <= LARGEST:  # times would overflow
            raise ValueError(
                f"{where} must be from {SMALLEST:g} to {LARGEST:g} {dimension}, "
                f"got {stated_value:g}"
            )
    return axis._replace(values=values)


_RANGE = {
    "from": FileField(NUMBER),
    "to": FileField(NUMBER),
    "points": FileField(whole(1, MAX_POINTS)),
    "scale": FileField(choice(SCALES), "linear"),
}


def _read_range(bounds: Mapping[str, Any], where: str) -> list[float]:
    """Return the numbers of a range `{from, to, points, scale}`."""
    low, high, points, scale = read_fields(_RANGE, bounds, where).values()
    if scale == "log" and not min(low, high) > 0:
        raise ValueError(f"{where}: a log range needs ends above 0, got {low:g} to {high:g}")
    if points == 1 and low != high:
        raise ValueError(f"{where}: one point cannot reach from {low:g} to {high:g}")
    spaced = np.geomspace if scale == "log" else np.linspace
    return spaced(low, high, points).tolist()


def _identity(value: Any) -> Any:
    """Return JSON data that identifies a value; for models and systems, all their numbers."""
    if isinstance(value, Choice) and value.user_builder is not None:
        return {"schedule": label(value), "content": value.user_builder.content}
    return dataclasses.asdict(value) if isinstance(value, Model | System | Stack) else label(value)


def _text(read: Callable[[Any], Any], form: str, types: tuple[type, ...] = (str,)) -> FieldKind:
    """Return the kind of a field that `read` parses; errors describe the text by `form`."""

    def parse(value: Any, where: str) -> Any:
        if not isinstance(value, types):
            raise ValueError(f"{where} must be {form}, got {value!r}")
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    return FieldKind(parse, {"type": [_JSON_TYPES[kind] for kind in types], "description": form})


_JSON_TYPES: Mapping[Any, str] = {str: "string", list: "array"}


def _label_kind(parse: Callable[[str], object], form: str) -> FieldKind:
    """Return the kind of a field whose texts are labels; `parse` refuses wrong texts."""

    def check_text(text: str) -> str:
        if text:
            parse(text)
        return text

    return _text(check_text, form)


def _pipeline_layout(value: str | list[Any]) -> str:
    """Return a layout in canonical form; "" if layers are assigned by stage shares."""
    return "" if value == "" else str(PipelineLayout.parse(value))


def _workload_axes() -> dict[str, FileField]:
    """Return {axis: its values and default} for the fields of a workload."""
    forms = {name: field.form for name, field in WORKLOAD_FIELDS.items()}
    kinds = {name: field.values for name, field in WORKLOAD_FIELDS.items()} | {
        "pipeline_layout": _text(_pipeline_layout, forms["pipeline_layout"], (str, list)),
        "stragglers": _label_kind(
            lambda text: parse_stragglers(text, "stragglers"), forms["stragglers"]
        ),
        "worker_places": _label_kind(
            lambda text: parse_places(text, "worker_places"), forms["worker_places"]
        ),
    }
    defaults = {field.name: field.default for field in dataclasses.fields(Workload)}
    defaults |= {"stragglers": "", "worker_places": ""}
    # in datasets, the axis of recomputation follows that of the layout of stages
    names = [name for name in WORKLOAD_FIELDS if name != "recompute"]
    names.insert(names.index("pipeline_layout") + 1, "recompute")
    return {name: FileField(kinds[name], defaults[name]) for name in names}


def _outputs(value: Any, where: str) -> tuple[str, ...]:
    if value == []:
        return ()
    return read_axis("outputs", value, where, choice(SWEPT).read).values


# The schedule axis: names with options, tables, and folders of tables


class Choice(NamedTuple):
    """A schedule with its options, which is one value of the schedule axis."""

    name: str  # name of the builder
    options: tuple[tuple[str, Any], ...] = ()  # options besides workers and microbatches
    # builder of a user's schedule, which workers of a cluster cannot look up
    user_builder: schedules.Builder | None = None

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options)])

    @property
    def builder(self) -> schedules.Builder:
        """Return the builder of the schedule."""
        return self.user_builder or schedules.find(self.name)

    @property
    def is_planned(self) -> bool:
        """Return whether the order of ops depends on the op times of each system."""
        return is_planned(self.builder, dict(self.options))


@functools.lru_cache(MAX_CACHED)
def built(choice: Choice, num_workers: int, num_microbatches: int) -> ScheduleTable:
    """Build a table, or return it from the cache, which also keeps the table's programs."""
    size = {"num_workers": num_workers, "num_microbatches": num_microbatches}
    return choice.builder.function(**size, **dict(choice.options))


def expand_folders(values: Any) -> Any:
    """Replace each folder by the list of its tables."""
    if isinstance(values, str):
        return schedules.listed(values) if is_folder(values) else values
    if not isinstance(values, Sequence):
        return values
    entries: list[Any] = []
    for value in values:
        tables = expand_folders(value) if isinstance(value, str) else value
        entries += tables if isinstance(tables, list) else [tables]
    return entries


def read_schedule(value: Any, where: str) -> Choice:
    """Read a value of the schedule axis: a name, or a mapping with a name and options."""
    fields = dict(value) if isinstance(value, Mapping) else {"name": value}
    if "name" not in fields:
        names = ", ".join(schedules.names())
        raise ValueError(f"{where}: {value!r} has no name: known are {names}")
    name = fields.pop("name")
    if not isinstance(name, str):
        raise ValueError(f"{where}: {unknown('schedule', name, schedules.names())}")
    try:
        name, builder = schedules.named(name), schedules.find(name)
    except ValueError as error:
        raise ValueError(f"{where}: {getattr(error, 'reason', error)}") from None
    check = _scalar if builder.content else _count  # own schedules may have any options
    for option in fields:
        if option not in builder.options:
            listed = f"it takes {', '.join(builder.options) or 'no options'}"
            raise ValueError(f"{where}: {name} has no option {option!r}; {listed}")
        fields[option] = check(fields[option], f"{where}: {name}: {option}")
    return Choice(name, tuple(sorted(fields.items())), builder if builder.content else None)


def _scalar(value: Any, where: str) -> Any:
    """Check an option of a user's own schedule, which may have any single value."""
    if not isinstance(value, str | bool | int | float):
        raise ValueError(f"{where} must be a number, a text, true or false, got {value!r}")
    return value


def _count(value: Any, where: str) -> int:
    return whole_number(value, where, maximum=MAX_COUNT)


_FILE_NAME = "a name or the path of a .json file"
_MODEL, _SYSTEM_NAME = _text(load_model, _FILE_NAME), _text(load_system, _FILE_NAME)
# an empty name stands for the software in the systems' files
_STACK = _text(lambda name: load_stack(name) if name else AS_THE_SYSTEM, _FILE_NAME)
_LAUNCHER = _text(lambda name: find_launcher(name).name, "the name of a launcher")


def _link_axis(name: str) -> FileField:
    """Return the values and the default of an axis over an option of the links."""
    option, default = LINK_OPTIONS[name], getattr(Links(), name)
    if not option.form:
        return FileField(choice(option.names) if option.names else NUMBER, default)

    def parse_links(text: str) -> Links:
        links: dict[str, Any] = {"model": option.models[0], name: option.parse(text, name)}
        return Links(**links)

    return FileField(_label_kind(parse_links, option.form), "")


# {key of a declaration: field}; each takes a value or a list, and `target` names the dimension
AXES: Mapping[str, FileField] = {
    "schedules": FileField(FieldKind(read_schedule), target="schedule"),
    "models": FileField(_MODEL, target="model"),
    "stack": FileField(_STACK, ""),
    "launcher": FileField(_LAUNCHER, None),
    "workers": FileField(whole()),
    "minibatch": FileField(whole()),
    "microbatches": FileField(whole(), None),
    "microbatch_size": FileField(whole(), None),
    **_workload_axes(),
    **{"link" if name == "model" else name: _link_axis(name) for name in LINK_OPTIONS},
    "systems": FileField(_SYSTEM_NAME, target="system"),
}
_SYSTEM_AXIS = FieldKind(
    lambda value, where: value, {"anyOf": [*several(NUMBER).schema["anyOf"], json_schema(_RANGE)]}
)
_SYSTEM = {
    name: {
        key: FileField(_SYSTEM_AXIS, None, field.dimension)
        for key, field in fields.items()
        if key not in ("algorithms", "attention")
    }
    for name, fields in SECTIONS.items()
}
_SYSTEM_FIELDS = {name: FileField(section(fields), None) for name, fields in _SYSTEM.items()}
FILE: Mapping[str, FileField] = {
    "title": FileField(TEXT, ""),
    **{key: field._replace(kind=several(field.kind)) for key, field in AXES.items()},
    "system": FileField(section(_SYSTEM_FIELDS), {}),
    "outputs": FileField(FieldKind(_outputs, {"items": {"enum": [*SWEPT]}}), ("bubble_ratio",)),
    "dtype": FileField(choice(DTYPES), "float64"),
}
