"""A batch over several devices: the mesh that it is laid out on, and how it gets there.

A batch of NumPy arrays goes to all devices of this process, if there are several. A batch of
JAX arrays stays where it is; laid out over the devices of several processes, it is solved by all
of them, each its own part.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipejax.engine.batched.cost_rows import Leaves

BATCH = "batch"  # name of the axis of devices, where nobody else has named it


def spread_of(leaves: Leaves) -> NamedSharding | None:
    """Find the devices that a batch of JAX arrays is laid out over."""
    found: dict[NamedSharding, str] = {}
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
        found[NamedSharding(layout.mesh, PartitionSpec(first))] = name
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found.values())} are laid out over devices in two ways")
    return next(iter(found), None)


def spread_out(leaves: Leaves, size: int, least: int) -> tuple[Leaves, NamedSharding | None]:
    """Send a batch on the host to all devices of this process, parts of one size."""
    devices = jax.local_devices()
    if len(devices) == 1 or size < least * len(devices):
        return leaves, None
    over = NamedSharding(Mesh(np.array(devices), BATCH), PartitionSpec(BATCH))
    place = np.arange(size + -size % len(devices))
    placed = {
        name: jax.device_put(np.take(leaf, place, axis=0, mode="clip"), over)
        for name, leaf in leaves.items()
        if len(leaf) > 1
    }
    return {**leaves, **placed}, over
