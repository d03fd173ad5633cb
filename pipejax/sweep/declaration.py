"""Declaration of a sweep: its axes, read from Python or from a TOML file."""

import dataclasses
import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.checks import (
    MAX_COUNT,
    check_types,
    efficiency,
    number,
    positive,
    resolve_choice,
    share,
    unknown,
    whole_number,
)
from pipejax.base.data_files import check_keys, quantity
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.files import read_file
from pipejax.base.machine import check_fits
from pipejax.costs.model.model import Model, check_recompute, load_model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.stack import (
    AS_THE_SYSTEM,
    OF_WORKLOAD,
    Stack,
    load_stack,
    machine_software,
)
from pipejax.costs.model.workload import Workload
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS
from pipejax.costs.scaling import parse_stragglers
from pipejax.costs.system.parts import SECTIONS
from pipejax.costs.system.system import System, load_system
from pipejax.costs.topology import parse_places
from pipejax.schedules.table.links import (
    LINKS,
    POSTINGS,
    QUEUES,
    Links,
    parse_groups,
    parse_pair_links,
    parse_pairs,
)
from pipejax.sweep.schedule_axis import Choice, read_schedule, unfolded

OUTPUTS = ("bubble_ratio", "tokens_per_second", "tokens_per_second_per_gpu", "bound_by", "share")
DTYPES = ("float64", "float32")
SCALES = ("linear", "log")
MAX_POINTS = 10**6  # of one axis: a label each
BYTES_PER_POINT = 8  # of a dataset, at least: its report reads all of it
SMALLEST, LARGEST = 1e-15, 1e24  # of a field of a system, in SI units
RANGE = ("from", "to", "points", "scale")
count = partial(whole_number, maximum=MAX_COUNT)
_CHECKS: Mapping[str, Any] = {
    "efficiency": efficiency,
    "attention_efficiency": efficiency,
    "misaligned_efficiency": efficiency,
    "low_latency_share": efficiency,
    "sharpness": partial(number, least=1.0),
    "copies": number,
    "mesh": share,
    "gpus": count,
    "gpus_per_nic": partial(number, least=1.0),
}


@short_repr
class Axis(NamedTuple):
    """Values that one dimension of a grid takes."""

    name: str  # of the dimension
    values: tuple[Any, ...]  # what it takes, in SI units
    unit: str  # of the values, or ""
    is_listed: bool  # of a list or range: only then the dataset has a dimension for it


@with_short_repr("title sizes num_points outputs dtype")
@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid of (schedule, workload, system) points.

    Attributes:
      title: what it is about.
      shape_axes: axes that make another program or other work, in the order of the dataset.
      system_axes: the systems, accelerators per node, then fields of the systems.
      outputs: what is kept beside step time, status, memory and reason.
      dtype: in which it is evaluated and kept.

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
        """Return all axes, with those of a single value."""
        return self.shape_axes + self.system_axes

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of every dimension of the dataset, by name."""
        return {axis.name: len(axis.values) for axis in self.axes if axis.is_listed}

    @property
    def num_points(self) -> int:
        """Number of points."""
        return math.prod(len(axis.values) for axis in self.axes)

    def to_json(self) -> str:
        """Return all that decides the numbers, as text: equal texts are equal grids.

        Returns:
          JSON with every value of every axis, models and systems with all their fields.

        Example:
          >>> sweep = read_sweep({"schedules": "1f1b", "workers": 2, "minibatch": 2,
          ...     "microbatch_size": 1, "models": "gpt-22b", "systems": "h100"})
          >>> '"workers": [2]' in sweep.to_json()
          True
        """
        values = {axis.name: [_plain(value) for value in axis.values] for axis in self.axes}
        fields = {"title": self.title, "axes": values, "dimensions": list(self.sizes)}
        return json.dumps(fields | {"outputs": self.outputs, "dtype": self.dtype})


def read_sweep(declaration: Mapping[str, Any] | str | Path) -> Sweep:
    """Read the declaration of a sweep.

    Args:
      declaration: the keys, or the path of a TOML file that holds them. Keys that take a value or
        a list: schedules (a name, a table, a folder of tables, FILE.py:FUNCTION, or
        `{name, stages_per_worker, waves}`), models, systems, stack,
        workers, minibatch, microbatch_size or microbatches, tensor_parallel, sequence_parallel,
        scatter_gather, context_parallel, expert_parallel, expert_tensor_parallel (0 as
        tensor_parallel), data_parallel, zero, overlap, expert_overlap, dispatcher,
        contiguous_context, graphs, optimizer_offload, attention_precision, head_precision (all
        eight the stack's where they are left out), precision, rank_order, embedding_units,
        loss_units, pipeline_layout (as Megatron writes it, or in lists), recompute, frozen,
        lora_rank, pair_factor, stragglers (as 3=1.2,5=2), worker_places (as 0,4,1,5), link, queues,
        host_links (as 0+1,2+3), posting, shared_links (as 0-1+1-0,2-3+1-3, or pairs),
        pair_links (as 0-1=rendezvous,1-2=queued), eager_below [s]. `system` holds axes over
        fields of the systems. Further: title, outputs, dtype.

    Returns:
      The sweep.

    Raises:
      ValueError: if a key is unknown or missing, or a value is wrong; the message names it. If the
        dataset cannot fit into memory.
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
        where = str(declaration)
        content = read_file(declaration)
        try:
            declaration = tomllib.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{declaration} is not TOML: {str(error).splitlines()[0]}") from None
    valid_keys = ("title", *_KEYS, "system", "outputs", "dtype")
    for key in declaration:
        if key not in valid_keys:
            raise ValueError(f"{where}: {unknown('key', key, valid_keys)}")
    if not isinstance(declaration.get("title", ""), str):
        raise ValueError(f"{where}: title must be a text, got {declaration['title']!r}")
    _check_size(declaration, where)
    axes: dict[str, Axis] = {}
    software = AS_THE_SYSTEM if "stack" in declaration else _calibrated_with(declaration, where)
    for key, (name, check, default) in _KEYS.items():
        is_optional = default is not None or name in ("microbatches", "microbatch_size")
        if key not in declaration and not is_optional:
            raise ValueError(f"{where}: {key} is missing")
        is_of_stack = key in OF_WORKLOAD and ("stack" in declaration or software.workload)
        if key in declaration or not (default is None or is_of_stack):
            values = declaration.get(key, default)
            values = unfolded(values) if key == "schedules" else values
            if key == "pipeline_layout" and _is_one_layout(values):
                values = _text(_pipeline_layout, "", (list,))(values, f"{where}: {key}")
            axes[name] = read_axis(name, values, f"{where}: {key}", check)
    if "stack" not in declaration:
        axes["stack"] = axes["stack"]._replace(values=(software,))
    _check_stacks(axes, where)
    if ("microbatches" in declaration) == ("microbatch_size" in declaration):
        raise ValueError(f"{where}: give microbatch_size or microbatches, one of them")
    system_axes = read_system_axes(declaration.get("system", {}), f"{where}: system")
    fields = {axis.name: axis for axis in system_axes}
    per_node = fields.pop("node.gpus", Axis("node.gpus", (None,), "", False))
    outputs = declaration.get("outputs", ["bubble_ratio"])
    if outputs != []:
        outputs = read_axis("outputs", outputs, f"{where}: outputs", _name_check(OUTPUTS)).values
    return Sweep(
        title=declaration.get("title", ""),
        shape_axes=tuple(axis for name, axis in axes.items() if name != "system"),
        system_axes=(axes["system"], per_node, *fields.values()),
        outputs=tuple(name for name in OUTPUTS if name in outputs),
        dtype=resolve_choice(declaration.get("dtype", "float64"), DTYPES, f"{where}: dtype"),
    )


def _calibrated_with(declaration: Mapping[str, Any], where: str) -> Stack:
    """Return the software of the runs on which all systems were calibrated, if it is one."""
    if "systems" not in declaration:  # refused later
        return AS_THE_SYSTEM
    names, check = declaration["systems"], _KEYS["systems"][1]
    systems = read_axis("system", names, f"{where}: systems", check).values
    first, *others = (machine_software(system) for system in systems)
    for system, other in zip(systems[1:], others, strict=True):
        if other != first:
            raise ValueError(
                f"{where}: systems: {systems[0].name} and {system.name} were calibrated on runs of "
                'different software: give stack, a name or "" for none, and overlap'
            )
    return first


def _check_stacks(axes: Mapping[str, Axis], where: str) -> None:
    """Refuse a stack whose kernel of attention a system does not know."""
    for stack in axes["stack"].values:
        for system in axes["system"].values:
            try:
                stack.on(system)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


def _check_size(declaration: Mapping[str, Any], where: str) -> None:
    """Refuse a grid whose dataset cannot fit into memory, before any axis of it is made."""
    sections = declaration.get("system", {})
    fields = sections.values() if isinstance(sections, Mapping) else ()
    listed = [declaration[key] for key in _KEYS if key in declaration]
    listed += [values for part in fields if isinstance(part, Mapping) for values in part.values()]
    points = math.prod(map(_num_values, listed))
    check_fits(points * BYTES_PER_POINT, f"{where}: a dataset of {points:,} points needs")


def _num_values(values: Any) -> int:
    """Count the values of an axis; wrong values are reported later."""
    if isinstance(values, Mapping):
        points = values.get("points", 1)
        return points if isinstance(points, int) and 1 <= points <= MAX_POINTS else 1
    return len(values) if isinstance(values, Sequence) and not isinstance(values, str) else 1


def label(value: Any) -> Any:
    """Return the name of a value in the dataset."""
    return str(value) if isinstance(value, tuple) else getattr(value, "name", value)


def read_axis(name: str, entry: Any, where: str, check: Any, unit: str = "") -> Axis:
    """Read one value or a list of them."""
    is_listed = isinstance(entry, Sequence) and not isinstance(entry, str)
    values = tuple(check(value, where) for value in (entry if is_listed else [entry]))
    if not values:
        raise ValueError(f"{where} is empty: an axis needs at least one value")
    labels = [label(value) for value in values]
    if len(set(labels)) < len(labels):
        (twice, _), *_ = Counter(labels).most_common(1)
        raise ValueError(f"{where} holds {twice} twice")
    return Axis(name, values, unit, is_listed)


def read_system_axes(section: Any, where: str) -> tuple[Axis, ...]:
    """Read the axes over fields of the systems."""
    # Sections and keys with units are those of a system file. A value is a number, a list, or
    # `{from, to, points, scale}` with the scale "linear" or "log".
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} must be a table of {', '.join(SECTIONS)}, got {section!r}")
    check_keys(dict(section), dict.fromkeys(SECTIONS, ""), where)
    axes: list[Axis] = []
    for name, fields in section.items():
        place = f"{where}: {name}"
        units = {key: unit for key, unit in SECTIONS[name].items() if key != "algorithms"}
        check_keys(fields, units, place)
        for key, entry in fields.items():
            axes.append(_read_field(name, key, entry, place))
            if axes[-1].name in [axis.name for axis in axes[:-1]]:
                raise ValueError(f"{place}: {key}: {axes[-1].name} is given twice")
    return tuple(axes)


def _read_field(section: str, key: str, entry: Any, place: str) -> Axis:
    """Read the axis of one field of a section, in SI units; `place` is for error texts."""
    name = next(
        name
        for name in sorted(SECTIONS[section], key=len, reverse=True)
        if key == name or key.startswith(f"{name}_")
    )
    where, dimension = f"{place}: {key}", SECTIONS[section][name]
    if isinstance(entry, Mapping):
        entry = _read_range(entry, where)
    check = number if dimension == "s" else _CHECKS.get(name, positive)
    axis = read_axis(f"{section}.{name}", entry, where, check, dimension)
    if not dimension:
        return axis
    values = tuple(quantity({key: value}, name, dimension, place) for value in axis.values)
    for given_value, value in zip(axis.values, values, strict=True):
        if value and not SMALLEST <= value <= LARGEST:  # times would overflow
            raise ValueError(
                f"{where} must be from {SMALLEST:g} to {LARGEST:g} {dimension}, got {given_value:g}"
            )
    return axis._replace(values=values)


def _read_range(bounds: Mapping[str, Any], where: str) -> list[float]:
    """Return the values of `{from, to, points, scale}`."""
    check_keys(dict(bounds), dict.fromkeys(RANGE, ""), where)
    for key in ("from", "to", "points"):
        if key not in bounds:
            raise ValueError(f"{where}: {key} is missing: a range is {{{', '.join(RANGE)}}}")
    low, high = (number(bounds[key], f"{where}: {key}") for key in ("from", "to"))
    points = whole_number(bounds["points"], f"{where}: points", maximum=MAX_POINTS)
    scale = resolve_choice(bounds.get("scale", "linear"), SCALES, f"{where}: scale")
    if scale == "log" and not min(low, high) > 0:
        raise ValueError(f"{where}: a log range needs ends above 0, got {low:g} to {high:g}")
    if points == 1 and low != high:
        raise ValueError(f"{where}: one point cannot reach from {low:g} to {high:g}")
    spaced = np.geomspace if scale == "log" else np.linspace
    return spaced(low, high, points).tolist()


def _plain(value: Any) -> Any:
    """Return the identity of a value: for models, stacks and systems, all their numbers."""
    if isinstance(value, Choice) and value.user_builder is not None:
        return {"schedule": label(value), "content": value.user_builder.content}
    return dataclasses.asdict(value) if isinstance(value, Model | System | Stack) else label(value)


def _text(
    read: Callable[[Any], Any], form: str, kinds: tuple[type, ...] = (str,)
) -> Callable[[Any, str], Any]:
    """Return a check of the type of a value that also reads it; `form` describes it in errors."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, kinds):
            raise ValueError(f"{where} must be {form}, got {value!r}")
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    return check


def _name_check(names: Collection[str]) -> Callable[[Any, str], Any]:
    return lambda value, where: resolve_choice(value, names, where)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false, got {value!r}")
    return value


def _fraction(value: Any, where: str) -> float:
    return share(float(value) if isinstance(value, bool) else value, where)


def _as_written(read: Callable[[str], object], form: str) -> Callable[[Any, str], Any]:
    """Keep a text, which labels its value, if it can be read."""

    def text(value: str) -> str:
        read(value)
        return value

    return _text(text, form)


def _host_links(text: str) -> Links:
    return Links(host_links=parse_groups(text, "host_links") if text else ())


def _shared_links(text: str) -> Links:
    return Links("queued", shared_links=parse_pairs(text, "shared_links") if text else ())


def _pair_links(text: str) -> Links:
    return Links(pair_links=parse_pair_links(text, "pair_links") if text else ())


def _pipeline_layout(value: str | list[Any]) -> str:
    """Write a layout in one way; without one, layers are assigned by shares."""
    return "" if value == "" else str(PipelineLayout.parse(value))


def _is_one_layout(values: Any) -> bool:
    """Return whether lists are the stages of one layout: it has one embedding."""
    are_lists = isinstance(values, list) and all(isinstance(value, list) for value in values)
    return are_lists and str(values).lower().count("embedding") < 2


TEXTS: Mapping[str, Callable[[str], object]] = {  # read by rules of their own
    "stragglers": lambda text: parse_stragglers(text, "stragglers"),
    "worker_places": lambda text: parse_places(text, "worker_places"),
}


def _fields_of_workload() -> dict[str, tuple[str, Callable[[Any, str], Any], Any]]:
    """Return the keys of the workload's fields, with their checks and defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(Workload)}
    readers: dict[str, tuple[str, Callable[[Any, str], Any], Any]] = {}
    for name, field in WORKLOAD_FIELDS.items():
        checks: dict[str, Callable[[Any, str], Any]] = {
            "whole": partial(whole_number, minimum=field.least, maximum=field.largest or MAX_COUNT),
            "flag": _flag,
            "name": _name_check(field.names),
            "number": number,
            "share": _fraction,
            "recompute": lambda value, _: check_recompute(value),
        }
        if name == "pipeline_layout":
            readers[name] = name, _text(_pipeline_layout, field.form, (str, list)), ""
        elif field.kind == "text":
            readers[name] = name, _as_written(TEXTS[name], field.form), ""
        else:
            readers[name] = name, checks[field.kind], defaults[name]
    # datasets have had this axis behind the layout of stages
    order = [name for name in readers if name != "recompute"]
    order.insert(order.index("pipeline_layout") + 1, "recompute")
    return {name: readers[name] for name in order}


def _stack(value: str) -> Stack:
    """Read a stack; an empty name leaves the systems as their files have them."""
    return load_stack(value) if value else AS_THE_SYSTEM


FILE = "a name or the path of a .json file"

# key: dimension, check of a value, value if the key is absent (a key without one is needed)
_KEYS: Mapping[str, tuple[str, Callable[[Any, str], Any], Any]] = {
    "schedules": ("schedule", read_schedule, None),
    "models": ("model", _text(load_model, FILE), None),
    "stack": ("stack", _text(_stack, FILE), ""),
    "workers": ("workers", count, None),
    "minibatch": ("minibatch", count, None),
    "microbatches": ("microbatches", count, None),
    "microbatch_size": ("microbatch_size", count, None),
    **_fields_of_workload(),
    "link": ("link", _name_check(LINKS), "delay"),
    "queues": ("queues", _name_check(QUEUES), "worker"),
    "host_links": ("host_links", _as_written(_host_links, "a text, as 0+1,2+3"), ""),
    "posting": ("posting", _name_check(POSTINGS), "early"),
    "shared_links": (
        "shared_links",
        _as_written(_shared_links, "a text, as 0-1+1-0, or pairs"),
        "",
    ),
    "pair_links": ("pair_links", _as_written(_pair_links, "a text, as 0-1=rendezvous"), ""),
    "eager_below": ("eager_below", number, 0.0),
    "systems": ("system", _text(load_system, FILE), None),
}
