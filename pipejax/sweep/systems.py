"""The systems of a block: all combinations of systems and of values of their fields, as batches."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.system import FIELDS, Efficiency, System
from pipejax.sweep.axes import Axis

CURVES = ("compute_efficiency", "memory_efficiency")


class SystemBatch(NamedTuple):
    """Systems stacked along the first axis of every field.

    Attributes:
      systems: fields with the batch axis first.
      gpus_per_node: (batch) accelerators of a node.
    """

    systems: System
    gpus_per_node: Int[NumpyArray, " batch"]


def stack_systems(axes: tuple[Axis, ...]) -> SystemBatch:
    """Stack all systems of a block, the last field fastest."""
    of_systems, per_node, *fields = axes
    inner = tuple(len(axis.values) for axis in fields)
    full = (len(of_systems.values), len(per_node.values), *inner)
    gpus = [
        [gpus or system.gpus_per_node for gpus in per_node.values] for system in of_systems.values
    ]
    stacked = jax.tree.map(
        lambda *leaves: np.array(leaves, float).reshape((-1, 1) + (1,) * len(inner)),
        *_alike(of_systems.values),
    )
    for k, axis in enumerate(fields):
        along = (len(axis.values), *(1,) * (len(inner) - k - 1))
        stacked = _put(stacked, FIELDS[axis.name], np.array(axis.values).reshape(along))
    return SystemBatch(
        jax.tree.map(lambda leaf: np.broadcast_to(leaf, full).ravel(), stacked),
        np.repeat(np.ravel(gpus), int(np.prod(inner))),
    )


def _alike(systems: tuple[System, ...]) -> list[System]:
    """Drop names, and give efficiency curves equally many steps: those added begin at infinity."""
    longest = {name: max(len(getattr(system, name).sizes) for system in systems) for name in CURVES}

    def lengthened(curve: Efficiency, steps: int) -> Efficiency:
        more = steps - len(curve.sizes)
        return Efficiency(curve.sizes + (np.inf,) * more, curve.shares + curve.shares[-1:] * more)

    def alike(system: System) -> System:
        curves: dict[str, Any] = {
            name: lengthened(getattr(system, name), steps) for name, steps in longest.items()
        }
        return dataclasses.replace(system, name="", source="", gpus_per_node=0, **curves)

    return [alike(system) for system in systems]


def _put(tree: Any, path: tuple[str, ...], value: NumpyArray) -> Any:
    """Replace a field; a share in the place of a curve is the same for all sizes."""
    name, *rest = path
    if rest == ["shares"]:
        return dataclasses.replace(tree, **{name: Efficiency((0.0,), (value,))})
    new = _put(getattr(tree, name), tuple(rest), value) if rest else value
    return dataclasses.replace(tree, **{name: new})
