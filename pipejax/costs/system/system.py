"""Systems: compute peaks, bandwidths and memory sizes of machines, read from data files.

A `System` is a pytree of plain numbers in SI units, each of which can be swept or differentiated.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.checks import check_types, is_number, resolve_name
from pipejax.base.data_files import load_json
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.file_fields import (
    FLAG,
    NEEDED,
    NUMBER,
    POSITIVE,
    SHARE,
    TEXT,
    FieldKind,
    Fields,
    FileField,
    optional,
    read_fields,
    section,
    sections,
    whole,
)
from pipejax.base.jax_on_demand import register
from pipejax.base.progress import Notice
from pipejax.costs import array_functions as xp
from pipejax.costs.precision import FloatFields, as_float, is_traced
from pipejax.costs.system.parts import (
    FIELDS,
    RECORDS,
    SECTIONS,
    AttentionKernels,
    Collectives as Collectives,
    Contention,
    Efficiency as Efficiency,
    Host,
    Kernels,
    Link as Link,
    NarrowPeaks,
    Number as Number,
    Numbers as Numbers,
    system_number,
    with_number,
)


@short_repr
class FittedParameter(NamedTuple):
    """One fitted number."""

    name: str  # section and key of the system file
    value: float  # in the unit
    unit: str
    standard_error: float | None  # in the unit; None if the data do not determine it
    identified: bool  # whether the data determine it better than the prior does


@short_repr
class Band(NamedTuple):
    """Range of the ratio measured / predicted time that covers a percentage of runs."""

    percent: float  # percentage of runs in the band
    low: float  # measured over predicted time at the lower end
    high: float  # measured over predicted time at the upper end


@with_short_repr("rows source parameters bands stack evidence")
class CalibrationRecord(NamedTuple):
    """Data that the numbers of a system were fitted to, and the quality of the fit."""

    source: str  # where the measured runs come from
    rows: int  # number of measured runs
    parameters: tuple[FittedParameter, ...]  # fitted numbers
    bands: tuple[Band, ...]  # ranges of measured / predicted time
    stack: str = ""  # stack of the runs, by name or file; empty if it has no name
    # regimes of the runs, and the errors of predictions of their configurations, as
    # `analysis/step/evidence.py` writes them
    evidence: tuple[tuple[float, ...], ...] = ()
    # share of gradient and weight exchanges beside compute that all runs with several replicas
    # have; None if runs differ or none has several replicas
    overlap: float | None = None


BITS = (4, 8, 16)  # bits of operands


def _evidence(value: Any, where: str) -> tuple[tuple[float, ...], ...]:
    """Check rows of evidence: three numbers for a regime, then errors of predictions [%]."""
    rows: list[Any] = value if isinstance(value, list) else [None]
    for row in rows:
        # the third number is bits of operands
        is_row = isinstance(row, list) and len(row) > 3 and row[2] in BITS
        if not is_row or not all(is_number(entry, least=-100) for entry in row):
            raise ValueError(
                f"{where} must be rows of a regime and errors, as [0, 0, 16, -1.5], got {row!r}"
            )
    return tuple(map(tuple, rows))


def _band(ends: Any, where: str) -> Band:
    """Check the two ends of a band of factors; `where` ends with the band's percentage."""
    percent = where.rpartition(" ")[2]
    is_pair = isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends))
    is_percentage = percent.isdecimal() and 0 < int(percent) < 100
    if not (is_pair and 0 < ends[0] <= ends[1] and is_percentage):
        raise ValueError(f'{where} must be as "90": [0.9, 1.2], two factors above 0, got {ends!r}')
    return Band(float(percent), float(ends[0]), float(ends[1]))


_PARAMETER = {
    "value": FileField(NUMBER),
    "unit": FileField(TEXT, ""),
    "standard_error": FileField(optional(NUMBER), None),
    "identified": FileField(FLAG, True),
}
_FACTORS = {"type": "array", "items": POSITIVE.schema, "minItems": 2, "maxItems": 2}
_ROWS = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
_CALIBRATION = {
    "source": FileField(TEXT),
    "rows": FileField(whole()),
    "parameters": FileField(sections(section(_PARAMETER)), {}),
    "bands": FileField(sections(FieldKind(_band, _FACTORS)), {}),
    "stack": FileField(TEXT, ""),
    "evidence": FileField(FieldKind(_evidence, _ROWS), ()),
    "overlap": FileField(SHARE, None),
}


def _calibration(parameters: Mapping[str, Any], bands: Mapping[str, Band], **fields: Any) -> Any:
    fitted = tuple(FittedParameter(name, **values) for name, values in parameters.items())
    return CalibrationRecord(parameters=fitted, bands=tuple(bands.values()), **fields)


DATA = Path(__file__).parents[1] / "data"


@with_short_repr(
    "name peak_flops memory_bandwidth memory_capacity gpus_per_node node network price "
    "calibration source"
)
@dataclasses.dataclass(frozen=True, repr=False)
class System(FloatFields):
    """A machine: accelerators in nodes that a network connects, described by its numbers.

    Attributes:
      peak_flops: dense peak of one accelerator [FLOP/s].
      compute_latency: fixed cost of an op [s].
      compute_efficiency: share of the peak FLOP/s, by FLOP of the op.
      memory_bandwidth: bandwidth of an accelerator's memory [B/s].
      memory_latency: fixed cost of touching memory [s].
      memory_efficiency: share of the memory bandwidth, by bytes of the op.
      memory_capacity: memory of one accelerator [B].
      node: link between accelerators of a node.
      network: link between nodes, per accelerator.
      gpus_per_node: accelerators in a node.
      name: name of the system.
      source: where the numbers come from.
      gpus_per_nic: accelerators that share a NIC.
      mesh: 1 if each accelerator of a node has a link to every other, which add up to the node's
        bandwidth; 0 if switches connect them.
      collectives: properties of the library for collectives.
      narrow_peaks: dense peaks below 16 bits.
      kernels: properties of the kernels of a layer.
      host: times of the host processor, and the bandwidth of its memory.
      contention: slow-down of compute and exchanges while both run.
      optimizer_efficiency: share of a large op's memory rate that the optimizer reaches.
      host_link: link of one accelerator to its host's memory; its bandwidth is 0 if unknown.
      memory_reserve: memory of one accelerator that tensors cannot use [B].
      price: price of one accelerator [USD/s]; 0 if unknown.
      attention_kernels: speed of each attention kernel.
      calibration: data and quality of the fit of these numbers; None for a data sheet.
    """

    peak_flops: Number
    compute_latency: Number
    compute_efficiency: Efficiency
    memory_bandwidth: Number
    memory_latency: Number
    memory_efficiency: Efficiency
    memory_capacity: Number
    node: Link
    network: Link
    gpus_per_node: Number
    name: str = dataclasses.field(metadata={"static": True})
    source: str = dataclasses.field(metadata={"static": True})
    gpus_per_nic: Number = 1.0
    mesh: Number = 0.0
    collectives: Collectives = dataclasses.field(default_factory=Collectives)
    narrow_peaks: NarrowPeaks = dataclasses.field(default_factory=NarrowPeaks)
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    host: Host = dataclasses.field(default_factory=Host)
    contention: Contention = dataclasses.field(default_factory=Contention)
    optimizer_efficiency: Number = 1.0
    host_link: Link = dataclasses.field(default_factory=lambda: Link(0.0, 0.0))
    memory_reserve: Number = 0.0
    price: Number = 0.0
    attention_kernels: AttentionKernels = dataclasses.field(default_factory=AttentionKernels)
    calibration: CalibrationRecord | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @property
    def memory_available(self) -> Number:
        """Return the memory of an accelerator that tensors can use: capacity minus reserve [B]."""
        return self.memory_capacity - self.memory_reserve

    def with_number(self, name: str, value: Number) -> "System":
        """Return a copy of the system in which a named number has another value.

        Names are those of the system's file, such as "compute.peak"; values are in SI units, and
        JAX may trace them. A share in place of a curve (compute.efficiency) holds for all sizes.

        Example:
          >>> import pipejax as pj
          >>> slow = pj.load_system("h100").with_number("network.bandwidth", 25e9)
          >>> slow.network.bandwidth
          25000000000.0
        """
        changed: System = with_number(self, name, value)
        if not is_traced(value):
            _warn_of_unusual_numbers(changed, "with_number", {name} & {*OF_SHEETS}, FAR_IN_STUDIES)
        return changed

    def reached(self, peers: Number) -> Number:
        """Return the share of a node's bandwidth that an exchange with `peers` others reaches.

        Behind switches it is 1. In a mesh of 8 accelerators, one peer is reached by 1 of 7 links.
        """
        max_peers = xp.maximum(self.gpus_per_node - 1.0, 1.0)
        return 1.0 - self.mesh * (1.0 - xp.clip(peers, 1.0, max_peers) / max_peers)

    @property
    def peer_link(self) -> Link:
        """Return the link between two accelerators of a node."""
        bandwidth = self.node.bandwidth * self.reached(1.0)
        return dataclasses.replace(self.node, bandwidth=bandwidth)

    def peak(self, precision: str) -> Number:
        """Return the dense peak of one accelerator in "bf16" or another precision [FLOP/s]."""
        narrow = vars(self.narrow_peaks)
        name = resolve_name(precision, ("bf16", "fp16", *narrow), "precision")
        if name not in narrow:
            return self.peak_flops
        if not is_traced(narrow[name]) and not np.all(np.asarray(narrow[name]) > 0):
            raise ValueError(f"{self.name or 'a system'}: no peak is known for precision {name!r}")
        return narrow[name]


register(System)


def roofline_time(system: System, flop: Number, volume: Number, precision: str = "bf16") -> Number:
    """Return the roofline time [s]: the longer of computing and of moving bytes."""
    #     t = max(FLOP / (peak e_c) + L_c, bytes / (bandwidth e_m) + L_m)
    # source: Barley et al. (arXiv:2605.24006), section on the cost model.
    flop, volume = as_float(flop), as_float(volume)
    compute = flop / (system.peak(precision) * system.compute_efficiency.at(flop))
    memory = volume / (system.memory_bandwidth * system.memory_efficiency.at(volume))
    return xp.maximum(compute + system.compute_latency, memory + system.memory_latency)


def system_names() -> tuple[str, ...]:
    """Return the names of the systems that come with pipejax."""
    return names_in("hardware")


def load_system(name: str | Path) -> System:
    """Read a system by name, or from a JSON file.

    Args:
      name: one of `system_names()`, or the path of a file that ends in .json.

    Returns:
      The system, in SI units.

    Raises:
      ValueError: if the name is unknown, or the file lacks a key or a unit.
      OSError: if the file cannot be read.

    Example:
      >>> import pipejax as pj
      >>> pj.load_system("h100").memory_capacity
      85520000000.0
    """
    data, where = read_named("hardware", name, "system")
    system = _system(read_fields(FILE, {key: {} for key in _SHEET} | data, where))
    if system.memory_reserve >= system.memory_capacity:
        raise ValueError(f"{where}: memory: reserve must be less than capacity")
    if isinstance(name, Path) or name not in system_names():
        _warn_of_unusual_numbers(system, where, (*OF_SHEETS, *LATENCIES))
    return system


_SHEET = ("compute", "memory", "node", "network")
# optional sections: kernels and host take no extra time by default
FILE: Fields = {
    "name": FileField(TEXT),
    "source": FileField(TEXT),
    "calibration": FileField(section(_CALIBRATION, _calibration), None),
    **{
        name: FileField(section(fields), NEEDED if name in _SHEET else None)
        for name, fields in SECTIONS.items()
    },
}


def _system(values: Mapping[str, Any]) -> System:
    """Build a system from the sections of its file; missing sections (None) get defaults."""
    fields: dict[str, Any] = {name: values[name] for name in ("name", "source", "calibration")}
    parts: dict[str, dict[str, Any]] = {}
    for name, path in FIELDS.items():
        section, key = name.split(".")
        if values[section] is None:
            continue
        if path[0] in RECORDS:  # ("network", "bandwidth")
            parts.setdefault(path[0], {})[path[1]] = values[section][key]
        else:  # ("memory_capacity",) or ("compute_efficiency", "shares"), which is read as a curve
            fields[path[0]] = values[section][key]
    if values["collectives"] is not None:
        parts["collectives"] |= values["collectives"]["algorithms"]
    if values["kernels"] is not None:
        parts["kernels"]["priced"] = True
        fields["attention_kernels"] = values["kernels"]["attention"]
    records = {name: RECORDS[name](**numbers) for name, numbers in parts.items()}
    return System(gpus_per_node=values["node"]["gpus"], **fields, **records)


FAR = 30.0  # factor outside the range of built-in systems at which a unit is probably wrong
FAR_IN_STUDIES = 500.0  # the same factor for studies, whose numbers may leave that range
LATENCIES = ("node.latency", "network.latency")  # studies vary these by any factor
OF_SHEETS = (
    *("compute.peak", "memory.bandwidth", "memory.capacity"),
    *("node.bandwidth", "network.bandwidth"),
)


@functools.cache
def _built_in_range(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value of a named number in all built-in systems."""
    values = [float(system_number(load_system(system), name)) for system in system_names()]
    return min(values), max(values)


def _warn_of_unusual_numbers(
    system: System, where: str, names: Iterable[str], far: float = FAR
) -> None:
    """Warn about numbers far outside the range of built-in systems, whose unit may be wrong."""
    for name in names:
        values, (low, high) = np.asarray(system_number(system, name)), _built_in_range(name)
        # a latency may be left out as 0
        above, below = values.max() / high, low / values.min(where=values > 0, initial=high)
        if max(above, below) > far:
            side = "times the largest" if above > below else "times below the smallest"
            warnings.warn(
                f"{where}: {name} is {max(above, below):.0f} {side} of all systems that come "
                "with pipejax: is its unit right?",
                Notice,
                stacklevel=3,
            )


def names_in(folder: str) -> tuple[str, ...]:
    """Return the names of the data files in a folder."""
    return tuple(sorted(path.stem for path in (DATA / folder).glob("*.json")))


def data_file(folder: str, name: str | Path, kind: str) -> Path:
    """Return the path of a data file, given its name in a folder or its path."""
    check_types(name=(name, str, Path))
    if str(name).endswith(".json"):
        return Path(name)
    full_name = resolve_name(str(name), names_in(folder), kind, ", or the path of a .json file")
    return DATA / folder / f"{full_name}.json"


def read_named(folder: str, name: str | Path, kind: str) -> tuple[dict[str, Any], str]:
    """Read a data file by name or path; return (content, name of the file for errors)."""
    path = data_file(folder, name, kind)
    return load_json(path), str(path) if str(name).endswith(".json") else path.name
