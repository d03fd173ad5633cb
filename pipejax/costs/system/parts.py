"""Parts of a system, and the names of its numbers, such as `network.bandwidth`.

Parts are efficiencies, links, collectives, kernels, and the host that starts kernels. The name of a
number serves to read it, to replace it, and to write it to a system's file.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.base.array_types import Array, Num, NumpyArray
from pipejax.base.checks import as_floats, resolve_choice, resolve_name
from pipejax.base.data_files import load_json
from pipejax.base.display import short_repr
from pipejax.base.file_fields import (
    EFFICIENCY,
    NUMBER,
    POSITIVE,
    SHARE,
    TEXT,
    FieldKind,
    FileField,
    at_least,
    json_schema,
    section,
    unit_factors,
    whole,
)
from pipejax.base.jax_on_demand import register
from pipejax.costs import array_functions as xp
from pipejax.costs.precision import FloatFields, is_traced, make_floats

# one, or one for each stage
Numbers = float | np.number | Num[NumpyArray, "..."] | Num[xp.Computed, "..."]
if TYPE_CHECKING:
    Number = float | Array  # without np.ndarray: the union would double the time of mypy
else:
    Number = Numbers
Flag = bool | Number

# Share of an accelerator's memory reserved for fragmentation and the allocator's buffers. By our
# prediction, 10 of 2,327 measured runs left less. In tables of llm-foundry, the largest
# microbatches that fit fill 0.901 and 0.912 of the memory.
HEADROOM = 0.1
ALGORITHMS = ("halving", "ring", "tree", "hierarchical")


@short_repr
@dataclasses.dataclass(frozen=True)
class Efficiency(FloatFields):
    """Share of a peak rate that an op reaches, as a step function of the op's size.

    Attributes:
      sizes: (steps) smallest size of each step [FLOP or bytes], ascending from 0.
      shares: (steps) share of the peak in each step.
    """

    sizes: tuple[Number, ...] = (0.0,)
    shares: tuple[Number, ...] = (1.0,)

    def at(self, size: Number) -> Number:
        """Return the share of the peak that an op of a size [FLOP or bytes] reaches."""
        share = xp.asarray(self.shares[0], float)
        for step, value in zip(self.sizes[1:], self.shares[1:], strict=True):
            share = xp.where(size >= step, value, share)
        return share


@short_repr
@dataclasses.dataclass(frozen=True)
class Link(FloatFields):
    """A kind of link, described by its bandwidth, latency and efficiency."""

    bandwidth: Number  # one direction [B/s]
    latency: Number  # [s]
    efficiency: Number = 1.0  # share of the bandwidth that a message reaches

    @property
    def rate(self) -> Number:
        """Return the bandwidth that a message reaches on the link [B/s]."""
        return self.bandwidth * self.efficiency


@short_repr
@dataclasses.dataclass(frozen=True)
class Collectives:
    """Properties of the library that runs a system's collectives, such as NCCL.

    The first four fields say whether an algorithm may be used. The fastest such algorithm is used.
    """

    halving: Flag = True  # recursive halving over the slowest kind of link
    ring: Flag = False  # rings through all accelerators
    tree: Flag = False  # two binary trees of nodes, for all-reduces
    hierarchical: Flag = False  # rings inside nodes, then between them
    latency: Number = 0.0  # of each collective, in addition to the latency of links [s]
    simple_latency: Number = 0.0  # further latency to use the whole bandwidth [s]
    # share of the bandwidth that is reached without this further latency
    low_latency_share: Number = 1.0
    copies: Number = 0.0  # memory passes over the tensor, for which links wait

    def __post_init__(self) -> None:
        _flags_in(self, ALGORITHMS)
        make_floats(self)


@short_repr
@dataclasses.dataclass(frozen=True)
class Kernels:
    """Properties of a layer's kernels, in addition to peak rates and efficiencies."""

    # whether every kernel of a layer is priced; if not, each phase of it is one roofline
    priced: Flag = False
    sharpness: Number = 4.0  # exponent of the maximum of device and host, (device^q + host^q)^(1/q)
    # share of a plain product's rate that attention's products reach
    attention_efficiency: Number = 1.0
    # share of a product's rate if rows of a factor or of the output are no multiple of 16 bytes
    misaligned_efficiency: Number = 1.0
    # efficiency of products below 16 bits, relative to that of plain products
    narrow_efficiency: Number = 1.0
    # bytes that norms, activation functions and residuals move, divided by those of fused kernels
    # in the model's precision; above 1 if each operation reads and writes memory, or casts
    elementwise: Number = 1.0

    def __post_init__(self) -> None:
        _flags_in(self, ("priced",))
        make_floats(self)


@short_repr
@dataclasses.dataclass(frozen=True)
class AttentionKernels(FloatFields):
    """Speed of attention kernels: the share of peak FLOP/s that their matrix products reach.

    The share is of forward and backward together, under a causal mask; 0 if unknown.
    """

    flash_attention_1: Number = 0.0  # also its Triton kernels
    flash_attention_2: Number = 0.0
    flash_attention_3: Number = 0.0
    flash_attention_4: Number = 0.0
    cudnn: Number = 0.0  # kernel of cuDNN, as Transformer Engine calls it


ATTENTION = tuple(field.name.replace("_", "-") for field in dataclasses.fields(AttentionKernels))


@short_repr
@dataclasses.dataclass(frozen=True)
class Host(FloatFields):
    """Times of the host processor that starts the kernels, and its memory bandwidth."""

    launch: Number = 0.0  # time to start one kernel [s]
    layer: Number = 0.0  # further time of one phase of one layer, beside its kernels [s]
    collective: Number = 0.0  # time to start one collective [s]
    microbatch: Number = 0.0  # further time of one phase of a stage, beside its layers [s]
    step: Number = 0.0  # further time of one step [s]
    # bandwidth of the host's memory for one accelerator; 0 if unknown [B/s]
    memory_bandwidth: Number = 0.0


@short_repr
@dataclasses.dataclass(frozen=True)
class Contention(FloatFields):
    """Slow-down factors of compute and of exchanges while both run; 1 means no slow-down."""

    compute: Number = 1.0  # time of compute beside an exchange, divided by its time alone
    exchange: Number = 1.0  # time of an exchange beside compute, divided by its time alone

    def saved(self, exchange: Numbers, compute: Numbers) -> Any:
        """Return the time [s] saved if exchange and compute overlap instead of running in turn."""
        # Exchange 2 s, compute 5 s, slow-downs 1.5 and 1.2: the exchange ends after 3 s, in which 3
        # / 1.2 = 2.5 s of compute are done. The remaining 2.5 s follow, so both take 5.5 s instead
        # of 7 s. In general, exchange * (1 - e + e / c) is saved, and likewise if compute ends
        # first. Below 0, overlap costs more than it saves.
        c, e = self.compute, self.exchange  # slow-downs
        exchange_ends_first = e * exchange <= c * compute
        by_exchange, by_compute = exchange * (1 - e + e / c), compute * (1 - c + c / e)
        return xp.where(exchange_ends_first, by_exchange, by_compute)


@short_repr
@dataclasses.dataclass(frozen=True)
class NarrowPeaks(FloatFields):
    """Dense peak FLOP/s of one accelerator in formats of up to 8 bits; 0 if not supported."""

    fp8: Number = 0.0  # with one factor per tensor or block of a tensor [FLOP/s]
    mxfp8: Number = 0.0  # with one factor per 32 elements [FLOP/s]
    nvfp4: Number = 0.0  # 4 bits, with one factor per 16 elements [FLOP/s]


def _flags_in(record: Any, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(record, name)
        if isinstance(value, int | float):
            object.__setattr__(record, name, bool(value))


def with_flags_as_numbers(record: Any) -> Any:
    """Convert a record's flags to numbers, so that systems with different flags form a batch."""
    numbers = {name: np.asarray(value, float) for name, value in _bool_fields(record).items()}
    return dataclasses.replace(record, **numbers)


def _bool_fields(record: Any) -> dict[str, bool]:
    return {name: value for name, value in vars(record).items() if isinstance(value, bool)}


def _register_with_flags(kind: type) -> None:
    """Register a record as a pytree; flags that are bools become part of its structure."""

    # A compiled function contains only the features whose flags are True. Flags may also be arrays
    # of 0 and 1, which are numbers like others: systems with different flags then make one batch.
    def flatten(record: Any) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
        flags = _bool_fields(record)
        numbers = {name: value for name, value in vars(record).items() if name not in flags}
        names = tuple(numbers)
        return names, tuple(numbers.values()), (names, tuple(flags.items()))

    def unflatten(form: Any, numbers: Iterable[Any]) -> Any:
        names, flags = form
        return kind(**dict(zip(names, numbers, strict=True)), **dict(flags))

    register(kind, flatten, unflatten)


for _kind in (AttentionKernels, Contention, Efficiency, Link, Host, NarrowPeaks):
    register(_kind)
_register_with_flags(Collectives)
_register_with_flags(Kernels)


def _curve(dimension: str) -> FieldKind:
    """Return the kind of a share in files: a number, or a list of steps {"from_..", "share"}."""
    step = section({"from": FileField(NUMBER, dimension=dimension), "share": FileField(EFFICIENCY)})

    def read_curve(value: Any, where: str) -> Efficiency:
        """Read one share for all sizes, or the shares from given sizes on."""
        if not isinstance(value, list):
            return Efficiency(shares=(EFFICIENCY.read(value, where),))
        steps = [step.read(entry, where) for entry in value]
        sizes = [entry["from"] for entry in steps]
        if not sizes or sizes[0] != 0 or sizes != sorted(set(sizes)):
            raise ValueError(f"{where} must be steps that ascend from size 0")
        return Efficiency(tuple(sizes), tuple(entry["share"] for entry in steps))

    steps = {"type": "array", "items": json_schema(step.fields or {})}
    return FieldKind(read_curve, {"anyOf": [EFFICIENCY.schema, steps]})


def _algorithms(value: Any, where: str) -> dict[str, bool]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a list of {', '.join(ALGORITHMS)}")
    names = [resolve_choice(name, ALGORITHMS, where) for name in value]
    return {name: name in names for name in ALGORITHMS}


_ATTENTION_FIELDS = {
    name: FileField(EFFICIENCY, 0.0, target=name.replace("-", "_")) for name in ATTENTION
}
_ALGORITHM_LIST = {"type": "array", "items": {"enum": [*ALGORITHMS]}, "minItems": 1}


_KINDS = {
    "number": FileField(NUMBER),
    "positive": FileField(POSITIVE),
    "efficiency": FileField(EFFICIENCY),
    "share": FileField(SHARE),
    "factor": FileField(at_least(1)),
    "count": FileField(whole()),
    "text": FileField(TEXT),
}


def file_fields(name: str, kinds: Mapping[str, FileField]) -> dict[str, dict[str, FileField]]:
    """Read {section: {key: field}} of a file from `costs/data`; `kinds` names kinds of values."""
    sections, kinds = load_json(Path(__file__).parents[1] / f"data/{name}.json"), _KINDS | {**kinds}
    return {
        section: {key: kinds[field.pop("kind")]._replace(**field) for key, field in fields.items()}
        for section, fields in sections.items()
    }


# sections of a system file; a target is the path of a number in `System`
SECTIONS: Mapping[str, Mapping[str, FileField]] = file_fields(
    "system_fields",
    {
        "curve of FLOP": FileField(_curve("FLOP"), Efficiency()),
        "curve of bytes": FileField(_curve("B"), Efficiency()),
        "attention": FileField(section(_ATTENTION_FIELDS, AttentionKernels), AttentionKernels()),
        "algorithms": FileField(
            FieldKind(_algorithms, _ALGORITHM_LIST),
            {name: name == "halving" for name in ALGORITHMS},
        ),
    },
)
# {name of a number: its path in a `System`}; accelerators per node and algorithms have none
FIELDS: Mapping[str, tuple[str, ...]] = {
    f"{section}.{name}": tuple(field.target.split("."))
    for section, fields in SECTIONS.items()
    for name, field in fields.items()
    if field.target
}
# the time that a resource takes is proportional to this power of its parameter
POWERS: Mapping[str, int] = {"s": 1, "FLOP/s": -1, "B/s": -1}
POWER: Mapping[str, int] = {
    f"{section}.{name}": POWERS[field.dimension]
    for section, fields in SECTIONS.items()
    for name, field in fields.items()
    if field.dimension in POWERS
}
RESOURCES = tuple(POWER)
RECORDS: Mapping[str, type] = {
    **dict.fromkeys(("node", "network", "host_link"), Link),
    "collectives": Collectives,
    "contention": Contention,
    "host": Host,
    "kernels": Kernels,
    "narrow_peaks": NarrowPeaks,
}


def with_number(system: Any, name: str, value: Number) -> Any:
    """Return the system with another value of a named number, or with a batch of values."""
    # The value is checked as in a file. A share replaces a whole efficiency curve.
    canonical = resolve_name(name, tuple(FIELDS), "number of a system")
    if not is_traced(value):
        section_name, key = canonical.split(".")
        field = SECTIONS[section_name][key]
        may_be_zero = field.default == 0 or section_name == "host_link"  # 0: the file has no number
        for entry in np.unique(as_floats(value, canonical)).tolist():
            if entry or not may_be_zero:
                field.kind.read(entry, canonical)
    return _replace_at(system, FIELDS[canonical], value)


def _replace_at(record: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return the record with another number at a path of fields, as ("network", "bandwidth")."""
    field, *subpath = path
    if subpath == ["shares"]:
        value = Efficiency((0.0,), (value,))  # one share for every size
    elif subpath:
        value = _replace_at(getattr(record, field), tuple(subpath), value)
    return dataclasses.replace(record, **{field: value})


def override_number(system: Any, name: str, value: Number) -> Any:
    """Return the system with another value of a named number; NaN keeps the old value."""
    # So a batch of values may change only some systems. For a curve, all its shares are set.
    path = FIELDS[name]
    current: Any = system
    for field in path:
        current = getattr(current, field)
    is_number = value == value  # false for NaN
    if path[-1] != "shares":
        return _replace_at(system, path, xp.where(is_number, value, current))
    curve = getattr(system, path[0])
    shares = tuple(xp.where(is_number, value, share) for share in current)
    return dataclasses.replace(system, **{path[0]: dataclasses.replace(curve, shares=shares)})


# {SI unit: unit in which files state fitted numbers}
WRITTEN_IN: Mapping[str, str] = {
    "FLOP/s": "TFLOP_per_s",
    "B/s": "GB_per_s",
    "B": "GB",
    "FLOP": "GFLOP",
    "s": "us",
}


def number_dimension(name: str) -> str:
    """Return the SI unit of a number of a system, by its name; empty for a share or a count."""
    section, key = name.split(".")
    return SECTIONS[section][key].dimension


def system_number(system: Any, name: str) -> Number:
    """Return a system's number, by its name; for a curve, the share that the largest ops reach."""
    value: Any = system
    for part in FIELDS[name]:
        value = getattr(value, part)
    return value[-1] if isinstance(value, tuple) else value


def written_with(data: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """Return a system file's content with numbers replaced by `values`, {name: SI number}."""
    content = {key: dict(part) if isinstance(part, dict) else part for key, part in data.items()}
    for name, value in values.items():
        section_name, key = name.split(".")
        dimension = number_dimension(name)
        section = content.setdefault(section_name, {})
        factors = unit_factors(key, dimension)  # by key with a unit: latency_us, latency_ms ..
        for old_key in factors:
            section.pop(old_key, None)
        new_key = f"{key}_{WRITTEN_IN[dimension]}" if dimension else key
        section[new_key] = value / factors[new_key]
    return content
