"""Times of collectives by algorithm, and the collectives that a layer runs.

An algorithm is a function that returns a `Route`: hops and bytes on links inside a node and
between nodes. As in NCCL, the fastest algorithm that a system lists is used. A group of n
accelerators has q of them in each of n / q nodes, and sends to other nodes over the NICs of all q.

The volume is the size of the whole tensor. For an all-to-all it is the data of one accelerator, of
which 1 / n stays. For a ring exchange it is the data of one round; each step sends 1 / n of it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipejax.base.jax_on_demand import register
from pipejax.costs import array_functions as xp
from pipejax.costs.layers.formulas import Phases, accelerator_tokens, boundary_bytes
from pipejax.costs.model.layout import Group, Layout
from pipejax.costs.model.model import Model, recomputed_modules
from pipejax.costs.precision import as_float
from pipejax.costs.system.parts import Flag
from pipejax.costs.system.system import Number, System


class Spread(NamedTuple):
    """Size of a tensor, and of the group of accelerators that runs a collective on it."""

    volume: Number  # size of the whole tensor [B]
    size: Number  # n, accelerators
    per_node: Number  # q, accelerators in each node
    nodes: Number  # n / q, nodes
    multinode: Number  # 1 for several nodes, else 0
    sent_bytes: Number  # bytes that an accelerator sends in a pass: (n - 1) / n of the volume
    copies: Number = 0.0  # accelerators that each piece goes to; 0 if every piece differs

    @classmethod
    def over(cls, group: Group, volume: Number, copies: Number = 0.0) -> "Spread":
        """Describe a collective on a tensor of `volume` bytes in a group of accelerators."""
        n, q, volume = map(as_float, (*group, volume))
        return cls(volume, n, q, n / q, 1.0 * (n > q), (n - 1) / n * volume, copies)


class Route(NamedTuple):
    """Hops in sequence, and bytes that each accelerator sends, for one pass of a collective."""

    near_hops: Number  # links inside the node that data passes one after another
    far_hops: Number  # links between nodes that data passes one after another
    near_bytes: Number  # bytes that an accelerator sends inside its node
    far_bytes: Number  # bytes that an accelerator sends over its share of the NICs
    is_sequential: bool = False  # whether far bytes wait for near bytes


def _halving(spread: Spread) -> Route:
    """Return the route of recursive halving and doubling; all data crosses the slowest links."""
    # source: Rabenseifner's all-reduce, as in Chimera (arXiv:2107.06925), section 3.4.
    hops, far, near = xp.log2(spread.size), spread.multinode, 1 - spread.multinode
    return Route(near * hops, far * hops, near * spread.sent_bytes, far * spread.sent_bytes)


def _ring(spread: Spread) -> Route:
    """Return the route of one ring per NIC, each through all accelerators, node after node."""
    # A part of the tensor takes n - 1 of its ring's n hops. The missing hop of the slowest part
    # lies inside a node, or between nodes if each has one accelerator.
    steps = spread.size - 1
    crossings = spread.multinode * xp.minimum(spread.nodes, steps)
    # 1 / `per_node` of an accelerator's bytes leave its node; `multinode` is 0 for a single node
    far_bytes = spread.multinode / spread.per_node * spread.sent_bytes
    return Route(steps - crossings, crossings, spread.sent_bytes - far_bytes, far_bytes)


def _tree(spread: Spread) -> Route:
    """Return the route of an all-reduce over two trees of nodes, with chains inside nodes."""
    # A node is a leaf of one tree and an inner node of the other, and sends the tensor once on the
    # way up and once on the way down.
    far_bytes = spread.multinode / spread.per_node * spread.volume
    near_bytes = (spread.per_node > 1) * spread.volume
    return Route(spread.per_node - 1, xp.log2(spread.nodes), near_bytes, far_bytes)


def _hierarchical(spread: Spread) -> Route:
    """Return the route of a ring inside each node of q accelerators, then q rings of nodes."""
    near_hops, far_hops = spread.per_node - 1, spread.nodes - 1
    part = spread.volume / spread.per_node
    far_bytes = far_hops / spread.nodes * part
    return Route(near_hops, far_hops, near_hops * part, far_bytes, is_sequential=True)


def _pairs(spread: Spread) -> Route:
    """Return the route of an all-to-all: each of n accelerators sends 1 / n to every other."""
    # If each piece goes to k = `copies` accelerators, one copy goes to each node that has any of
    # the k, and is passed on inside the node. Each of N nodes has one of the k accelerators with
    # probability 1 - (1 - 1 / N)^k: with 8 copies and 4 nodes, 3.6 nodes get a copy. N - 1 of the
    # N nodes are other nodes. In a node of q accelerators, 1 / q of those that get a piece have
    # the node's copy already.
    # source: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2: cross-node all-to-all.
    has_copies = spread.copies > 0
    k = xp.where(has_copies, spread.copies, 1.0)

    def mean_reached(count: Number) -> Number:
        """Return how many of `count` nodes (or accelerators) a piece reaches on average."""
        return count * (1 - (1 - 1 / count) ** k)

    near_copies = (1 - 1 / spread.per_node) * mean_reached(spread.size) * spread.volume / k
    far_copies = (1 - 1 / spread.nodes) * mean_reached(spread.nodes) * spread.volume / k
    piece = spread.volume / spread.size
    return Route(
        near_hops=1.0 * (spread.per_node > 1),
        far_hops=spread.multinode,
        near_bytes=xp.where(has_copies, near_copies, (spread.per_node - 1) * piece),
        far_bytes=xp.where(has_copies, far_copies, (spread.size - spread.per_node) * piece),
    )


def _steps(spread: Spread) -> Route:
    """Return the route of a ring exchange: n - 1 sends to the next of n accelerators."""
    # In each node, one accelerator sends to the next node, over its share of a NIC.
    steps, far = spread.size - 1, spread.multinode
    near_bytes = (spread.per_node > 1) * spread.sent_bytes
    return Route((1 - far) * steps, far * steps, near_bytes, far * spread.sent_bytes)


ROUTES: Mapping[str, Callable[[Spread], Route]] = {
    "halving": _halving,
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
# passes over the tensor: an all-reduce is a reduce-scatter, then an all-gather
PASSES: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
# collectives with one route for all algorithms of a system
DIRECT: Mapping[str, Callable[[Spread], Route]] = {"all_to_all": _pairs, "ring": _steps}


def collective_time(
    system: System,
    kind: str,
    volume: Number,
    group: Group,
    count: Number = 1.0,
    copies: Number = 0.0,
) -> Number:
    """Return the time [s] of `count` equal collectives in sequence; 0 for one accelerator."""
    # `kind` is a key of `PASSES` or `DIRECT`. `volume` [B] is the whole tensor; for an all-to-all,
    # the data of one accelerator, of which `copies` accelerators (if above 0) get each piece.
    #     t = base + hops latency + min(x + simple, x / share),   x = bytes / bandwidth + copy time
    # The minimum is over NCCL's protocols Simple and LL. LL sends flags with the data, which saves
    # the latency `simple` and costs a share of the bandwidth.
    spread = Spread.over(group, volume, copies)
    peers = 1.0 if kind == "ring" else spread.per_node - 1
    passes, library = PASSES.get(kind, 1), system.collectives  # an all-reduce has 2 passes
    near_latency, far_latency = passes * system.node.latency, passes * system.network.latency
    near_rate = system.node.rate * system.reached(peers) / passes
    far_rate = system.network.rate / passes
    copy_seconds = passes / 2 * library.copies / system.memory_bandwidth * spread.volume

    def route_time(route: Route, nic_rate: Number) -> Number:
        """Return the time [s] of a route's hops and bytes, with the faster of two protocols."""
        near, far = route.near_bytes / near_rate, route.far_bytes / nic_rate
        transfer = near + far if route.is_sequential else xp.maximum(near, far)
        x = transfer + copy_seconds
        hop_seconds = route.near_hops * near_latency + route.far_hops * far_latency
        return hop_seconds + xp.minimum(x + library.simple_latency, x / library.low_latency_share)

    if kind in DIRECT:
        if kind == "ring":
            # accelerators of other groups in the node send over the same NIC at the same time
            neighbours = xp.clip(system.gpus_per_node / spread.per_node, 1.0, system.gpus_per_nic)
            far_rate = far_rate * (system.gpus_per_nic / neighbours)
        fastest = route_time(DIRECT[kind](spread), far_rate)
    else:
        fastest = math.inf
        for name, allows in _algorithms(system, kind).items():
            if allows is not False:  # a bool, or a number, which may be traced
                seconds = route_time(ROUTES[name](spread), far_rate)
                allowed = seconds if allows is True else xp.where(allows > 0, seconds, math.inf)
                fastest = xp.minimum(fastest, allowed)
    return xp.where(spread.size > 1, as_float(count) * (library.latency + fastest), 0.0)


def _algorithms(system: System, kind: str) -> dict[str, Flag]:
    """Return {algorithm: whether the system may use it for this kind of collective}."""
    # Values are booleans, or 0 and 1 for a batch of systems. Only all-reduces use trees: for other
    # kinds, the flag of the tree allows a ring.
    flags = {name: getattr(system.collectives, name) for name in ROUTES}
    if kind != "all_reduce":
        ring, tree = flags["ring"], flags.pop("tree")
        if isinstance(ring, bool) and isinstance(tree, bool):
            flags["ring"] = ring or tree
        else:
            flags["ring"] = xp.maximum(ring, tree)
    return flags


# exchanges of each phase between the accelerators that share a layer


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of collective in a group: bytes and number of repetitions in each phase."""

    # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "ring"
    kind: str = dataclasses.field(metadata={"static": True})
    # "tensor", "context", "expert", "expert_tensor" or "data"
    group: str = dataclasses.field(metadata={"static": True})
    volume: Phases  # bytes of the whole tensor; for an all-to-all, bytes that an accelerator holds
    count: Phases  # number of exchanges
    # what hides it: "attention" of the same phase, products of "input_grad" or "weight_grad",
    # a "layer" of another microbatch, or "" for nothing
    overlaps_with: str = dataclasses.field(default="", metadata={"static": True})
    # accelerators that get each piece from one copy per node; 0 if each gets its own copy
    copies: Number = 0.0


register(Collective)


def _in_all_phases(volume: Number) -> Phases:
    return Phases(volume, volume, volume)


def layer_collectives(
    model: Model, layout: Layout, kind: str = "dense", *, recompute: str = "none"
) -> tuple[Collective, ...]:
    """List the collectives that a layer runs in each phase."""
    # Tensor parallelism: F has an all-reduce after attention and one after the MLP, and so has I.
    # Megatron runs those of I beside the weight gradients of the same product. Under sequence
    # parallelism each is an all-gather and a reduce-scatter, and W gathers its inputs once more,
    # beside the products of I. Both forms are listed, one with counts of 0, because the choice may
    # be traced. Context parallelism: keys and values go round a ring beside attention; in I their
    # gradients follow. Experts: an all-to-all sends every token to its experts, another brings it
    # back. I has the same two, or four if it recomputes the experts. Accelerators that split an
    # expert gather tokens after the first and scatter sums before the second. Adapters add
    # exchanges, mostly of width r.
    # source: Korthikanti et al. (arXiv:2205.05198), section 4.2.2.
    unit_bytes, h = model.element_bytes * accelerator_tokens(model, layout), model.hidden
    num_mlps = _num_split_mlps(model, kind)
    if model.mla is None:
        exchanges = _tensor_exchanges(unit_bytes, (h, h), 1 + num_mlps, layout)
    else:  # latent attention gathers the vectors from which queries, keys and values unfold
        query_units = h if model.mla.query_rank is None else model.mla.query_rank
        gathered_units = query_units + model.mla.kv_rank + model.mla.rope_width
        exchanges = _tensor_exchanges(unit_bytes, (gathered_units, h), 1.0, layout)
        exchanges += _tensor_exchanges(unit_bytes, (h, h), num_mlps, layout)
    exchanges += _adapter_exchanges(model, layout, 1 + num_mlps)
    exchanges += _context_exchanges(model, layout)
    if kind == "moe" and model.moe is not None:
        exchanges += _expert_exchanges(model, layout, "moe" in recomputed_modules(recompute))
    return exchanges


def _num_split_mlps(model: Model, kind: str) -> Number:
    """Return the number of MLPs of a layer that tensor parallelism splits, 0 or 1."""
    # Shared experts are split. Routed experts are not: they take the tokens of an accelerator.
    if kind == "moe" and model.moe is not None:
        return 1.0 * (model.moe.shared_experts > 0)
    return 1.0


def _tensor_exchanges(
    unit_bytes: Number, units: tuple[Number, Number], count: Number, layout: Layout
) -> tuple[Collective, ...]:
    """List tensor-parallel collectives before and after `count` pairs of matrix products."""
    # `units` are the widths of the first product's input, which is gathered, and of the second
    # product's output, which is summed; `unit_bytes` are bytes of one unit of all tokens.
    scatters = 1.0 * (layout.shared_by > 1) * count  # all under sequence parallelism, else none
    reduces = count - scatters
    regathers = layout.trains_layers * scatters  # gathers of inputs for W
    input_bytes, output_bytes = (unit_bytes * width for width in units)
    inputs, outputs = _in_all_phases(input_bytes), _in_all_phases(output_bytes)
    both_scatters = Phases(forward=scatters, input_grad=scatters)
    gathered = inputs._replace(input_grad=output_bytes)
    return (
        Collective("all_reduce", "tensor", outputs, Phases(forward=reduces)),
        # the last argument names the products that hide the collective
        Collective("all_reduce", "tensor", inputs, Phases(input_grad=reduces), "weight_grad"),
        Collective("all_gather", "tensor", gathered, both_scatters),
        Collective("reduce_scatter", "tensor", outputs, Phases(forward=scatters)),
        Collective("reduce_scatter", "tensor", inputs, Phases(input_grad=scatters), "weight_grad"),
        Collective("all_gather", "tensor", inputs, Phases(weight_grad=regathers), "input_grad"),
    )


def _adapter_exchanges(model: Model, layout: Layout, count: Number) -> tuple[Collective, ...]:
    """List the collectives of LoRA adapters B A x, if any, on `count` pairs of linear layers."""
    # The first layer of a pair is column-parallel, the second row-parallel.
    # source: Megatron-Bridge, peft/utils.py: ParallelLinearAdapter.
    if not layout.lora_rank:
        return ()
    unit_bytes = model.element_bytes * accelerator_tokens(model, layout)
    narrow = _in_all_phases(unit_bytes * layout.lora_rank)
    wide = _in_all_phases(unit_bytes * model.hidden)
    count = count * (layout.tensor > 1)
    scatters = 1.0 * (layout.shared_by > 1) * count  # with sequence parallelism all, else none
    return (
        # A x of the first layer
        Collective("all_gather", "tensor", narrow, Phases(forward=count)),
        # A x of the second layer; in I the gradients of A x of both layers
        Collective("all_reduce", "tensor", narrow, Phases(forward=count, input_grad=2 * count)),
        # B A x of the second layer; under sequence parallelism also the gradient of B A x
        Collective("all_gather", "tensor", wide, Phases(forward=count, input_grad=scatters)),
        # without sequence parallelism the gradient of x of the first layer
        Collective("all_reduce", "tensor", wide, Phases(input_grad=count - scatters)),
    )


def _context_exchanges(model: Model, layout: Layout) -> tuple[Collective, ...]:
    unit_bytes = model.element_bytes * accelerator_tokens(model, layout) / layout.tensor
    ring_bytes = layout.context * unit_bytes * (model.kv_hidden + model.value_hidden)
    volume = Phases(ring_bytes, 2 * ring_bytes, 0.0)
    counts = Phases(forward=1.0, input_grad=1.0)
    return (Collective("ring", "context", volume, counts, "attention"),)


def _expert_exchanges(
    model: Model, layout: Layout, recomputes: bool = False
) -> tuple[Collective, ...]:
    """List collectives that send tokens to experts and back; a recomputing I repeats those of F."""
    assert model.moe is not None
    slots = model.moe.slots
    routed_tokens = accelerator_tokens(model, layout) / layout.shared_by * slots
    volume = model.element_bytes * routed_tokens * model.hidden
    passes = Phases(forward=1.0, input_grad=2.0 if recomputes else 1.0)
    counts = Phases(*(2 * count for count in passes))  # to the experts and back
    copies = layout.dispatch_per_node * slots
    volumes = _in_all_phases(volume)
    exchanges = [Collective("all_to_all", "expert", volumes, counts, "layer", copies)]
    # Accelerators that split an expert gather their tokens and scatter sums. Without sequence
    # parallelism they have the same tokens, so they only sum outputs and gradients.
    n = layout.expert_gather
    gathers, sums = 1.0 * (n > 1), 1.0 * (layout.expert_tensor > n)  # 0 or 1
    for kind, count in (("all_gather", gathers), ("reduce_scatter", gathers), ("all_reduce", sums)):
        counts = Phases(*(num_passes * count for num_passes in passes))
        volumes = _in_all_phases(volume * n)
        exchanges.append(Collective(kind, "expert_tensor", volumes, counts, "layer"))
    return tuple(exchanges)


def head_collectives(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """List the collectives of the output head: t accelerators share its vocabulary."""
    # Under sequence parallelism the head's input is gathered. The maximum, the sum and the logit of
    # the correct token are reduced over the vocabulary in float32. I reduces the input's gradient.
    tokens = accelerator_tokens(model, layout)
    hidden = _in_all_phases(model.element_bytes * tokens * model.hidden)
    scalars = _in_all_phases(4 * tokens)
    scatters = 1.0 * (layout.shared_by > 1)
    regathers = layout.trains_base * scatters
    return (
        Collective("all_gather", "tensor", hidden, Phases(forward=scatters)),
        Collective("all_reduce", "tensor", scalars, Phases(forward=3.0)),  # maximum, sum, logit
        Collective("all_reduce", "tensor", hidden, Phases(input_grad=1 - scatters), "weight_grad"),
        Collective("reduce_scatter", "tensor", hidden, Phases(input_grad=scatters), "weight_grad"),
        Collective("all_gather", "tensor", hidden, Phases(weight_grad=regathers), "input_grad"),
    )


def embedding_collectives(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """List the collectives of the embedding: t accelerators share its vocabulary."""
    # F sums outputs. Under sequence parallelism an accelerator keeps a part; W gathers gradients.
    hidden = _in_all_phases(model.element_bytes * accelerator_tokens(model, layout) * model.hidden)
    scatters = 1.0 * (layout.shared_by > 1)
    regathers = layout.trains_base * scatters
    return (
        Collective("all_reduce", "tensor", hidden, Phases(forward=1 - scatters)),
        Collective("reduce_scatter", "tensor", hidden, Phases(forward=scatters)),
        Collective("all_gather", "tensor", hidden, Phases(weight_grad=regathers)),
    )


def whole_layer_collectives(
    model: Model, layout: Layout, kind: str = "dense"
) -> tuple[Collective, ...]:
    """List the collectives of a layer priced as a single op: two all-reduces in F and in I."""
    volume = boundary_bytes(model, dataclasses.replace(layout, sequence_parallel=0.0))
    counts = Phases(forward=2.0, input_grad=2.0)
    all_reduce = Collective("all_reduce", "tensor", _in_all_phases(volume), counts)
    experts = _expert_exchanges(model, layout) if kind == "moe" and model.moe is not None else ()
    adapters = _adapter_exchanges(model, layout, 1 + _num_split_mlps(model, kind))
    return (all_reduce, *adapters, *_context_exchanges(model, layout), *experts)
