"""Seconds of collectives, by algorithm: how often data waits for a link, and how much of it passes.

An algorithm is a function from numbers to a `Route`: hops and bytes on the links inside a node and
on those between nodes. A system says which algorithms it may use; the fastest is taken, as NCCL
does. A group of n accelerators has q of them in each of n / q nodes. What crosses to another node
is spread over the q shares of NICs that the q accelerators bring along; other groups of the same
node use the other shares at the same time.

Volume is the whole tensor's: what an all-reduce has on each accelerator, what an all-gather leaves
there, what a reduce-scatter starts from. In an all-to-all it is what one accelerator holds before
it, of which 1 / n stays; in a ring exchange what passes by in one round, 1 / n of it in each step.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from pipejax.costs.layout import Group
from pipejax.costs.precision import as_float
from pipejax.costs.system import Number, System


class Route(NamedTuple):
    """What one accelerator waits for and sends in one collective.

    Attributes:
      near_hops: links inside the node that data passes one after another.
      far_hops: the same between nodes.
      near_bytes: what an accelerator sends inside its node.
      far_bytes: what it sends over its share of the NICs.
      in_turn: whether the two kinds of links work one after the other, not at once.
    """

    near_hops: Number
    far_hops: Number
    near_bytes: Number
    far_bytes: Number
    in_turn: bool = False


def _halving(passes: int, volume: Number, group: Group) -> Route:
    """Recursive halving (and doubling) over one kind of link, the slowest that the group has.

    References:
      Rabenseifner's all-reduce, as in Chimera (arXiv:2107.06925), section 3.4.
    """
    n, far = group.size, _crosses(group)
    hops = passes * jnp.log2(n)
    moved = passes * (n - 1) / n * volume
    return Route((1 - far) * hops, far * hops, (1 - far) * moved, far * moved)


def _ring(passes: int, volume: Number, group: Group) -> Route:
    """Rings through all accelerators, node by node: q of them, each through another NIC.

    Per pass a part of the tensor takes n - 1 of the ring's n hops. The one that is left out lies
    inside a node for the part that waits longest, or, with one accelerator per node, between two.
    """
    n, q, far = group.size, group.inside, _crosses(group)
    crossings = far * jnp.minimum(n / q, n - 1)
    moved = passes * (n - 1) / n * volume
    return Route(
        near_hops=passes * (n - 1 - crossings),
        far_hops=passes * crossings,
        near_bytes=(1 - far / q) * moved,
        far_bytes=far / q * moved,
    )


def _tree(passes: int, volume: Number, group: Group) -> Route:
    """Two binary trees of nodes with half the tensor each, chains inside: only for all-reduces.

    A node is a leaf of one tree and an inner node of the other. Up and down it sends the tensor
    twice. Other collectives take the ring.
    """
    if passes == 1:
        return _ring(passes, volume, group)
    q, far = group.inside, _crosses(group)
    return Route(
        near_hops=passes * (q - 1),
        far_hops=passes * jnp.log2(group.size / q),
        near_bytes=passes * (q > 1) * volume,
        far_bytes=passes * far / q * volume,
    )


def _hierarchical(passes: int, volume: Number, group: Group) -> Route:
    """A ring inside each node, and q rings between nodes, each for its part of the tensor."""
    q = group.inside
    nodes = group.size / q
    return Route(
        near_hops=passes * (q - 1),
        far_hops=passes * (nodes - 1),
        near_bytes=passes * (q - 1) / q * volume,
        far_bytes=passes * (nodes - 1) / nodes * volume / q,
        in_turn=True,
    )


ROUTES: Mapping[str, Callable[[int, Number, Group], Route]] = {
    "halving": _halving,
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
# how often the tensor goes round: an all-reduce is a reduce-scatter and an all-gather
PASSES: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def _all_to_all(system: System, volume: Number, group: Group) -> Route:
    """All pairs at once: a share of 1 / n for each other accelerator."""
    n, q, far = group.size, group.inside, _crosses(group)
    return Route(1.0 * (q > 1), far, (q - 1) / n * volume, (n - q) / n * volume)


def _ring_exchange(system: System, volume: Number, group: Group) -> Route:
    """One round, n - 1 steps to the next accelerator: each step lasts as long as its slowest hop.

    One accelerator of a node sends to another node, all others stay inside. It has its NIC to
    itself but for those beside it, of other groups, that send at the same time.
    """
    n, q, far = group.size, group.inside, _crosses(group)
    neighbours = jnp.clip(system.gpus_per_node / q, 1.0, system.gpus_per_nic)
    moved = (n - 1) / n * volume
    return Route(
        near_hops=(1 - far) * (n - 1),
        far_hops=far * (n - 1),
        near_bytes=(q > 1) * moved,
        far_bytes=far * neighbours / system.gpus_per_nic * moved,
    )


# what has one way whatever the system's algorithms
DIRECT: Mapping[str, Callable[[System, Number, Group], Route]] = {
    "all_to_all": _all_to_all,
    "ring": _ring_exchange,
}


def collective_time(
    system: System, kind: str, volume: Number, group: Group, count: Number = 1.0
) -> Number:
    """Time [s] of `count` equal collectives, one after another; 0 within a group of one.

        t = base + hops latency + min(x + simple, x / share),   x = bytes / bandwidth + copies

    The minimum is over NCCL's two protocols: flags beside the data spare waiting, and cost a share
    of the bandwidth. Copies are passes of the tensor through memory that links wait for.

    `kind`: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ring".
    """
    volume, count = as_float(volume), as_float(count)
    group = Group(*map(as_float, group))
    if kind in DIRECT:
        fastest = _route_time(system, DIRECT[kind](system, volume, group), volume / 2)
    else:
        copied = PASSES[kind] * volume / 2
        times = [
            jnp.where(
                getattr(system.collectives, name) > 0,
                _route_time(system, algorithm(PASSES[kind], volume, group), copied),
                jnp.inf,
            )
            for name, algorithm in ROUTES.items()
        ]
        fastest = functools.reduce(jnp.minimum, times)
    return jnp.where(group.size > 1, count * fastest, 0.0)


def _route_time(system: System, route: Route, copied: Number) -> Number:
    """Time [s] of one collective, whose tensor passes `copied` bytes through memory per copy."""
    of = system.collectives
    near, far = route.near_bytes / system.node.rate, route.far_bytes / system.network.rate
    on_links = near + far if route.in_turn else jnp.maximum(near, far)
    moving = on_links + of.copies * copied / system.memory_bandwidth
    hops = route.near_hops * system.node.latency + route.far_hops * system.network.latency
    return (
        of.latency + hops + jnp.minimum(moving + of.simple_latency, moving / of.low_latency_share)
    )


def _crosses(group: Group) -> Number:
    """1 where the group spans several nodes, else 0."""
    return 1.0 * (group.size > group.inside)
