"""The numbers of a system by name, as `network.bandwidth`: their units, and where they stand."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipejax.base.checks import as_floats, known_as
from pipejax.costs.precision import is_traced
from pipejax.costs.system_parts import Efficiency, Number

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
    "kernels": dict.fromkeys(("sharpness", *KERNEL_SHARES), ""),
    "host": dict.fromkeys(("launch", "layer", "collective", "microbatch", "step"), "s"),
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
    **{f"{part}.{name}": (part, name) for part in ("kernels", "host") for name in SECTIONS[part]},
    "optimizer.efficiency": ("optimizer_efficiency",),
    **{f"host_link.{name}": ("host_link", name) for name in SECTIONS["host_link"]},
}


def with_number(system: Any, name: str, value: Number) -> Any:
    """Replace a number, or a batch of them; a share in the place of a curve holds for all sizes."""
    known = known_as(name, tuple(FIELDS), "number of a system")
    if not is_traced(value):
        given = as_floats(value, known)
        if not np.all(np.isfinite(given) & (given >= 0)):
            raise ValueError(f"{known} must be a number of at least 0, got {value!r}")
    return _with(system, FIELDS[known], value)


def _with(tree: Any, path: tuple[str, ...], value: Number) -> Any:
    name, *rest = path
    if rest == ["shares"]:
        return dataclasses.replace(tree, **{name: Efficiency((0.0,), (value,))})
    new = _with(getattr(tree, name), tuple(rest), value) if rest else value
    return dataclasses.replace(tree, **{name: new})
