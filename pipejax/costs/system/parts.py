"""Parts of a system, and all its numbers by name, as `network.bandwidth`.

Parts are efficiencies, links, collectives, kernels, the host that starts them. By its name a number
is read, replaced, and written to a system's file.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import as_floats, resolve_name
from pipejax.base.data_files import UNITS
from pipejax.base.display import short_repr
from pipejax.base.trees import register
from pipejax.costs import array_functions as xp
from pipejax.costs.precision import FloatFields, floats_in, is_traced

Numbers = float | Float[Array, "..."] | Float[NumpyArray, "..."]  # one, or one for each stage
if TYPE_CHECKING:
    Number = float | Array  # NumPy's arrays, too: in every product they double what mypy takes
else:
    Number = Numbers
Flag = bool | Number

# share of an accelerator's memory that is left for what tensors do not tell: fragmentation, what
# the allocator keeps. Of 2,327 measured runs 27 are predicted to have left less; both tables of
# llm-foundry, whose microbatches were made as large as fit, end at 0.901 and 0.912 of the memory
HEADROOM = 0.1
ALGORITHMS = ("halving", "ring", "tree", "hierarchical")


@short_repr
@dataclasses.dataclass(frozen=True)
class Efficiency(FloatFields):
    """Share of a peak rate that an op of a given size reaches: a step curve.

    Attributes:
      sizes: (steps) smallest size of each step [FLOP or bytes], ascending from 0.
      shares: (steps) share of the peak in each step.
    """

    sizes: tuple[Number, ...] = (0.0,)
    shares: tuple[Number, ...] = (1.0,)

    def at(self, size: Number) -> Number:
        """Return the share of the peak at a size [FLOP or bytes]."""
        share = xp.asarray(self.shares[0], float)
        for step, value in zip(self.sizes[1:], self.shares[1:], strict=True):
            share = xp.where(size >= step, value, share)
        return share


@short_repr
@dataclasses.dataclass(frozen=True)
class Link(FloatFields):
    """A connection between two workers.

    Attributes:
      bandwidth: one direction [B/s].
      latency: [s].
      efficiency: share of the bandwidth that a message reaches.
    """

    bandwidth: Number
    latency: Number
    efficiency: Number = 1.0

    @property
    def rate(self) -> Number:
        """Return the bandwidth that a message reaches [B/s]."""
        return self.bandwidth * self.efficiency


@short_repr
@dataclasses.dataclass(frozen=True)
class Collectives:
    """Implementation of collectives in a system's library.

    The first four say whether an algorithm may be used; the fastest of them is.

    Attributes:
      halving: recursive halving over the slowest kind of link.
      ring: rings through all accelerators.
      tree: two binary trees of nodes, for all-reduces.
      hierarchical: rings inside nodes, then between them.
      latency: of each collective, besides the links' [s].
      simple_latency: more of it where the whole bandwidth is used [s].
      low_latency_share: share of the bandwidth that is reached without waiting for that.
      copies: passes of the tensor through memory that the links wait for.
    """

    halving: Flag = True
    ring: Flag = False
    tree: Flag = False
    hierarchical: Flag = False
    latency: Number = 0.0
    simple_latency: Number = 0.0
    low_latency_share: Number = 1.0
    copies: Number = 0.0

    def __post_init__(self) -> None:
        _flags_in(self, ALGORITHMS)
        floats_in(self)


@short_repr
@dataclasses.dataclass(frozen=True)
class Kernels:
    """Times of a layer's kernels, beyond peak rates and their shares.

    Attributes:
      priced: whether every kernel of a layer is priced; if not, each phase of it is one roofline.
      sharpness: exponent of the maximum of device and host, (device^q + host^q)^(1/q).
      attention_efficiency: share of a plain product's rate that attention's products reach.
      misaligned_efficiency: share of it where rows of the output are no multiple of 16 bytes.
      narrow_efficiency: share that products below 16 bits reach, of a plain product's share of its
        peak.
      elementwise: bytes that norms, activation functions and residuals move, over those of fused
        kernels in the model's precision: more where each operation reads and writes by itself, or
        casts.
    """

    priced: Flag = False
    sharpness: Number = 4.0
    attention_efficiency: Number = 1.0
    misaligned_efficiency: Number = 1.0
    narrow_efficiency: Number = 1.0
    elementwise: Number = 1.0

    def __post_init__(self) -> None:
        _flags_in(self, ("priced",))
        floats_in(self)


@short_repr
@dataclasses.dataclass(frozen=True)
class AttentionKernels(FloatFields):
    """Speed of attention kernels: the share of the peak that their products reach.

    Forward and backward under a causal mask together; 0 where it is not known.

    Attributes:
      flash_attention_1: FlashAttention 1 and its Triton kernels.
      flash_attention_2: FlashAttention 2.
      flash_attention_3: FlashAttention 3.
      flash_attention_4: FlashAttention 4.
      cudnn: cuDNN's, as Transformer Engine calls it.
    """

    flash_attention_1: Number = 0.0
    flash_attention_2: Number = 0.0
    flash_attention_3: Number = 0.0
    flash_attention_4: Number = 0.0
    cudnn: Number = 0.0


ATTENTION = tuple(field.name.replace("_", "-") for field in dataclasses.fields(AttentionKernels))


@short_repr
@dataclasses.dataclass(frozen=True)
class Host(FloatFields):
    """Times of the processor that starts the kernels, and the rate of its memory.

    Attributes:
      launch: of one kernel [s].
      layer: of one phase of one layer, beside its kernels [s].
      collective: of one collective [s].
      microbatch: of one phase of a stage, beside its layers [s].
      step: of one step [s].
      memory_bandwidth: of its memory, the part of one accelerator; 0 where it is unknown [B/s].
    """

    launch: Number = 0.0
    layer: Number = 0.0
    collective: Number = 0.0
    microbatch: Number = 0.0
    step: Number = 0.0
    memory_bandwidth: Number = 0.0


@short_repr
@dataclasses.dataclass(frozen=True)
class NarrowPeaks(FloatFields):
    """Dense peaks of one accelerator in formats of 8 bits and fewer; 0 where it has none.

    Attributes:
      fp8: with one factor per tensor or block of a tensor [FLOP/s].
      mxfp8: with one factor per 32 elements [FLOP/s].
      nvfp4: 4 bits, with one factor per 16 elements [FLOP/s].
    """

    fp8: Number = 0.0
    mxfp8: Number = 0.0
    nvfp4: Number = 0.0


def _flags_in(record: Any, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(record, name)
        if isinstance(value, int | float):
            object.__setattr__(record, name, bool(value))


def with_flags_as_numbers(record: Any) -> Any:
    """Return a record with flags as numbers, which makes a batch with records of other flags."""
    numbers = {name: np.asarray(value, float) for name, value in _bool_fields(record).items()}
    return dataclasses.replace(record, **numbers)


def _bool_fields(record: Any) -> dict[str, bool]:
    return {name: value for name, value in vars(record).items() if isinstance(value, bool)}


def _register_with_flags(kind: type) -> None:
    """Make a record a pytree; flags that are known belong to its structure."""

    # What is compiled for it leaves out what they say is not there. Flags as arrays of 0 and 1 are
    # numbers like others: systems with different flags then make one batch.
    def apart(record: Any) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
        flags = _bool_fields(record)
        numbers = {name: value for name, value in vars(record).items() if name not in flags}
        names = tuple(numbers)
        return names, tuple(numbers.values()), (names, tuple(flags.items()))

    def together(form: Any, numbers: Iterable[Any]) -> Any:
        names, flags = form
        return kind(**dict(zip(names, numbers, strict=True)), **dict(flags))

    register(kind, apart, together)


for _kind in (AttentionKernels, Efficiency, Link, Host, NarrowPeaks):
    register(_kind)
_register_with_flags(Collectives)
_register_with_flags(Kernels)

# defaults of missing sections
WHOLE_LAYERS, FREE_HOST, NO_NARROW_PEAKS = Kernels(), Host(), NarrowPeaks()
NO_KERNELS = AttentionKernels()
NO_LINK, HALVING = Link(0.0, 0.0), Collectives()


KERNEL_SHARES = ("attention_efficiency", "misaligned_efficiency", "narrow_efficiency")
# sections of a system file, and the dimension of each quantity in them
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "compute": {
        "peak": "FLOP/s",
        "fp8_peak": "FLOP/s",
        "mxfp8_peak": "FLOP/s",
        "nvfp4_peak": "FLOP/s",
        "latency": "s",
        "efficiency": "",
    },
    "memory": {
        "capacity": "B",
        "reserve": "B",
        "bandwidth": "B/s",
        "latency": "s",
        "efficiency": "",
    },
    "node": {"gpus": "", "bandwidth": "B/s", "latency": "s", "efficiency": "", "mesh": ""},
    "network": {"bandwidth": "B/s", "latency": "s", "efficiency": "", "gpus_per_nic": ""},
    "collectives": {
        "algorithms": "",
        "latency": "s",
        "simple_latency": "s",
        "low_latency_share": "",
        "copies": "",
    },
    "kernels": dict.fromkeys(("sharpness", *KERNEL_SHARES, "elementwise", "attention"), ""),
    "host": {
        **dict.fromkeys(("launch", "layer", "collective", "microbatch", "step"), "s"),
        "memory_bandwidth": "B/s",
    },
    "optimizer": {"efficiency": ""},
    "host_link": {"bandwidth": "B/s", "latency": "s", "efficiency": ""},
    "price": {"accelerator": "USD/s"},
}
# where each quantity stands in a `System`; accelerators in a node and algorithms are no costs
FIELDS: Mapping[str, tuple[str, ...]] = {
    "compute.peak": ("peak_flops",),
    "compute.latency": ("compute_latency",),
    "compute.efficiency": ("compute_efficiency", "shares"),
    "memory.capacity": ("memory_capacity",),
    "memory.reserve": ("memory_reserve",),
    "memory.bandwidth": ("memory_bandwidth",),
    "memory.latency": ("memory_latency",),
    "memory.efficiency": ("memory_efficiency", "shares"),
    "node.bandwidth": ("node", "bandwidth"),
    "node.latency": ("node", "latency"),
    "node.efficiency": ("node", "efficiency"),
    "network.bandwidth": ("network", "bandwidth"),
    "network.latency": ("network", "latency"),
    "network.efficiency": ("network", "efficiency"),
    "network.gpus_per_nic": ("gpus_per_nic",),
    "node.mesh": ("mesh",),
    "collectives.latency": ("collectives", "latency"),
    "collectives.simple_latency": ("collectives", "simple_latency"),
    "collectives.low_latency_share": ("collectives", "low_latency_share"),
    "collectives.copies": ("collectives", "copies"),
    **{f"compute.{name}_peak": ("narrow_peaks", name) for name in ("fp8", "mxfp8", "nvfp4")},
    **{f"kernels.{name}": ("kernels", name) for name in ("sharpness", *KERNEL_SHARES)},
    "kernels.elementwise": ("kernels", "elementwise"),
    **{f"host.{name}": ("host", name) for name in SECTIONS["host"]},
    "optimizer.efficiency": ("optimizer_efficiency",),
    "price.accelerator": ("price",),
    **{f"host_link.{name}": ("host_link", name) for name in SECTIONS["host_link"]},
}


def with_number(system: Any, name: str, value: Number) -> Any:
    """Return a system with another number, or a batch of them; a share replaces a whole curve."""
    canonical = resolve_name(name, tuple(FIELDS), "number of a system")
    if not is_traced(value):
        numbers = as_floats(value, canonical)
        if not np.all(np.isfinite(numbers) & (numbers >= 0)):
            raise ValueError(f"{canonical} must be a number of at least 0, got {value!r}")
    return _with(system, FIELDS[canonical], value)


def _with(tree: Any, path: tuple[str, ...], value: Number) -> Any:
    name, *rest = path
    if rest == ["shares"]:
        return dataclasses.replace(tree, **{name: Efficiency((0.0,), (value,))})
    new = _with(getattr(tree, name), tuple(rest), value) if rest else value
    return dataclasses.replace(tree, **{name: new})


def with_known(system: Any, name: str, value: Number) -> Any:
    """Return a system with another number, or with one share for a whole curve; NaN keeps it."""
    path = FIELDS[name]
    current: Any = system
    for field in path:
        current = getattr(current, field)
    is_given = value == value  # false for NaN
    if path[-1] != "shares":
        return _with(system, path, xp.where(is_given, value, current))
    curve = getattr(system, path[0])
    shares = tuple(xp.where(is_given, value, share) for share in current)
    return dataclasses.replace(system, **{path[0]: dataclasses.replace(curve, shares=shares)})


# in which unit a file states a quantity that was fitted
WRITTEN_IN: Mapping[str, str] = {
    "FLOP/s": "TFLOP_per_s",
    "B/s": "GB_per_s",
    "B": "GB",
    "FLOP": "GFLOP",
    "s": "us",
}


def number_dimension(name: str) -> str:
    """Return the SI unit of a number, empty for a share or a count."""
    section, key = name.split(".")
    return SECTIONS[section][key]


def system_number(system: Any, name: str) -> Number:
    """Return a number of a system; of a curve, the share that the largest ops reach."""
    value: Any = system
    for part in FIELDS[name]:
        value = getattr(value, part)
    return value[-1] if isinstance(value, tuple) else value


def written_with(data: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """Return the content of a system file with some numbers replaced, in the usual units."""
    # `values` are in SI units. All other entries of the file stay as they are.
    changed = {key: dict(part) if isinstance(part, dict) else part for key, part in data.items()}
    for name, value in values.items():
        section, key = name.split(".")
        dimension = SECTIONS[section][key]
        entry = changed.setdefault(section, {})
        units = [f"{key}_{unit}" for unit, (kind, _) in UNITS.items() if kind == dimension]
        for old_key in (key, *units):
            entry.pop(old_key, None)
        if dimension:
            unit = WRITTEN_IN[dimension]
            entry[f"{key}_{unit}"] = value / UNITS[unit][1]
        else:
            entry[key] = value
    return changed
