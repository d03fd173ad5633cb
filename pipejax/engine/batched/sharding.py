"""A batch over several devices: the mesh that it is laid out on, and how it gets there.

A batch of NumPy arrays goes to all devices of this process, if there are several. A batch of
JAX arrays stays where it is; laid out over the devices of several processes, it is solved by all
of them, each its own part.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pipejax.engine.batched.cost_rows import Leaves

BATCH = "batch"  # name of the axis of devices, where nobody else has named it


class Spread(NamedTuple):
    """Devices in the order of the parts of a batch.

    Attributes:
      mesh: the devices.
      axis: names of the axes of the mesh along which the batch is cut.
    """

    mesh: Mesh | AbstractMesh
    axis: str | tuple[str, ...]

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of an array on these devices."""
        return NamedSharding(self.mesh, spec)


def spread_of(leaves: Leaves) -> Spread | None:
    """Find the devices that a batch of JAX arrays is laid out over."""
    found: dict[Spread, str] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
            continue
        layout = leaf.sharding
        cut = tuple(layout.spec) if isinstance(layout, NamedSharding) else ()
        first, *others = (*cut, None)
        if not isinstance(layout, NamedSharding) or first is None or set(others) != {None}:
            raise ValueError(
                f"{name} lies on several devices as {layout}: a batch is cut along its "
                "first axis and no other"
            )
        found[Spread(layout.mesh, first)] = name
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found.values())} are laid out over devices in two ways")
    return next(iter(found), None)


def spread_out(leaves: Leaves, size: int, least: int) -> tuple[Leaves, Spread | None]:
    """Send a batch on the host to all devices of this process."""
    devices = jax.local_devices()
    if len(devices) == 1 or size < least * len(devices):
        return leaves, None
    over = Spread(Mesh(np.array(devices), BATCH), BATCH)
    more = -size % len(devices)
    placed = {}
    for name, leaf in leaves.items():
        if len(leaf) > 1:
            widths = [(0, more)] + [(0, 0)] * (leaf.ndim - 1)
            filled = np.pad(np.asarray(leaf), widths, mode="edge") if more else leaf
            leaf = jax.device_put(filled, over.sharding(PartitionSpec(BATCH)))
        placed[name] = leaf
    return placed, over
